"""Values of JSON documents that may be damaged, or of another version: each reader takes what it can use."""

from __future__ import annotations

import json
import math
from typing import Any

LARGEST = 1e15  # numbers beyond it are no measurements, and would make an axis useless


def number(value: Any) -> float:
    """A finite number as a float; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        converted = float(value)
    except OverflowError:
        return math.nan
    return converted if abs(converted) <= LARGEST else math.nan


def text(value: Any, most: int = 2000) -> str:
    """A value as text of at most ``most`` characters; empty for None."""
    if value is None:
        return ""
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def table(value: Any) -> dict[Any, Any]:
    """A JSON object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """A JSON array as a list; empty for anything else."""
    return list(value) if isinstance(value, list | tuple) else []
