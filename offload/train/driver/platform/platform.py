"""What a run asks of the machines on which it runs.

It has two implementations: a Ray cluster (:mod:`offload.train.driver.platform.ray_platform`), and this machine without a cluster
(:mod:`offload.train.driver.platform.this_machine`). Where it stops: a platform decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from offload.arbiter.values import Lease, Report
from offload.model.placement import Bundle, NodeResources
from offload.pipeline.cache.spec import CacheSpec
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.report.events import RunEvent
from offload.report.run_dir import RunDirectory
from offload.train.cluster.connected import ConnectedCluster
from offload.train.group.group import Groups, Reservation
from offload.train.hub.client import HubClient
from offload.train.hub.division import FeedTerms
from offload.train.steering.messages import Command, Reply, RunState


class Requests(Protocol):
    """The requests to the cluster for nodes."""

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        """Ask the cluster for this many of each bundle."""

    def close(self) -> None:
        """Withdraw all requests."""


class HeldRequests(Requests, Protocol):
    """Requests of which the cluster may have granted some."""

    def held(self) -> dict[str, dict[str, float]]:
        """The resources that the requests hold, by node id."""


class Watch(Protocol):
    """Watches nodes for notices that the provider takes them back."""

    def look(self, alive: Sequence[NodeResources], leaving: Collection[str]) -> None:
        """Watch these nodes. Does not wait."""

    def close(self) -> None:
        """Watch no more."""


class RunDesk(Protocol):
    """A run's own side of the desk at which others see and steer it. Its calls do not wait. ``state``: what the run has shown last."""

    state: RunState

    def show(self, state: RunState) -> None:
        """Make this the state that others see."""

    def reply(self, number: int, reply: Reply) -> None:
        """Answer a command."""

    def hear(self, tell: Callable[[int, Command], None]) -> None:
        """Call ``tell`` with each command and its number, from another thread."""


class Tenancy(Protocol):
    """A run's own side of the cluster's arbiter. Its calls do not wait. ``lease``: the newest lease, if any."""

    @property
    def lease(self) -> Lease | None:
        """The newest lease; None before the first, and after :meth:`depart`."""

    def start(self, changed: Callable[[], None]) -> None:
        """Begin to listen. ``changed`` is called from another thread when there is another lease."""

    def report(self, report: Report) -> None:
        """Describe the run."""

    def depart(self) -> None:
        """Tell the arbiter that the run holds nothing, and wants nothing for now."""

    def close(self) -> None:
        """Depart, and listen no more: the run is over."""


class Platform(Protocol):
    """The machines of one run, and what runs on them.

    Args:
        cluster: the machines as they were found.
        here: the id of the driver's node.
        note: what the user should know of it; empty if nothing.
        forks: whether preprocessing processes are forks of the program, and so have all that it has set up.
    """

    cluster: ConnectedCluster
    note: str
    forks: bool

    @property
    def here(self) -> str:
        """The id of the driver's node."""

    # -- the machines ------------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[NodeResources, ...]:
        """The nodes that are alive now, with all their resources."""

    def leaving(self) -> Collection[str]:
        """The ids of nodes that will soon be gone."""

    def silent(self, nodes: Collection[str]) -> frozenset[str]:
        """The ids of those of these nodes that do not answer."""

    def ends_with(self) -> set[str]:
        """The ids of the nodes whose end ends the run."""

    def lost(self) -> str | None:
        """A sentence, if the platform itself has ended; None if not."""

    def requests(self) -> HeldRequests:
        """New requests for nodes."""

    def held_by_others(self, ours: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """The resources that other programs hold, by node id, without ``ours``."""

    def in_use(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """The resources in use now, by node id: those of all programs, and those of this run's workers and requests."""

    def holders(self) -> str:
        """Who holds CPUs, in words; empty if nobody does."""

    def held_by_us(self) -> bool:
        """Return whether this program alone holds CPUs beside the run, and will not give them back."""

    def free(self) -> Mapping[str, Mapping[str, float]]:
        """The free amount of each resource, by node id."""

    def check_caches(self, specs: Iterable[CacheSpec], nodes: Mapping[str, str]) -> None:
        """Raise ConfigError, with the node's name, if a node cannot hold one of the caches. ``nodes``: their names, by id."""

    # -- what runs on them -------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Any:
        """A reference to a value, which processes on all nodes can read."""

    def process_env(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The environment of preprocessing processes; of workers, if ``own`` is the user's for them."""

    def import_ahead(self, nodes: Collection[str], env: Mapping[str, Any]) -> None:
        """Begin the imports of processes with this environment on these nodes. Does not wait."""

    def open_desk(self, directory: RunDirectory) -> RunDesk | None:
        """The desk at which others see and steer the run; None without a cluster, where there are no others."""

    def open_tenancy(self) -> Tenancy:
        """The run's side of the cluster's arbiter, which departs at the latest when the platform closes. Call it after :meth:`open_desk`.
        Raises ConfigError if there is no arbiter."""

    def start_hub(
        self, directory: RunDirectory, streams: dict[str, FeedDataset], cores: Cores, *, terms: FeedTerms
    ) -> HubClient:
        """Start the run's hub, and other feeds beside it if ``terms`` need them. Without a cluster, the hub alone feeds the run."""

    def groups(self, reservation: Reservation) -> Groups:
        """What starts the workers."""

    def watch(self, hub: HubClient, tell: Callable[[RunEvent], None]) -> Watch:
        """What watches the nodes for notices. ``tell`` writes an event."""

    def release(self, cpus: Mapping[str, float]) -> None:
        """End what the run has started. ``cpus``: what it has used, by node id."""

    def forget(self) -> None:
        """Forget what the run has started: the platform itself has ended."""


class PlatformOpener(Protocol):
    """A platform before it is there."""

    def preparing(self) -> AbstractContextManager[None]:
        """A context for the preparations of a run. Meanwhile, processes begin their imports."""

    def opened(self, *, metrics_port: int | None = None) -> AbstractContextManager[Platform]:
        """The platform, for one run.

        Args:
            metrics_port: the port at which a new cluster serves its metrics, 0 for a free one; None: it serves none.

        Raises:
            ConfigError: if there is no such platform.
        """

    @property
    def starting(self) -> str:
        """What the user waits for meanwhile."""
