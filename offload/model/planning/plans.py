"""A plan with its candidates and its recommendation. Its document is plan.json, schema ``offload.plan/1``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from offload.errors import ConfigError
from offload.model.checks import check_choice, check_count, check_mapping, check_number, check_text, shown

SCHEMA = "offload.plan/1"
MOST_NODES = 100_000  # the most nodes of one type: a larger number is a typo
REMEDY = "Make it with offload plan -o."
Objective = Literal["cost", "time"]
Spot = Literal["none", "cpu", "all"]
"""The nodes that are spot capacity: none, those that only preprocess, or the GPU nodes too."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape in its best configuration.

    Rates are in samples/s. ``hours`` and ``usd`` are None without an amount of work. The range of ``samples_per_s`` comes from the
    profile's uncertainty (95 %).
    """

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
        """The candidate's entry in plan.json; infinite values become null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["shape"] = dict(self.shape)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }

    @classmethod
    def from_document(cls, document: Any, name: str) -> Candidate:
        """The inverse of :meth:`document`. Raises ConfigError, with a message that begins with ``name``."""
        values = check_mapping(name, document, sane="a candidate")
        entries = {field.name: _field(values, field.name, name) for field in fields(cls)}
        shape = check_mapping(f"{name}.shape", entries["shape"], sane="counts by instance type")
        numbers: dict[str, Any] = {key: _number(f"{name}.{key}", entries[key]) for key in _NUMBERS}
        for key in _COUNTS:
            numbers[key] = check_count(f"{name}.{key}", entries[key], whole_floats=True)
        for key in _OF_WORK:
            numbers[key] = None if entries[key] is None else _number(f"{name}.{key}", entries[key])
        return cls(
            shape={
                check_text(f"{name}: the instance types of shape", kind, sane="such as ml.g5.xlarge"): check_count(
                    f"{name}.shape[{kind!r}]", count, most=MOST_NODES, sane="a number of nodes"
                )
                for kind, count in shape.items()
            },
            bottleneck=check_text(f"{name}.bottleneck", entries["bottleneck"], sane="what binds"),
            **numbers,
        )


_COUNTS = ("workers", "batch_size", "local_batch_size", "accum_steps")
_OF_WORK = ("hours", "usd")
_NUMBERS = (
    *("samples_per_s", "samples_per_s_low", "samples_per_s_high", "step_time_s", "stall"),
    *("goodput", "usd_per_hour", "usd_per_million_samples"),
)


def _number(name: str, value: Any) -> float:
    """The number, or infinity for null: JSON has no infinity."""
    return math.inf if value is None else check_number(name, value, most=math.inf, infinite=True, sane="such as 310.2")


def misses(value: float | None, limit: float | None) -> bool:
    """Return whether a value exceeds its limit; None: there is none, of either."""
    return value is not None and limit is not None and value > limit


def _limit(document: Mapping[str, Any], name: str) -> float | None:
    limit = document.get(name)
    return None if limit is None else check_number(name, limit, above=0.0)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{name} must be a list, found {shown(value)}.")
    return value


def _field(document: Mapping[str, Any], field: str, name: str) -> Any:
    if field not in document:
        raise ConfigError(f"{name} has no field {field!r}.")
    return document[field]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates, best first (those that miss the budget or deadline last), and the index of the recommended one.

    ``baseline`` is the recommended GPU nodes without CPU nodes: the single instance that comparisons refer to.
    ``alternative`` is a bigger GPU host that does better without any CPU node, if the catalog holds one.
    ``budget_usd`` and ``deadline_hours`` are the user's limits; None: none.
    """

    objective: Objective
    spot: Spot
    candidates: tuple[Candidate, ...]
    recommended: int
    baseline: int
    alternative: Candidate | None
    explanation: str
    warnings: tuple[str, ...]
    budget_usd: float | None = None
    deadline_hours: float | None = None

    @property
    def best(self) -> Candidate:
        """The recommended candidate."""
        return self.candidates[self.recommended]

    def allows(self, candidate: Candidate) -> bool:
        """Return whether a candidate trains at all, within the budget and the deadline."""
        missed = misses(candidate.usd, self.budget_usd) or misses(candidate.hours, self.deadline_hours)
        return candidate.goodput > 0 and not missed

    def document(self) -> dict[str, Any]:
        """plan.json."""
        return {
            "schema": SCHEMA,
            "objective": self.objective,
            "spot": self.spot,
            "budget_usd": self.budget_usd,
            "deadline_hours": self.deadline_hours,
            "candidates": [candidate.document() for candidate in self.candidates],
            "recommended": self.recommended,
            "baseline": self.baseline,
            "alternative": None if self.alternative is None else self.alternative.document(),
            "explanation": self.explanation,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_document(cls, document: Any, source: str) -> Plan:
        """Read plan.json. ``source`` is its name in messages.

        A plan that names no spot capacity is on demand, as ``offload plan`` plans by default.

        Raises ConfigError, with the field, the value found and the remedy, if it is not a plan or recommends nothing.
        """
        if not isinstance(document, Mapping) or "schema" not in document:
            raise ConfigError(
                f"{source} is not a plan: it holds {shown(document)} instead of a document with a schema. {REMEDY}"
            )
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{source} has schema {document['schema']!r}, not {SCHEMA!r}. {REMEDY}")
        try:
            return cls._read(document, source)
        except ConfigError as error:
            raise ConfigError(f"{source} is not a plan: {error} {REMEDY}") from None
        except _NothingRecommendedError:
            raise ConfigError(
                f"{source} recommends no candidate: plan with other types or ranges, or a larger budget."
            ) from None

    @classmethod
    def _read(cls, document: Mapping[str, Any], source: str) -> Plan:
        listed = _list("candidates", _field(document, "candidates", "it"))
        recommended = _field(document, "recommended", "it")
        if recommended is None or not listed:
            raise _NothingRecommendedError
        last = len(listed) - 1
        candidates = tuple(Candidate.from_document(document, f"candidates[{i}]") for i, document in enumerate(listed))
        alternative = document.get("alternative")
        spot: Any = check_choice("spot", document.get("spot", "none"), get_args(Spot))
        objective: Any = check_choice("objective", _field(document, "objective", "it"), get_args(Objective))
        return cls(
            objective=objective,
            spot=spot,
            candidates=candidates,
            recommended=check_count("recommended", recommended, most=last, sane="the number of a candidate, from 0"),
            baseline=check_count("baseline", _field(document, "baseline", "it"), most=last, sane="as recommended"),
            alternative=None if alternative is None else Candidate.from_document(alternative, "alternative"),
            explanation=str(document.get("explanation", "")),
            warnings=tuple(map(str, _list("warnings", document.get("warnings", [])))),
            budget_usd=_limit(document, "budget_usd"),
            deadline_hours=_limit(document, "deadline_hours"),
        )


class _NothingRecommendedError(Exception):
    """A plan without a recommendation."""
