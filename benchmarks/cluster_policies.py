"""Who chooses workers, batches and cores in `benchmarks/accuracy_cost.py`: nobody, AdaptDL on Ray, or this project."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from benchmarks.spot_clusters import CORE_USD, GPU_USD, NEAR, OVERLAP, Cluster
from offload.adapt.cores import CorePrice, CoresLearned, InputSeen, count_cores
from offload.adapt.decide import Keep, State, cores_meanwhile, decide
from offload.adapt.observe import Seen, StepInterval
from offload.adapt.situation import DecisionBounds, Objective, Option, Situation
from offload.measure.steps import INPUT_BOUND
from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise

INITIAL, LARGEST = 32, 512
LOCAL = (4, 64)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # workers: numbers whose batches have equal parts
MOST_CORES = 2048


@dataclass(frozen=True, kw_only=True)
class Seeing:
    """What a policy sees after an interval. ``work_left``: samples of initial batches, in emulated ones."""

    cluster: Cluster
    split: BatchSplit
    interval: StepInterval
    noise: GradientNoise | None
    work_left: float


class Offload:
    """This project's decisions, as a run makes them after each interval: the cores from what was measured, then workers and batch."""

    def __init__(self, objective: Objective) -> None:
        self._rules = DecisionBounds(
            initial_batch_size=INITIAL, max_batch_size=LARGEST, local_batch_size=LOCAL, objective=objective,
            overlap=OVERLAP,
        )  # fmt: skip
        self._seen, self._state, self._learned = Seen(), State(), CoresLearned()

    def decide(self, seeing: Seeing) -> tuple[BatchSplit, int]:
        """The split of the next batches, and the cores."""
        cluster, split = seeing.cluster, seeing.split
        self._seen = self._seen.with_interval(seeing.interval, cluster.cores)
        pace = cluster.workload.core_samples_per_s
        known = InputSeen(
            cores=cluster.cores, complete=True, samples_per_s=seeing.interval.samples_per_s,
            bound=seeing.interval.stall >= INPUT_BOUND,
            device_samples_per_s=seeing.interval.device_samples_per_s or 1.0,
            core_samples_per_s=min(self._seen.input_samples_per_s(1.0), pace), core_pace_samples_per_s=pace,
            busy_core_samples_per_s=pace, conditions=split,
        )  # fmt: skip
        near = NEAR * split.workers
        price = CorePrice(core=CORE_USD, rest=split.workers * GPU_USD, free=near)
        self._learned, counted = count_cores(
            self._learned, known, bounds=(1, MOST_CORES), before=cluster.cores, overlap=OVERLAP,
            price=price if self._rules.objective == "cost" else None,
        )  # fmt: skip
        most = float(min(self._learned.enough or MOST_CORES, MOST_CORES))
        options = [
            Option(
                workers=count, nodes=count, cores=most, usd_per_hour=count * GPU_USD, elastic=True,
                usd_per_core=CORE_USD, free_cores=NEAR * count,
            )
            for count in COUNTS
        ]  # fmt: skip
        situation = Situation(
            split=split, seen=self._seen, noise=seeing.noise, options=options, work_left=seeing.work_left,
            restart_s=cluster.restart_s,
        )  # fmt: skip
        self._state, decision = decide(self._state, situation, self._rules)
        cores = cores_meanwhile(counted, cluster.cores, self._state, decision, self._rules)
        chosen = split if isinstance(decision, Keep) else decision.split
        return chosen, max(cores, NEAR * chosen.workers)


class AdaptDL:
    """AdaptDL on Ray's rule (``ray/adaptdl_ray/aws/optimizer.py`` of petuum/adaptdl at 0124535).

    It takes the most workers whose goodput is at least half of what as many times one worker's would be, unless that is near the present
    number. Its goodput has no input term, and preprocessing stays on the GPU nodes.
    """

    def __init__(self) -> None:
        self._seen = Seen()

    def decide(self, seeing: Seeing) -> tuple[BatchSplit, int]:
        """The split of the next batches, and the cores: those of its nodes."""
        split = seeing.split
        # A fast input, whatever was seen: the goodput of Pollux.
        self._seen = self._seen.with_interval(
            dataclasses.replace(seeing.interval, busy_ceiling_samples_per_s=None), seeing.cluster.cores
        )
        if self._seen.fit is None or seeing.noise is None:
            return split, NEAR * split.workers
        joint = JointGoodput(self._seen.fit.step_time, seeing.noise)
        workers = np.array([count for count in COUNTS if LOCAL[0] * count <= LARGEST])
        goodput, local, accum = joint.optimize(workers, workers, LARGEST, LOCAL, accumulate=True)
        speedup = goodput / goodput[0]
        enough = np.flatnonzero(speedup / workers >= 0.5)
        present = int(np.flatnonzero(workers == split.workers)[0])
        chosen = int(enough[-1]) if len(enough) else present
        near = abs(workers[chosen] + 1 - split.workers) < 0.15 * split.workers
        if speedup[chosen] < 1.05 * speedup[present] or near:
            chosen = present
        best = BatchSplit(
            workers=int(workers[chosen]), local_batch_size=int(local[chosen]), accum_steps=int(accum[chosen])
        )
        if best.workers == split.workers:
            # It changes the batch alone where that gains a twentieth.
            now = float(joint.goodput(split.workers, split.workers, split.local_batch_size, split.accum_steps))
            best = best if goodput[chosen] > 1.05 * now else split
        return best, NEAR * best.workers
