"""The best batch and the goodput of each option: the joint model, for all options at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from offload.adapt.situation import DecisionBounds, Objective, Option, Situation
from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise
from offload.model.overlap import Floats
from offload.model.step_time import StepTime

EXPLORED = 2  # times the largest batch seen: beyond it the model would guess


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An option with its batch, throughput and goodput in samples/s."""

    option: Option
    split: BatchSplit
    samples_per_s: float
    goodput: float

    def worth(self, objective: Objective) -> float:
        """Goodput, or goodput per dollar an hour."""
        usd = self.option.usd_per_hour
        return self.goodput / usd if objective == "cost" and usd else self.goodput


@dataclass(frozen=True)
class WorthModel:
    """The joint model of each option. ``hopeful``: assume that larger local batches take no more time than those seen, so that
    the run tries them and learns their time."""

    situation: Situation
    rules: DecisionBounds
    hopeful: bool = False

    @cached_property
    def _step_time(self) -> StepTime:
        fit = self.situation.seen.fit
        assert fit is not None
        if not self.hopeful:
            return fit.step_time
        # The time of the present micro-batch becomes independent of its size, so that larger ones cost no more.
        alpha_s = float(fit.step_time.compute_time_s(self.situation.split.local_batch_size))
        return replace(fit.step_time, alpha_compute=alpha_s, beta_compute=0.0)

    @cached_property
    def _noise(self) -> GradientNoise | None:
        """The noise at the end of its uncertainty that makes large batches worth less."""
        noise = self.situation.noise
        # Too large a batch wastes samples for good, and too small a one only some speed.
        return None if noise is None else noise.cautious

    def _joint(self, options: Sequence[Option]) -> JointGoodput:
        """The model of these options, whose worker counts differ."""
        rates = {option.workers: self.situation.seen.input_samples_per_s(option.cores) for option in options}
        return JointGoodput(self._step_time, self._noise, rates.__getitem__, overlap=self.rules.overlap)

    def at(self, options: Sequence[Option], splits: Sequence[BatchSplit]) -> list[Choice]:
        """The options with these batches."""
        if not options:
            return []
        noise = self._noise
        columns = [
            (o.nodes, s.workers, s.local_batch_size, s.accum_steps) for o, s in zip(options, splits, strict=True)
        ]
        rates = np.asarray(self._joint(options).throughput(*np.array(columns).T))
        batches = np.array([split.global_batch_size for split in splits])
        # Rounding to whole local batches may give a few samples fewer than the initial batch.
        goodput = rates if noise is None else rates * noise.efficiency(np.maximum(batches, noise.batch_size))
        return [
            Choice(
                option=self._with_cores(option, float(rate)),
                split=split,
                samples_per_s=float(rate),
                goodput=float(good),
            )
            for option, split, rate, good in zip(options, splits, rates, goodput, strict=True)
        ]

    def _with_cores(self, option: Option, samples_per_s: float) -> Option:
        """The option with the cores that this rate needs, and their price."""
        per_core = self.situation.seen.input_samples_per_s(1.0)
        if not option.elastic or math.isinf(per_core):
            return option
        cores = min(max(math.ceil(samples_per_s / per_core), option.free_cores), option.cores)
        usd = None if option.usd_per_hour is None else float(option.usd_with(cores))
        return replace(option, cores=cores, usd_per_hour=usd, elastic=False)

    def _per_dollar(self, options: Sequence[Option]) -> Callable[[Floats, Floats], Floats] | None:
        """Goodput per dollar an hour where more samples need more cores; None: goodput alone decides on the batch."""
        per_core = self.situation.seen.input_samples_per_s(1.0)
        if (
            self.rules.objective != "cost"
            or math.isinf(per_core)
            or not all(o.elastic and o.usd_per_hour for o in options)
        ):
            return None
        rest, core, free = np.array([(o.usd_per_hour, o.usd_per_core, o.free_cores) for o in options], dtype=float).T
        return lambda goodput, rate: goodput / (rest + core * np.maximum(rate / per_core - free, 0.0))

    def best(self, options: Sequence[Option], within: float = math.inf) -> list[Choice]:
        """The best batch for each option, among global batches up to ``within``; without the options that none fits."""
        rules, (least, most) = self.rules, self.rules.local_batch_size
        initial = rules.initial_batch_size
        if self.situation.noise is None or max(rules.max_batch_size, initial) <= initial:
            return self.at(options, [BatchSplit.of(initial, o.workers, most) for o in options])
        explored = EXPLORED * max(m for _, _, m in self.situation.seen.steps)
        most = max(min(most, explored), least)
        # Many workers need a larger batch than the initial one: of each worker's least.
        fitting = [o for o in options if least * o.workers <= max(rules.max_batch_size, initial)]
        choices = []
        for largest, group in _by_largest(fitting, initial, least, min(rules.max_batch_size, within)):
            nodes, workers = np.array([(o.nodes, o.workers) for o in group]).T
            optimum: Any = self._joint(group).optimize(
                nodes, workers, largest, (least, most), accumulate=True, worth=self._per_dollar(group)
            )
            splits = [
                BatchSplit(workers=o.workers, local_batch_size=int(local), accum_steps=int(accum))
                if goodput > 0
                else BatchSplit.of(initial, o.workers, most)
                for o, goodput, local, accum in zip(group, *optimum, strict=True)
            ]
            # Every option is evaluated by the same function, so that their values can be compared.
            choices += self.at(group, splits)
        return choices


def _by_largest(options: Sequence[Option], initial: int, least: int, most: float) -> list[tuple[float, list[Option]]]:
    """Options by the largest global batch to try: ``most``, or what the workers need at least."""
    groups: dict[float, list[Option]] = {}
    for option in options:
        groups.setdefault(max(most, initial, least * option.workers), []).append(option)
    return list(groups.items())
