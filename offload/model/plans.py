"""What planning comes to: candidates and a recommendation. The document is plan.json, schema ``offload.plan/1``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

SCHEMA = "offload.plan/1"
Objective = Literal["cost", "time"]
Spot = Literal["none", "cpu", "all"]
"""Which nodes are spot capacity: none, those that only preprocess, or the GPU nodes too."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape in its best configuration. Rates are in samples/s; ``hours`` and ``usd`` are None without an amount of
    work; the range of ``samples_per_s`` comes from the profile's uncertainty (95 %)."""

    shape: Mapping[str, int]
    workers: int
    batch_size: int
    local_batch_size: int
    accum_steps: int
    samples_per_s: float
    samples_per_s_low: float
    samples_per_s_high: float
    step_time_s: float
    stall: float
    bottleneck: str
    goodput: float
    usd_per_hour: float
    usd_per_million_samples: float
    hours: float | None
    usd: float | None

    @property
    def name(self) -> str:
        """``1 × ml.g5.xlarge + 2 × ml.c5.4xlarge``."""
        return " + ".join(f"{count} × {kind}" for kind, count in self.shape.items())

    def document(self) -> dict[str, Any]:
        """As it stands in plan.json; what is infinite becomes null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["shape"] = dict(self.shape)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates, best first (those that miss the budget or deadline last), and which is recommended.

    ``baseline`` is the recommended GPU nodes without CPU nodes: the single instance that comparisons are made against.
    ``alternative`` is a bigger GPU host that does better without any CPU node, if the catalog holds one.
    """

    objective: Objective
    spot: Spot
    candidates: tuple[Candidate, ...]
    recommended: int
    baseline: int
    alternative: Candidate | None
    explanation: str
    warnings: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The recommended candidate."""
        return self.candidates[self.recommended]

    def document(self) -> dict[str, Any]:
        """plan.json."""
        return {
            "schema": SCHEMA,
            "objective": self.objective,
            "spot": self.spot,
            "candidates": [candidate.document() for candidate in self.candidates],
            "recommended": self.recommended,
            "baseline": self.baseline,
            "alternative": None if self.alternative is None else self.alternative.document(),
            "explanation": self.explanation,
            "warnings": list(self.warnings),
        }
