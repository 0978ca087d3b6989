"""Choose the next size of training (workers, local batch, accumulation) from the joint goodput.

A decision is a value with its reason and its expected gain. Other modules carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.adapt.situation import DecisionBounds, Option, Situation
from offload.adapt.worth import EXPLORED, Choice, WorthModel
from offload.formatting import rate_shown
from offload.model.batch_split import BatchSplit


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Nothing changes."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Rebatch:
    """Another local batch or accumulation, from the next global batch on."""

    split: BatchSplit
    nodes: int
    reason: str
    predicted_samples_per_s: float
    predicted_goodput: float


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Another number of workers: they commit at the next step's end and start again. ``cores``: those that feed them."""

    split: BatchSplit
    nodes: int
    cores: float
    reason: str
    predicted_samples_per_s: float
    predicted_goodput: float


MOST_TURNS = 3  # changes back and forth that lengthen the wait for the next
CERTAIN = 2.0  # standard deviations of the step times, below which a gain may be noise

Decision = Keep | Rebatch | Resize


@dataclass(frozen=True, kw_only=True)
class State:
    """Memory between decisions.

    Args:
        wanted_workers: the worker count that the last decision asked for.
        asked: how often in a row.
        wanted_cores: the cores that would feed them.
        grew: whether the last change added workers; None before the first.
        turns: how often a change undid the direction of the one before it.
        released_s: seconds that restarts to release surplus workers have cost.
    """

    wanted_workers: int | None = None
    asked: int = 0
    wanted_cores: float | None = None
    grew: bool | None = None
    turns: int = 0
    released_s: float = 0.0

    def agreeing(self, rules: DecisionBounds, *, grows: bool) -> int:
        """The intervals in a row that must ask for a change: twice as many after each change back and forth, since noise caused it."""
        turns = self.turns + (self.grew is not None and self.grew != grows)
        return rules.agreeing << min(turns, MOST_TURNS)

    def at_rest(self) -> State:
        """The memory while no other count is wanted."""
        return replace(self, wanted_workers=None, asked=0, wanted_cores=None)

    def after(self, *, grows: bool, released_s: float) -> State:
        """The memory after a change of the worker count."""
        turned = self.grew is not None and self.grew != grows
        return State(grew=grows, turns=self.turns + turned, released_s=self.released_s + released_s)


