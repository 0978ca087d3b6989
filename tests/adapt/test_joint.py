"""Workers, batch and cores in one decision."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.joint_worlds import offload_rule, run, world
from offload.adapt.decide import Keep, State, decide
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
