"""Follow what other programs hold of the cluster while a run trains, so that it takes up what becomes free.

Where it stops: the platform looks at the cluster, and :mod:`offload.train.driver.fleet` decides what to do with the room. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from offload.model.placement import NodeResources
from offload.train.driver.fleet.state import Fleet

SETTLED_S = 5.0  # tasks come and go, and Ray reports free resources later than held ones
DIGITS = 4  # decimals of resource amounts: Ray's resolution

Amounts = Mapping[str, Mapping[str, float]]
"""Amounts of resources by node id and name."""


class Others:
    """What other programs hold.

    Args:
        held: what they held at the start.
        certain: whether all that the run itself holds is known, so that the rest is others'.
    """

    def __init__(self, held: Amounts, *, certain: bool = True) -> None:
        self.held, self.certain = held, certain
        self._newest, self._since_s = held, 0.0

    def see(self, held: Amounts, now_s: float) -> bool:
        """Note what they hold at one time. Return whether :attr:`held` has changed: it follows amounts that stay for a while."""
        if held != self._newest:
            self._newest, self._since_s = held, now_s
            return False
        if held == self.held or now_s - self._since_s < SETTLED_S:
            return False
        self.held = held
        return True


def summed(*parts: Amounts) -> dict[str, dict[str, float]]:
    """The sums of these amounts."""
    sums: dict[str, Counter[str]] = {}
    for amounts in parts:
        for node, of_node in amounts.items():
            sums.setdefault(node, Counter()).update(of_node)
    return {node: dict(amounts) for node, amounts in sums.items()}


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
