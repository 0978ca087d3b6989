"""What a plan recommends, as a cluster file needs it: nodes with GPUs, and nodes that only preprocess.

Where it stops: the plan is believed; whether it is a good one is the planner's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from offload.errors import ConfigError
from offload.model.catalog import Catalog, NodeType
from offload.model.plans import SCHEMA, Spot

MOST_NODES = 1000  # of one type: more is a slip of the pen
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes of one type, one or more. ``spot``: whether they are planned on spot capacity."""

    kind: NodeType
    count: int
    spot: bool

    def __str__(self) -> str:
        return f"{self.count} × {self.kind.name}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The nodes for workers, those that only preprocess (None: there are none), and what the plan expects of them together.

    ``usd_per_hour`` is at the prices that the plan was made with: spot prices for the nodes that ``priced_as_spot`` names.
    """

    gpu: Nodes
    cpu: Nodes | None
    samples_per_s: float
    usd_per_hour: float
    priced_as_spot: Spot

    @property
    def groups(self) -> tuple[Nodes, ...]:
        """Nodes with GPUs first."""
        return (self.gpu,) if self.cpu is None else (self.gpu, self.cpu)

    @property
    def prices(self) -> str:
        """Which prices ``usd_per_hour`` is of, in words."""
        at = {
            "none": "at the plan's prices on demand",
            "cpu": "at the plan's prices, spot for the CPU nodes",
            "all": "at the plan's spot prices",
        }[self.priced_as_spot]
        less = any(group.spot and not _on_spot(group.kind, self.priced_as_spot) for group in self.groups)
        return at + (", and less on spot capacity" if less else "")

    @property
    def count(self) -> int:
        """All nodes together."""
        return sum(group.count for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


def planned(plan: Any, catalog: Catalog, source: str, spot: Spot | None = None) -> Planned:
    """What plan.json recommends. ``spot``: which nodes are to be spot capacity, whatever the plan says.

    Raises ConfigError for what is no plan, one that recommends nothing, instance types that the catalog does not hold or no
    label can carry, and a shape other than one type with GPUs and at most one without. A plan that does not say what is spot
    capacity is on demand, as ``offload plan`` plans by default.
    """
    try:
        if plan["schema"] != SCHEMA:
            raise ConfigError(
                f"{source} is of schema {plan['schema']!r}, not {SCHEMA!r}: make it with offload plan -o."
            )
        at = plan["recommended"]
        if at is None or not plan["candidates"]:
            raise ConfigError(f"{source} recommends no candidate: plan with other types or ranges, or a larger budget.")
        if not _is_count(at):
            raise TypeError(f"recommended is {at!r}")
        best = plan["candidates"][at]
        priced = plan.get("spot", "none")
        if priced not in get_args(Spot):
            raise ConfigError(
                f"{source} has spot {priced!r}, and not one of {', '.join(get_args(Spot))}: plan with --spot."
            )
        groups = _groups(best["shape"], spot or priced, catalog, source)
        samples_per_s, usd_per_hour = float(best["samples_per_s"]), float(best["usd_per_hour"])
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{source} is no plan ({type(error).__name__}: {error}): make it with offload plan -o."
        ) from None
    gpu, cpu = groups
    return Planned(gpu=gpu, cpu=cpu, samples_per_s=samples_per_s, usd_per_hour=usd_per_hour, priced_as_spot=priced)


def _groups(shape: Mapping[str, Any], spot: Spot, catalog: Catalog, source: str) -> tuple[Nodes, Nodes | None]:
    for name, count in shape.items():
        if not _is_count(count) or count > MOST_NODES:
            raise ConfigError(
                f"{source} recommends {count!r} × {name}: a count is a whole number from 0 to {MOST_NODES}."
            )
        if not _LABEL.fullmatch(name):
            raise ConfigError(
                f"{source}: {name!r} cannot be the label of a node, by which prices are found: name the type with at most 63 letters, "
                "digits, dots, dashes and underscores."
            )
    nodes = [
        Nodes(kind=kind, count=count, spot=_on_spot(kind, spot))
        for kind, count in ((catalog[name], count) for name, count in shape.items() if count)
    ]
    gpus, cpus = [n for n in nodes if n.kind.gpus], [n for n in nodes if not n.kind.gpus]
    if len(gpus) != 1 or len(cpus) > 1:
        named = ", ".join(n.kind.name for n in nodes) or "no nodes"
        raise ConfigError(
            f"{source} recommends {len(gpus)} types of nodes with GPUs and {len(cpus)} without ({named}), and a cluster file "
            "takes one with and at most one without: plan with --gpu-type ml.g5.xlarge, say."
        )
    return gpus[0], cpus[0] if cpus else None


def _on_spot(kind: NodeType, spot: Spot) -> bool:
    return spot == "all" or (spot == "cpu" and not kind.gpus)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
