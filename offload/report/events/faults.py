"""Events of what goes wrong, or stands in a run's way: processes that die or hang, missing memory and CPUs, and mistakes in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.formatting import count, parts_held
from offload.report.events.event import NodeNames, RunEvent


@dataclass(frozen=True, kw_only=True)
class WorkerLost(RunEvent, kind="worker_lost", group="fault", live=True):
    """A worker's process died."""

    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"a worker died ({self.reason}): all workers restart from the last checkpoint"


@dataclass(frozen=True, kw_only=True)
class WorkerHung(RunEvent, kind="worker_hung", group="fault", live=True):
    """A worker made no progress for ``deadline_s``. ``where``: the line of code."""

    deadline_s: float
    where: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"worker {self.by} made no progress for {self.deadline_s:g} s, at {self.where}: the run kills it"


@dataclass(frozen=True, kw_only=True)
class WorkerWaits(RunEvent, kind="worker_waits", group="fault", live=True, changes=False):
    """A worker waits in a call that the others may never make."""

    call: str
    seconds: float

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"worker {self.by} has waited {self.seconds:g} s in {self.call} for the other workers: all workers must make this call, not "
            "rank 0 alone"
        )


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(RunEvent, kind="out_of_memory", group="fault", live=True):
    """Local batches of ``did_not_fit`` samples exceed a device's memory; the others say how workers split batches from now on."""

    did_not_fit: int
    local_batch_size: int
    accum_steps: int

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"local batches of {self.did_not_fit:,} do not fit into the memory of worker {self.by}'s device: workers now "
            f"take {self.local_batch_size:,} samples at a time and accumulate {self.accum_steps + 1} micro-batches"
        )


@dataclass(frozen=True, kw_only=True)
class PreprocessingLost(RunEvent, kind="preprocessing_lost", group="fault", live=True):
    """A preprocessing process died on this node."""

    node: str
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"a preprocessing process died ({self.reason}): its tasks run again"


@dataclass(frozen=True, kw_only=True)
class PreprocessingSlow(RunEvent, kind="preprocessing_slow", group="fault", live=True):
    """A preprocessing process works on one thing for long. ``what``: what it does, such as a sample."""

    node: str
    what: str
    seconds: int

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"{self.what} has taken {self.seconds} s so far on {self.node}, and training waits for it. Pass sample_timeout_s to give up "
            "samples that take too long"
        )


@dataclass(frozen=True, kw_only=True)
class CacheStopped(RunEvent, kind="cache_stopped", group="fault", live=True):
    """A node's cache takes nothing more."""

    node: str
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"node {self.node} stores nothing more in its cache ({self.reason}): the run goes on without"


@dataclass(frozen=True, kw_only=True)
class BlocksThroughRay(RunEvent, kind="blocks_through_ray", group="fault", live=True):
    """A node's blocks take a detour."""

    node: str
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"samples of node {self.node} could not be sent to a worker directly ({self.reason}): Ray carries them, which takes more CPU "
            "time. A firewall may be blocking the workers' ports"
        )


@dataclass(frozen=True, kw_only=True)
class NodeExcluded(RunEvent, kind="node_excluded", group="fault", live=True):
    """The run uses the nodes of these names no longer."""

    nodes: Sequence[str]
    reason: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"the run stops using {', '.join(self.nodes)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ShortOfMemory(RunEvent, kind="short_of_memory", group="fault", live=True):
    """Memory holds fewer preprocessing processes than a node has cores. ``cores``: how many fit on each of ``nodes``."""

    nodes: Sequence[str]
    cores: Sequence[int]
    process_bytes: int

    def sentence(self, nodes: NodeNames) -> str:
        cores = ", ".join(f"{node} ({fitting})" for node, fitting in zip(self.nodes, self.cores, strict=True))
        mib = self.process_bytes / (1 << 20)
        return f"memory limits how many cores preprocess: {cores}; each process takes {mib:,.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class NotStarted(RunEvent, kind="not_started", group="fault", live=True):
    """No worker has started yet.

    Args:
        workers: how many should start.
        after_s: how long the run has waited.
        needs: the resources that each reserves.
        free: what the cluster has free of these.
        held: who holds CPUs, in words; empty if nobody does.
    """

    workers: int
    after_s: float
    needs: Mapping[str, float]
    free: Mapping[str, float]
    held: str = ""

    def sentence(self, nodes: NodeNames) -> str:
        needs = " and ".join(f"{amount:g} {name}" for name, amount in self.needs.items())
        free = " and ".join(f"{amount:g} {name}" for name, amount in self.free.items())
        held = f" Who holds CPUs: {self.held}." if self.held else ""
        return (
            f"no worker has started for {self.after_s:.0f} s: they need {self.workers} × ({needs}), and {free} of the cluster are free."
            f"{held} They may be starting slowly, or other programs hold the resources; training then begins when those end"
        )


