"""Instance groups: from what a user writes, or a plan recommends, to names, types and counts; and what they cost.

Where it stops: whether the service has such instances is checked with the whole job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchers.sagemaker.settings import GPU_GROUP
from offload.errors import ConfigError
from offload.model import Catalog
from offload.model.plans import SCHEMA

CPU_GROUP = "cpu"
SHORTEST_RUN_S = 600  # below, a cap on spend buys hardly more than the machines' start
ENDING_S = 300  # are paid after the service began to stop a job: it waits for two minutes, and uploads what there is
MOST_ALTERNATIVES = 3
_GPU_FAMILIES = re.compile(r"ml\.(p|g)\d")
_LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d+[a-z]*d|[a-z]+\d+d|(g[5-9]|p[5-9]|trn\d))")
_SPEC = re.compile(r"(?P<type>[^:\s]+):(?P<count>\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Instances of one type."""

    name: str
    instance_type: str
    count: int


Groups = tuple[Group, ...]


def groups_of(gpu: str, cpus: Sequence[str]) -> Groups:
    """Groups from ``TYPE:COUNT`` texts, named ``gpu``, ``cpu``, ``cpu-2``, …

    Raises ConfigError for a text of another form.
    """
    return _named(_parsed(gpu), [_parsed(text) for text in cpus])


def groups_of_plan(plan: Any, source: str) -> tuple[Groups, ...]:
    """The groups that a plan.json recommends, and behind them those to take where there is no capacity for these: its next
    best candidates of other instance types, or of fewer.

    Raises ConfigError for what is no plan, or one that recommends no GPU node.
    """
    try:
        if plan["schema"] != SCHEMA:
            raise ConfigError(
                f"{source} is of schema {plan['schema']!r}, not {SCHEMA!r}: make it with offload plan -o."
            )
        shapes = [dict(candidate["shape"]) for candidate in plan["candidates"]]
        best = shapes[plan["recommended"]]
        found = [_of_shape(best, source), *(_of_shape(shape, source) for shape in shapes if _is_other(shape, best))]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{source} is no plan ({type(error).__name__}: {error}): make it with offload plan -o."
        ) from None
    return tuple(found[: 1 + MOST_ALTERNATIVES])


def has_gpus(instance_type: str) -> bool:
    """Whether instances of this type have GPUs."""
    return _GPU_FAMILIES.match(instance_type) is not None


def has_local_storage(instance_type: str) -> bool:
    """Whether instances of this type have disks of their own, which their hardware encrypts: the service refuses another key for
    them."""
    return _LOCAL_STORAGE.match(instance_type) is not None


def usd_per_hour(groups: Sequence[Group], catalog: Catalog) -> float:
    """On demand. Raises ConfigError where a price is not known."""
    return sum(catalog[group.instance_type].usd_per_hour * group.count for group in groups)


def seconds_for(usd: float, groups: Sequence[Group], catalog: Catalog) -> int:
    """How long the groups may run for ``usd``, their end included. Raises ConfigError where a price is not known, or it is hardly
    any time."""
    hourly = usd_per_hour(groups, catalog)
    seconds = math.floor(usd / hourly * 3600) - ENDING_S if hourly > 0 else 0
    if seconds < SHORTEST_RUN_S:
        raise ConfigError(
            f"${usd:g} buys {max(seconds, 0):,} s of these instances (${hourly:.2f} an hour), less than the {SHORTEST_RUN_S // 60} minutes "
            "that they need to start and to do something: raise --max-usd or rent fewer."
        )
    return seconds


def _parsed(text: str) -> tuple[str, int]:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(f"a group is TYPE:COUNT, such as ml.c5.4xlarge:2; found {text!r}.")
    return match["type"], int(match["count"])


def _named(gpu: tuple[str, int], cpus: Sequence[tuple[str, int]]) -> Groups:
    names = [GPU_GROUP, *(CPU_GROUP if number == 1 else f"{CPU_GROUP}-{number}" for number in range(1, len(cpus) + 1))]
    return tuple(
        Group(name=name, instance_type=kind, count=count)
        for name, (kind, count) in zip(names, [gpu, *cpus], strict=True)
    )


def _of_shape(shape: Mapping[str, int], source: str) -> Groups:
    gpus = [(kind, int(count)) for kind, count in shape.items() if has_gpus(kind)]
    cpus = [(kind, int(count)) for kind, count in shape.items() if not has_gpus(kind) and count]
    if len(gpus) != 1:
        raise ConfigError(
            f"{source} has a candidate with {len(gpus)} types of GPU instances ({', '.join(shape) or 'none'}), and a job has one: plan "
            "with --gpu-type ml.g5.xlarge, say."
        )
    return _named(gpus[0], cpus)


def _is_other(shape: Mapping[str, int], best: Mapping[str, int]) -> bool:
    """Whether it may be had where the best one may not: it asks for less of at least one type."""
    return any(shape.get(kind, 0) < count for kind, count in best.items())
