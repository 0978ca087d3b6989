"""Boxes, masks and key points of torchvision, which must change together with their image."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def annotated_parts(sample: Mapping[str, Any]) -> dict[str, str]:
    """The type of the first annotation in each part of a sample that holds one."""
    return {name: kind for name, value in sample.items() if (kind := annotation(value)) is not None}


def annotation(value: Any) -> str | None:
    """The type of the first annotation in a part of a sample: None without any. Imports nothing."""
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    if tv_tensors is None:
        return None
    if isinstance(value, tv_tensors.TVTensor):
        return None if isinstance(value, tv_tensors.Image | tv_tensors.Video) else type(value).__name__
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(annotation, parts)), None)
