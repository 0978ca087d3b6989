"""What other programs hold of the cluster beside a run that trains, so that it takes up what becomes free.

Where it stops: the platform looks at the cluster, :mod:`offload.model.others` waits until amounts stay, and
:mod:`offload.train.driver.fleet` decides what to do with the room. Pure.
"""

from __future__ import annotations

from offload.model.others import DIGITS, Amounts
from offload.model.placement import NodeResources
from offload.train.driver.fleet.state import Fleet


def cores_of(fleet: Fleet) -> dict[str, float]:
    """The CPUs of a run's preprocessing, by node id."""
    return {node: cores * fleet.core_cpus for node, cores in fleet.used.items() if cores}


def others_hold(
    in_use: Amounts, ours: Amounts, fleet: Fleet, nodes: tuple[NodeResources, ...]
) -> dict[str, dict[str, float]]:
    """What others hold of these whole ``nodes`` if so much is ``in_use`` and so much of it ``ours``.

    They never hold what the run believes to have: its workers and cores must not seem to have lost their room while Ray's amounts lag.
    """
    workers = dict(zip((node.node_id for node in fleet.nodes.usable), fleet.placement.held, strict=True))
    worker, cores = fleet.terms.worker, cores_of(fleet)
    held: dict[str, dict[str, float]] = {}
    for node in nodes:
        here = workers.get(node.node_id, 0) if fleet.workers else 0
        own = {"CPU": here * worker.cpus + cores.get(node.node_id, 0.0), "GPU": here * worker.gpus}
        own |= {name: here * amount for name, amount in worker.others.items() if name not in own}
        whole = {"CPU": node.cpus, "GPU": node.gpus, **node.others}
        amounts = {
            name: round(
                min(amount - ours.get(node.node_id, {}).get(name, 0.0), whole[name] - own.get(name, 0.0)), DIGITS
            )
            for name, amount in in_use.get(node.node_id, {}).items()
            if name in whole
        }
        if amounts := {name: amount for name, amount in amounts.items() if amount > 0}:
            held[node.node_id] = amounts
    return held
