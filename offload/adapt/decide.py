"""Which size to train at next: workers, local batch and accumulation, from the joint goodput.

A decision is a value that carries its reason and what it is expected to bring; others execute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offload.adapt.observe import Seen, Size
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise

Objective = Literal["time", "cost"]
EXPLORED = 2  # times the largest batch seen that a next one may be: beyond, the model is a guess


@dataclass(frozen=True, kw_only=True)
class Option:
    """A worker count that fits: the nodes it lies on, the cores it leaves for preprocessing, and dollars per hour of all
    nodes that are then needed (None: unknown)."""

    workers: int
    nodes: int
    cores: float
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What bounds and steadies the decisions.

    Args:
        initial_batch_size: M0.
        max_batch_size: of the global batch; the initial one where batches are fixed.
        local_batch_size: least and most of one worker.
        objective: ``time``: the most goodput; ``cost``: the most goodput per dollar.
        least_gain: relative gain from which a change of the batch is worth it.
        least_resize_gain: the same of the worker count, which stops training for a while.
        indifferent: share of the best goodput that may be missed by fewer workers: surplus ones are given back.
        agreeing: intervals in a row that must ask for the same worker count.
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

    size: Size
    reason: str
    predicted_samples_per_s: float
    predicted_goodput: float


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Another number of workers: they commit at the next step's end and start again."""

    size: Size
    reason: str
    predicted_samples_per_s: float
    predicted_goodput: float


Decision = Keep | Rebatch | Resize


@dataclass(frozen=True, kw_only=True)
class State:
    """What is remembered from decision to decision: the worker count last asked for, and how often in a row."""

    wanted_workers: int | None = None
    asked: int = 0


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision is made from.

    Args:
        size: at which the workers train.
        seen: what was learned.
        noise: of the gradient; None: not known yet, or the batch is fixed.
        options: worker counts that fit, that of ``size`` among them if it still does.
        work_left: initial-batch-equivalent samples still to train.
        restart_s: seconds that a change of the worker count costs.
    """

    size: Size
    seen: Seen
    noise: GradientNoise | None
    options: Sequence[Option]
    work_left: float = math.inf
    restart_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Choice:
    option: Option
    size: Size
    samples_per_s: float
    goodput: float

    def worth(self, objective: Objective) -> float:
        usd = self.option.usd_per_hour
        return self.goodput / usd if objective == "cost" and usd else self.goodput


@dataclass(frozen=True)
class _Model:
    """The joint model of each option. ``hopeful``: larger local batches are taken to need no more time than those seen, to find
    out what they do need."""

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
                alpha_s = float(step_time.compute_time_s(self.situation.size.local_batch_size))
                step_time = replace(step_time, alpha_compute=alpha_s, beta_compute=0.0)
            rate = self.situation.seen.input_samples_per_s(option.cores)
            self.models[option.workers] = JointGoodput(
                step_time, self.situation.noise, None if math.isinf(rate) else rate, overlap=self.rules.overlap
            )
        return self.models[option.workers]

    def at(self, option: Option, size: Size) -> _Choice:
        joint, where = self.of(option), (size.nodes, size.workers, size.local_batch_size, size.accum_steps)
        # A few samples fewer than the initial batch come of rounding to whole local batches.
        noise = self.situation.noise
        efficiency = 1.0 if noise is None else float(noise.efficiency(max(size.global_batch_size, noise.batch_size)))
        rate = float(joint.throughput(*where))
        return _Choice(option=option, size=size, samples_per_s=rate, goodput=rate * efficiency)

    def best(self, option: Option, within: float = math.inf) -> _Choice | None:
        """The best batch for an option, of global batches up to ``within``; None where no batch fits it."""
        rules, least, most = self.rules, *self.rules.local_batch_size
        largest = max(min(rules.max_batch_size, within), rules.initial_batch_size)
        if self.situation.noise is None or largest <= rules.initial_batch_size:
            size = split_batch(rules.initial_batch_size, option, rules.local_batch_size)
            return self.at(option, size)
        explored = EXPLORED * max(m for _, _, m in self.situation.seen.steps)
        most = max(min(most, explored), least)
        if math.ceil(rules.initial_batch_size / option.workers) < least:
            return None
        goodput, local, accum = self.of(option).optimize(
            option.nodes, option.workers, largest, (least, most), accumulate=True
        )
        if goodput <= 0:
            return self.at(option, split_batch(rules.initial_batch_size, option, (least, most)))
        size = Size(nodes=option.nodes, workers=option.workers, local_batch_size=int(local), accum_steps=int(accum))
        return self.at(option, size)


def split_batch(global_batch_size: int, option: Option, local: tuple[int, int]) -> Size:
    """A global batch over an option's workers, rounded up to whole local batches; accumulated where they grow too large."""
    share = math.ceil(global_batch_size / option.workers)
    accum = max(math.ceil(share / local[1]) - 1, 0)
    return Size(
        nodes=option.nodes,
        workers=option.workers,
        local_batch_size=math.ceil(share / (accum + 1)),
        accum_steps=accum,
    )


