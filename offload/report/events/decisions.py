"""Events of adaptation: what the run decides, what it asks for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from offload.formatting import count, duration, figure, rate, rate_shown
from offload.report.events.event import NodeNames, RunEvent
from offload.report.json_values import number


@dataclass(frozen=True, kw_only=True)
class Decided(RunEvent, kind="decided", group="decision", live=True):
    """A decision, with its reason in words. One that follows the user's schedule names no rates, and one to keep the size no size.

    Args:
        decision: ``keep``, ``rebatch`` or ``resize``.
        samples_per_s, stall: the interval that led to it.
        nodes, workers, local_batch_size, accum_steps, global_batch_size: the new size.
        predicted_samples_per_s, predicted_goodput: what the model expects of it.
    """

    decision: str
    reason: str
    samples_per_s: float | None = None
    stall: float | None = None
    nodes: int | None = None
    workers: int | None = None
    local_batch_size: int | None = None
    accum_steps: int | None = None
    global_batch_size: int | None = None
    predicted_samples_per_s: float | None = None
    predicted_goodput: float | None = None

    @property
    def changes(self) -> bool:
        return self.decision != "keep"

    def sentence(self, nodes: NodeNames) -> str:
        if self.decision == "keep":
            return f"keeps its size: {self.reason}"
        workers, local, accum = self.workers, self.local_batch_size, self.accum_steps
        if workers is None or local is None or accum is None:
            return ""
        expected = number(self.predicted_samples_per_s)
        return (
            f"decides on {count(workers, 'worker')} with a global batch of {local * workers * (accum + 1):,}: {self.reason}"
            + (f"; it expects {rate(expected)}" if expected == expected else "")
        )

    def live_lines(self) -> tuple[str, ...]:
        """Only a change of workers interrupts training. The rates stand in the line below."""
        if self.decision != "resize" or self.workers is None:
            return ()
        return (f"changing to {count(self.workers, 'worker')}: {self.reason}",)


@dataclass(frozen=True, kw_only=True)
class GainMeasured(RunEvent, kind="measured", group="decision", changes=False):
    """The rate after a change, beside the one that the decision expected."""

    predicted_samples_per_s: float
    measured_samples_per_s: float

    def sentence(self, nodes: NodeNames) -> str:
        measured, predicted = number(self.measured_samples_per_s), number(self.predicted_samples_per_s)
        return f"after the change: {rate(measured)} measured, {figure(predicted)} predicted"


@dataclass(frozen=True, kw_only=True)
class Rebatched(RunEvent, kind="rebatched", group="decision", live=True):
    """The workers split global batches in another way from this step on."""

    epoch: int
    step: int
    local_batch_size: int
    accum_steps: int
    global_batch_size: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"step {self.step:,}: the global batch is {self.global_batch_size:,} from here on"


@dataclass(frozen=True, kw_only=True)
class Resized(RunEvent, kind="resized", group="decision", live=True):
    """A change of workers is over."""

    workers_before: int
    workers: int

    def sentence(self, nodes: NodeNames) -> str:
        train = f"{count(self.workers, 'worker')} train{'s' if self.workers == 1 else ''}"
        if self.workers == self.workers_before:
            return f"{train}, on other nodes than before"
        return f"{train}, {self.workers_before} before"


@dataclass(frozen=True, kw_only=True)
class ResizeCost(RunEvent, kind="resize_cost", group="decision", changes=False):
    """The time without a step that a change of workers took."""

    without_steps_s: float

    def sentence(self, nodes: NodeNames) -> str:
        return f"the change of workers took {duration(number(self.without_steps_s))} without a step"


@dataclass(frozen=True, kw_only=True)
class ReadyToResize(RunEvent, kind="ready_to_resize", group="decision", changes=False):
    """All workers have committed, and wait for their end."""

    step: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"step {self.step:,}: the workers have committed and make way for the next group"


@dataclass(frozen=True, kw_only=True)
class WorkerCountWanted(RunEvent, kind="workers_wanted", group="decision", live=True):
    """The run wants more workers than ``before``, and asks for nodes."""

    workers: int
    before: int

    def sentence(self, nodes: NodeNames) -> str:
        return f"the run wants {self.workers} workers and has room for {self.before}: it asks for nodes"


@dataclass(frozen=True, kw_only=True)
class Leased(RunEvent, kind="leased", group="decision", live=True):
    """The arbiter lets the run hold this many workers and cores from now on. ``reason``: why."""

    workers: int
    cores: int
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        if not self.workers:
            return f"the arbiter gives the run nothing for now: {self.reason}"
        return (
            f"the arbiter gives the run {count(self.workers, 'worker')} and {count(self.cores, 'core')}: {self.reason}"
        )


@dataclass(frozen=True, kw_only=True)
class CoreCountWanted(RunEvent, kind="cores_wanted", group="decision", live=True):
    """The run wants another number of preprocessing cores.

    Args:
        cores, before: the new number and the present one.
        device_samples_per_s, core_samples_per_s: what the workers could train, and what a core delivers.
        capped_samples_per_s: the input's rate that more cores did not raise; None if no such limit is known.
    """

    cores: int
    before: int
    device_samples_per_s: float | None = None
    core_samples_per_s: float | None = None
    capped_samples_per_s: float | None = None

    def sentence(self, nodes: NodeNames) -> str:
        wants = f"the run wants {self.cores} preprocessing cores instead of {self.before}"
        if self.capped_samples_per_s is not None:
            return f"{wants}: more cores did not raise the input's {rate_shown(self.capped_samples_per_s)} samples/s"
        if self.device_samples_per_s is None or self.core_samples_per_s is None:
            return wants
        return (
            f"{wants}: the workers could train {rate_shown(self.device_samples_per_s)} samples/s, and a core delivers "
            f"{rate_shown(self.core_samples_per_s)}"
        )


@dataclass(frozen=True, kw_only=True)
class NodesNotGranted(RunEvent, kind="not_granted", group="decision", live=True):
    """Nodes that the run asked for did not come.

    Args:
        workers, cores: the wanted size; ``cores`` is None if the run does not choose them.
        cores_now, workers_now: the size that goes on.
        after_s: how long the run waited.
    """

    workers: int
    cores: int | None
    cores_now: int
    after_s: float
    workers_now: int

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"the nodes that the run asked for did not come within {self.after_s:.0f} s: {count(self.workers_now, 'worker')} "
            f"and {count(self.cores_now, 'preprocessing core')} go on"
        )


@dataclass(frozen=True, kw_only=True)
class EventIgnored(RunEvent, kind="ignored", group="decision", changes=False):
    """An event changed nothing. ``what``: the name of its class."""

    what: str
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"the run ignored {self.what}: {self.reason}"
