"""The number of preprocessing cores that are worth their price, on a cluster that can grow and shrink.

More cores than before are a trial. If they do not deliver more, something else limits the input: a network, a storage, a lock.
The run then gives them back, and asks for no more until it sees the rate change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from offload.adapt.series import LONGEST, Series

HEADROOM = (
    0.05  # by which the input is faster than the accelerators: cores that wait cost as much as accelerators that wait
)
CREEP = 0.05  # added where the need has crept up by little, since it may go on: fewer changes
STEADY = 0.25  # surplus that is kept: nodes take minutes to come
CERTAIN = 2.0  # standard errors by which the present number must be wrong
DECIDED = 2.0  # standard errors that decide a trial
KEPT = 0.7  # share of the promised gain, in logarithms, that makes cores worth keeping
LEAST_TRIED = 3  # intervals before a trial is decided


@dataclass(frozen=True, kw_only=True)
class InputSeen:
    """One interval of the input.

    Args:
        cores: the cores that preprocessed.
        complete: whether all of them did, long enough for the rate to be theirs.
        samples_per_s: the delivered rate.
        bound: whether workers waited for data.
        device_samples_per_s: the workers' rate if they never waited for data.
        core_samples_per_s: the rate of one core, as delivered.
        core_pace_samples_per_s: the rate at which one core makes samples, delivered or not; infinite if it is unknown.
        conditions: what else the rate depends on. Nothing learned under other conditions counts.
    """

    cores: int
    complete: bool
    samples_per_s: float
    bound: bool
    device_samples_per_s: float
    core_samples_per_s: float
    core_pace_samples_per_s: float = math.inf
    conditions: Hashable = None


@dataclass(frozen=True, kw_only=True)
class CoresLearned:
    """Memory between decisions.

    Args:
        needed: the cores that the accelerators need, by interval.
        device: the workers' rate if they never waited for data, by interval.
        rates: what numbers of cores delivered while workers waited for data.
        enough: the least number of cores known to deliver what a larger number does; None: more cores help.
        conditions: those of all this.
    """

    needed: Series = field(default_factory=Series)
    device: Series = field(default_factory=Series)
    rates: Mapping[int, Series] = field(default_factory=dict)
    enough: int | None = None
    conditions: Hashable = None


def wanted_cores(
    device_samples_per_s: float, core_samples_per_s: float, *, bounds: tuple[int, int], before: int | None
) -> int:
    """The cores that preprocess a little faster than the accelerators train.

    Args:
        device_samples_per_s: the workers' rate if they never waited for data.
        core_samples_per_s: the rate of one core.
        bounds: the least and the most cores.
        before: the number wanted so far; a small surplus stays.
    """
    needed = math.ceil(device_samples_per_s * (1 + HEADROOM) / core_samples_per_s)
    if before is not None and needed <= before <= math.ceil(needed * (1 + STEADY)):
        needed = before
    return min(max(needed, bounds[0]), bounds[1])


def count_cores(
    learned: CoresLearned, seen: InputSeen, *, bounds: tuple[int, int], before: int | None
) -> tuple[CoresLearned, int]:
    """The cores to ask for after one more interval, with the memory for the next decision.

    ``before``: the number wanted so far. Another number needs evidence beyond the noise that the intervals show.
    """
    if learned.conditions != seen.conditions:
        learned = CoresLearned(conditions=seen.conditions)
    needed = learned.needed.with_value(seen.device_samples_per_s * (1 + HEADROOM) / seen.core_samples_per_s)
    device = learned.device.with_value(seen.device_samples_per_s)
    if len(device.logs) < len(learned.device.logs):  # a trial for other accelerators ends
        learned = replace(learned, rates={})
    learned = _with_rate(replace(learned, needed=needed, device=device), seen)
    wanted = _beyond_noise(needed, bounds, before)
    undecided = _undecided(learned, seen)
    if learned.enough is not None:
        wanted = min(wanted, learned.enough)
    elif undecided and before is not None:
        wanted = min(wanted, before)
    return learned, min(max(wanted, bounds[0]), bounds[1])


def _beyond_noise(needed: Series, bounds: tuple[int, int], before: int | None) -> int:
    wanted = wanted_cores(math.exp(needed.mean), 1 + HEADROOM, bounds=bounds, before=before)
    if before is None or wanted == before:
        return wanted
    margin, off = CERTAIN * needed.error, math.log(before) - needed.mean
    if wanted < before:
        return wanted if off > math.log(1 + STEADY) + margin else before
    off = max(off, math.log(before) - statistics.median(needed.logs))  # a single interval must not decide
    if off >= -max(margin, math.log(1 + HEADROOM)):
        return before
    crept = wanted <= before * (1 + STEADY)
    return min(math.ceil(wanted * (1 + CREEP)), bounds[1]) if crept else wanted


def _with_rate(learned: CoresLearned, seen: InputSeen) -> CoresLearned:
    """The memory with the delivered rate of one more interval, and what follows from it."""
    if not (seen.complete and seen.bound):
        return learned
    known = learned.rates.get(seen.cores, Series())
    now = known.with_value(seen.samples_per_s)
    rates = {**learned.rates, seen.cores: now}
    if len(now.logs) < len(known.logs):  # another rate of the same cores: what limits the input has changed
        return replace(learned, rates={seen.cores: now}, enough=None, needed=Series(logs=learned.needed.logs[-1:]))
    learned = replace(learned, rates=rates)
    fewer, more = _neighbours(learned, seen.cores)
    if learned.enough is not None:
        # Fewer cores were tried, as the estimate said. If they deliver less, those before are needed.
        if seen.cores == learned.enough and more is not None and _helped(rates, seen.cores, more, math.inf) is True:
            return replace(learned, enough=more)
        return learned
    if fewer is None or _helped(rates, fewer, seen.cores, seen.device_samples_per_s) is not False:
        return learned
    rate = math.exp(max(rates[fewer].mean, now.mean))
    each = max(seen.core_pace_samples_per_s if math.isfinite(seen.core_pace_samples_per_s) else 0.0,
               *(math.exp(of.mean) / cores for cores, of in rates.items()))  # fmt: skip
    return replace(learned, enough=min(math.ceil(rate * (1 + HEADROOM) / each), seen.cores))


def _undecided(learned: CoresLearned, seen: InputSeen) -> bool:
    """Whether a larger number of cores is still on trial."""
    fewer, _ = _neighbours(learned, seen.cores)
    on_trial = seen.bound and fewer is not None and seen.cores in learned.rates
    return on_trial and _helped(learned.rates, fewer or 0, seen.cores, seen.device_samples_per_s) is None


def _neighbours(learned: CoresLearned, cores: int) -> tuple[int | None, int | None]:
    """The next smaller and the next larger number of cores whose rate is known."""
    return (
        max((count for count in learned.rates if count < cores), default=None),
        min((count for count in learned.rates if count > cores), default=None),
    )


def _helped(rates: Mapping[int, Series], fewer: int, more: int, device_samples_per_s: float) -> bool | None:
    """Whether more cores delivered most of what they promised; None while noise hides it."""
    one, other = rates[fewer], rates[more]
    promised = min(math.log(more / fewer), max(math.log(device_samples_per_s) - one.mean, 0.0))
    noise = max(one.noise, other.noise)
    error = DECIDED * noise * math.sqrt(1 / len(one.logs) + 1 / len(other.logs))
    beyond = other.mean - one.mean - KEPT * promised
    if len(other.logs) < LEAST_TRIED or (abs(beyond) < error and len(other.logs) < LONGEST):
        return None
    return beyond > 0
