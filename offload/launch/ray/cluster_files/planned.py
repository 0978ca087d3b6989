"""A plan's recommendation in the form for cluster files: nodes with GPUs, and nodes that only preprocess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from offload.errors import ConfigError
from offload.model.catalog import Catalog, NodeType
from offload.model.planning.plans import Plan, Spot

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class PlannedNodes:
    """One or more nodes of one type. ``spot``: whether they are planned on spot capacity."""

    kind: NodeType
    count: int
    spot: bool

    def __str__(self) -> str:
        return f"{self.count} × {self.kind.name}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The worker nodes, the nodes that only preprocess (or None), and their expected rate and price.

    ``usd_per_hour`` uses the prices of the plan: spot prices for the nodes that ``priced_as_spot`` names.
    """

    gpu: PlannedNodes
    cpu: PlannedNodes | None
    samples_per_s: float
    usd_per_hour: float
    priced_as_spot: Spot

    @property
    def groups(self) -> tuple[PlannedNodes, ...]:
        """The groups, with GPU nodes first."""
        return (self.gpu,) if self.cpu is None else (self.gpu, self.cpu)

    @property
    def prices(self) -> str:
        """The prices behind ``usd_per_hour``, in words."""
        at = {
            "none": "at the plan's prices on demand",
            "cpu": "at the plan's prices, spot for the CPU nodes",
            "all": "at the plan's spot prices",
        }[self.priced_as_spot]
        less = any(group.spot and not _on_spot(group.kind, self.priced_as_spot) for group in self.groups)
        return at + (", and less on spot capacity" if less else "")

    @property
    def count(self) -> int:
        """The number of all nodes."""
        return sum(group.count for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


def planned(plan: Plan, catalog: Catalog, source: str, spot: Spot | None = None) -> Planned:
    """A plan's recommendation. ``spot``: the nodes on spot capacity, instead of the plan's choice.

    Raises ConfigError if the catalog lacks an instance type, if a label cannot hold its name, or if the shape is not one type with
    GPUs and at most one type without.
    """
    best = plan.best
    gpu, cpu = _groups(best.shape, spot or plan.spot, catalog, source)
    return Planned(
        gpu=gpu,
        cpu=cpu,
        samples_per_s=best.samples_per_s,
        usd_per_hour=best.usd_per_hour,
        priced_as_spot=plan.spot,
    )


def _groups(
    shape: Mapping[str, int], spot: Spot, catalog: Catalog, source: str
) -> tuple[PlannedNodes, PlannedNodes | None]:
    for name in shape:
        if not _LABEL.fullmatch(name):
            raise ConfigError(
                f"{source}: {name!r} cannot be the label of a node, by which a run finds prices: name the type with at most 63 letters, "
                "digits, dots, dashes and underscores."
            )
    nodes = [
        PlannedNodes(kind=kind, count=count, spot=_on_spot(kind, spot))
        for kind, count in ((catalog[name], count) for name, count in shape.items() if count)
    ]
    gpus, cpus = [n for n in nodes if n.kind.gpus], [n for n in nodes if not n.kind.gpus]
    if len(gpus) != 1 or len(cpus) > 1:
        named = ", ".join(n.kind.name for n in nodes) or "no nodes"
        raise ConfigError(
            f"{source} recommends {len(gpus)} types of nodes with GPUs and {len(cpus)} without ({named}), and a cluster file "
            "takes one type with and at most one without: make the plan for one type (offload plan --gpu-type ml.g5.xlarge)."
        )
    return gpus[0], cpus[0] if cpus else None


def _on_spot(kind: NodeType, spot: Spot) -> bool:
    return spot == "all" or (spot == "cpu" and not kind.gpus)