def decide(state: State, situation: Situation, rules: DecisionBounds) -> tuple[State, Decision]:
    """The next size, or why the present one stays, with the memory for the next decision.

    Objective ``cost`` needs the price of every option. If one is unknown, goodput alone decides, and the reason says so.
    """
    if rules.objective == "cost" and any(option.usd_per_hour is None for option in situation.options):
        unknown = sum(option.usd_per_hour is None for option in situation.options)
        # An option without a price has no goodput per dollar to compare.
        state, decision = decide(state, situation, replace(rules, objective="time"))
        reason = f"{decision.reason}; prices of {unknown} of {len(situation.options)} options are unknown, so goodput decides"
        return state, replace(decision, reason=reason)
    if situation.seen.fit is None:
        return state.at_rest(), Keep(reason="no step was measured yet")
    model = WorthModel(situation, rules)
    here = next((o for o in situation.options if o.workers == situation.split.workers), None)
    if here is None:
        return state.at_rest(), _forced(situation, rules, model)
    # The present size as the model sees it, not as it was measured: an error of the model then cancels out of the
    # gain.
    (now,) = model.at([here], [situation.split])
    best = _pick(model.best(situation.options), rules)
    at_home = _at_home(here, now, situation, rules)
    if best is None or best.option.workers == here.workers:
        return state.at_rest(), _rebatch(now, at_home, rules)
    why_not = _not_worth(state, now, best, situation, rules)
    if why_not is not None:
        return state.at_rest(), _rebatch(now, at_home, rules, instead=why_not)
    grows = best.option.workers > here.workers
    # Only the same count counts: intervals that want different sizes contradict each other.
    asked = state.asked + 1 if state.wanted_workers == best.option.workers else 1
    missing = state.agreeing(rules, grows=grows) - asked
    if missing > 0:
        more = "one more interval" if missing == 1 else f"{missing} more intervals"
        reason = f"{best.option.workers} workers look better; {more} must confirm it"
        waiting = replace(state, wanted_workers=best.option.workers, asked=asked, wanted_cores=best.option.cores)
        return waiting, _rebatch(now, at_home, rules, instead=reason)
    # A restart that only releases workers brings no progress, so the run keeps account of what it has spent on those.
    released_s = situation.restart_s if _only_releases(now, best, rules) else 0.0
    return state.after(grows=grows, released_s=released_s), Resize(
        split=best.split,
        nodes=best.option.nodes,
        cores=best.option.cores,
        reason=_why(now, best, situation),
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def cores_meanwhile(counted: int, present: int, state: State, decision: Decision, rules: DecisionBounds) -> int:
    """The cores to ask for besides a decision, where ``counted`` would feed the present size, and ``present`` are there or coming.

    If a run that saves dollars is about to change its workers, it adds no cores that only the present ones need: it would pay for them
    long after.
    """
    cores = decision.cores if isinstance(decision, Resize) else state.wanted_cores
    if rules.objective != "cost" or cores is None:
        return counted
    return min(counted, max(present, math.ceil(cores)))


def _at_home(here: Option, now: Choice, situation: Situation, rules: DecisionBounds) -> Choice:
    """The best batch for the present worker count, accumulated or not; ``now`` if none fits.

    The gradient noise changes while batches grow, so the batch is at most ``EXPLORED`` times the largest one seen. Steps of one
    size predict nothing about a larger size, and waiting for evidence could take forever. A larger batch is therefore tried if it
    could be better.
    """
    sizes = {local for _, _, local in situation.seen.steps}
    micro_batches = 2 if here.workers == 1 else 1  # one worker accumulates to grow its batch
    within = EXPLORED * max(situation.split.global_batch_size, micro_batches * here.workers * max(sizes))
    return next(iter(WorthModel(situation, rules, hopeful=len(sizes) == 1).best([here], within)), now)


def _forced(situation: Situation, rules: DecisionBounds, model: WorthModel) -> Decision:
    """The best possible option, where the present worker count no longer fits."""
    best = _pick(model.best(situation.options), rules)
    if best is None:
        return Keep(reason="no number of workers fits the cluster now")
    return Resize(
        split=best.split,
        nodes=best.option.nodes,
        cores=best.option.cores,
        reason=f"{situation.split.workers} workers no longer fit",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _pick(choices: Sequence[Choice], rules: DecisionBounds) -> Choice | None:
    """The best option, or one of fewer workers that is about as good: nobody should pay for idle workers."""
    if not choices:
        return None
    top = max(choice.worth(rules.objective) for choice in choices)
    good = [choice for choice in choices if choice.worth(rules.objective) >= (1 - rules.indifferent) * top]
    return min(good, key=lambda choice: choice.option.workers)


def _only_releases(now: Choice, best: Choice, rules: DecisionBounds) -> bool:
    """Return whether a change gains nothing except the workers that it releases."""
    gain = best.worth(rules.objective) / now.worth(rules.objective) - 1
    return best.option.workers < now.option.workers and gain < rules.least_resize_gain


def _not_worth(state: State, now: Choice, best: Choice, situation: Situation, rules: DecisionBounds) -> str | None:
    """The reason why a change of the worker count does not pay; None if it pays."""
    fewer = best.option.workers < now.option.workers
    gain = best.worth(rules.objective) / now.worth(rules.objective) - 1
    fit = situation.seen.fit
    # Where the fit misses its own measurements, a gain of that size may be an error of the model.
    least = max(rules.least_resize_gain, CERTAIN * (fit.residual if fit is not None else 0.0))
    if not fewer and gain < least:
        return f"{best.option.workers} workers would gain {gain:.0%}, less than {least:.0%}"
    left_s = situation.work_left / now.goodput
    then_s = situation.restart_s + situation.work_left / best.goodput
    # Without a known end, the restart is paid back at some time.
    if math.isinf(left_s):
        return None
    if rules.objective == "time" and _only_releases(now, best, rules):
        restarts = _restarts_to(best, situation, rules)
        cost_s, most_s = state.released_s + restarts * situation.restart_s, rules.indifferent * left_s
        if cost_s > most_s:
            return (
                f"{best.option.workers} workers are as good, but {cost_s:.0f} s of restarts on the way to fewer workers are more than "
                f"{rules.indifferent:.0%} of the {left_s:.0f} s left"
            )
    # Fewer workers at the same goodput save worker time until the end of the run, whatever the restart costs.
    worth_it = left_s * now.option.workers > then_s * best.option.workers if fewer else left_s > then_s
    if not worth_it:
        return (
            f"{best.option.workers} workers would take {then_s:.0f} s to the end, the restart's {situation.restart_s:.0f} s "
            f"included, and {now.option.workers} take {left_s:.0f} s"
        )
    return None


def _restarts_to(best: Choice, situation: Situation, rules: DecisionBounds) -> int:
    """The restarts until no more workers are released.

    Fewer workers need larger local batches. The run learns their time only there, and may then release more: at worst it halves the
    count, restart by restart, down to what larger batches at no more time would allow.
    """
    last = _pick(WorthModel(situation, rules, hopeful=True).best(situation.options), rules)
    fewest = best.option.workers if last is None else min(last.option.workers, best.option.workers)
    return 1 + math.ceil(math.log2(best.option.workers / fewest))


def _rebatch(now: Choice, best: Choice, rules: DecisionBounds, instead: str | None = None) -> Decision:
    gain = best.worth(rules.objective) / now.worth(rules.objective) - 1 if now.goodput > 0 else math.inf
    if best.split == now.split or gain < rules.least_gain:
        return Keep(reason=instead or f"no other size gains {rules.least_gain:.0%}")
    return Rebatch(
        split=best.split,
        nodes=best.option.nodes,
        reason=f"goodput {rate_shown(now.goodput)} → {rate_shown(best.goodput)} (+{gain:.0%}) with a global batch of "
        f"{best.split.global_batch_size:,}",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _why(now: Choice, best: Choice, situation: Situation) -> str:
    rate = situation.seen.input_samples_per_s(now.option.cores)
    if best.option.workers < now.option.workers:
        binds = f": the input delivers {rate_shown(rate)} samples/s" if rate < 1.2 * now.samples_per_s else ""
        return f"{best.option.workers} of {now.option.workers} workers are as good{binds}"
    gain = best.goodput / now.goodput - 1
    return f"goodput {rate_shown(now.goodput)} → {rate_shown(best.goodput)} (+{gain:.0%}) with {best.option.workers} workers"
