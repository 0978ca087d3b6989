"""Measure the cost of preprocessing from recent tasks, and the relative speed of the nodes' cores.

Where it stops: :mod:`offload.pipeline.feed.sizing` derives task sizes from it, :mod:`offload.adapt` numbers of workers.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from offload.pipeline.feed.sizing import SampleCost
from offload.pipeline.pool.task import Block

RECENT_OF_A_NODE = 8  # tasks
UNKNOWN_SPEED = 0.25  # relative to the fastest: the assumed speed of a core before its first block
# The recent tasks of many cores turn over often, and medians of them take a millisecond. So the meter computes medians this many times
# while all recent tasks are replaced by newer ones.
ANEW = 16


@dataclass(frozen=True)
class _SampleCost:
    """Costs per sample of one task: seconds for sizing the next tasks, core-seconds, bytes, wall-clock seconds, and those of them in
    which it waited for files or other programs. ``first_wait_s``: the seconds in which the task waited for its first file."""

    seconds: float
    cpu_s: float
    size_bytes: float
    wall_s: float
    blocked_s: float
    first_wait_s: float


class Meter:
    """The measurements of one data set.

    Args:
        cores: gives the number of preprocessing cores by node.
        shared: whether other runs may have made the samples, so that most of them cost next to nothing, until the next ones do not.
    """

    def __init__(self, cores: Callable[[], Mapping[str, int]], *, shared: bool = False) -> None:
        self._cores, self._shared = cores, shared
        self._made: deque[float] = deque(maxlen=RECENT_OF_A_NODE)  # seconds of a shared sample that was made here
        # Four tasks of each core: new enough to follow a change, and enough for a median.
        self._recent: deque[_SampleCost] = deque(maxlen=max(16, 4 * sum(cores().values())))
        self._of_node: dict[str, deque[_SampleCost]] = {}
        self._pace: dict[str, float] = {}  # samples/s of one core, by node
        self._process_bytes = 0
        self._cache_bytes = self._storage_bytes = 0
        self._cpu_s: dict[str, float] = {}  # of all finished tasks, by node
        self._rates: SampleCost | None = None
        self._since_rates = 0  # tasks
        self._lock = threading.Lock()

    def add(self, block: Block) -> None:
        """Count a finished block."""
        cost = block.cost
        with self._lock:
            self._cache_bytes += cost.cache_bytes
            self._storage_bytes += cost.storage_bytes
        # A block without rows has no cost per sample, and NaN (a block of Ray Data without statistics) would spoil
        # every median.
        if not cost.rows or cost.cpu_s != cost.cpu_s:
            return
        spent = _SampleCost(
            seconds=cost.work_s / cost.rows,
            cpu_s=cost.cpu_s / cost.rows,
            size_bytes=cost.size_bytes / cost.rows,
            wall_s=cost.wall_s / cost.rows,
            blocked_s=cost.blocked_s / cost.rows,
            first_wait_s=cost.first_wait_s,
        )
        with self._lock:
            self._recent.append(spent)
            # A node whose cache cannot be used counts no bytes, and makes everything.
            made = cost.storage_bytes / (cost.storage_bytes + cost.cache_bytes) if cost.cache_bytes else 1.0
            if self._shared and made:
                self._made.append(spent.seconds / made)
            # The largest, not the mean: it decides how many processes fit into a node's memory.
            self._process_bytes = max(self._process_bytes, cost.process_bytes)
            self._since_rates += 1
            if block.node:
                self._cpu_s[block.node] = self._cpu_s.get(block.node, 0.0) + cost.cpu_s
                recent = self._of_node.setdefault(block.node, deque(maxlen=RECENT_OF_A_NODE))
                recent.append(spent)
                walls = [task.wall_s for task in recent]
                wall_s = statistics.fmean(walls) if self._shared else statistics.median(walls)
                if wall_s > 0:
                    self._pace[block.node] = 1 / wall_s

    def reshaped(self) -> None:
        """Forget nodes that no longer preprocess."""
        with self._lock:
            for gone in self._of_node.keys() - self._cores().keys():
                del self._of_node[gone]
                self._pace.pop(gone, None)

    def rates(self) -> SampleCost | None:
        """Medians over recent tasks; None before there are any."""
        with self._lock:
            if not self._recent:
                return None
            if self._rates is None or self._since_rates >= len(self._recent) // ANEW:
                self._since_rates = 0
                if self._shared:
                    # A task that was sized for finished samples would take minutes where it has to make them.
                    seconds = _median(list(self._made)) if self._made else math.inf
                else:
                    seconds = _median([spent.seconds for spent in self._recent])
                self._rates = SampleCost(
                    core_seconds_per_sample=seconds,
                    bytes_per_sample=_median([spent.size_bytes for spent in self._recent]),
                    first_wait_s=_median([spent.first_wait_s for spent in self._recent]),
                )
            return self._rates

    def summary(self) -> dict[str, float]:
        """``core_seconds_per_sample``, its coefficient of ``variation`` over the tasks, ``wire_bytes_per_sample``,
        ``input_ceiling_samples_per_s``, ``input_pace_samples_per_s``, and ``blocked``, the share of the tasks' time in which they waited
        for files or other programs, if the kernel tells; empty at first. With a cache also the bytes so far that came from it and from
        storage, ``cache_bytes`` and ``storage_bytes``.

        The pace, unlike the ceiling, includes the time that tasks wait (for storage, or for a core that other programs use).
        """
        with self._lock:
            if not self._recent:
                return {}
            cpu = [spent.cpu_s for spent in self._recent]
            # A node without a measurement of its own counts with the usual cost.
            mean = float(np.mean(cpu))
            usual = self._usual(cpu)
            by_node = {node: self._usual([spent.cpu_s for spent in recent]) for node, recent in self._of_node.items()}
            wall_s = self._usual([spent.wall_s for spent in self._recent])
            blocked_s = _median([spent.blocked_s for spent in self._recent])
            pace = dict(self._pace)
            size = _median([spent.size_bytes for spent in self._recent])
            read = {"cache_bytes": self._cache_bytes, "storage_bytes": self._storage_bytes}
        cores = self._cores()
        costs = [(count, by_node.get(node, usual)) for node, count in cores.items()]
        usual_pace = 1 / wall_s if wall_s > 0 else math.inf
        return {
            "core_seconds_per_sample": usual,
            "variation": float(np.std(cpu)) / mean if mean > 0 else 0.0,
            "wire_bytes_per_sample": size,
            "input_ceiling_samples_per_s": sum(count / cpu_s for count, cpu_s in costs if cpu_s > 0),
            "input_pace_samples_per_s": sum(count * pace.get(node, usual_pace) for node, count in cores.items()),
            **({"blocked": min(max(blocked_s / wall_s, 0.0), 1.0)} if wall_s > 0 and blocked_s == blocked_s else {}),
            **(read if any(read.values()) else {}),
        }

    def _usual(self, values: list[float]) -> float:
        """The median, since one slow file says nothing. But that of many finished samples and a few that were made would be the finished
        ones' alone."""
        return float(np.mean(values)) if self._shared else _median(values)

    @property
    def process_bytes(self) -> int:
        """The largest private memory measured in a preprocessing process, in bytes; 0 before the first measurement."""
        return self._process_bytes

    def cpu_s(self) -> dict[str, float]:
        """The CPU seconds of all finished tasks whose node is known, by node."""
        with self._lock:
            return dict(self._cpu_s)

    def costs(self) -> list[tuple[float, float]]:
        """(core-seconds, bytes) per sample of each recent task."""
        with self._lock:
            return [(spent.cpu_s, spent.size_bytes) for spent in self._recent]

    def over_fastest(self, node: str) -> float:
        """The speed of this node's cores by the clock, relative to the fastest node's.

        Unmeasured nodes are assumed slow once others are known: their first block may take long, and others would wait behind it.
        """
        with self._lock:
            if not self._pace:
                return 1.0
            if node not in self._pace:
                return UNKNOWN_SPEED
            # With many nodes, ignore the fastest tenth: it may be chance. Not by numpy, which takes ten times as long for so few values.
            ordered = sorted(self._pace.values())
            return min(1.0, self._pace[node] / ordered[math.ceil(0.9 * (len(ordered) - 1))])

    def samples_per_s(self, nodes: Collection[str]) -> float:
        """Samples/s of all cores of these nodes by the clock; 0 before their first block."""
        cores = self._cores()
        with self._lock:
            return sum(cores.get(node, 0) * self._pace.get(node, 0.0) for node in nodes)

    def speeds(self) -> dict[str, float]:
        """Samples/s of one core of each measured node, relative to the mean over all their cores.

        The speed is by the clock, not by CPU time: to a worker that waits for a block, the reason of a slow core does not matter.
        """
        cores = self._cores()
        with self._lock:
            pace = {node: samples_per_s for node, samples_per_s in self._pace.items() if node in cores}
        count = sum(cores[node] for node in pace)
        mean = sum(cores[node] * samples_per_s for node, samples_per_s in pace.items()) / count if count else 1.0
        return {node: samples_per_s / mean for node, samples_per_s in pace.items()}


def _median(values: list[float]) -> float:
    return float(np.median(values))
