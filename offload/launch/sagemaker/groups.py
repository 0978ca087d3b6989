"""Instance groups (names, types, counts) from a user's text or from a plan, and their price.

Where it stops: the job's own checks find out whether the service has such instances.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.errors import ConfigError, argument
from offload.launch.sagemaker.settings import GPU_GROUP
from offload.model import Catalog
from offload.model.planning.plans import Plan

CPU_GROUP = "cpu"
SHORTEST_RUN_S = 600  # a shorter run buys hardly more than the machines' start
ENDING_S = 300  # time paid for after the service begins to stop a job: it waits two minutes and uploads the results
MOST_ALTERNATIVES = 3
_GPU_FAMILIES = re.compile(r"ml\.(p|g)\d")
_LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d+[a-z]*d|[a-z]+\d+d|(g[5-9]|p[5-9]|trn\d))")
_SPEC = re.compile(r"(?P<type>[^:\s]+):(?P<count>\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class InstanceGroup:
    """Instances of one type."""

    name: str
    instance_type: str
    count: int


Groups = tuple[InstanceGroup, ...]


def groups_of(gpu: str, cpus: Sequence[str]) -> Groups:
    """Groups from ``TYPE:COUNT`` texts, named ``gpu``, ``cpu``, ``cpu-2``, …

    Raises ConfigError for a text of another form.
    """
    return _named(_parsed(gpu), [_parsed(text) for text in cpus])


def groups_of_plan(plan: Plan, source: str) -> tuple[Groups, ...]:
    """The groups that a plan recommends, then the next best candidates that it allows, with other or fewer instances, in case AWS lacks
    capacity.

    Raises ConfigError for a plan whose shapes a job cannot have.
    """
    best = plan.best.shape
    allowed = filter(plan.allows, plan.candidates)
    shapes = [best, *(candidate.shape for candidate in allowed if _is_other(candidate.shape, best))]
    return tuple(_of_shape(shape, source) for shape in shapes)[: 1 + MOST_ALTERNATIVES]


def has_gpus(instance_type: str) -> bool:
    """Return whether instances of this type have GPUs."""
    return _GPU_FAMILIES.match(instance_type) is not None


def has_local_storage(instance_type: str) -> bool:
    """Return whether instances of this type have local disks. Their hardware encrypts these, and the service refuses a key for them."""
    return _LOCAL_STORAGE.match(instance_type) is not None


def usd_per_hour(groups: Sequence[InstanceGroup], catalog: Catalog) -> float:
    """The on-demand price of the groups, in dollars per hour. Raises ConfigError if a price is unknown."""
    return sum(catalog[group.instance_type].usd_per_hour * group.count for group in groups)


def seconds_for(usd: float, groups: Sequence[InstanceGroup], catalog: Catalog) -> int:
    """The seconds that the groups may run for ``usd``, minus the time to end. Raises ConfigError if a price is unknown, or if the
    time is too short."""
    hourly = usd_per_hour(groups, catalog)
    seconds = math.floor(usd / hourly * 3600) - ENDING_S if hourly > 0 else 0
    if seconds < SHORTEST_RUN_S:
        raise ConfigError(
            f"${usd:g} buys {max(seconds, 0):,} s of these instances (${hourly:.2f} an hour), less than the {SHORTEST_RUN_S // 60} minutes "
            f"that they need to start and train at all: raise {argument('max_usd')} or rent fewer."
        )
    return seconds


def _parsed(text: str) -> tuple[str, int]:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(f"a group must be TYPE:COUNT, such as ml.c5.4xlarge:2; found {text!r}.")
    return match["type"], int(match["count"])


def _named(gpu: tuple[str, int], cpus: Sequence[tuple[str, int]]) -> Groups:
    names = [GPU_GROUP, *(CPU_GROUP if number == 1 else f"{CPU_GROUP}-{number}" for number in range(1, len(cpus) + 1))]
    return tuple(
        InstanceGroup(name=name, instance_type=kind, count=count)
        for name, (kind, count) in zip(names, [gpu, *cpus], strict=True)
    )


def _of_shape(shape: Mapping[str, int], source: str) -> Groups:
    gpus = [(kind, int(count)) for kind, count in shape.items() if has_gpus(kind)]
    cpus = [(kind, int(count)) for kind, count in shape.items() if not has_gpus(kind) and count]
    other = next((kind for kind in shape if not kind.startswith("ml.")), None)
    if other is not None:
        raise ConfigError(
            f"{source} has a candidate with nodes of type {other!r}, which is no instance type of SageMaker (ml.g5.xlarge). Make the plan "
            "with SageMaker's types alone."
        )
    if len(gpus) != 1:
        raise ConfigError(
            f"{source} has a candidate with {len(gpus)} types of GPU instances ({', '.join(shape) or 'none'}), and a job has one: "
            "make the plan for one type (offload plan --gpu-type ml.g5.xlarge)."
        )
    return _named(gpus[0], cpus)


def _is_other(shape: Mapping[str, int], best: Mapping[str, int]) -> bool:
    """Return whether AWS may have this shape while it lacks the best one: it needs fewer instances of at least one type."""
    return any(shape.get(kind, 0) < count for kind, count in best.items())
