"""Learning-rate rules, what is learned from intervals, and decisions: pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.adapt.decide import Keep, Rebatch, Resize, State, decide
from offload.adapt.observe import Seen, StepInterval
from offload.adapt.rules import RULES, learning_rate_factor
from offload.adapt.situation import DecisionBounds, Option, Situation
from offload.errors import ConfigError
from offload.measure.steps import Totals
from offload.model import GradientNoise, JointGoodput, StepTime
from offload.model.batch_split import BatchSplit
from offload.model.placement import NodeResources, WorkerResources, place_workers
from offload.train.driver.fleet.room import usd_per_hour
from offload.train.driver.tuner import interval_of
from offload.train.messages import News

TRUTH = StepTime(0.02, 0.001, 0.01, 0.001, 0.02, 0.001, 2.0)
NOISE = GradientNoise(sqr=0.01, var=1.0, batch_size=64)
RULES_OF = DecisionBounds(initial_batch_size=64, max_batch_size=1024, local_batch_size=(8, 512))


def interval(
    size: BatchSplit,
    *,
    nodes: int = 1,
    input_samples_per_s: float = math.inf,
    ceiling: float | None = None,
    truth: StepTime = TRUTH,
) -> StepInterval:
    """What the truth shows at one size in ten steps a rank."""
    where = (nodes, size.workers, size.local_batch_size)
    compute = float(truth.compute_time_s(size.local_batch_size)) * (size.accum_steps + 1)
    step = float(truth.predict(*where, size.accum_steps))
    wait = max(size.global_batch_size / input_samples_per_s - step, 0.0)
    steps = 10 * size.workers
    return StepInterval(
        nodes=nodes,
        split=size,
        steps=steps,
        samples=10 * size.global_batch_size,
        step_time_s=steps * (step + wait),
        data_wait_s=steps * wait,
        compute_s=steps * compute,
        sync_s=steps * (step - compute),
        busy_ceiling_samples_per_s=ceiling,
    )


def seen_at(*sizes: BatchSplit, input_samples_per_s: float = math.inf, cores: float = 8.0) -> Seen:
    seen = Seen()
    for size in sizes:
        known = None if math.isinf(input_samples_per_s) else input_samples_per_s
        seen = seen.with_interval(interval(size, input_samples_per_s=input_samples_per_s, ceiling=known), cores)
    return seen


def one(local: int, accum: int = 0) -> BatchSplit:
    return BatchSplit(workers=1, local_batch_size=local, accum_steps=accum)


def many(workers: int, local: int) -> BatchSplit:
    return BatchSplit(workers=workers, local_batch_size=local, accum_steps=0)


# -- rules ---------------------------------------------------------------------------------------------------------------


@given(scale=st.floats(1, 100), gained=st.floats(0, 1))
def test_every_rule_leaves_the_initial_batch_alone_and_steps_no_further_than_linear(
    scale: float, gained: float
) -> None:
    gain = 1 + gained * (scale - 1)
    for rule in RULES:
        assert learning_rate_factor(rule, scale=1.0, gain=1.0) == pytest.approx(1.0)
        assert 1 - 1e-9 <= learning_rate_factor(rule, scale=scale, gain=gain) <= scale + 1e-9
    assert learning_rate_factor("adascale-sqrt", scale=scale, gain=gain) <= learning_rate_factor(
        "adascale", scale=scale, gain=gain
    )


def test_legw_warms_up_longer_for_larger_batches() -> None:
    def rate(scale: float, passes: float) -> float:
        return learning_rate_factor("legw", scale=scale, gain=1.0, passes=passes, warmup_epochs=2.0)

    assert rate(1.0, 1.0) == pytest.approx(0.5)
    assert rate(4.0, 4.0) == pytest.approx(1.0)  # half of the way to 2, which takes 8 passes
    assert rate(4.0, 8.0) == rate(4.0, 80.0) == pytest.approx(2.0)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be one of adascale.*found 'cubic'"):
        learning_rate_factor("cubic", scale=2.0, gain=1.5)  # type: ignore[arg-type]


# -- what is learned -----------------------------------------------------------------------------------------------------


def test_steps_that_waited_teach_the_step_time_of_those_that_did_not() -> None:
    """The failure that is this project's reason to be: waiting learned as computing, or not seen at all."""
    sizes = [one(32), one(64), one(128)]
    fast, starved = seen_at(*sizes), seen_at(*sizes, input_samples_per_s=50.0)
    assert fast.fit is not None
    assert starved.fit is not None
    for size in (48, 256):
        truth = float(TRUTH.predict(1, 1, size))
        assert float(fast.fit.step_time.predict(1, 1, size)) == pytest.approx(truth, rel=0.02)
        assert float(starved.fit.step_time.predict(1, 1, size)) == pytest.approx(truth, rel=0.02)


