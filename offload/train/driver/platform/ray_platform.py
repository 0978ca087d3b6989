"""A Ray cluster as the platform of a run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray

from offload import preload
from offload.model.placement import NodeResources
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.pool.ray_state import held
from offload.process.interrupts import handled
from offload.ray_private.draining import draining_nodes
from offload.report.events import RunEvent
from offload.report.run_dir import RunDirectory
from offload.train.cluster import connection
from offload.train.cluster.connected import ConnectedCluster
from offload.train.cluster.holdings import Holdings, worker_title
from offload.train.cluster.idle import is_alone
from offload.train.cluster.left import leave
from offload.train.cluster.node_requests import NodeRequests
from offload.train.cluster.notices import Watchers
from offload.train.cluster.ray_nodes import free_resources
from offload.train.cluster.ray_output import keep_to_logs
from offload.train.cluster.ray_processes import ControlWatch
from offload.train.cluster.reachable import silent_nodes
from offload.train.driver.caches import check_caches
from offload.train.group.group import Reservation
from offload.train.group.ray_group import RayGroups
from offload.train.hub.client import HubClient
from offload.train.hub.division import FeedTerms
from offload.train.hub.ray_hub import RayHub
from offload.train.hub.run_names import named_hub
from offload.train.steering.listening import Listening
from offload.train.steering.messages import RunState
from offload.train.steering.registry import OwnDesk, open_desk, user_name
from offload.train.steering.tenancy import RayTenancy

NO_METRICS = "this Ray serves no metrics, so Prometheus finds none: start it again with ray[default] installed, or let the run start one"


class RayPlatform:
    """See :class:`offload.train.driver.platform.platform.Platform`. ``cluster``: the one to which this process is connected."""

    forks = False

    def __init__(self, cluster: ConnectedCluster, note: str = "") -> None:
        self.cluster, self.note = cluster, note
        self._holdings = Holdings()
        self._control: ControlWatch | None = None
        self._run = ""
        self._desk: OwnDesk | None = None
        self._listening = Listening()
        self._tenancy: RayTenancy | None = None
        self._job_env: dict[str, Any] = dict(ray.get_runtime_context().runtime_env)

    @property
    def here(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def nodes(self) -> tuple[NodeResources, ...]:
        return connection.alive_nodes()

    def leaving(self) -> Collection[str]:
        return draining_nodes()

    def silent(self, nodes: Collection[str]) -> frozenset[str]:
        return silent_nodes(nodes)

    def ends_with(self) -> set[str]:
        return connection.nodes_to_end_with()

    def lost(self) -> str | None:
        return None if self._control is None else self._control.lost()

    def requests(self) -> NodeRequests:
        return NodeRequests(self._holdings)

    def held_by_others(self, ours: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        return connection.held_by_others(ours)

    def in_use(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        return connection.amounts_in_use(), self._holdings.held()

    def holders(self) -> str:
        return held().in_words

    def held_by_us(self) -> bool:
        return held().by_us_alone and is_alone()

    def free(self) -> Mapping[str, Mapping[str, float]]:
        return free_resources()

    def check_caches(self, specs: Iterable[CacheSpec], nodes: Mapping[str, str]) -> None:
        check_caches(specs, nodes, self.process_env())

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def process_env(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if own is None:
            return preload.runtime_env(self._job_env)
        return {**preload.runtime_env({**self._job_env, **own}, also=preload.TRAINING), **own}

    def import_ahead(self, nodes: Collection[str], env: Mapping[str, Any]) -> None:
        connection.import_ahead(nodes, env)

    def open_desk(self, directory: RunDirectory) -> OwnDesk:
        state = RunState(
            name=directory.path.name,
            user=user_name(),
            host=socket.gethostname(),
            pid=os.getpid(),
            run_dir=str(directory.path),
            since=time.time(),
        )
        self._desk = open_desk(state, self._holdings, self.process_env(), self._listening)
        self._run = self._desk.state.name
        return self._desk

    def open_tenancy(self) -> RayTenancy:
        self._tenancy = RayTenancy(self._run, self._listening)
        return self._tenancy

    def start_hub(
        self, directory: RunDirectory, streams: dict[str, FeedDataset], cores: Cores, *, terms: FeedTerms
    ) -> HubClient:
        stored = ray.put(streams)

        def start(**named: str) -> Any:
            return connection.on_this_node(
                ray.remote(RayHub),
                max_concurrency=terms.threads,
                enable_task_events=False,
                runtime_env=dict(cores.runtime_env) or None,
                **named,
            ).remote(stored, cores, len(self.cluster.nodes), directory.path, terms)

        self._control = ControlWatch()
        self._run, actor = named_hub(self._run or directory.path.name, start, self._holdings)
        keep_to_logs(self._run)
        return HubClient(actor)

    def groups(self, reservation: Reservation) -> RayGroups:
        if self._desk is not None:  # meanwhile the hub starts, too
            self._desk.wait_for_watch()
        return RayGroups(reservation, title=worker_title(self._run), holdings=self._holdings)

    def watch(self, hub: HubClient, tell: Callable[[RunEvent], None]) -> Watchers:
        return Watchers(hub, tell)

    def release(self, cpus: Mapping[str, float]) -> None:
        self._listening.end()
        self._holdings.release()
        self._holdings.drop()
        leave(cpus)

    def forget(self) -> None:
        self._listening.end()
        self._holdings.drop()

    def close(self) -> None:
        """Leave the arbiter, and end all threads, wherever the run has ended: the connection ends next."""
        if self._tenancy is not None:
            self._tenancy.close()
        self._listening.end()


class OnRay:
    """See :class:`offload.train.driver.platform.platform.PlatformOpener`.

    Args:
        address: the cluster, as a user gives it.
        leased: whether an arbiter says what the run may use, so that the run need not see what others hold.

    Raises ConfigError and RunError as :func:`offload.train.cluster.connection.check_address` does.
    """

    starting = "starting Ray"

    def __init__(self, address: str | None, *, leased: bool = False) -> None:
        self._address, self._leased = connection.check_address(address), leased

    def preparing(self) -> AbstractContextManager[None]:
        return connection.preparing(self._address)

    @contextmanager
    def opened(self, *, metrics_port: int | None = None) -> Iterator[RayPlatform]:
        with connection.connected(self._address, metrics_port=metrics_port, looks=not self._leased) as cluster:
            note = ""
            if metrics_port is not None:
                where = connection.metrics_address(ours=cluster.ours)
                note = f"metrics for Prometheus: {where}" if where else NO_METRICS
            platform = RayPlatform(cluster, note)
            try:
                yield platform
            finally:
                with handled() as interrupts, interrupts.shielded():
                    platform.close()
