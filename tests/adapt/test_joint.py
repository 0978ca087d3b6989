"""Workers, batch and cores in one decision."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.joint_worlds import naive_rule, offload_rule, run, world
from offload.adapt.decide import Keep, Resize, State, cores_meanwhile, decide
from offload.adapt.situation import Option, Situation
from tests.adapt.test_adapt import NOISE, RULES_OF, many, seen_at


def test_cores_that_just_feed_the_present_batch_do_not_hide_what_a_larger_one_gains() -> None:
    sizes = (many(4, 16), many(4, 32))
    seen = replace(seen_at(*sizes), delivered=1.0, ceiling_samples_per_s=1200.0, cores=8.0)
    batches = []
    for option in (Option(workers=4, nodes=1, cores=8), Option(workers=4, nodes=1, cores=64, elastic=True)):
        _, decision = decide(State(), Situation(split=sizes[0], seen=seen, noise=NOISE, options=[option]), RULES_OF)
        batches.append(64 if isinstance(decision, Keep) else decision.split.global_batch_size)
    assert batches[0] < batches[1]


def test_a_dearer_core_never_makes_the_batch_larger_if_dollars_decide() -> None:
    sizes = (many(4, 16), many(4, 32))
    seen = replace(seen_at(*sizes), delivered=1.0, ceiling_samples_per_s=1200.0, cores=8.0)
    rules, batches = replace(RULES_OF, objective="cost", least_gain=0.0), []
    for usd in (0.001, 0.1, 10.0):
        option = Option(workers=4, nodes=1, cores=64, usd_per_hour=4.0, elastic=True, usd_per_core=usd)
        _, decision = decide(State(), Situation(split=sizes[0], seen=seen, noise=NOISE, options=[option]), rules)
        batches.append(64 if isinstance(decision, Keep) else decision.split.global_batch_size)
    assert batches == sorted(batches, reverse=True)


def test_a_run_with_growing_noise_stays_near_an_oracle_of_all_three() -> None:
    over, resizes, _, cores = run(world("growing noise", 0), offload_rule(), "time", 0)
    assert over <= 1.10
    assert resizes <= 2
    assert cores <= 10


def test_a_run_that_saves_dollars_adds_no_cores_for_workers_that_it_is_about_to_release() -> None:
    sizes = (many(4, 16), many(2, 32))
    seen = replace(seen_at(*sizes), delivered=1.0, ceiling_samples_per_s=100.0, cores=8.0)
    options = [
        Option(workers=count, nodes=count, cores=64, usd_per_hour=4.0 * count, elastic=True, usd_per_core=0.01)
        for count in (1, 2, 4)
    ]
    situation = Situation(split=sizes[0], seen=seen, noise=NOISE, options=options)
    rules, state = replace(RULES_OF, objective="cost"), State()
    for _ in range(rules.agreeing):
        state, decision = decide(state, situation, rules)
        asked = cores_meanwhile(60, 8, state, decision, rules)
        needed = decision.cores if isinstance(decision, Resize) else state.wanted_cores
        assert needed is not None
        assert 8 <= asked <= max(8, needed) < 60
        assert cores_meanwhile(60, 8, state, decision, replace(rules, objective="time")) == 60
    assert isinstance(decision, Resize)
    assert decision.split.workers < 4


def test_for_dollars_a_run_costs_less_than_the_rules_of_others() -> None:
    for kind in ("input-bound", "capped", "growing noise"):
        ours, others = (
            statistics.fmean(run(world(kind, seed), rule(), "cost", seed)[0] for seed in range(3))
            for rule in (offload_rule, naive_rule)
        )
        assert ours < others
        assert ours <= 1.10
