"""Emulated clusters of spot nodes: how long a step takes there, what nodes cost, and what interruptions take.

A node with a GPU trains one worker, and its other cores preprocess. Cores of CPU nodes are paid one by one. The time of a step is that of
the joint model (:mod:`offload.model.goodput`), with variation. Nothing here has a clock.

Nodes are lost in a Poisson process. A fixed cluster then goes back to its last checkpoint, and waits for another node. An elastic run
commits on the notice, and restarts twice: without the node, and with its replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.planning.planner import INTERRUPTIONS_PER_HOUR, REPLACEMENT_S
from offload.model.step_time import StepTime
from offload.prices import built_in

GPU_NODE, CPU_NODE = "ml.g5.xlarge", "ml.c5.4xlarge"
SPOT = 1 / 3  # of the price on demand: the articles' figure
NEAR = 3  # cores of a GPU node that preprocess
VARIATION = 0.02  # standard deviation of the logarithm of a step's time
CHECKPOINT_S = 600.0  # between two checkpoints of a fixed cluster
BOOT_S = 180.0  # a node is paid this long before it works
STEP = StepTime(0.02, 0.004, 0.015, 0.0002, 0.015, 0.0002, gamma=2.0)  # of a paced accelerator
OVERLAP = 8.0


def spot_usd_per_hour(node: str) -> float:
    """The price of a spot node of this type: its own in the built-in catalog, else the articles' share of the price on demand."""
    kind = built_in().nodes[node]
    return SPOT * kind.usd_per_hour if kind.spot_usd_per_hour is None else kind.spot_usd_per_hour


GPU_USD = spot_usd_per_hour(GPU_NODE)
CORE_USD = spot_usd_per_hour(CPU_NODE) / built_in().nodes[CPU_NODE].vcpus


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``core_samples_per_s``: samples that one core preprocesses in a second."""

    name: str
    core_samples_per_s: float


WORKLOADS = (
    Workload(name="GPU-bound", core_samples_per_s=400.0),
    Workload(name="input-bound", core_samples_per_s=8.0),
)


@dataclass
class Cluster:
    """A run's nodes and its bill.

    Args:
        workload: what the cores do.
        workers: the nodes with a GPU at first.
        elastic: whether the run goes on without a lost node.
        restart_s: seconds of a restart.
        seed: of interruptions and variation.

    Attributes:
        cores: all cores that preprocess; those beyond ``NEAR`` a worker are paid.
        seconds, usd: what was spent so far.
        interruptions, restarts: how many there were.
        since_checkpoint_s: seconds whose work an interruption of a fixed cluster would lose.
    """

    workload: Workload
    workers: int
    elastic: bool
    restart_s: float
    seed: int
    cores: int = 0
    seconds: float = 0.0
    usd: float = 0.0
    interruptions: int = 0
    restarts: int = 0
    since_checkpoint_s: float = 0.0
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.cores = NEAR * self.workers
        self._pay(BOOT_S, self.workers, 0)

    @property
    def usd_per_hour(self) -> float:
        """The price of the nodes."""
        return self.workers * GPU_USD + max(self.cores - NEAR * self.workers, 0) * CORE_USD

    @property
    def input_samples_per_s(self) -> float:
        """The rate of all cores; those of CPU nodes are interrupted, too."""
        near = min(self.cores, NEAR * self.workers)
        there = 1 / (1 + INTERRUPTIONS_PER_HOUR * REPLACEMENT_S / 3600)
        return self.workload.core_samples_per_s * (near + there * (self.cores - near))

    def step_s(self, split: BatchSplit) -> float:
        """Seconds of a step, waits for input included, without variation."""
        joint = JointGoodput(STEP, None, self.input_samples_per_s, OVERLAP)
        return float(joint.step_time_s(split.workers, split.workers, split.local_batch_size, split.accum_steps))

    def run(self, split: BatchSplit, steps: float) -> float:
        """Spend the time of so many steps, with what befalls the nodes meanwhile. Return the seconds of the steps alone."""
        stepping_s = steps * self.step_s(split) * math.exp(VARIATION * self._random.standard_normal())
        self._spend(stepping_s)
        self.since_checkpoint_s = (self.since_checkpoint_s + stepping_s) % CHECKPOINT_S
        for _ in range(self._random.poisson(INTERRUPTIONS_PER_HOUR * self.workers * stepping_s / 3600)):
            self._interrupted()
        return stepping_s

    def change(self, workers: int, cores: int) -> None:
        """Change the nodes. Another number of workers costs a restart."""
        paid = max(cores - NEAR * workers, 0) - max(self.cores - NEAR * self.workers, 0)
        self._pay(BOOT_S, max(workers - self.workers, 0), max(paid, 0))
        if workers != self.workers:
            self._restart()
        self.workers, self.cores = workers, max(cores, 1)

    def _interrupted(self) -> None:
        self.interruptions += 1
        self._pay(BOOT_S, 1, 0)
        if self.elastic:
            self._restart()
            self._restart()
            self._spend(REPLACEMENT_S / self.workers)  # the share of the work that the missing node would have done
        else:
            # The work since the checkpoint is done again, and the other nodes wait for a replacement.
            self._spend(self.since_checkpoint_s)
            self.since_checkpoint_s = 0.0
            self._restart()
            self._spend(REPLACEMENT_S)

    def _restart(self) -> None:
        self.restarts += 1
        self._spend(self.restart_s)

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self.usd += seconds / 3600 * self.usd_per_hour

    def _pay(self, seconds: float, workers: int, cores: int) -> None:
        self.usd += seconds / 3600 * (workers * GPU_USD + cores * CORE_USD)
