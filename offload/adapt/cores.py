"""The number of preprocessing cores that are worth their price, on a cluster that can grow and shrink. Pure.

More cores than the accelerators need on average keep them busy while the rates vary. How many more depends on how much the rates
vary, and on what a core costs beside an accelerator that waits.

More cores than before are a trial. If they do not deliver more, something else limits the input: a network, a storage, a lock.
The run then gives them back, and asks for no more until it sees the rate change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.adapt.series import LONGEST, Series
from offload.model.overlap import MOST_OVERLAP
from offload.model.placement import NodeResources

LOST = 0.01  # share of the rate that a run without prices, or for time alone, leaves to waiting
LOGISTIC = math.pi / math.sqrt(3)  # standard deviation of the standard logistic distribution


@dataclass(frozen=True, kw_only=True)
class CorePrice:
    """Dollars per hour.

    Args:
        core: of one more core.
        rest: of all that the run pays for besides, such as the workers' nodes.
        free: the cores that ``rest`` includes.
    """

    core: float
    rest: float
    free: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CoreCosts:
    """The cost of a sample as a function of the number of cores.

    The rate of ``n`` cores is that of the accelerators times ``(1 + x^-delta)^(-1/delta)``, with ``x`` the input's rate over theirs, as
    in the joint model of :mod:`offload.model.goodput`. Let the logarithm of ``x`` follow a logistic distribution. Then this is the mean
    of the slower side, to first order, and ``delta`` is pi/sqrt(3) over the standard deviation.

    Args:
        overlap: delta of the queue between both sides, for constant rates.
        spread: standard deviation of the logarithm of ``x`` from interval to interval.
        price: None if a price is unknown, or only time counts.
    """

    overlap: float
    spread: float = 0.0
    price: CorePrice | None = None

    @property
    def delta(self) -> float:
        """The joint model's exponent with both causes of waiting."""
        return LOGISTIC / math.hypot(LOGISTIC / self.overlap, self.spread)

    def per_sample(self, cores: float, needed: float) -> float:
        """Dollars, or seconds without a price, of a sample over those of accelerators that never wait. ``needed``: the cores whose rate
        is the accelerators'."""
        # In logarithms, and relative to the slower side: large exponents would overflow otherwise.
        log = math.log(needed / cores)
        slower: float = math.exp(max(log, 0.0)) * (1 + math.exp(-self.delta * abs(log))) ** (1 / self.delta)
        if self.price is None:
            return slower
        return slower * (self.price.rest + self.price.core * max(cores - self.price.free, 0.0))

    def best(self, needed: float) -> int:
        """The cores of the least cost; without a price, the fewest at which waiting costs at most ``LOST``."""
        delta, price = self.delta, self.price
        # Only time counts, and every further core saves some of it. So the smallest number that leaves waiting
        # negligible is the best.
        if price is None:
            # Solve (1 + x^-delta)^(1/delta) = 1 / (1 - LOST) for x, the cores over those needed.
            waits: float = math.expm1(-delta * math.log1p(-LOST))
            spare: float = waits ** (-1 / delta)
            return max(math.ceil(needed * max(spare, 1.0) - 1e-9), 1)
        rest = price.rest - price.core * price.free  # the rest, if free cores had the price of the others
        # The cost is least where its derivative is 0: core · needed · x^(delta + 1) = rest.
        at: float = needed * (rest / (price.core * needed)) ** (1 / (delta + 1)) if rest > 0 else 0.0
        # The cost has a single minimum, so the best whole number is next to the best real one.
        least = max(math.floor(max(at, price.free)), 1)
        return min((least, least + 1), key=lambda cores: self.per_sample(cores, needed))


