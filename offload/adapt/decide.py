"""Choose the next size of training (workers, local batch, accumulation) from the joint goodput.

A decision is a value with its reason and its expected gain. Other modules carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offload.adapt.observe import Seen
from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise

Objective = Literal["time", "cost"]
EXPLORED = 2  # times the largest batch seen: beyond it the model would guess


@dataclass(frozen=True, kw_only=True)
class Option:
    """A worker count that fits, with the workers' nodes, the cores that then preprocess, and the dollars per hour of all nodes
    in use (None: unknown)."""

    workers: int
    nodes: int
    cores: float
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The bounds of the decisions, and the rules that keep them steady.

    Args:
        initial_batch_size: M0.
        max_batch_size: the largest global batch; the initial one where batches are fixed.
        local_batch_size: the smallest and the largest batch of one worker.
        objective: ``time``: the most goodput; ``cost``: the most goodput per dollar.
        least_gain: the least relative gain that justifies another batch.
        least_resize_gain: the same for another worker count, which stops training for a while.
        indifferent: the share of the best goodput that fewer workers may lose: the run releases surplus workers.
        agreeing: consecutive intervals that must ask for the same worker count.
        overlap: delta of the joint model.
    """

    initial_batch_size: int
    max_batch_size: int
    local_batch_size: tuple[int, int]
    objective: Objective = "time"
    least_gain: float = 0.05
    least_resize_gain: float = 0.1
    indifferent: float = 0.03
    agreeing: int = 2
    overlap: float = 8.0


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


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of a decision.

    Args:
        split: how the global batches are split now.
        seen: what the run has learned.
        noise: gradient noise; None if it is unknown, or the batch is fixed.
        options: worker counts that fit, including that of ``split`` if it still fits.
        work_left: initial-batch-equivalent samples still to train.
        restart_s: the cost of a change of the worker count, in seconds.
    """

    split: BatchSplit
    seen: Seen
    noise: GradientNoise | None
    options: Sequence[Option]
    work_left: float = math.inf
    restart_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Choice:
    option: Option
    split: BatchSplit
    samples_per_s: float
    goodput: float

    def worth(self, objective: Objective) -> float:
        usd = self.option.usd_per_hour
        return self.goodput / usd if objective == "cost" and usd else self.goodput


@dataclass(frozen=True)
class _Model:
    """The joint model of each option. ``hopeful``: assume that larger local batches take no more time than those seen, so that
    the run tries them and learns their time."""

    situation: Situation
    rules: Rules
    hopeful: bool = False
    models: dict[int, JointGoodput] = field(default_factory=dict)

    def of(self, option: Option) -> JointGoodput:
        if option.workers not in self.models:
            fit = self.situation.seen.fit
            assert fit is not None
            step_time = fit.step_time
            if self.hopeful:
                alpha_s = float(step_time.compute_time_s(self.situation.split.local_batch_size))
                step_time = replace(step_time, alpha_compute=alpha_s, beta_compute=0.0)
            rate = self.situation.seen.input_samples_per_s(option.cores)
            self.models[option.workers] = JointGoodput(
                step_time, self.situation.noise, None if math.isinf(rate) else rate, overlap=self.rules.overlap
            )
        return self.models[option.workers]

    def at(self, option: Option, split: BatchSplit) -> _Choice:
        joint, where = self.of(option), (option.nodes, split.workers, split.local_batch_size, split.accum_steps)
        # Rounding to whole local batches may give a few samples fewer than the initial batch.
        noise = self.situation.noise
        efficiency = 1.0 if noise is None else float(noise.efficiency(max(split.global_batch_size, noise.batch_size)))
        rate = float(joint.throughput(*where))
        return _Choice(option=option, split=split, samples_per_s=rate, goodput=rate * efficiency)

    def best(self, option: Option, within: float = math.inf) -> _Choice | None:
        """The best batch for an option, among global batches up to ``within``; None if none fits."""
        rules, least, most = self.rules, *self.rules.local_batch_size
        largest = max(min(rules.max_batch_size, within), rules.initial_batch_size)
        if self.situation.noise is None or largest <= rules.initial_batch_size:
            return self.at(option, BatchSplit.of(rules.initial_batch_size, option.workers, rules.local_batch_size[1]))
        explored = EXPLORED * max(m for _, _, m in self.situation.seen.steps)
        most = max(min(most, explored), least)
        if math.ceil(rules.initial_batch_size / option.workers) < least:
            return None
        goodput, local, accum = self.of(option).optimize(
            option.nodes, option.workers, largest, (least, most), accumulate=True
        )
        if goodput <= 0:
            return self.at(option, BatchSplit.of(rules.initial_batch_size, option.workers, most))
        return self.at(option, BatchSplit(workers=option.workers, local_batch_size=int(local), accum_steps=int(accum)))


def decide(state: State, situation: Situation, rules: Rules) -> tuple[State, Decision]:
    """The next size, or why the present one stays, with the memory for the next decision."""
    if situation.seen.fit is None:
        return State(), Keep(reason="no step was measured yet")
    model = _Model(situation, rules)
    here = next((o for o in situation.options if o.workers == situation.split.workers), None)
    if here is None:
        return State(), _forced(situation, rules, model)
    now = model.at(here, situation.split)
    choices = [c for o in situation.options if (c := model.best(o)) is not None]
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


def _at_home(here: Option, now: _Choice, situation: Situation, rules: Rules) -> _Choice:
    """The best batch for the present worker count, accumulated or not; ``now`` if none fits.

    The gradient noise changes while batches grow, so the batch is at most ``EXPLORED`` times the largest one seen. Steps of one
    size predict nothing about a larger size, and waiting for evidence could take forever. A larger batch is therefore tried if it
    could be better.
    """
    sizes = {local for _, _, local in situation.seen.steps}
    micro_batches = 2 if here.workers == 1 else 1  # one worker accumulates to grow its batch
    within = EXPLORED * max(situation.split.global_batch_size, micro_batches * here.workers * max(sizes))
    return _Model(situation, rules, hopeful=len(sizes) == 1).best(here, within) or now


def _forced(situation: Situation, rules: Rules, model: _Model) -> Decision:
    """The best possible option, where the present worker count no longer fits."""
    choices = [c for o in situation.options if (c := model.best(o)) is not None]
    best = _pick(choices, rules)
    if best is None:
        return Keep(reason="no number of workers fits the cluster now")
    return Resize(
        split=best.split,
        nodes=best.option.nodes,
        reason=f"{situation.split.workers} workers no longer fit",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _pick(choices: Sequence[_Choice], rules: Rules) -> _Choice | None:
    """The best option, or one of fewer workers that is about as good: nobody should pay for idle workers."""
    if not choices:
        return None
    top = max(choice.worth(rules.objective) for choice in choices)
    good = [choice for choice in choices if choice.worth(rules.objective) >= (1 - rules.indifferent) * top]
    return min(good, key=lambda choice: choice.option.workers)


def _not_worth(now: _Choice, best: _Choice, situation: Situation, rules: Rules) -> str | None:
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


def _rebatch(now: _Choice, best: _Choice, rules: Rules, instead: str | None = None) -> Decision:
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


def _why(now: _Choice, best: _Choice, situation: Situation) -> str:
    rate = situation.seen.input_samples_per_s(now.option.cores)
    if best.option.workers < now.option.workers:
        binds = f": the input delivers {rate:,.0f} samples/s" if rate < 1.2 * now.samples_per_s else ""
        return f"{best.option.workers} of {now.option.workers} workers are as good{binds}"
    gain = best.goodput / now.goodput - 1
    return f"goodput {now.goodput:,.0f} → {best.goodput:,.0f} (+{gain:.0%}) with {best.option.workers} workers"
