"""Measurements of both sides of a run, the step times by size and the rate of the input.

A step that waited for data says nothing about the accelerator, and a queue that was never empty says nothing about the input.
In the other regime, each measurement is only a bound, not a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from offload.measure.steps import INPUT_BOUND
from offload.model.batch_split import BatchSplit
from offload.model.fit import StepTimeFit, fit_step_time

LEAST_STEPS = 3  # steps that make an interval reliable
FORGOTTEN = 0.7  # weight that an older interval keeps for each newer one at the same size: machines drift
MOST_SIZES = 32
SETTLED_S = 10.0  # time with the same cores that makes the input's rate reliable: blocks arrive in bursts of seconds
# An unconfirmed low share is forgotten over this time (its logarithm falls to 37 %): the cause may be gone by then.
FORGOTTEN_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class StepInterval:
    """One interval of training at one size; times are sums over the steps of all ranks, in seconds.

    Args:
        nodes: the nodes on which the workers ran.
        split: how the global batches of all its steps were split.
        steps: steps of all ranks.
        samples: samples of all ranks.
        step_time_s: wall time, without waits for the first batch of a pass.
        data_wait_s: time spent waiting for the rank's own samples, without first batches of a pass.
        compute_s: time spent computing, including the optimizer.
        sync_s: synchronisation that computing did not hide.
        busy_ceiling_samples_per_s: cores over busy core-seconds per sample, the best rate of preprocessing. None if it is
            unknown, or if not all of these cores preprocessed.
    """

    nodes: int
    split: BatchSplit
    steps: int
    samples: int
    step_time_s: float
    data_wait_s: float
    compute_s: float
    sync_s: float
    busy_ceiling_samples_per_s: float | None = None

    @property
    def samples_per_s(self) -> float:
        """All ranks' samples over one rank's stepping time."""
        # Times are sums over all ranks, which step at once. Divided by their number, they are the time that passed.
        return self.samples * self.split.workers / self.step_time_s if self.step_time_s > 0 else 0.0

    @property
    def device_samples_per_s(self) -> float | None:
        """The rate of the workers if they had not waited for data; None if they made no step."""
        busy_s = self.compute_s + self.sync_s
        return self.samples * self.split.workers / busy_s if self.steps and busy_s > 0 else None

    @property
    def duration_s(self) -> float:
        """The interval's length by the ranks' clocks."""
        return self.step_time_s / self.split.workers

    @property
    def stall(self) -> float:
        """``data_wait_s / step_time_s``."""
        return self.data_wait_s / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class StepSeen:
    """Mean seconds of one micro-batch at one size: of any (forward and backward), and of the last, which also synchronises."""

    compute_s: float
    last_s: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Recent:
    """Decayed sums over the recent seconds with the same cores; older seconds weigh less.

    The sums are the time itself, the time that workers waited for data, and the time that the input would have taken at its busy
    ceiling.
    """

    cores: float
    duration_s: float
    waited_s: float
    at_ceiling_s: float

    def before(self, other: Recent) -> Recent:
        """The sums with a newer interval added. Seconds with other cores do not count."""
        if self.cores != other.cores:
            return other
        # Weights fall with time, not with the number of intervals, which differ in length.
        kept = math.exp(-other.duration_s / SETTLED_S)
        return replace(
            other,
            duration_s=kept * self.duration_s + other.duration_s,
            waited_s=kept * self.waited_s + other.waited_s,
            at_ceiling_s=kept * self.at_ceiling_s + other.at_ceiling_s,
        )

    @property
    def at_ceiling(self) -> float:
        """The trained samples over those that the input could deliver at its busy ceiling."""
        return min(self.at_ceiling_s / self.duration_s, 1.0)

    @property
    def input_bound(self) -> bool:
        """Whether the workers waited for data."""
        return self.waited_s >= INPUT_BOUND * self.duration_s

    @property
    def settled(self) -> bool:
        """Whether the sums cover enough time to be reliable. (Ten decayed intervals of a second weigh 6.6 s.)"""
        return self.duration_s >= (1 - math.exp(-1)) * SETTLED_S


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that the run has learned.

    Args:
        steps: by (nodes, workers, local batch size).
        delivered: the rate of the input as the bottleneck, over its busy ceiling; 1 until observed.
        ceiling_samples_per_s: the busy ceiling of the newest interval.
        cores: the cores that preprocessed in that interval.
        recent: the source of ``delivered``.
    """

    steps: Mapping[tuple[int, int, int], StepSeen] = field(default_factory=dict)
    delivered: float = 1.0
    ceiling_samples_per_s: float | None = None
    cores: float = 0.0
    recent: Recent | None = None

    def with_interval(self, interval: StepInterval, cores: float) -> Seen:
        """The knowledge after one more interval, in which ``cores`` preprocessed."""
        # The steps of all ranks, so LEAST_STEPS of each.
        if interval.steps < LEAST_STEPS * interval.split.workers or interval.samples <= 0:
            return self
        ceiling = interval.busy_ceiling_samples_per_s
        steps = self._steps_with(interval)
        if ceiling is None or not math.isfinite(ceiling) or ceiling <= 0:
            return replace(self, steps=steps)
        newest = Recent(
            cores=cores,
            duration_s=interval.duration_s,
            waited_s=interval.stall * interval.duration_s,
            at_ceiling_s=interval.samples_per_s / ceiling * interval.duration_s,
        )
        recent = newest if self.recent is None else self.recent.before(newest)
        delivered = self._delivered_with(recent, newest)
        return replace(
            self, steps=steps, delivered=delivered, ceiling_samples_per_s=ceiling, cores=cores, recent=recent
        )

    def _delivered_with(self, recent: Recent, newest: Recent) -> float:
        if not recent.settled:
            return self.delivered
        # Waiting at a larger size, a moment ago, says nothing about the input if nobody waits for it now.
        if (recent.input_bound and newest.input_bound) or recent.at_ceiling > self.delivered:
            return recent.at_ceiling
        # Well-fed workers show that the input delivers at least this much, but not how much it could. Decay multiplicatively:
        # addition would double a small share, that of an input waiting mostly for storage, within seconds.
        return math.pow(self.delivered, math.exp(-newest.duration_s / FORGOTTEN_S))

    def _steps_with(self, interval: StepInterval) -> dict[tuple[int, int, int], StepSeen]:
        if interval.compute_s <= 0:  # too short for the device's clock: no step takes no time
            return dict(self.steps)
        split = interval.split
        key = (interval.nodes, split.workers, split.local_batch_size)
        # The device's clock measures a whole step. Synchronisation happens once, behind the last micro-batch.
        compute = interval.compute_s / interval.steps / (split.accum_steps + 1)
        last = compute + interval.sync_s / interval.steps
        known = dict(self.steps)
        old = known.pop(key, StepSeen(compute_s=0.0, last_s=0.0, weight=0.0))
        kept = FORGOTTEN * old.weight
        weight = kept + interval.steps
        # At the end of the dict, as the newest: the loop below drops sizes from its front.
        known[key] = StepSeen(
            compute_s=(kept * old.compute_s + interval.steps * compute) / weight,
            last_s=(kept * old.last_s + interval.steps * last) / weight,
            weight=weight,
        )
        while len(known) > MOST_SIZES:
            del known[next(iter(known))]  # the size not seen for the longest time
        return known

    @cached_property  # a decision asks for it several times, and the fit is most of what it costs
    def fit(self) -> StepTimeFit | None:
        """The step time as a function of the size, fitted to the sizes seen; None before the first."""
        if not self.steps:
            return None
        keys, values = zip(*self.steps.items(), strict=True)
        nodes, workers, sizes = (list(column) for column in zip(*keys, strict=True))
        return fit_step_time(nodes, workers, sizes, [v.compute_s for v in values], [v.last_s for v in values])

    def input_samples_per_s(self, cores: float) -> float:
        """The rate of ``cores`` cores like those seen; infinite while the rate is unknown."""
        if self.ceiling_samples_per_s is None or self.cores <= 0:
            return math.inf
        delivered, recent = self.delivered, self.recent
        if recent is not None and recent.input_bound and not recent.settled:
            delivered = min(delivered, recent.at_ceiling)  # nothing relies on more until it is certain
        return delivered * self.ceiling_samples_per_s * cores / self.cores

    def to_state(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        steps = [[*key, v.compute_s, v.last_s, v.weight] for key, v in self.steps.items()]
        return {"steps": steps, "delivered": self.delivered}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Seen:
        """The inverse of :meth:`to_state`, without the input's rate, which a restart may change."""
        steps = {
            (int(n), int(k), int(m)): StepSeen(compute_s=float(c), last_s=float(last), weight=float(w))
            for n, k, m, c, last, w in state["steps"]
        }
        return cls(steps=steps, delivered=float(state["delivered"]))