# A need that creeps up probably goes on rising: ask for this share more, and change less often.
CREEP = 0.05
STEADY = 0.25  # keep a surplus up to this share, since new nodes take minutes to come
LEAST_GAIN = 0.02  # share of a sample's cost that a change must save
CERTAIN = 2.0  # standard errors by which the present number must be wrong
DECIDED = 2.0  # standard errors that decide a trial
KEPT = 0.7  # share of the promised gain, in logarithms, that makes cores worth keeping
# Spare cores beyond a limit that more cores do not raise. Without them, nothing would show that the limit is gone.
LIFTS = 0.05
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
        grew: whether the last change added cores; None before the first.
        turned: whether a change ever undid the direction of the one before it.
        rates: what numbers of cores delivered while workers waited for data, over the rate of one core that never waits.
        enough: the least number of cores known to deliver what a larger number does; None: more cores help.
        conditions: those under which all of this was learned.
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
    # The cores whose rate equals the accelerators'. Both rates are of the same interval, so what slows both cancels
    # out.
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
    # A single interval must not decide: the mean and the median of the need have to agree.
    needs = math.exp(statistics.fmean(logs)), math.exp(statistics.median(logs))
    best = [min(max(costs.best(need), bounds[0]), bounds[1]) for need in needs]
    if before is None:
        return best[0]
    if all(wanted > before for wanted in best):
        wanted = min(best)
        crept = wanted <= before * (1 + STEADY)
        beyond = wanted * (1 + CREEP) if crept and learned.grown else wanted
        changed = min(math.ceil(beyond), bounds[1])
    # A number that has crept up at least twice includes a margin, which is no surplus.
    elif all(wanted * (1 + 2 * CREEP * (learned.grown > 1)) < before for wanted in best):
        changed = wanted = max(best)
        if costs.price is None:  # a surplus costs no time
            return wanted if math.log(before / wanted) > math.log(1 + STEADY) + CERTAIN * error else before
    else:
        return before
    # The smaller of both gains: mean and median must agree that the change pays.
    gain = min(costs.per_sample(before, need) / costs.per_sample(wanted, need) - 1 for need in needs)
    return (
        changed
        if gain >= LEAST_GAIN * (1 + learned.turned) and abs(math.log(before / wanted)) >= CERTAIN * error
        else before
    )


def _with_rate(learned: CoresLearned, seen: InputSeen) -> CoresLearned:
    """The memory with the delivered rate of one more interval, and what follows from it."""
    # While nobody waits, the delivered rate is the accelerators', and says nothing about the cores.
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
        # The estimate asked for fewer cores. If they deliver less than the larger number did, that number is needed.
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
    # The best pace of one core: where cores showed less, the limit held them up.
    core_pace = max(pace if math.isfinite(pace) else 0.0, *(math.exp(of.mean) / count for count, of in rates.items()))
    return replace(learned, enough=min(math.ceil(cores * (1 + LIFTS) / core_pace), seen.cores))


def _undecided(learned: CoresLearned, seen: InputSeen) -> bool:
    """Return whether a larger number of cores is still on trial."""
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
    """Return whether the present cores deliver most of what they promised over fewer; None while noise hides it."""
    return _more(rates, fewer, seen.cores, math.log(seen.device_samples_per_s / seen.busy_core_samples_per_s))


def _more(rates: Mapping[int, Series], fewer: int, more: int, most: float) -> bool | None:
    """The same for any two numbers. ``most``: the logarithm of what the accelerators take.

    The promise is a rate in proportion to the cores, up to what the accelerators take. All rates are logarithms.
    """
    base, trial = rates[fewer], rates[more]
    promised = min(math.log(more / fewer), max(most - base.mean, 0.0))
    noise = max(base.noise, trial.noise)
    error = DECIDED * noise * math.sqrt(1 / len(base.logs) + 1 / len(trial.logs))
    beyond = trial.mean - base.mean - KEPT * promised
    if len(trial.logs) < LEAST_TRIED or (abs(beyond) < error and len(trial.logs) < LONGEST):
        return None
    return beyond > 0


Kind = tuple[object, ...]


def core_speeds(nodes: Sequence[NodeResources], measured: Mapping[str, float], used: Sequence[int]) -> list[float]:
    """The speed of each node's cores, relative to the mean of the cores that preprocess now.

    Args:
        nodes: all nodes.
        measured: relative speeds by node id. An unmeasured node is assumed as fast as others of its kind, or as the mean.
        used: how many cores of each node preprocess now.
    """
    of_kind: dict[Kind, list[float]] = {}
    for node in nodes:
        if node.node_id in measured:
            of_kind.setdefault(_kind(node), []).append(measured[node.node_id])
    known = {kind: sum(speeds) / len(speeds) for kind, speeds in of_kind.items()}
    speeds = [measured.get(node.node_id, known.get(_kind(node), 1.0)) for node in nodes]
    count = sum(used)
    mean = sum(speed * cores for speed, cores in zip(speeds, used, strict=True)) / count if count else 1.0
    return [speed / mean for speed in speeds]


def _kind(node: NodeResources) -> Kind:
    return (node.instance_type,) if node.instance_type else (node.cpus, node.gpus, node.gpu_type)
