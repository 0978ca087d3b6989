"""Check a request against SageMaker's limits before any call: lengths, ranges, patterns and enumerations.

The limits come from the service's own API model. botocore ships it but checks only a part (types, required keys, minima). The checks need
no network and no credentials. Where it stops: :mod:`offload.launch.sagemaker.job` has the rules between fields.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.loaders import Loader
from botocore.model import OperationModel, ServiceModel

# Java's character classes in the API model, within brackets.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{Alnum}": r"a-zA-Z0-9"}


@functools.cache
def service_model() -> ServiceModel:
    """The installed botocore's API model of SageMaker. A session would read the user's configuration, which may be wrong."""
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def create_training_job() -> OperationModel:
    """The operation that starts a job."""
    return service_model().operation_model("CreateTrainingJob")


def training_types() -> frozenset[str]:
    """The instance types for training."""
    return _names("TrainingInstanceType")


def inference_types() -> frozenset[str]:
    """The instance types that serve models and do not train."""
    return _names("ProductionVariantInstanceType") - training_types()


def _names(enumeration: str) -> frozenset[str]:
    return frozenset(service_model().shape_for(enumeration).metadata["enum"])


def violations(value: Any, shape: Any, where: str = "") -> Iterator[str]:
    """Yield a sentence for each part of ``value`` that the service would refuse: its place, the value found, and the limit."""
    kind, limits = shape.type_name, shape.metadata
    if kind == "structure":
        yield from _of_structure(value, shape, where)
    elif kind in ("list", "map"):
        yield from _out_of_range(len(value), limits, where, f"{len(value)} entries")
        for key, item in value.items() if kind == "map" else enumerate(value):
            inner = f"{where}[{key}]" if kind == "list" else f"{where}.{key}"
            if kind == "map":
                yield from violations(key, shape.key, f"the key {key!r} of {where}")
            yield from violations(item, shape.value if kind == "map" else shape.member, inner)
    elif kind in ("integer", "long"):
        if not isinstance(value, int) or isinstance(value, bool):
            yield f"{where}: {value!r} is not a whole number"
        else:
            yield from _out_of_range(value, limits, where, str(value))
    elif kind == "string":
        yield from _of_text(value, shape, where)


def _of_structure(value: Any, shape: Any, where: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where}: {value!r} is not a mapping"
        return
    for name in shape.required_members:
        if name not in value:
            yield f"{_inside(where, name)} is missing"
    for name, item in value.items():
        if name not in shape.members:
            near = difflib.get_close_matches(name, shape.members, n=1)
            yield f"{_inside(where, name)}: the service has no such field{f'; did you mean {near[0]}?' if near else ''}"
        else:
            yield from violations(item, shape.members[name], _inside(where, name))


def _of_text(value: Any, shape: Any, where: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{where}: {value!r} is not text"
        return
    yield from _out_of_range(len(value), shape.metadata, where, f"{len(value)} characters", shown=_short(value))
    allowed = shape.metadata.get("enum")
    if allowed and value not in allowed:
        near = ", ".join(difflib.get_close_matches(value, allowed, n=3, cutoff=0.0))
        yield f"{where}: {value!r} is not known; nearest: {near}"
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        yield f"{where}: {_short(value)} does not match {pattern}"


def _out_of_range(size: int, limits: Mapping[str, Any], where: str, actual: str, shown: str = "") -> Iterator[str]:
    text = f"{actual}{f' ({shown})' if shown else ''}"
    if size > limits.get("max", size):
        yield f"{where}: {text}, at most {limits['max']:,} are allowed"
    if size < limits.get("min", size):
        yield f"{where}: {text}, at least {limits['min']:,} are needed"


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _short(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern, re.DOTALL)