def stretched(interval: StepInterval, seconds: float) -> StepInterval:
    """As many steps as take so long."""
    times = seconds / interval.duration_s
    names = ("steps", "samples", "step_time_s", "data_wait_s", "compute_s", "sync_s")
    return replace(interval, **{name: times * getattr(interval, name) for name in names})


def test_the_input_rate_is_what_was_delivered_when_it_was_the_bottleneck() -> None:
    size = one(64)
    bound = Seen().with_interval(stretched(interval(size, input_samples_per_s=90.0, ceiling=100.0), 30.0), 4.0)
    assert bound.input_samples_per_s(4.0) == pytest.approx(90.0)
    assert bound.input_samples_per_s(8.0) == pytest.approx(180.0)
    # Fed well it only shows that the input delivers at least so much.
    fast = stretched(interval(size, ceiling=800.0), 30.0)
    assert bound.with_interval(fast, 4.0).input_samples_per_s(4.0) >= 0.95 * fast.samples_per_s


def test_a_low_rate_that_nothing_confirms_is_forgotten_in_hours_not_in_minutes() -> None:
    size = one(64)
    known = Seen().with_interval(stretched(interval(size, input_samples_per_s=90.0, ceiling=180.0), 30.0), 4.0)
    assert known.delivered == pytest.approx(0.5)
    fed = stretched(interval(size, ceiling=100_000.0), 30.0)
    assert known.with_interval(fed, 4.0).delivered == pytest.approx(0.5, rel=0.03)
    for _ in range(2 * 3600 // 30):
        known = known.with_interval(fed, 4.0)
    assert known.delivered > 0.98


@given(share=st.floats(0.005, 0.9))
def test_a_share_is_forgotten_as_many_times_whatever_it_is(share: float) -> None:
    """An input that waits for storage delivers a hundredth of what its CPU time says: it must not seem twice as fast a minute later."""
    size, ceiling = one(64), 100.0 / share
    bound = stretched(interval(size, input_samples_per_s=100.0, ceiling=ceiling), 30.0)
    known = Seen().with_interval(bound, 4.0)
    assert known.delivered == pytest.approx(share, rel=0.01)
    later = known.with_interval(stretched(interval(size, ceiling=100_000.0 / share), 30.0), 4.0)
    assert known.delivered <= later.delivered <= 1.1 * known.delivered


def test_lumps_of_blocks_are_averaged_over_seconds() -> None:
    """Intervals of a second in which all or nothing is waited for: together 60 of the 100 samples/s that cores could make."""
    size = one(16)
    fed, starved = stretched(interval(size, ceiling=100.0), 1.0), interval(size, ceiling=100.0)
    fed = replace(fed, samples=105)
    starved = replace(starved, steps=4, samples=15, step_time_s=1.0, data_wait_s=0.9, compute_s=0.1, sync_s=0.0)
    seen = Seen()
    for number in range(60):
        before, seen = seen, seen.with_interval(fed if number % 2 else starved, 4.0)
        if number < 6:
            assert seen.delivered == 1.0
        if number > 20:
            assert 50 < seen.input_samples_per_s(4.0) < 70
            assert abs(seen.delivered - before.delivered) < 0.06


def test_a_first_short_wait_holds_the_input_back_until_more_is_known() -> None:
    size = one(16)
    bound = stretched(interval(size, input_samples_per_s=60.0, ceiling=100.0), 2.0)
    seen = Seen().with_interval(bound, 4.0)
    assert seen.input_samples_per_s(4.0) == pytest.approx(60.0, rel=0.01)
    assert seen.delivered == 1.0  # not learned: it may have been the start
    fed = stretched(interval(size, ceiling=1000.0), 10.0)
    for _ in range(5):
        seen = seen.with_interval(fed, 4.0)
    assert seen.input_samples_per_s(4.0) > 900.0


def test_an_input_that_is_about_as_fast_as_the_workers_is_learned_while_batches_change() -> None:
    """Or the batch would grow, starve, shrink, and grow again, each time too soon for anything to be learned."""
    seen = Seen()
    for number in range(12):
        size = one(64 if number % 2 else 96)
        seen = seen.with_interval(stretched(interval(size, input_samples_per_s=500.0, ceiling=2000.0), 5.0), 4.0)
    assert seen.input_samples_per_s(4.0) == pytest.approx(500.0, rel=0.02)


def test_waiting_at_another_size_tells_nothing_of_this_one() -> None:
    bound = Seen().with_interval(stretched(interval(one(64), input_samples_per_s=90.0, ceiling=100.0), 30.0), 4.0)
    fed = bound.with_interval(stretched(interval(one(16), ceiling=2000.0), 30.0), 4.0)
    assert fed.delivered >= bound.delivered


def test_an_interval_of_hardly_a_step_is_not_believed() -> None:
    few = replace(interval(one(64)), steps=2)
    assert Seen().with_interval(few, 4.0) == Seen()


def test_an_interval_without_computing_does_not_end_decisions() -> None:
    """A fit of the step time refuses it."""
    seen = seen_at(one(32), one(64))
    later = seen.with_interval(replace(interval(one(128)), compute_s=0.0), 8.0)
    assert later.steps == seen.steps
    assert later.fit is not None


def test_what_is_learned_survives_a_checkpoint() -> None:
    seen = seen_at(one(32), many(2, 32))
    again = Seen.from_state(seen.to_state())
    assert again.steps == seen.steps


def test_old_measurements_fade() -> None:
    seen = seen_at(*[one(64)] * 3)
    slower = replace(interval(one(64)), compute_s=2 * interval(one(64)).compute_s)
    for _ in range(12):
        seen = seen.with_interval(slower, 8.0)
    assert seen.fit is not None
    assert float(seen.fit.step_time.predict(1, 1, 64)) == pytest.approx(2 * float(TRUTH.predict(1, 1, 64)), rel=0.05)


# -- decisions -----------------------------------------------------------------------------------------------------------

HERE = Option(workers=1, nodes=1, cores=8)
UP_TO_4 = [Option(workers=k, nodes=1, cores=8) for k in (1, 2, 3, 4)]


def test_a_gpu_bound_run_grows_its_batch_as_adaptdl_would() -> None:
    size = many(4, 16)
    seen = seen_at(size, many(4, 32), many(4, 64), many(4, 128), many(4, 256))
    four = Option(workers=4, nodes=1, cores=8)
    _, decision = decide(State(), Situation(split=size, seen=seen, noise=NOISE, options=[four]), RULES_OF)
    assert isinstance(decision, Rebatch)
    goodput, _, _ = JointGoodput(TRUTH, NOISE).optimize(1, 4, 1024, (8, 512), accumulate=True)
    assert decision.predicted_goodput == pytest.approx(goodput, rel=0.02)
    assert decision.split.global_batch_size > 4 * size.global_batch_size


def test_an_input_bound_run_keeps_its_batch() -> None:
    size = many(4, 16)
    seen = seen_at(size, many(4, 32), many(4, 64), input_samples_per_s=200.0)
    four = Option(workers=4, nodes=1, cores=8)
    _, decision = decide(State(), Situation(split=size, seen=seen, noise=NOISE, options=[four]), RULES_OF)
    assert isinstance(decision, Keep)


def test_a_batch_beyond_twice_what_was_seen_is_not_tried_at_once() -> None:
    size = many(4, 16)
    four = Option(workers=4, nodes=1, cores=8)
    _, decision = decide(State(), Situation(split=size, seen=seen_at(size), noise=NOISE, options=[four]), RULES_OF)
    assert isinstance(decision, Rebatch)
    assert decision.split.local_batch_size <= 32


@pytest.mark.parametrize("faster", [True, False])
def test_a_larger_batch_that_could_be_better_is_tried_once(faster: bool) -> None:
    """Steps of one size do not say what a step of twice the size takes: as long (``faster``), or twice as long."""
    truth = StepTime(0.1, 0.0) if faster else StepTime(0.0, 0.1 / 32)
    noise = GradientNoise(sqr=1.0, var=1.33, batch_size=64)  # of 128 samples 0.7 are as useful as those of 64
    sizes, seen = [many(2, 32)], Seen()
    two = Option(workers=2, nodes=1, cores=8)
    for _ in range(12):
        seen = seen.with_interval(interval(sizes[-1], truth=truth), 8.0)
        situation = Situation(split=sizes[-1], seen=seen, noise=noise, options=[two])
        _, decision = decide(State(), situation, RULES_OF)
        if not isinstance(decision, Keep):
            sizes.append(decision.split)
    batches = [size.global_batch_size for size in sizes]
    assert 100 < batches[1] <= 128
    assert batches[-1] > 100 if faster else batches[2:] == [64]


def test_one_worker_tries_a_larger_batch_too_and_accumulates() -> None:
    noise = GradientNoise(sqr=1.0, var=10.0, batch_size=64)
    seen = Seen().with_interval(interval(one(64), truth=StepTime(0.1, 0.0)), 8.0)
    _, decision = decide(State(), Situation(split=one(64), seen=seen, noise=noise, options=[HERE]), RULES_OF)
    assert isinstance(decision, Rebatch)
    assert decision.split.accum_steps == 1
    assert 64 < decision.split.global_batch_size <= 256


def test_a_larger_batch_is_not_tried_where_the_input_could_not_feed_it() -> None:
    shown = interval(one(64), input_samples_per_s=500.0, ceiling=500.0)
    seen = Seen().with_interval(stretched(shown, 60.0), 8.0)
    _, decision = decide(State(), Situation(split=one(64), seen=seen, noise=NOISE, options=[HERE]), RULES_OF)
    assert isinstance(decision, Keep)


def test_before_anything_is_known_nothing_changes() -> None:
    _, decision = decide(State(), Situation(split=one(64), seen=Seen(), noise=NOISE, options=[HERE]), RULES_OF)
    assert isinstance(decision, Keep)
    _, decision = decide(State(), Situation(split=one(64), seen=seen_at(one(64)), noise=None, options=[HERE]), RULES_OF)
    assert isinstance(decision, Keep)


def test_surplus_workers_of_an_input_bound_run_are_given_back() -> None:
    size = many(4, 16)
    seen = seen_at(size, input_samples_per_s=150.0)
    situation = Situation(split=size, seen=seen, noise=NOISE, options=UP_TO_4, work_left=1e6, restart_s=10.0)
    state, first = decide(State(), situation, RULES_OF)
    assert not isinstance(first, Resize)  # one interval may be an accident
    _, second = decide(state, situation, RULES_OF)
    assert isinstance(second, Resize)
    assert second.split.workers == 1
    assert "the input delivers 150 samples/s" in second.reason


def test_a_gpu_bound_run_takes_all_workers_it_can_get() -> None:
    size = one(64)
    seen = seen_at(size, one(32), one(128))
    situation = Situation(split=size, seen=seen, noise=NOISE, options=UP_TO_4, work_left=1e6, restart_s=10.0)
    state, _ = decide(State(), situation, RULES_OF)
    _, decision = decide(state, situation, RULES_OF)
    assert isinstance(decision, Resize)
    assert decision.split.workers == 4


def test_a_restart_that_cannot_pay_any_more_is_not_made() -> None:
    size = one(64)
    seen = seen_at(size, one(32), one(128))
    state = State()
    for _ in range(4):
        situation = Situation(split=size, seen=seen, noise=NOISE, options=UP_TO_4, work_left=2000, restart_s=30.0)
        state, decision = decide(state, situation, RULES_OF)
        assert not isinstance(decision, Resize)


def test_a_decision_is_stable_at_what_it_chose() -> None:
    """At the size that was chosen the same observation asks for no further change."""
    size = many(4, 16)
    four = Option(workers=4, nodes=1, cores=8)
    sizes = [size]
    for _ in range(20):
        situation = Situation(split=sizes[-1], seen=seen_at(*sizes), noise=NOISE, options=[four])
        _, decision = decide(State(), situation, RULES_OF)
        if isinstance(decision, Keep):
            break
        assert isinstance(decision, Rebatch)
        sizes.append(decision.split)
    else:
        pytest.fail("the batch never settled")
    assert len(sizes) < 8


def settled(options: list[Option], noise: GradientNoise, input_samples_per_s: float) -> BatchSplit:
    """Where decisions come to rest, from the initial batch on the most workers."""
    size = BatchSplit.of(RULES_OF.initial_batch_size, options[-1].workers, RULES_OF.local_batch_size[1])
    state, seen, kept = State(), Seen(), 0
    for _ in range(100):
        known = None if math.isinf(input_samples_per_s) else input_samples_per_s
        shown = interval(size, input_samples_per_s=input_samples_per_s, ceiling=known)
        seen = seen.with_interval(stretched(shown, 30.0), 8.0)
        situation = Situation(split=size, seen=seen, noise=noise, options=options, work_left=1e9, restart_s=10.0)
        state, decision = decide(state, situation, RULES_OF)
        kept = kept + 1 if isinstance(decision, Keep) else 0
        if kept > RULES_OF.agreeing:
            return size
        if not isinstance(decision, Keep):
            size = decision.split
    pytest.fail("decisions never came to rest")


@settings(max_examples=3, deadline=None)  # each runs a hundred decisions
@given(sqr=st.floats(1e-4, 0.1), var=st.floats(0.1, 10.0), spare=st.floats(1.5, 20.0))
def test_with_input_to_spare_the_choice_is_that_of_a_policy_without_the_input_term(
    sqr: float, var: float, spare: float
) -> None:
    noise = GradientNoise(sqr=sqr, var=var, batch_size=RULES_OF.initial_batch_size)
    device = JointGoodput(TRUTH, noise)

    def goodput(size: BatchSplit) -> float:
        where = (1, size.workers, size.local_batch_size, size.accum_steps)
        return float(device.throughput(*where) * noise.efficiency(size.global_batch_size))

    fastest = max(float(device.throughput(1, k, 512, 1)) for k in (1, 2, 3, 4))
    without = settled(UP_TO_4, noise, math.inf)
    joint = settled(UP_TO_4, noise, spare * fastest)
    assert goodput(joint) >= 0.98 * goodput(without)


def test_dollars_choose_fewer_workers_than_time() -> None:
    options = [Option(workers=k, nodes=k, cores=8, usd_per_hour=1.0 + 4.0 * k) for k in (1, 2, 3, 4)]
    size = BatchSplit(workers=2, local_batch_size=32, accum_steps=0)
    seen = seen_at(size, BatchSplit(workers=2, local_batch_size=64, accum_steps=0), one(64), one(128))
    chosen = {}
    for objective in ("time", "cost"):
        situation = Situation(split=size, seen=seen, noise=NOISE, options=options, work_left=1e9, restart_s=1.0)
        rules = replace(RULES_OF, objective=objective, max_batch_size=64)
        state, _ = decide(State(), situation, rules)
        _, decision = decide(state, situation, rules)
        chosen[objective] = decision.split.workers if isinstance(decision, Resize) else size.workers
    assert chosen["cost"] <= chosen["time"]


def test_workers_that_no_longer_fit_are_left_at_once() -> None:
    size = many(4, 16)
    situation = Situation(split=size, seen=seen_at(size), noise=NOISE, options=UP_TO_4[:2])
    _, decision = decide(State(), situation, RULES_OF)
    assert isinstance(decision, Resize)
    assert decision.split.workers <= 2
    assert "4 workers no longer fit" in decision.reason


@given(batch=st.integers(1, 10_000), workers=st.integers(1, 64), most=st.integers(1, 512))
def test_a_split_holds_the_batch_and_its_bounds(batch: int, workers: int, most: int) -> None:
    size = BatchSplit.of(batch, workers, most)
    assert size.global_batch_size >= batch
    assert size.local_batch_size <= most
    assert (size.global_batch_size - batch) < workers * (size.accum_steps + 1)


# -- what a user may set -------------------------------------------------------------------------------------------------


def test_settings_that_contradict_are_refused_with_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r'learning_rate must be "auto", "adascale".*found .cubic'):
        offload.Adaptation(learning_rate="cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"interval_s must be greater than 0 .*found 0"):
        offload.Adaptation(interval_s=0)
    with pytest.raises(ConfigError, match=r"warmup_epochs must be at least 0 .*found -1"):
        offload.Adaptation(warmup_epochs=-1)
    for schedule in ({3: 0}, {-1: 2}, {1.5: 2}):
        with pytest.raises(ConfigError, match=r"schedule.* must be at (least|most) .*, found"):
            offload.Adaptation(schedule=schedule)
    with pytest.raises(ConfigError, match=r"epochs and shares of the training"):
        offload.Adaptation(schedule={0: 1, 0.5: 2, 3: 4})
    with pytest.raises(ConfigError, match=r"initial batch size 4 is below the smallest local batch of one worker, 8"):
        offload.BatchSize(initial=4, local=(8, 16))


def test_a_schedule_goes_by_epochs_or_by_shares_of_the_training() -> None:
    by_epoch = offload.Adaptation(schedule={0: 1, 2: 4})
    assert [by_epoch.scheduled(epoch, 0.9) for epoch in range(4)] == [1, 1, 4, 4]
    by_share = offload.Adaptation(schedule={0: 1, 0.5: 2, 1.0: 3})
    assert [by_share.scheduled(7, share) for share in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 3]
    assert offload.Adaptation(schedule={3: 2}).scheduled(2, 0.5) is None
    assert offload.Adaptation().scheduled(0, 0.0) is None


def test_a_schedule_beyond_the_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for 3 workers in epoch 6.*pass workers=\(1, 3\)"):
        offload.Trainer(
            lambda ctx: None,
            datasets={"train": offload.from_torch([{"x": 1.0}])},
            batch_size=1,
            workers=(1, 2),
            adaptation=offload.Adaptation(schedule={0: 1, 5: 3}),
        )
    with pytest.raises(ConfigError, match=r"hang_s must be greater than 0 .*found 0"):
        offload.Trainer(lambda ctx: None, datasets={"train": offload.from_torch([{"x": 1.0}])}, batch_size=1, hang_s=0)


def test_a_node_that_is_there_for_workers_and_holds_none_costs_nothing() -> None:
    nodes = [
        NodeResources(name="g1", cpus=4, gpus=1, instance_type="g"),
        NodeResources(name="g2", cpus=4, gpus=1, instance_type="g"),
        NodeResources(name="c1", cpus=16, instance_type="c"),
    ]
    worker, prices = WorkerResources(cpus=1, gpus=1), {"g": 1.5, "c": 0.5}
    one, two = (place_workers(nodes, worker, (count, count)) for count in (1, 2))
    assert usd_per_hour(nodes, worker, one, prices) == 2.0
    assert usd_per_hour(nodes, worker, two, prices) == 3.5
    assert usd_per_hour(nodes, worker, two, {"g": 1.5}) is None
    on_cpus = WorkerResources(cpus=1)  # any node may hold such a worker: none is there for them alone
    assert usd_per_hour(nodes, on_cpus, place_workers(nodes, on_cpus, (1, 1)), prices) == 3.5


def test_an_objective_or_price_that_is_none_is_refused() -> None:
    objective: Any = "fun"
    with pytest.raises(offload.ConfigError, match=r'objective must be "time" or "cost", found \'fun\''):
        offload.Adaptation(objective=objective)
    with pytest.raises(offload.ConfigError, match=r"usd_per_hour\['g'\] must be greater than 0 \(dollars.*found 0"):
        offload.Cluster(usd_per_hour={"g": 0.0})


def test_the_wait_for_the_first_batch_of_a_pass_is_not_held_against_the_input() -> None:
    """Passes of a second, half of which is waited for the first batch: nothing is learned of the rate of what follows."""
    each = Totals(steps=8, samples=64, step_time_s=8.0, data_wait_s=4.0, compute_s=4.0, pass_start_s=4.0)
    before = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=(), cores=(4, 0))
    rates = {"train": {"input_ceiling_samples_per_s": 1000.0}}
    now = replace(before, totals={0: each, 1: each}, rates=rates)
    found = interval_of(before, now, many(2, 8), nodes=1, cores=4)
    assert found.stall == 0.0
    assert found.samples_per_s == pytest.approx(2 * 64 / 4.0)
    assert Seen().with_interval(stretched(found, 60.0), 4.0).delivered == 1.0


def test_cores_that_are_being_started_do_not_make_the_others_look_slow() -> None:
    """Twelve cores where there were four: they are taken to deliver as the four did, until they do and are seen to."""
    size = one(64)
    known = Seen().with_interval(stretched(interval(size, input_samples_per_s=90.0, ceiling=100.0), 30.0), 4.0)
    starved = Totals(steps=10, samples=640, step_time_s=7.0, data_wait_s=5.0, compute_s=2.0)
    now = News(
        cursor=0, totals={0: starved}, epoch=0, step=0, samples=0, metrics={}, events=(), cores=(12, 0),
        rates={"train": {"input_ceiling_samples_per_s": 300.0}},
    )  # fmt: skip
    for cores in ((4, 0), (12, 8)):
        found = interval_of(replace(now, totals={}, cores=cores), now, one(64), nodes=1, cores=12)
        assert known.with_interval(stretched(found, 60.0), 12.0).input_samples_per_s(12.0) == pytest.approx(270.0)
    whole = interval_of(replace(now, totals={}), now, one(64), nodes=1, cores=12)
    assert known.with_interval(stretched(whole, 60.0), 12.0).input_samples_per_s(12.0) < 100.0
