"""Batches of a run whose gradient noise grows, in simulated worlds, and what uncertain noise does to a decision."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.batch_worlds import adaptdl_rule, offload_rule, run, world
from offload.adapt.decide import Keep, State, decide
from offload.adapt.situation import Option, Situation
from tests.adapt.test_adapt import NOISE, RULES_OF, many, seen_at


def test_a_run_follows_growing_noise_even_if_its_steps_are_slow() -> None:
    kind = "growing noise, slow steps"
    times = [run(world(kind, seed), offload_rule, seed)[0] for seed in range(3)]
    assert statistics.fmean(times) <= 1.10


def test_where_the_input_binds_the_batch_stays_and_adaptdls_grows() -> None:
    starved = world("input-bound", 0)
    assert run(starved, offload_rule, 0) == (pytest.approx(1.0, abs=0.01), 0)
    assert run(starved, adaptdl_rule, 0)[0] > 1.2


def test_the_less_sure_the_noise_the_smaller_the_batch() -> None:
    sizes = (many(4, 16), many(4, 32), many(4, 64), many(4, 128), many(4, 256))
    seen, batches = seen_at(*sizes), []
    for error in (0.0, 0.5, 2.0, 10.0, 200.0):
        noise = replace(NOISE, sqr_error=error * NOISE.sqr)
        options = [Option(workers=4, nodes=1, cores=8)]
        _, decision = decide(State(), Situation(split=sizes[0], seen=seen, noise=noise, options=options), RULES_OF)
        batches.append(64 if isinstance(decision, Keep) else decision.split.global_batch_size)
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > 2 * batches[-1]
