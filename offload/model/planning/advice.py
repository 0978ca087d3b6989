"""Explain a plan in words, with the reasons for its shape, the alternatives, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.formatting import rate_shown, usd
from offload.model.catalog import NodeType
from offload.model.noise import GradientNoise
from offload.model.planning.device_speeds import RelativeSpeed
from offload.model.planning.plans import Candidate

NAMED_FROM = 0.005  # share of the cost by which a shape must be cheaper by the estimates for the plan to name it

_BINDS = {
    "gpu": "the GPUs bind, so more preprocessing would change nothing",
    "cpu": "preprocessing binds: its cores are all busy",
    "network": "the network binds between the CPU nodes and the workers",
    "ingest": "the workers' own intake binds: collating and copying to the device",
    "storage": "the storage binds",
    "hub": "the run's hub binds: one process hands out all blocks, and more cores would change nothing",
}


def explain(
    best: Candidate,
    baseline: Candidate,
    alternative: Candidate | None,
    candidates: Sequence[Candidate],
    *,
    rivals: Sequence[Candidate],
    more_cores: int,
) -> str:
    """The recommendation in a few sentences, compared with the single instance.

    Args:
        rivals: the candidates that the recommended one has to be cheaper than.
        more_cores: of the alternative's host than of the recommended one.
    """
    figures = f"{rate_shown(best.samples_per_s)} samples/s at {usd(best.usd_per_million_samples)} per million"
    why = f"{_BINDS[best.bottleneck]} (stall {best.stall:.0%})"
    if best == baseline:
        compared = any(c.shape != best.shape for c in candidates)
        text = f"{best.name} alone{' is the better buy' if compared else ''}: {figures}; {why}."
        helped = [c for c in candidates if c.shape.items() > best.shape.items()]
        if helped:
            nearest = min(helped, key=lambda c: c.usd_per_million_samples)
            text += (
                f" {nearest.name} would run at {nearest.samples_per_s / best.samples_per_s:.2f}× its rate and "
                f"{nearest.usd_per_million_samples / best.usd_per_million_samples:.2f}× its cost per sample."
            )
    else:
        text = f"{best.name}: {figures}; {why}."
        if baseline.samples_per_s > 0:
            text += (
                f" That is {best.samples_per_s / baseline.samples_per_s:.2f}× the rate of {baseline.name} alone at "
                f"{best.usd_per_million_samples / baseline.usd_per_million_samples:.2f}× its cost per sample."
            )
    text += _cheaper_if_exact(best, rivals)
    if alternative is not None:
        cheaper = alternative.usd_per_hour / alternative.goodput < best.usd_per_hour / best.goodput
        host = "A bigger" if more_cores > 0 else "A smaller" if more_cores < 0 else "Another"
        text += (
            f" {host} GPU host is {'cheaper' if cheaper else 'faster'} still: {alternative.name} alone, "
            f"{rate_shown(alternative.samples_per_s)} samples/s at {usd(alternative.usd_per_million_samples)} per million."
        )
    return text


def _cheaper_if_exact(best: Candidate, rivals: Sequence[Candidate]) -> str:
    """A sentence about another number of the same CPU nodes that is cheaper by the estimates alone, if there is one."""
    alike = [c for c in rivals if c.shape.keys() == best.shape.keys() and c.goodput > 0]
    first = min(alike, key=lambda c: c.usd_per_hour / c.goodput, default=best)
    if first.usd_per_hour / first.goodput >= best.usd_per_hour / best.goodput * (1 - NAMED_FROM):
        return ""
    return (
        f" {first.name} would cost {usd(first.usd_per_hour / 3600 * 1e6 / first.goodput)} per million useful samples, not "
        f"{usd(best.usd_per_hour / 3600 * 1e6 / best.goodput)}, if everything were exactly as estimated; on average over what the profile "
        "leaves open, it costs more."
    )


def network_warnings(candidates: Sequence[Candidate], kinds: Mapping[str, NodeType]) -> list[str]:
    """Warnings about candidates that rely on a burst network figure."""
    binding = [c for c in candidates if c.bottleneck == "network"]
    bursting = sorted({name for c in binding for name in _narrow_side(c, kinds) if kinds[name].burst})
    if bursting:
        return [
            f"the network binds in {len(binding)} of {len(candidates)} candidates on a figure that {', '.join(bursting)} "
            "only reaches in bursts: count on less over hours."
        ]
    return []


def price_warnings(kinds: Sequence[NodeType]) -> list[str]:
    """Warnings about prices that cannot be compared."""
    if len({kind.region for kind in kinds if kind.region}) < 2:
        return []
    priced = ", ".join(f"{kind.name}: {kind.region}" for kind in kinds if kind.region)
    return [f"the prices come from different regions ({priced})."]


def noise_warnings(noise: GradientNoise | None, samples: int | None) -> list[str]:
    """Warnings about a batch whose gradient noise the profile hardly tells. ``samples``: those behind it, if known."""
    if noise is None:
        return []
    if not noise.sqr and not noise.sqr_error and noise.var:
        return [
            "the profile's noise.sqr is 0 without a standard error (noise.sqr_error), so any batch looks free: probe again, or give a "
            "fixed batch."
        ]
    if noise.told:
        return []
    share = f"|G|² by ± {noise.sqr_error / noise.sqr:.0%}" if noise.sqr else "|G|² not even from 0"
    said = f"the profile measures the gradient noise poorly ({share}), so the plan enlarges the batch cautiously."
    if samples is not None:
        said += f" At least {noise.samples_missing(samples):,} more than its {samples:,} samples would tell."
    return [said + " A run measures the noise anew, and adapts the batch."]


def spot_warnings(kinds: Sequence[NodeType], assumed_per_hour: float) -> list[str]:
    """Warnings about spot nodes whose interruption rate is assumed."""
    assumed = [kind.name for kind in kinds if kind.interruptions_per_hour is None]
    if not assumed:
        return []
    return [
        f"the catalog does not say how often spot nodes of {', '.join(assumed)} are interrupted: {assumed_per_hour:g} times an "
        "hour is assumed."
    ]


def speed_warnings(speeds: Mapping[str, RelativeSpeed], device: str | None) -> list[str]:
    """Warnings about GPUs whose speed comes from data sheets."""
    return [
        f"the GPU of {name} is taken as {speed.speed:.2g} times as fast as {device} ({speed.least:.2g} to {speed.most:.2g}) by their data "
        f"sheets, not by a measurement: probe there, or say it with --gpu-speed {name}=X."
        for name, speed in speeds.items()
    ]


def _narrow_side(candidate: Candidate, kinds: Mapping[str, NodeType]) -> list[str]:
    """The types on the side with the slower network."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in candidate.shape:
        sides[kinds[name].gpus > 0].append(name)
    width = {side: sum(kinds[n].network_gbps * candidate.shape[n] for n in names) for side, names in sides.items()}
    return sides[width[True] <= width[False]]
