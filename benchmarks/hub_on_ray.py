"""One hub on a local Ray, with sleeping cores and counting workers: a whole pass, then fewer cores, all again, and the end.

A machine of a few cores cannot make the calls of a thousand cores at their rate. So the clock of the cluster runs slower than that of the
machine: the blocks are the same ones, further apart. What does not depend on the clock is measured: CPU time, memory, and who gets what.
Where it stops: :mod:`benchmarks.stand_ins` has the cores, :mod:`benchmarks.counting_ranks` the workers.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import threading
import time
from typing import Any, Literal

import numpy as np
import ray

from benchmarks import counting_ranks, stand_ins
from offload import preload
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.feed.sizing import SampleCost, plan_tasks
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.train.hub.client import HubClient
from tests.helpers import RAY_STARTS_NOTHING_AHEAD

LOCAL_BATCH = 32
BLOCK_BYTES = 512 << 10  # of a full task: the smallest ones, of a quarter, are too large to travel inside of messages
STORE_BYTES = 4 << 30  # of this machine's Ray
NODE_STORE_BYTES = (
    64 << 20
)  # of each node, as the hub is told: in proportion to the blocks, which are a fiftieth of usual ones
BLOCKS_PER_S = 80  # that two cores make, fetch and count beside the hub, half busy
SETTLE, REST = 2.0, 2.0  # tasks of a core before and after the measurement
CORES_OF_A_PROCESS = 125
PROCESS_START_S = 0.7  # for each core's own process, one after the other
READ_S = 2.0  # by the cluster's clock
LOOK_S = 0.25
DEADLINE_S = 600.0


class Case:
    """A hub with so many cores and workers. ``kind``: cores that processes stand for, or a process for each. The measurement takes
    ``seconds``, or the time of two tasks if they take longer. ``feeds``: among which the run divides its cores and workers."""

    def __init__(
        self, kind: Literal["stood", "real"], cores: int, workers: int, seconds: float, feeds: int = 1
    ) -> None:
        self.kind, self.cores, self.workers = kind, cores, workers
        self.request = PassRequest(world_size=workers, first_rows=workers * LOCAL_BATCH, epoch=0, followed=True)
        rows = _full_task(cores // feeds, self.request.first_rows // feeds)
        core_task_s = rows * stand_ins.SAMPLE_S
        self.slower = math.ceil(cores / core_task_s / BLOCKS_PER_S)
        self.task_s = core_task_s * self.slower
        self.seconds = max(seconds, 2 * self.task_s)
        starting_s = (
            PROCESS_START_S * cores / 2 if kind == "real" else 0.0
        )  # in which half of the cores work, on average
        self.samples = round(cores * rows * ((starting_s + self.seconds) / self.task_s + SETTLE + REST))
        load = stand_ins.Load(sample_bytes=BLOCK_BYTES // rows, slower=self.slower)
        environment = preload.runtime_env({})
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": environment or None}
        self.processes: list[Any] = []
        if kind == "stood":
            count = math.ceil(cores / CORES_OF_A_PROCESS)
            stood: Any = ray.remote(stand_ins.Stood)
            threads = 2 * math.ceil(cores / count) + 4
            self.processes = [stood.options(**options, max_concurrency=threads).remote() for _ in range(count)]
            ray.get([process.slept_s.remote(0.0, 0.0) for process in self.processes])
        self.homes = homes = [f"node-{rank // counting_ranks.RANKS_PER_NODE}" for rank in range(workers)]
        ranks_class: Any = ray.remote(counting_ranks.Ranks)
        self.ranks = [
            ranks_class.options(**options, max_concurrency=4).remote(
                [rank for rank in range(workers) if homes[rank] == home], workers, home, self.slower
            )
            for home in sorted(set(homes))
        ]
        self._counts()  # they run: in a cluster, they need not wait for the processes of other nodes
        self.nodes = stand_ins.node_names(cores)
        self.stores = dict.fromkeys(self.nodes, float(NODE_STORE_BYTES))
        place = Cores(nodes=self.nodes, task_cpus=1.0, stores=self.stores, runtime_env=environment)
        index = list_torch_dataset(range(self.samples)).rows
        stream = FeedDataset(recipe=PackedRecipe.of(load), rows=index, shuffle=True)
        hub_class: Any = ray.remote(stand_ins.ScaleHub)
        self.began = time.time()
        self.actor = hub_class.options(**options, max_concurrency=8 + 6 * workers, enable_task_events=False).remote(
            {"train": stream}, place, self.processes, self.slower, homes, feeds
        )
        self.hub = HubClient(self.actor)
        ray.get(self.actor.start_ahead.remote(self.request, "train", sorted(set(homes))))

    def run(self) -> dict[str, float]:
        """The measurements, by name. Seconds are those of this machine's clock."""
        ended = threading.Event()
        threading.Thread(target=self._read, args=(ended,), daemon=True).start()
        attempt = self.hub.begin_group(1, self.homes).attempt
        self._begin(PassKey(attempt=attempt, name="train", number=0), self.request)
        first = self._all_served()
        result = {"first_block_s": min(first.values()) - self.began, "all_served_s": max(first.values()) - self.began}
        self._until(self._started, "the start of all cores")
        result["all_started_s"] = time.time() - self.began
        _say(f"{self.task_s:.0f} s a task, {self.seconds:.0f} s of measurement")
        time.sleep(SETTLE * self.task_s)
        result |= self._steady()
        _say("the end of the pass")
        began = time.time()
        positions = np.concatenate(self._joined())
        result["rest_of_pass_s"] = time.time() - began
        result["each_once"] = float(np.array_equal(np.sort(positions), np.arange(self.samples)))
        _say("the next pass")
        began = time.time()
        following = PassRequest(world_size=self.workers, first_rows=self.request.first_rows, epoch=1)
        self._begin(PassKey(attempt=attempt, name="train", number=1), following)
        result["next_pass_s"] = max(self._all_served().values()) - began
        for name, wanted in (("halved_s", self.nodes[: self.cores // 2]), ("doubled_s", self.nodes)):
            _say(name)
            began = time.time()
            self.hub.reshape(wanted, self.stores, DEADLINE_S).result()
            self._until(self._started, "the start of cores")
            result[name] = time.time() - began
        _say("leaving")
        began = time.time()
        ray.get([each.leave.remote() for each in self.ranks])
        self._joined()
        self._until(lambda: not any(each["blocks"] for each in self._usages()), "the end of a pass that all have left")
        result["left_s"] = time.time() - began
        ended.set()
        return result

    def _started(self) -> bool:
        return not ray.get(self.actor.core_counts.remote())[1]

    def _begin(self, key: PassKey, request: PassRequest) -> None:
        ray.get([each.begin.remote(self.hub, key, request) for each in self.ranks])

    def _joined(self) -> list[Any]:
        """The positions of all rows, by process, once all ranks are through with their pass."""
        joining = [each.join.remote() for each in self.ranks]
        self._until(lambda: len(ray.wait(joining, num_returns=len(joining), timeout=0)[0]) == len(joining), "a pass")
        return ray.get(joining)

    def _read(self, ended: threading.Event) -> None:
        """Read the news as a driver does."""
        cursor = 0
        while not ended.wait(READ_S * self.slower):
            cursor = self.hub.read(cursor).cursor

    def _counts(self) -> tuple[dict[int, int], dict[int, float]]:
        rows, first = dict[int, int](), dict[int, float]()
        for each in ray.get([each.counts.remote() for each in self.ranks]):
            rows |= each[0]
            first |= each[1]
        return rows, first

    def _all_served(self) -> dict[int, float]:
        """When each rank had its first rows, once all have."""
        self._until(lambda: len(self._counts()[1]) == self.workers, "the first rows of all workers")
        return self._counts()[1]

    def _steady(self) -> dict[str, float]:
        before, rows_before = self._usages(), self._counts()[0]
        time.sleep(self.seconds)
        after, rows_after = self._usages(), self._counts()[0]
        used = [{name: now[name] - then[name] for name in now} for then, now in zip(before, after, strict=True)]
        cpu_s, python_cpu_s, blocks, rows = (
            sum(each[name] for each in used) for name in ("cpu_s", "python_cpu_s", "blocks", "rows")
        )
        wall_s = used[0]["at"]
        ceiling = sum(each["blocks"] / each["cpu_s"] for each in used)
        taken = [rows_after[rank] - rows_before[rank] for rank in range(self.workers)]
        slept = ray.get(
            [each.slept_s.remote(before[0]["at"], after[0]["at"]) for each in self.processes or [self.actor]]
        )
        asked = self.cores * self.slower / self.task_s
        found = {
            "slower": self.slower,
            "busy": sum(map(sum, slept)) / wall_s / self.cores,
            "blocks_per_s": blocks / wall_s,
            "samples_per_s": sum(taken) / wall_s,
            "rows_per_block": rows / blocks,
            "taken_over_made": sum(taken) / rows,
            "cpu_ms_per_block": cpu_s / blocks * 1e3,
            "python_ms_per_block": python_cpu_s / blocks * 1e3,
            "ceiling_blocks_per_s": ceiling,
            "asked_blocks_per_s": asked,
            "asked_samples_per_s": self.cores / stand_ins.SAMPLE_S,
            "hub_share": asked / ceiling,
            "uss_mib": after[0]["uss_mib"],
            "fewest_over_most_rows": min(taken) / max(taken),
        }
        if self.kind == "real":
            found["core_mib"] = statistics.median(ray.get(self.actor.memory_bytes.remote())) / 2**20
        return found

    def _usages(self) -> list[dict[str, float]]:
        """What each feed has used so far."""
        usages: list[dict[str, float]] = ray.get(self.actor.usages.remote())
        return usages

    def _until(self, condition: Any, what: str) -> None:
        until = time.time() + DEADLINE_S
        while not condition():
            if time.time() > until:
                raise RuntimeError(f"{what} took more than {DEADLINE_S:.0f} s; rows of ranks: {self._counts()[0]}")
            time.sleep(LOOK_S)


def _full_task(cores: int, first_rows: int) -> int:
    """The rows of a full task."""
    rates = SampleCost(core_seconds_per_sample=stand_ins.SAMPLE_S, bytes_per_sample=1.0)
    return plan_tasks(sys.maxsize, cores=cores, first_rows=first_rows, rates=rates, local_batch_size=LOCAL_BATCH)[0]


def measured(
    kind: Literal["stood", "real"], cores: int, workers: int, seconds: float, feeds: int = 1
) -> dict[str, float]:
    """Run a case on a Ray of its own."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", **RAY_STARTS_NOTHING_AHEAD}
    ray.init(
        "local", num_cpus=2 * cores, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    try:
        return Case(kind, cores, workers, seconds, feeds).run()
    finally:
        ray.shutdown()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
