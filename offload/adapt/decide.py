"""Choose the next size of training (workers, local batch, accumulation) from the joint goodput.

A decision is a value with its reason and its expected gain. Other modules carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.adapt.situation import Option, Rules, Situation
from offload.adapt.worth import EXPLORED, Choice, Model
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
    """Another number of workers: they commit at the next step's end and start again."""

    split: BatchSplit
    nodes: int
    reason: str
    predicted_samples_per_s: float
    predicted_goodput: float


Decision = Keep | Rebatch | Resize


@dataclass(frozen=True, kw_only=True)
class State:
    """Memory between decisions: the worker count that the last one asked for, and how often in a row."""

    wanted_workers: int | None = None
    asked: int = 0


def decide(state: State, situation: Situation, rules: Rules) -> tuple[State, Decision]:
    """The next size, or why the present one stays, with the memory for the next decision."""
    if situation.seen.fit is None:
        return State(), Keep(reason="no step was measured yet")
    model = Model(situation, rules)
    here = next((o for o in situation.options if o.workers == situation.split.workers), None)
    if here is None:
        return State(), _forced(situation, rules, model)
    (now,) = model.at([here], [situation.split])
    choices = model.best(situation.options)
    best = _pick(choices, rules)
    if best is None or best.option.workers == here.workers:
        return State(), _rebatch(now, _at_home(here, now, situation, rules), rules)
    asked = state.asked + 1 if state.wanted_workers == best.option.workers else 1
    waiting = replace(state, wanted_workers=best.option.workers, asked=asked)
    why_not = _not_worth(now, best, situation, rules)
    at_home = _at_home(here, now, situation, rules)
    if why_not is not None:
        return State(), _rebatch(now, at_home, rules, instead=why_not)
    if asked < rules.agreeing:
        reason = f"{best.option.workers} workers look better; one more interval must confirm it"
        return waiting, _rebatch(now, at_home, rules, instead=reason)
    return State(), Resize(
        split=best.split,
        nodes=best.option.nodes,
        reason=_why(now, best, situation),
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _at_home(here: Option, now: Choice, situation: Situation, rules: Rules) -> Choice:
    """The best batch for the present worker count, accumulated or not; ``now`` if none fits.

    The gradient noise changes while batches grow, so the batch is at most ``EXPLORED`` times the largest one seen. Steps of one
    size predict nothing about a larger size, and waiting for evidence could take forever. A larger batch is therefore tried if it
    could be better.
    """
    sizes = {local for _, _, local in situation.seen.steps}
    micro_batches = 2 if here.workers == 1 else 1  # one worker accumulates to grow its batch
    within = EXPLORED * max(situation.split.global_batch_size, micro_batches * here.workers * max(sizes))
    return next(iter(Model(situation, rules, hopeful=len(sizes) == 1).best([here], within)), now)


def _forced(situation: Situation, rules: Rules, model: Model) -> Decision:
    """The best possible option, where the present worker count no longer fits."""
    best = _pick(model.best(situation.options), rules)
    if best is None:
        return Keep(reason="no number of workers fits the cluster now")
    return Resize(
        split=best.split,
        nodes=best.option.nodes,
        reason=f"{situation.split.workers} workers no longer fit",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _pick(choices: Sequence[Choice], rules: Rules) -> Choice | None:
    """The best option, or one of fewer workers that is about as good: nobody should pay for idle workers."""
    if not choices:
        return None
    top = max(choice.worth(rules.objective) for choice in choices)
    good = [choice for choice in choices if choice.worth(rules.objective) >= (1 - rules.indifferent) * top]
    return min(good, key=lambda choice: choice.option.workers)


def _not_worth(now: Choice, best: Choice, situation: Situation, rules: Rules) -> str | None:
    """The reason why a change of the worker count does not pay; None if it pays."""
    fewer = best.option.workers < now.option.workers
    gain = best.worth(rules.objective) / now.worth(rules.objective) - 1
    if not fewer and gain < rules.least_resize_gain:
        return f"{best.option.workers} workers would gain {gain:.0%}, less than {rules.least_resize_gain:.0%}"
    left_s = situation.work_left / now.goodput
    then_s = situation.restart_s + situation.work_left / best.goodput
    if math.isinf(left_s):
        return None
    # Fewer workers at the same goodput save worker time until the end of the run, whatever the restart costs.
    worth_it = left_s * now.option.workers > then_s * best.option.workers if fewer else left_s > then_s
    if not worth_it:
        return (
            f"{best.option.workers} workers would take {then_s:.0f} s to the end, the restart's {situation.restart_s:.0f} s "
            f"included, and {now.option.workers} take {left_s:.0f} s"
        )
    return None


def _rebatch(now: Choice, best: Choice, rules: Rules, instead: str | None = None) -> Decision:
    gain = best.goodput / now.goodput - 1 if now.goodput > 0 else math.inf
    if best.split == now.split or gain < rules.least_gain:
        return Keep(reason=instead or f"no other size gains {rules.least_gain:.0%}")
    return Rebatch(
        split=best.split,
        nodes=best.option.nodes,
        reason=f"goodput {now.goodput:,.0f} → {best.goodput:,.0f} (+{gain:.0%}) with a global batch of "
        f"{best.split.global_batch_size:,}",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _why(now: Choice, best: Choice, situation: Situation) -> str:
    rate = situation.seen.input_samples_per_s(now.option.cores)
    if best.option.workers < now.option.workers:
        binds = f": the input delivers {rate:,.0f} samples/s" if rate < 1.2 * now.samples_per_s else ""
        return f"{best.option.workers} of {now.option.workers} workers are as good{binds}"
    gain = best.goodput / now.goodput - 1
    return f"goodput {now.goodput:,.0f} → {best.goodput:,.0f} (+{gain:.0%}) with {best.option.workers} workers"