def decide(state: State, situation: Situation, rules: Rules) -> tuple[State, Decision]:
    """The next size, or why it stays; with it, what to remember."""
    if situation.seen.fit is None:
        return State(), Keep(reason="no step was measured yet")
    model = _Model(situation, rules)
    here = next((o for o in situation.options if o.workers == situation.size.workers), None)
    if here is None:
        return State(), _forced(situation, rules, model)
    now = model.at(here, situation.size)
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
        reason = f"{best.option.workers} workers look better; one more interval must say so"
        return waiting, _rebatch(now, at_home, rules, instead=reason)
    return State(), Resize(
        size=best.size,
        reason=_why(now, best, situation),
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _at_home(here: Option, now: _Choice, situation: Situation, rules: Rules) -> _Choice:
    """The best batch with as many workers as there are, at most twice what was seen, accumulated or not: gradients change
    while batches grow. ``now`` where none fits. Steps of one size say nothing of what a larger one would take, and whoever
    waits until it looks better may wait for ever: it is tried if it could be better."""
    sizes = {local for _, _, local in situation.seen.steps}
    micro_batches = 2 if here.workers == 1 else 1  # one worker accumulates to grow its batch
    within = EXPLORED * max(situation.size.global_batch_size, micro_batches * here.workers * max(sizes))
    return _Model(situation, rules, hopeful=len(sizes) == 1).best(here, within) or now


def _forced(situation: Situation, rules: Rules, model: _Model) -> Decision:
    """The worker count is no longer possible: the best that is."""
    choices = [c for o in situation.options if (c := model.best(o)) is not None]
    best = _pick(choices, rules)
    if best is None:
        return Keep(reason="no number of workers fits the cluster now")
    return Resize(
        size=best.size,
        reason=f"{situation.size.workers} workers no longer fit",
        predicted_samples_per_s=best.samples_per_s,
        predicted_goodput=best.goodput,
    )


def _pick(choices: Sequence[_Choice], rules: Rules) -> _Choice | None:
    """The best, or one of fewer workers that is as good: what changes nothing is not paid for."""
    if not choices:
        return None
    top = max(choice.worth(rules.objective) for choice in choices)
    good = [choice for choice in choices if choice.worth(rules.objective) >= (1 - rules.indifferent) * top]
    return min(good, key=lambda choice: choice.option.workers)


def _not_worth(now: _Choice, best: _Choice, situation: Situation, rules: Rules) -> str | None:
    """Why a change of the worker count does not pay, None where it does."""
    fewer = best.option.workers < now.option.workers
    gain = best.worth(rules.objective) / now.worth(rules.objective) - 1
    if not fewer and gain < rules.least_resize_gain:
        return f"{best.option.workers} workers would gain {gain:.0%}, less than {rules.least_resize_gain:.0%}"
    left_s = situation.work_left / now.goodput
    then_s = situation.restart_s + situation.work_left / best.goodput
    if math.isinf(left_s):
        return None
    # Fewer workers that change nothing save the rest of the run's worker time, whatever a restart takes of it.
    worth_it = left_s * now.option.workers > then_s * best.option.workers if fewer else left_s > then_s
    if not worth_it:
        return (
            f"{best.option.workers} workers would take {then_s:.0f} s to the end, the restart's {situation.restart_s:.0f} s "
            f"included, and {now.option.workers} take {left_s:.0f} s"
        )
    return None


def _rebatch(now: _Choice, best: _Choice, rules: Rules, instead: str | None = None) -> Decision:
    gain = best.goodput / now.goodput - 1 if now.goodput > 0 else math.inf
    if best.size == now.size or gain < rules.least_gain:
        return Keep(reason=instead or f"no other size gains {rules.least_gain:.0%}")
    return Rebatch(
        size=best.size,
        reason=f"goodput {now.goodput:,.0f} → {best.goodput:,.0f} (+{gain:.0%}) with a global batch of "
        f"{best.size.global_batch_size:,}",
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
