"""One hub on a local Ray, with sleeping cores and counting workers: a whole pass, then fewer cores, all again, and the end.

Where it stops: :mod:`benchmarks.stand_ins` has the cores and the workers.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from typing import Any, Literal

import numpy as np
import ray

from benchmarks import stand_ins
from offload import preload
from offload.pipeline.passes import PassKey, PassRequest
from offload.pipeline.pool import PackedRecipe
from offload.pipeline.sizing import task_s
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.pipeline.streams import Cores, Stream
from offload.train.hub.client import HubClient

LOCAL_BATCH = 32
STORE_BYTES = 3 << 30  # of this machine's Ray
NODE_STORE_BYTES = 9 << 30  # of each node, as the hub is told
CORES_OF_A_PROCESS = 125
READ_S = 2.0
DEADLINE_S = 300.0


class NoContent:
    """A recipe without content."""

    def ready(self) -> NoContent:
        return self

    def process(self, rows: Any, *, epoch: int, scratch: Any, watch: Any) -> Any:
        """Stand-ins do no work."""
        raise NotImplementedError


class Case:
    """A hub with so many cores and workers. ``kind``: cores that processes stand for, or a process for each."""

    def __init__(self, kind: Literal["stood", "real"], cores: int, workers: int, seconds: float) -> None:
        self.cores, self.workers, self.seconds = cores, workers, seconds
        self.samples = int(cores / stand_ins.SAMPLE_S * (seconds + 6 * task_s(cores)))
        environment = preload.runtime_env({})
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": environment or None}
        self.processes: list[Any] = []
        if kind == "stood":
            count = math.ceil(cores / CORES_OF_A_PROCESS)
            stood: Any = ray.remote(stand_ins.Stood)
            threads = 2 * math.ceil(cores / count) + 4
            self.processes = [stood.options(**options, max_concurrency=threads).remote() for _ in range(count)]
            ray.get([process.slept_s.remote(0.0, 0.0) for process in self.processes])
        self.nodes = stand_ins.node_names(cores)
        self.stores = dict.fromkeys(self.nodes, float(NODE_STORE_BYTES))
        place = Cores(nodes=self.nodes, task_cpus=1.0, stores=self.stores, runtime_env=environment)
        rows = list_torch_dataset(range(self.samples)).rows
        stream = Stream(recipe=PackedRecipe.of(NoContent()), rows=rows, shuffle=True)
        hub_class: Any = ray.remote(stand_ins.ScaleHub)
        self.began = time.time()
        self.actor = hub_class.options(**options, max_concurrency=8 + 6 * workers, enable_task_events=False).remote(
            {"train": stream}, place, self.processes
        )
        self.hub = HubClient(self.actor)
        self.request = PassRequest(world_size=workers, first_rows=workers * LOCAL_BATCH, epoch=0, followed=True)
        homes = [f"node-{rank // stand_ins.RANKS_PER_NODE}" for rank in range(workers)]
        self.hub.start_ahead(self.request, "train", sorted(set(homes)))
        ranks_class: Any = ray.remote(stand_ins.Ranks)
        self.ranks = [
            ranks_class.options(**options, max_concurrency=4).remote(
                self.actor, [rank for rank in range(workers) if homes[rank] == home], workers, home
            )
            for home in sorted(set(homes))
        ]

    def run(self) -> dict[str, float]:
        """The measurements, by name."""
        ended = threading.Event()
        threading.Thread(target=self._read, args=(ended,), daemon=True).start()
        attempt = self.hub.begin_group().attempt
        self._begin(PassKey(attempt=attempt, name="train", number=0), self.request)
        first = self._all_served()
        result = {"first_block_s": min(first.values()) - self.began, "all_served_s": max(first.values()) - self.began}
        time.sleep(3 * task_s(self.cores))
        result |= self._steady()
        _say("the end of the pass")
        positions = np.concatenate(ray.get([each.join.remote() for each in self.ranks]))
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
            self._until(lambda: not ray.get(self.actor.core_counts.remote())[1], "cores that start")
            result[name] = time.time() - began
        _say("leaving")
        began = time.time()
        ray.get([each.leave.remote() for each in self.ranks])
        ray.get([each.join.remote() for each in self.ranks])
        self._until(lambda: not ray.get(self.actor.usage.remote())["blocks"], "the end of a pass that all have left")
        result["left_s"] = time.time() - began
        ended.set()
        return result

    def _begin(self, key: PassKey, request: PassRequest) -> None:
        ray.get([each.begin.remote(key, request) for each in self.ranks])

    def _read(self, ended: threading.Event) -> None:
        """Read the news as a driver does."""
        cursor = 0
        while not ended.wait(READ_S):
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
        before, rows_before = ray.get(self.actor.usage.remote()), self._counts()[0]
        time.sleep(self.seconds)
        after, rows_after = ray.get(self.actor.usage.remote()), self._counts()[0]
        wall_s, cpu_s, blocks = (after[name] - before[name] for name in ("at", "cpu_s", "blocks"))
        taken = [rows_after[rank] - rows_before[rank] for rank in range(self.workers)]
        holders = self.processes or [self.actor]
        slept = ray.get([each.slept_s.remote(before["at"], after["at"]) for each in holders])
        return {
            "blocks_per_s": blocks / wall_s,
            "samples_per_s": sum(taken) / wall_s,
            "busy": sum(map(sum, slept)) / wall_s / self.cores,
            "cpu_ms_per_block": cpu_s / blocks * 1e3,
            "cpu_share": cpu_s / wall_s,
            "uss_mib": after["uss_mib"],
            "fewest_over_most_rows": min(taken) / max(taken),
        }

    def _until(self, condition: Any, what: str) -> None:
        until = time.time() + DEADLINE_S
        while not condition():
            if time.time() > until:
                raise RuntimeError(f"{what} took more than {DEADLINE_S:.0f} s")
            time.sleep(0.1)


def measured(kind: Literal["stood", "real"], cores: int, workers: int, seconds: float) -> dict[str, float]:
    """Run a case on a Ray of its own."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        "local", num_cpus=2 * cores, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, _system_config=preload.NONE_AHEAD,
    )  # fmt: skip
    try:
        return Case(kind, cores, workers, seconds).run()
    finally:
        ray.shutdown()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
