"""A run that begins before its nodes are there: on a cluster with an autoscaler they come when they are asked for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from offload.errors import ConfigError
from offload.model.placement import NodeResources
from offload.train.cluster import Cluster, alive_nodes
from offload.train.demand import Bundle, Demand

LOOK_S = 1.0


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
    demand = Demand()
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
            demand.ask(asked)
            parts = [f"{count} × {_named(bundle)}" for bundle, count in asked.items()]
            status(f"waiting for nodes with room for {', '.join(parts)}")
            time.sleep(LOOK_S)
            cluster = dataclasses.replace(cluster, nodes=alive_nodes())
    finally:
        demand.close()


def _named(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle)
