"""This machine as the platform of a run, without a cluster.

The hub lives in the driver. Preprocessing processes are forks of the program, so they have all that it has set up. Workers are forks of
a fresh Python, where nothing has used CUDA or threads yet. Blocks lie in memory that all of them share (:mod:`offload.actors.values`).
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import psutil
import torch

from offload import machine, preload
from offload.actors.processes import Actor, Served, answer_calls, start_actor
from offload.actors.starter import Starter
from offload.actors.values import Answer
from offload.errors import ConfigError, argument
from offload.model.placement import NodeResources
from offload.pipeline.cache.spec import CacheSpec, obstacle_here
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.pool.pool import Pool
from offload.pipeline.pool.preprocessor import Preprocessor
from offload.pipeline.preprocessing.environment import Ordinal
from offload.report.events import RunEvent
from offload.report.run_dir import RunDirectory
from offload.train.cluster.connected import ConnectedCluster
from offload.train.group.group import Reservation
from offload.train.group.local_group import LocalGroups
from offload.train.hub.actor import Hub, take_turns
from offload.train.hub.client import HubClient
from offload.train.hub.division import FeedTerms

STORE_SHARE = 0.3  # of the memory, for blocks: Ray's own choice
BYTES_PER_FILE = 1 << 20  # of blocks, for each open file that the driver may have: larger ones are a file each
MOST_FILES = 1 << 16
WORKERS_IMPORT = ("offload.train.worker.process", "offload.train.group.local_group", *preload.FIRST_STEP)
MAIN = "offload.actors.processes:answer_calls"


class LocalProcesses:
    """See :class:`offload.pipeline.pool.processes.Processes`."""

    reserves = False

    def __init__(self, starter: Starter) -> None:
        self._starter, self.title = starter, "preprocessing"

    def start(self, node: str, hub: Any, me: Ordinal) -> Actor:
        return start_actor(self._starter, Preprocessor, hub, me, self.title, node, title="the process")

    def end(self, handle: Actor) -> None:
        handle.kill()


class NoRequests:
    """See :class:`offload.train.driver.platform.platform.Requests`. Nobody could add a node."""

    def ask(self, missing: Mapping[Any, int], *, hold: bool = False) -> None: ...

    def held(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None: ...


class NoWatch:
    """See :class:`offload.train.driver.platform.platform.Watch`. The end of this machine is the end of the run."""

    def look(self, alive: Collection[NodeResources], leaving: Collection[str]) -> None: ...

    def close(self) -> None: ...


class ThisMachine:
    """See :class:`offload.train.driver.platform.platform.Platform`. ``workers``: starts the workers' processes."""

    forks = True

    def __init__(self, workers: Starter) -> None:
        self.cluster = ConnectedCluster(whole=(this_node(),), ours=True)
        cores = machine.usable_cores()
        self.note = (
            f"runs on this machine's {cores} core(s), without Ray; a Ray cluster brings more: address= (--address)"
        )
        self._workers, self._preprocessing = workers, Starter.forked(answer_calls)
        self._served: Served | None = None
        self._hub: Hub | None = None

    @property
    def here(self) -> str:
        return self.cluster.whole[0].node_id

    def nodes(self) -> tuple[NodeResources, ...]:
        return self.cluster.whole

    def leaving(self) -> Collection[str]:
        return ()

    def silent(self, nodes: Collection[str]) -> frozenset[str]:
        return frozenset()

    def ends_with(self) -> set[str]:
        return {self.here}

    def lost(self) -> str | None:
        return None

    def requests(self) -> NoRequests:
        return NoRequests()

    def held_by_others(self, ours: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        return {}

    def in_use(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        return {}, {}  # nobody reserves anything

    def holders(self) -> str:
        return ""

    def held_by_us(self) -> bool:
        return False

    def free(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    def check_caches(self, specs: Iterable[CacheSpec], nodes: Mapping[str, str]) -> None:
        for spec in dict.fromkeys(specs):
            if (obstacle := obstacle_here(spec)) is not None:
                raise ConfigError(f"cache={spec.text!r} cannot be used on this machine: {obstacle}.")

    def put(self, value: Any) -> Answer:
        return Answer.of(value)

    def process_env(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(own or {})

    def import_ahead(self, nodes: Collection[str], env: Mapping[str, Any]) -> None: ...

    def open_desk(self, directory: RunDirectory) -> None:
        return None  # nobody else shares these processes: signals steer the program

    def open_tenancy(self) -> NoReturn:
        raise ConfigError(
            "an arbiter shares a Ray cluster, and this run uses this machine alone: name a cluster with "
            f"{argument('address', 'HOST:PORT')}, or drop {argument('arbiter', True, python='Cluster(arbiter=True)')}."
        )

    def start_hub(
        self, directory: RunDirectory, streams: dict[str, FeedDataset], cores: Cores, *, terms: FeedTerms
    ) -> HubClient:
        hub = _LateHub()
        self._served = Served(hub)
        self._hub = hub.hub = Hub(
            streams,
            cores,
            1,
            directory.path,
            handle=self._served.handle,
            pool=partial(Pool, processes=LocalProcesses(self._preprocessing)),
        )
        return HubClient(self._served.handle)

    def groups(self, reservation: Reservation) -> LocalGroups:
        return LocalGroups(
            self._workers,
            node=self.here,
            gpus=gpu_ids() if reservation.bundle.get("GPU") else (),
            gpus_each=reservation.bundle.get("GPU", 0.0),
            variables=reservation.runtime_env.get("env_vars"),
        )

    def watch(self, hub: HubClient, tell: Callable[[RunEvent], None]) -> NoWatch:
        return NoWatch()

    def release(self, cpus: Mapping[str, float]) -> None:
        self.close()

    def forget(self) -> None:
        self.close()

    def close(self) -> None:
        """End everything. It may be called again."""
        if self._served is not None:
            self._served.close()
        if self._hub is not None:
            self._hub.feed.close()
        self._preprocessing.close()


class _LateHub:
    """Stands for the hub, which needs the handle of what is served."""

    hub: Hub

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hub, name)


class OnThisMachine:
    """See :class:`offload.train.driver.platform.platform.PlatformOpener`."""

    starting = "starting"

    def __init__(self) -> None:
        self._workers: Starter | None = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        workers = self._fresh()
        try:
            yield
        finally:
            workers.close()

    @contextmanager
    def opened(self, *, metrics_port: int | None = None) -> Iterator[ThisMachine]:
        workers = self._workers or self._fresh()
        switch_s, files = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_most_files(), files[1]))
        platform = ThisMachine(workers)
        take_turns()
        try:
            yield platform
        finally:
            platform.close()
            workers.close()
            sys.setswitchinterval(switch_s)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)

    def _fresh(self) -> Starter:
        self._workers = Starter.fresh(MAIN, [*WORKERS_IMPORT, *preload.used()])
        return self._workers


def _most_files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft, min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES)


def gpu_ids() -> tuple[str, ...]:
    """The ids of this machine's GPUs that this program may use. This does not initialise CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if visible is None else tuple(filter(None, visible.split(",")))[:count]


def this_node() -> NodeResources:
    """This machine, as the state machine sees a node."""
    memory_bytes = machine.memory_limit(psutil.virtual_memory().total)
    store_bytes = min(STORE_SHARE * memory_bytes, _most_files() / 2 * BYTES_PER_FILE)
    name = socket.gethostname()
    return NodeResources(
        name=name,
        node_id=name,
        cpus=float(machine.usable_cores()),
        gpus=float(len(gpu_ids())),
        store_bytes=store_bytes,
        memory_bytes=memory_bytes - store_bytes,
    )
