"""What is true of a job: its samples, steps and nodes, which no policy sees but through measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offload.model.catalog import NodeType
from offload.model.input_rate import REMOTE_CORE_SECONDS_PER_BYTE
from offload.model.noise import GradientNoise
from offload.model.step_time import StepTime

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HubCost:
    """CPU time that a hub spends on a block, with Ray's part of the calls.

    ``benchmarks/results/scale.json`` has it for 8 and for 64 workers of a thousand cores. It grows with the logarithm of the workers
    there, and beyond 64 workers that is extrapolated.
    """

    at_8_s: float = 0.004283
    at_64_s: float = 0.005343

    def block_s(self, workers: float) -> float:
        """Seconds of one core for a block that goes to one of so many workers."""
        per_doubling = (self.at_64_s - self.at_8_s) / 3
        return float(max(self.at_8_s + per_doubling * (np.log2(max(workers, 1)) - 3), self.at_8_s / 2))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job as it is.

    Args:
        core_seconds: of one sample on a core of speed 1, with all cores of its node busy.
        wire_bytes: of a sample in a block.
        step: the time of a step on this GPU.
        noise: gradient noise; None: every sample counts the same in any batch.
        batches: the least and the most global batch.
        max_local_batch: the most samples of a micro-batch.
        ingest_samples_per_s: that one worker can take in.
        task_variation: coefficient of variation of a task's time.
        host_cpus: cores that a worker keeps on its node.
        link_share: payload of a network card over its nominal rate.
        travel_s_per_byte: CPU time of both ends of a byte that travels.
        buffered_batches: global batches that are ready or under way beside the one that trains.
        speeds: true speed of a node type's cores over the catalog's, by name.
        interruptions_per_hour: of a spot node, by the name of its type.
        replacement_s: until a node that was reclaimed is there again.
        restart_s: without steps when workers leave or join.
        hub: what a block costs the feed; None: nothing.
        feeds: hubs among which the ranks are divided; None: as many as the product takes.
    """

    core_seconds: float
    wire_bytes: float
    step: StepTime
    batches: tuple[int, int]
    noise: GradientNoise | None = None
    max_local_batch: int = 1 << 20
    ingest_samples_per_s: float = np.inf
    task_variation: float = 0.1
    host_cpus: float = 1.0
    link_share: float = 0.8
    travel_s_per_byte: float = REMOTE_CORE_SECONDS_PER_BYTE
    buffered_batches: int = 4
    speeds: Mapping[str, float] = field(default_factory=dict)
    interruptions_per_hour: Mapping[str, float] = field(default_factory=dict)
    replacement_s: float = 300.0
    restart_s: float = 10.0
    hub: HubCost | None = None
    feeds: int | None = None

    def speed(self, kind: NodeType) -> float:
        """True speed of one core of this type."""
        return kind.core_speed * self.speeds.get(kind.name, 1.0)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """GPU nodes, and CPU nodes of at most one type. Counts are arrays that broadcast.

    ``training``: GPUs that train, evenly spread; None: all.
    """

    host: NodeType
    hosts: Ints
    helper: NodeType | None = None
    helpers: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    training: int | None = None

    @property
    def workers(self) -> Ints:
        """GPUs that train."""
        all_of_them = self.hosts * self.host.gpus
        return all_of_them if self.training is None else np.minimum(all_of_them, self.training)

    def near_cores(self, job: Job) -> Floats:
        """Cores of the GPU nodes that workers leave to preprocessing."""
        return np.asarray(np.maximum(self.hosts * self.host.vcpus - self.workers * job.host_cpus, 0.0), dtype=float)

    def cores(self, job: Job) -> Floats:
        """Cores that preprocess."""
        far = 0.0 if self.helper is None else float(self.helper.vcpus)
        return np.asarray(self.near_cores(job) + self.helpers * far, dtype=float)

    def usd_per_hour(self, spot: str = "none") -> Floats:
        """The price of all nodes. ``spot``: the nodes that are spot capacity: none, cpu or all."""
        host = self.host.spot_usd_per_hour if spot == "all" else self.host.usd_per_hour
        total = self.hosts * float(host or self.host.usd_per_hour)
        if self.helper is not None:
            far = self.helper.usd_per_hour if spot == "none" else self.helper.spot_usd_per_hour
            total = total + self.helpers * float(far or self.helper.usd_per_hour)
        return np.asarray(total, dtype=float)
