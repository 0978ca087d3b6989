"""What a run waits for: nodes that come when they are asked for, on a cluster with an autoscaler; room that other programs hold, on
one that is shared; and workers that do not start."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from offload.errors import ConfigError
from offload.model.placement import NodeResources, WorkerResources
from offload.train.cluster import Cluster, alive_nodes, held_by_others
from offload.train.demand import Bundle, Demand
from offload.train.journal import shares
from offload.train.monitor import News

LOOK_S = 1.0
OVERDUE_S = 60.0  # after which it is said that no worker has started


def wait_for_nodes(
    cluster: Cluster,
    check: Callable[[Sequence[NodeResources]], object],
    missing: Callable[[Sequence[NodeResources]], Mapping[Bundle, int]],
    *,
    deadline_s: float,
    status: Callable[[str], None],
) -> Cluster:
    """The cluster as soon as its nodes suffice.

    Args:
        check: raises ConfigError for nodes that do not.
        missing: what to ask for beside these nodes.
        status: shows what it is waited for.

    Raises ConfigError where they do not suffice in time, with what is missing then.
    """
    demand, shown = Demand(), ""
    until = time.monotonic() + deadline_s
    try:
        while True:
            try:
                check(cluster.nodes)
                return cluster
            except ConfigError as error:
                asked = missing(cluster.nodes)
                if not asked:  # nodes are not what is wrong
                    raise
                if time.monotonic() > until:
                    raise ConfigError(
                        f"the nodes that were asked for did not come within {deadline_s:.0f} s (nodes_deadline_s): {error} What the "
                        "autoscaler does is shown by ray status: a quota may be used up, or the cluster at its largest."
                    ) from None
            demand.ask(asked, hold=True)
            parts = ", ".join(f"{count} × {_named(bundle)}" for bundle, count in asked.items())
            held = shares(cluster.held_of_all())
            beside = f"; other programs hold {held}" if held else ""
            shown = _show(f"waiting for nodes with room for {parts}{beside}", shown, status)
            cluster = _beside(demand, cluster)
    finally:
        demand.close()


def _beside(demand: Demand, cluster: Cluster) -> Cluster:
    """The cluster now, with what others hold of it beside ``demand``."""
    while True:
        ours = demand.held()
        time.sleep(LOOK_S)  # what is free is told later than what is held
        cluster = dataclasses.replace(cluster, whole=alive_nodes(), held=held_by_others(ours))
        if demand.held() == ours:  # else what has just come would count as others', and be asked for again
            return cluster


def wait_for_room(
    cluster: Cluster, check: Callable[[Sequence[NodeResources]], object], *, status: Callable[[str], None]
) -> Cluster:
    """The cluster as soon as other programs leave enough of it.

    Args:
        check: raises ConfigError for nodes that do not suffice.
        status: shows what it is waited for.

    Raises what ``check`` does where the whole cluster would not suffice either.
    """
    shown = ""
    while True:
        try:
            check(cluster.nodes)
            return cluster
        except ConfigError:
            check(cluster.whole)
        shown = _show(f"waiting for room: other programs hold {shares(cluster.held_of_all()) or 'it'}", shown, status)
        time.sleep(LOOK_S)
        cluster = dataclasses.replace(cluster, whole=alive_nodes(), held=held_by_others({}))


class StartWatch:
    """Says once that workers are long in starting, at the start or after a failure: another program may have taken their room.

    Args:
        worker: what each reserves.
        tell: writes an event.
        free: by node id, the amount of each resource that nobody holds.
        now_s: the time, in seconds.
    """

    def __init__(
        self,
        worker: WorkerResources,
        tell: Callable[..., None],
        *,
        free: Callable[[], Mapping[str, Mapping[str, float]]],
        now_s: float,
    ) -> None:
        self._needs = {"CPU": worker.cpus, "GPU": worker.gpus, **worker.others}
        self._tell, self._free = tell, free
        self._since, self._attempts, self._failures, self._told = now_s, 0, 0, False

    def look(self, news: News, *, wanted: int, now_s: float) -> None:
        """``wanted``: how many are to train."""
        if news.failures > self._failures:
            self._since, self._attempts, self._failures, self._told = now_s, news.attempts, news.failures, False
        if not wanted:
            self._since = now_s
        started = news.running or news.attempts > self._attempts
        if self._told or started or now_s - self._since < OVERDUE_S:
            return
        self._told = True
        free = self._free()
        self._tell(
            "not_started",
            workers=wanted,
            after_s=now_s - self._since,
            needs={name: amount for name, amount in self._needs.items() if amount},
            free={name: sum(n.get(name, 0.0) for n in free.values()) for name, amount in self._needs.items() if amount},
        )


def _show(text: str, shown: str, status: Callable[[str], None]) -> str:
    """Where standard error is no terminal every call is a line."""
    if text != shown:
        status(text)
    return text


def _named(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle)