@dataclass(frozen=True, kw_only=True)
class OthersHold(RunEvent, kind="others_hold", group="fault", live=True, changes=False):
    """Other programs hold resources, at the start or from now on. ``held``: by resource, the held amount and the cluster's; empty if they
    hold none any more."""

    held: Mapping[str, Sequence[float]]

    def sentence(self, nodes: NodeNames) -> str:
        if not self.held:
            return "other programs hold nothing any more: this run may use the whole cluster"
        return f"other programs hold {parts_held(self.held)}: this run uses the rest, and what they release later"


@dataclass(frozen=True, kw_only=True)
class CoresShared(RunEvent, kind="cores_shared", group="fault", live=True, changes=False):
    """Preprocessing gives its reservations back, for other tasks of the program."""

    def sentence(self, nodes: NodeNames) -> str:
        return "other tasks of this program wait for CPUs that preprocessing reserves: its processes go on, and reserve none from now on"


@dataclass(frozen=True, kw_only=True)
class WaitsForCpus(RunEvent, kind="waits_for_cpus", group="fault", live=True, changes=False):
    """A data set's preprocessing gets no CPU. ``held``: who holds CPUs, in words."""

    dataset: str
    seconds: int
    held: str

    def sentence(self, nodes: NodeNames) -> str:
        return (
            f"the preprocessing of {self.dataset!r} has waited {self.seconds} s for a CPU, and training waits for it. Who holds CPUs: "
            f"{self.held or 'nobody'}. End what is not needed, let workers reserve fewer CPUs, or add nodes"
        )


@dataclass(frozen=True, kw_only=True)
class ClassesDiffer(RunEvent, kind="classes_differ", group="fault", live=True, changes=False):
    """A label means another class in a data set (``is_here``) than in the one for training (``is_there``; None: it has none)."""

    dataset: str
    label: int
    is_here: str
    is_there: str | None

    def sentence(self, nodes: NodeNames) -> str:
        there = "no class" if self.is_there is None else repr(self.is_there)
        return (
            f"label {self.label} is {self.is_here!r} in {self.dataset!r} and {there} in 'train': their labels do not mean the same, and "
            "metrics of one model on both are wrong. Give both folders the same classes"
        )


@dataclass(frozen=True, kw_only=True)
class PassesDiffer(RunEvent, kind="passes_differ", group="fault", live=True, changes=False):
    """Workers went through a data set a different number of times. ``passes``: those of worker 0 and of the worker ``other``."""

    dataset: str
    epoch: int
    other: int
    passes: Sequence[int]

    def sentence(self, nodes: NodeNames) -> str:
        of_first, of_other = self.passes
        return (
            f"in epoch {self.epoch + 1}, worker 0 went through {self.dataset!r} {count(of_first, 'time')} and worker "
            f"{self.other} {count(of_other, 'time')}, and each gets its share of the samples alone: validate on all workers, and add "
            "up with ctx.sum"
        )


@dataclass(frozen=True, kw_only=True)
class CallbackFailed(RunEvent, kind="callback_failed", group="fault", live=True, changes=False):
    """A method of the user's callback failed."""

    callback: str
    method: str
    error: str
    traceback: str

    def sentence(self, nodes: NodeNames) -> str:
        return f"callback {self.callback} failed in {self.method} ({self.error}): the run goes on"
