"""Values of samples: copies for transforms, and torchvision's annotations.

A transform may write to its sample, so it gets copies of values that a source keeps. Annotations (boxes, masks, key points) must change
together with their image.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from offload.pipeline.blocks.wire import Column

_FIXED = frozenset({str, bytes, int, float, bool, complex, type(None)})


def own(value: Any) -> Any:
    """A copy of an array, a tensor or an image, and of lists, tuples, dicts, named tuples and dataclasses of these.

    Read-only arrays and objects of other types stay.
    """
    if type(value) in _FIXED:
        return value
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    if type(value) in (list, tuple):
        return type(value)(map(own, value))
    if isinstance(value, dict):
        copied = copy.copy(value)  # an OrderedDict and a defaultdict remain what they are
        for key, part in value.items():  # the outputs of Hugging Face's models refuse update()
            copied[key] = own(part)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(own, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(record, field.name, own(getattr(value, field.name)))
        return record
    if type(value).__module__.startswith("torch") and hasattr(value, "clone"):
        return value.clone()
    return value.copy() if type(value).__module__.startswith("PIL.") and hasattr(value, "copy") else value


def own_column(column: Column, *, shared: bool = True) -> Column:
    """The column with copies of its values. ``shared``: the source keeps the array itself, and not only the objects in it."""
    if not isinstance(column, np.ndarray):
        return list(map(own, column))
    column = column.copy() if shared else column
    if column.dtype.hasobject:
        values = column.reshape(-1)
        for number, value in enumerate(values):
            values[number] = own(value)
    return column


def annotated_parts(sample: Mapping[str, Any]) -> dict[str, str]:
    """The type of the first annotation in each part of a sample that holds one."""
    return {name: kind for name, value in sample.items() if (kind := annotation(value)) is not None}


def annotation(value: Any) -> str | None:
    """The type of the first annotation in a part of a sample. None if there is none. Imports nothing."""
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    if tv_tensors is None:
        return None
    if isinstance(value, tv_tensors.TVTensor):
        return None if isinstance(value, tv_tensors.Image | tv_tensors.Video) else type(value).__name__
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(annotation, parts)), None)
