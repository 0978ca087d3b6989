"""Which checkpoints a run keeps: the newest, or the best and the newest. Pure functions on names and metrics."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.train.config import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete checkpoint.

    Args:
        name: the name of its folder. Names sort by time.
        metrics: the metrics that describe its model.
    """

    name: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


def to_remove(entries: Sequence[Entry], settings: Checkpoints) -> list[str]:
    """The names of the checkpoints that a run with these settings removes, in the order in which it removes them: the worst first, or
    without ``best`` the oldest. It never removes the newest one.

    A checkpoint without a finite value of ``best`` counts as the worst. Of equals, the older goes first.
    """
    ranked = sorted(entries, key=lambda entry: (_score(entry.metrics, settings), entry.name))
    newest = max((entry.name for entry in entries), default=None)
    return [entry.name for entry in ranked[: -settings.keep] if entry.name != newest]


def _score(metrics: Mapping[str, Any], settings: Checkpoints) -> float:
    """The worth of a checkpoint: more is better."""
    if settings.best is None:
        return 0.0
    value = metrics.get(settings.best)
    # Ray Train's list, which earlier versions used, holds the largest float instead of a missing value.
    if not isinstance(value, int | float) or not abs(value) < sys.float_info.max:
        return -math.inf
    return -float(value) if settings.mode == "min" else float(value)
