"""Changes of the worker count over simulated runs: what they cost, and how seldom they are."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from offload.adapt import observe
from offload.adapt.decide import Keep, Resize, State, decide
from offload.adapt.observe import Seen
from offload.adapt.situation import DecisionBounds, Option, Situation
from offload.model import GradientNoise, JointGoodput, StepTime
from offload.model.batch_split import BatchSplit
from offload.model.fit import fit_step_time
from tests.adapt.test_adapt import TRUTH, interval, many, seen_at, stretched

INTERVAL_S = 30.0
NOISE = GradientNoise(sqr=0.01, var=1.0, batch_size=64)


@dataclass
class Done:
    """A simulated run: seconds to the end, and the worker counts."""

    seconds: float
    workers: list[int]

    @property
    def resizes(self) -> int:
        return len(self.workers) - 1


def train(
    truth: StepTime, split: BatchSplit, rules: DecisionBounds, *, work: float, restart_s: float, input_samples_per_s: float,
    noise: float = 0.0, seed: int = 0, until_s: float = math.inf, most: int = 8,
) -> Done:  # fmt: skip
    rng, seen, state = random.Random(seed), Seen(), State()
    options = [Option(workers=k, nodes=1, cores=8.0) for k in range(1, most + 1)]
    done = Done(0.0, [split.workers])
    while work > 0 and done.seconds < until_s:

        def jitter() -> float:
            return math.exp(rng.gauss(0, noise))

        rate = input_samples_per_s * jitter()
        shown = stretched(
            interval(split, input_samples_per_s=rate, ceiling=input_samples_per_s, truth=truth), INTERVAL_S
        )
        shown = replace(shown, compute_s=shown.compute_s * jitter(), sync_s=shown.sync_s * jitter())
        seen = seen.with_interval(shown, 8.0)
        useful = shown.samples_per_s * float(NOISE.efficiency(max(split.global_batch_size, 64)))
        spent = min(INTERVAL_S, work / useful)
        work, done.seconds = work - useful * spent, done.seconds + spent
        situation = Situation(
            split=split, seen=seen, noise=NOISE, options=options, work_left=max(work, 1.0), restart_s=restart_s
        )
        state, decision = decide(state, situation, rules)
        if isinstance(decision, Resize):
            done.seconds += restart_s
            done.workers.append(decision.split.workers)
        if not isinstance(decision, Keep):
            split = decision.split
    return done


RULES = DecisionBounds(initial_batch_size=64, max_batch_size=64, local_batch_size=(8, 512))


@pytest.mark.parametrize(
    "truth",
    [StepTime(0.1, 0.0001), pytest.param(StepTime(0.02, 0.001), marks=pytest.mark.soak), StepTime(0.001, 0.002)],
)
@pytest.mark.parametrize(
    "restart_s", [pytest.param(10.0, marks=pytest.mark.soak), 60.0, pytest.param(300.0, marks=pytest.mark.soak)]
)
def test_surplus_workers_are_released_in_few_restarts_that_cost_little_time(truth: StepTime, restart_s: float) -> None:
    done = train(truth, many(8, 8), RULES, input_samples_per_s=150.0, work=150.0 * 3600, restart_s=restart_s)
    assert done.seconds <= 1.07 * 3600
    assert restart_s * done.resizes <= 0.03 * 3600
    assert done.resizes <= 2


@pytest.mark.parametrize("input_samples_per_s", [150.0, 400.0, 1200.0, 1e6])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_a_tenth_of_noise_changes_the_workers_at_most_twice_in_20_minutes(
    input_samples_per_s: float, seed: int
) -> None:
    rules = replace(RULES, max_batch_size=1024)
    done = train(
        TRUTH, many(4, 16), rules, work=1e9, restart_s=20.0, input_samples_per_s=input_samples_per_s, noise=0.1,
        seed=seed, until_s=1200.0,
    )  # fmt: skip
    assert done.resizes <= 2


def test_options_without_a_price_are_not_weighed_against_priced_ones() -> None:
    size = many(2, 32)
    options = [Option(workers=k, nodes=1, cores=8, usd_per_hour=None if k == 4 else 4.0 * k) for k in (1, 2, 3, 4)]
    situation = Situation(split=size, seen=seen_at(size, many(2, 64)), noise=None, options=options, work_left=1e9)
    decisions = []
    for objective in ("cost", "time"):
        rules = replace(RULES, objective=objective)
        state, _ = decide(State(), situation, rules)
        decisions.append(decide(state, situation, rules)[1])
    by_cost, by_time = decisions
    assert by_cost.reason == f"{by_time.reason}; prices of 1 of 4 options are unknown, so goodput decides"
    assert replace(by_cost, reason="") == replace(by_time, reason="")


@pytest.fixture(scope="module")
def adaptdl() -> Any:
    """``adaptdl.goodput`` of AdaptDL 0.2.11, an independent implementation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "int", int, raising=False)  # it predates numpy 1.24
        yield importlib.import_module("adaptdl.goodput")


@pytest.mark.parametrize("least", [1, 16, 32])
@pytest.mark.parametrize("sqr", [0.001, 0.1])
def test_the_options_of_worker_counts_are_adaptdls(adaptdl: Any, least: int, sqr: float) -> None:
    """More workers than the initial batch has least local batches train a larger one."""
    noise = GradientNoise(sqr=sqr, var=1.0, batch_size=64)
    s = TRUTH
    perf = adaptdl.PerfParams(
        s.alpha_compute, s.beta_compute, s.alpha_inter, s.beta_inter, s.alpha_intra, s.beta_intra, s.gamma
    )
    theirs = adaptdl.GoodputFunction(perf, adaptdl.GradParams(noise.sqr, noise.var), 64)
    seen = seen_at(*[many(k, m) for k in (1, 2, 8, 16) for m in (16, 64, 256)])
    rules = DecisionBounds(initial_batch_size=64, max_batch_size=4096, local_batch_size=(least, 256))
    for workers in (1, 2, 4, 8, 12, 16):
        # The present count no longer fits, so the only option is taken whatever it is worth.
        situation = Situation(
            split=many(20, 16), seen=seen, noise=noise, options=[Option(workers=workers, nodes=1, cores=8)]
        )
        _, decision = decide(State(), situation, rules)
        assert isinstance(decision, Resize)
        expected, _, _ = theirs.optimize(1, workers, 4096, (least, 256), accumulation=True)
        assert decision.predicted_goodput == pytest.approx(float(expected), rel=0.02)
        assert decision.split.local_batch_size >= least


def test_a_decision_over_many_options_fits_the_step_times_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            called.append(name)
            return original(*args, **more)

        return call

    monkeypatch.setattr(observe, "fit_step_time", noted("fit", fit_step_time))
    monkeypatch.setattr(JointGoodput, "optimize", noted("search", JointGoodput.optimize))
    size = many(4, 16)
    options = [Option(workers=k, nodes=1, cores=8) for k in range(1, 257)]
    rules = replace(RULES, max_batch_size=65536)
    seen = seen_at(size, many(4, 32))
    decide(State(), Situation(split=size, seen=seen, noise=NOISE, options=options, work_left=1e9), rules)
    assert called.count("fit") == 1
    assert called.count("search") <= 3
