"""The events of the state machine, and the actions that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.arbiter.values import Lease
from offload.model.batch_split import BatchSplit
from offload.model.placement import Bundle, NodeResources
from offload.report.events.event import RunEvent
from offload.train.messages import News, Orders

# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterSeen:
    """The state of the cluster at one time.

    Args:
        now_s: the time, in seconds.
        nodes: the nodes that are alive, without the resources that other programs hold.
        leaving: ids of nodes that are alive but will soon be gone.
        silent: ids of nodes that do not answer, although Ray does not count them as dead yet. ``nodes`` lacks them.
        whole: the same nodes with the resources that other programs hold. Matters while the run starts.
        held: the resources that other programs hold, in words. Matters while the run starts.
        by_us: whether this program itself, outside the run, holds all of these. Matters while the run starts.
    """

    now_s: float
    nodes: Sequence[NodeResources]
    leaving: frozenset[str] = frozenset()
    silent: tuple[str, ...] = ()
    whole: Sequence[NodeResources] = ()
    held: str = ""
    by_us: bool = False


@dataclass(frozen=True, kw_only=True)
class NewsRead:
    """The driver has read the hub's news."""

    now_s: float
    news: News


@dataclass(frozen=True, kw_only=True)
class RoomMade:
    """Preprocessing has left the cores that the :class:`Reshape` with this number took from it, or has timed out."""

    number: int


@dataclass(frozen=True, kw_only=True)
class ResizeDecided:
    """Another number of workers is worth a restart.

    Args:
        split: its split of global batches.
        pinned: whether somebody outside the run has chosen it: it stays until it is chosen anew.
        allotment: the workers by node id; empty: any nodes.
    """

    split: BatchSplit
    pinned: bool = False
    allotment: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SplitDecided:
    """Another split of global batches among the same workers."""

    split: BatchSplit


@dataclass(frozen=True, kw_only=True)
class WorkersWanted:
    """This many workers are worth their nodes, whether or not they fit now."""

    workers: int


@dataclass(frozen=True, kw_only=True)
class CoresWanted:
    """This many preprocessing cores keep the accelerators busy.

    Args:
        cores: the number.
        device_samples_per_s, core_samples_per_s: what the workers could train, and what a core delivers.
        capped_samples_per_s: the rate of the input that more cores did not raise; None if no such limit is known.
    """

    cores: int
    device_samples_per_s: float | None = None
    core_samples_per_s: float | None = None
    capped_samples_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What adaptation has learned so far, as plain data for checkpoints."""

    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EntriesFollowed:
    """The driver has followed this many entries of the schedule of worker counts, as far as it can."""

    entries: int


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """The run ends: workers commit and stop."""


@dataclass(frozen=True, kw_only=True)
class PauseAsked:
    """The run pauses: workers commit and end, and then preprocessing ends, too."""


@dataclass(frozen=True, kw_only=True)
class WorkersEnded:
    """No worker runs, and none starts on the orders with this serial."""

    serial: int


@dataclass(frozen=True, kw_only=True)
class ResumeAsked:
    """A paused run goes on where it has committed."""


@dataclass(frozen=True, kw_only=True)
class LeaseSeen:
    """The arbiter of the cluster has leased these workers and cores to the run."""

    lease: Lease


Event = (
    ClusterSeen
    | NewsRead
    | RoomMade
    | ResizeDecided
    | SplitDecided
    | WorkersWanted
    | CoresWanted
    | Learned
    | EntriesFollowed
    | StopAsked
    | PauseAsked
    | WorkersEnded
    | ResumeAsked
    | LeaseSeen
)

# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Give these orders to the hub."""

    orders: Orders


@dataclass(frozen=True, kw_only=True)
class Reshape:
    """Preprocess on these nodes, one core for each mention.

    Args:
        number: a serial number.
        nodes: the ids of the nodes.
        stores: bytes of object store by node id.
        timeout_s: how long to wait for the tasks on other cores. Above 0, :class:`RoomMade` follows.
    """

    number: int
    nodes: tuple[str, ...]
    stores: Mapping[str, float]
    timeout_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask the cluster's autoscaler for these bundles, and nothing else. ``hold``: keep new nodes until all have come."""

    missing: Mapping[Bundle, int]
    hold: bool = False


@dataclass(frozen=True, kw_only=True)
class TellNotStarted:
    """Tell the user that no worker has started for ``after_s`` seconds, and how much of the needed resources is free."""

    workers: int
    after_s: float
    needs: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what the run waits for, before it starts."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """An event changed nothing, for this reason."""

    event: Event
    reason: str


Action = Publish | Reshape | Ask | RunEvent | TellNotStarted | Show | Ignored
"""The actions that the conductor carries out. It writes and shows each :class:`RunEvent`."""
