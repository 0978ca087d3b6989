"""The number of preprocessing cores that are worth their price, on a cluster that can grow and shrink.

More cores than before are a trial. If they do not deliver more, something else limits the input: a network, a storage, a lock.
The run then gives them back, and asks for no more until it sees the rate change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from offload.adapt.core_price import CoreCosts, CorePrice
from offload.adapt.series import LONGEST, Series
from offload.model.overlap import MOST_OVERLAP

CREEP = 0.05  # added where the need has crept up by little, since it may go on: fewer changes
STEADY = 0.25  # surplus that is kept: nodes take minutes to come
LEAST_GAIN = 0.02  # of the cost of a sample, that justifies a change
CERTAIN = 2.0  # standard errors by which the present number must be wrong
DECIDED = 2.0  # standard errors that decide a trial
KEPT = 0.7  # share of the promised gain, in logarithms, that makes cores worth keeping
LIFTS = 0.05  # by which cores could exceed a limit that more cores do not raise: without them, nothing shows that it is gone
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
        busy_core_samples_per_s: the rate of one core that never waits, by its CPU time. It changes with the samples and the machines,
            and no other limit of the input changes it. 1: unknown.
        conditions: what else the rate depends on. Nothing learned under other conditions counts.
    """

    cores: int
    complete: bool
    samples_per_s: float
    bound: bool
    device_samples_per_s: float
    core_samples_per_s: float
    core_pace_samples_per_s: float = math.inf
    busy_core_samples_per_s: float = 1.0
    conditions: Hashable = None


@dataclass(frozen=True, kw_only=True)
class CoresLearned:
    """Memory between decisions.

    Args:
        needed: the cores that the accelerators need, by interval.
        device: the workers' rate if they never waited for data, by interval.
        grown: how often in a row the number grew by little.
        grew, turned: whether the last change added cores (None: there was none), and whether one undid the direction of the one before it.
        rates: what numbers of cores delivered while workers waited for data, over the rate of one core that never waits.
        enough: the least number of cores known to deliver what a larger number does; None: more cores help.
        conditions: those of all this.
    """

    needed: Series = field(default_factory=Series)
    device: Series = field(default_factory=Series)
    grown: int = 0
    grew: bool | None = None
    turned: bool = False
    rates: Mapping[int, Series] = field(default_factory=dict)
    enough: int | None = None
    conditions: Hashable = None


def count_cores(
    learned: CoresLearned,
    seen: InputSeen,
    *,
    bounds: tuple[int, int],
    before: int | None,
    overlap: float = MOST_OVERLAP,
    price: CorePrice | None = None,
) -> tuple[CoresLearned, int]:
    """The cores to ask for after one more interval, with the memory for the next decision.

    ``before``: the number wanted so far. Another number needs evidence beyond the noise that the intervals show.
    """
    if learned.conditions != seen.conditions:
        learned = CoresLearned(conditions=seen.conditions)
    needed = learned.needed.with_value(seen.device_samples_per_s / seen.core_samples_per_s)
    device = learned.device.with_value(seen.device_samples_per_s)
    if len(device.logs) < len(learned.device.logs):  # a trial for other accelerators ends
        learned = replace(learned, rates={})
    learned = _with_rate(replace(learned, needed=needed, device=device), seen)
    costs = CoreCosts(overlap=overlap, spread=needed.noise, price=price)
    wanted = _beyond_noise(learned, bounds, before, costs)
    if learned.enough is not None:
        wanted = min(wanted, learned.enough)
    elif before is not None and _undecided(learned, seen):
        wanted = min(wanted, before)
    wanted = min(max(wanted, bounds[0]), bounds[1])
    if before is not None and wanted != before:
        grew = wanted > before
        crept = grew and wanted <= before * (1 + STEADY)
        learned = replace(
            learned,
            grown=learned.grown + 1 if crept else 0,
            grew=grew,
            turned=learned.turned or learned.grew == (not grew),
        )
    return learned, wanted


