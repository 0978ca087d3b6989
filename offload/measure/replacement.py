"""What faster equivalents of a data set's transforms bring, as measured on its samples. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.formatting import rate_shown
from offload.measure.equivalents import DropIn
from offload.measure.findings import Findings
from offload.measure.steps import INPUT_BOUND

WORTH_TAKING = 0.05  # share of a sample's core-seconds that an equivalent must save


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far the outputs of two ways lie apart.

    Args:
        name: the column, or the place in a batch.
        dtype: the type of its values.
        largest: the greatest difference of two values.
        mean: the mean difference.
    """

    name: str
    dtype: str
    largest: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The measurement of equivalents.

    Args:
        chosen: the equivalents that pay, all used together.
        left: those that do not pay, each with its core-seconds over those of the original.
        unlike: those that would change the shape or the type of a sample.
        samples: the samples measured, each with the same random numbers before and after.
        before_s, after_s: core-seconds of a sample on one core.
        over: the median of after over before, side by side.
        distances: of the outputs; None: the data set's samples differ from call to call, so that nothing can be compared.
    """

    chosen: Sequence[DropIn]
    left: Sequence[tuple[DropIn, float]]
    unlike: Sequence[DropIn] = ()
    samples: int
    before_s: float
    after_s: float
    over: float
    distances: Sequence[Distance] | None


def predicted(findings: Findings, replacement: Replacement) -> Findings:
    """The findings of the probe with the equivalents in place: each task takes as much less time as the samples did."""
    return dataclasses.replace(
        findings,
        core_seconds=[seconds * replacement.over for seconds in findings.core_seconds],
        stages=[],
        constant=None,
    )


def sentences(findings: Findings, replacement: Replacement) -> list[str]:
    """The measurement in plain words."""
    said = [
        f"{drop_in.name} stays: {drop_in.path} takes {over:.0%} of the time of these samples."
        for drop_in, over in replacement.left
    ]
    said += [
        f"{drop_in.name} stays: with {drop_in.path} samples have another shape or type."
        for drop_in in replacement.unlike
    ]
    if not replacement.chosen:
        return said
    ours = " and ".join(drop_in.path for drop_in in replacement.chosen)
    said.append(
        f"{ours}: {replacement.before_s * 1e3:,.3g} → {replacement.after_s * 1e3:,.3g} core-ms a sample, measured on one core "
        f"with {replacement.samples} samples and equal seeds."
    )
    said += _of_distances(replacement.distances)
    then = predicted(findings, replacement)
    binds = "the input still binds" if then.stall >= INPUT_BOUND else f"the {findings.accelerator} binds"
    said.append(
        f"Prediction: an input ceiling of {rate_shown(then.input_ceiling)} samples/s instead of {rate_shown(findings.input_ceiling)}; then "
        f"{binds} (stall {then.stall:.0%} instead of {findings.stall:.0%})."
    )
    return said


def _of_distances(distances: Sequence[Distance] | None) -> list[str]:
    if distances is None:
        return ["Outputs cannot be compared: this data set's samples differ from call to call, even with equal seeds."]
    differ = [distance for distance in distances if distance.largest]
    if not differ:
        return ["The outputs are equal."]
    return [
        f"Outputs differ by at most {distance.largest:.2g} in {distance.name} ({distance.dtype}), {distance.mean:.2g} on average."
        for distance in differ
    ]


def document(findings: Findings, replacement: Replacement) -> Mapping[str, Any]:
    """The measurement for other programs, in seconds and samples/s."""
    then = predicted(findings, replacement)
    return {
        "taken": [drop_in.path for drop_in in replacement.chosen],
        "left": {drop_in.path: over for drop_in, over in replacement.left},
        "unlike": [drop_in.path for drop_in in replacement.unlike],
        "samples": replacement.samples,
        "core_seconds_per_sample": {"before": replacement.before_s, "after": replacement.after_s},
        "distances": None
        if replacement.distances is None
        else [dataclasses.asdict(distance) for distance in replacement.distances],
        "predicted": {"input_samples_per_s": then.input_ceiling, "stall": then.stall},
    }