def _beyond_noise(learned: CoresLearned, bounds: tuple[int, int], before: int | None, costs: CoreCosts) -> int:
    """The number of the least cost, or ``before`` unless another is better beyond the noise."""
    logs, error = learned.needed.logs, learned.needed.error
    # A single interval must not decide: what it takes for a change is the need by mean and by median.
    needs = math.exp(statistics.fmean(logs)), math.exp(statistics.median(logs))
    best = [min(max(costs.best(need), bounds[0]), bounds[1]) for need in needs]
    if before is None:
        return best[0]
    if all(wanted > before for wanted in best):
        wanted = min(best)
        crept = wanted <= before * (1 + STEADY)
        beyond = wanted * (1 + CREEP) if crept and learned.grown else wanted
        changed = min(math.ceil(beyond), bounds[1])
    elif all(wanted * (1 + 2 * CREEP * (learned.grown > 1)) < before for wanted in best):
        changed = wanted = max(best)
        if costs.price is None:  # a surplus costs no time
            return wanted if math.log(before / wanted) > math.log(1 + STEADY) + CERTAIN * error else before
    else:
        return before
    gain = min(costs.per_sample(before, need) / costs.per_sample(wanted, need) - 1 for need in needs)
    return (
        changed
        if gain >= LEAST_GAIN * (1 + learned.turned) and abs(math.log(before / wanted)) >= CERTAIN * error
        else before
    )


def _with_rate(learned: CoresLearned, seen: InputSeen) -> CoresLearned:
    """The memory with the delivered rate of one more interval, and what follows from it."""
    if not (seen.complete and seen.bound):
        return learned
    known = learned.rates.get(seen.cores, Series())
    now = known.with_value(seen.samples_per_s / seen.busy_core_samples_per_s)
    rates = {**learned.rates, seen.cores: now}
    if len(now.logs) < len(known.logs):  # another rate of the same cores: what limits the input has changed
        return replace(learned, rates={seen.cores: now}, enough=None, needed=Series(logs=learned.needed.logs[-1:]))
    learned = replace(learned, rates=rates)
    fewer, more = _neighbours(learned, seen.cores)
    if learned.enough is not None:
        # Fewer cores were tried, as the estimate said. If they deliver less, those before are needed.
        if seen.cores == learned.enough and more is not None and _more(rates, seen.cores, more, math.inf) is True:
            return replace(learned, enough=more)
        return learned
    helped = None if fewer is None else _helped(rates, fewer, seen)
    if fewer is None or helped is None:
        return learned
    if helped:  # later, the rate may differ for other reasons
        return replace(learned, rates={count: of for count, of in rates.items() if count > fewer})
    cores = math.exp(max(rates[fewer].mean, now.mean))
    pace = seen.core_pace_samples_per_s / seen.busy_core_samples_per_s
    each = max(pace if math.isfinite(pace) else 0.0, *(math.exp(of.mean) / count for count, of in rates.items()))
    return replace(learned, enough=min(math.ceil(cores * (1 + LIFTS) / each), seen.cores))


def _undecided(learned: CoresLearned, seen: InputSeen) -> bool:
    """Whether a larger number of cores is still on trial."""
    fewer, _ = _neighbours(learned, seen.cores)
    on_trial = seen.bound and fewer is not None and seen.cores in learned.rates
    return on_trial and _helped(learned.rates, fewer or 0, seen) is None


def _neighbours(learned: CoresLearned, cores: int) -> tuple[int | None, int | None]:
    """The next smaller and the next larger number of cores whose rate is known."""
    return (
        max((count for count in learned.rates if count < cores), default=None),
        min((count for count in learned.rates if count > cores), default=None),
    )


def _helped(rates: Mapping[int, Series], fewer: int, seen: InputSeen) -> bool | None:
    """Whether the present cores deliver most of what they promised over fewer; None while noise hides it."""
    return _more(rates, fewer, seen.cores, math.log(seen.device_samples_per_s / seen.busy_core_samples_per_s))


def _more(rates: Mapping[int, Series], fewer: int, more: int, most: float) -> bool | None:
    """The same for any two numbers. ``most``: the logarithm of what the accelerators take."""
    one, other = rates[fewer], rates[more]
    promised = min(math.log(more / fewer), max(most - one.mean, 0.0))
    noise = max(one.noise, other.noise)
    error = DECIDED * noise * math.sqrt(1 / len(one.logs) + 1 / len(other.logs))
    beyond = other.mean - one.mean - KEPT * promised
    if len(other.logs) < LEAST_TRIED or (abs(beyond) < error and len(other.logs) < LONGEST):
        return None
    return beyond > 0
