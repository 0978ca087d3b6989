"""Laws of the simulated cluster: what goes in comes out, limits have closed forms, and nobody beats the exhaustive optimum."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import plot_simulation, scale, simulation
from benchmarks.simulator import hub, regret, validation
from benchmarks.simulator.flow import block_rows, flow
from benchmarks.simulator.job import Fleet, HubCost, Job
from benchmarks.simulator.policies import POLICIES, View, optimum, value_of
from benchmarks.simulator.run import START_S, train
from benchmarks.simulator.steady import steady
from benchmarks.simulator.steps import RATIOS, batches, slowest_of, step_over_longer
from benchmarks.simulator.workloads import Question, random_question, typical
from offload.model import StepTime
from offload.pipeline.feed.sizing import SampleCost, block_bytes, rows_per_task
from offload.prices import built_in

TYPES = built_in()
HOST, HELPER = TYPES["ml.g5.xlarge"], TYPES["ml.c5.4xlarge"]
SEEDS = st.integers(0, 10_000)


def job_of(core_seconds: float = 0.01, wire_bytes: float = 1e5, step_s: float = 0.1, **more: object) -> Job:
    """A job without noise: 64 samples a step on each worker."""
    return Job(
        core_seconds=core_seconds,
        wire_bytes=wire_bytes,
        step=StepTime(step_s / 2, step_s / 128),
        batches=(64, 64),
        task_variation=0.0,
        **more,  # type: ignore[arg-type]
    )


def fleet_of(hosts: int, helpers: int) -> Fleet:
    return Fleet(host=HOST, hosts=np.array(hosts), helper=HELPER, helpers=np.array(helpers))


@given(SEEDS, st.integers(1, 6), st.floats(0.1, 10))
@settings(max_examples=20, deadline=None)
def test_batches_come_in_order_and_never_exceed_their_room(seed: int, room: int, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    wait, step = ratio * rng.exponential(size=(60, 1)), rng.exponential(size=(60, 1))
    ready, ended = batches(wait, step, room)
    taken = ended - step
    assert (np.diff(ready, axis=0) > 0).all()
    assert (np.diff(ended, axis=0) > 0).all()
    assert (taken >= ready - 1e-9).all()
    # A batch begins to be made only when there is room for it.
    assert (ready[room:] >= taken[:-room] + wait[room:] - 1e-9).all()
    # Each batch trains once, and neither side works faster than it can.
    assert ended[-1, 0] >= max(wait.sum(), step.sum()) - 1e-9


def test_a_side_that_is_much_slower_sets_the_pace() -> None:
    for ratio in (RATIOS[0], RATIOS[-1]):
        found = step_over_longer(np.array(ratio), workers=1, step_variation=0.1, input_variation=0.1, room=4)
        assert found == pytest.approx(1.0, abs=0.02)
    # Without variation nothing waits, whatever the ratio.
    even = step_over_longer(RATIOS, workers=8, step_variation=0.0, input_variation=0.0, room=1)
    np.testing.assert_allclose(even, 1.0, atol=1e-9)


def test_the_slowest_of_many_has_its_known_distribution() -> None:
    rng = np.random.default_rng(0)
    sampled = np.exp(0.1 * rng.standard_normal((4000, 16)) - 0.005).max(axis=1)
    exact = slowest_of(16, math.sqrt(math.expm1(0.01)), rng.random(4000))
    assert exact.mean() == pytest.approx(sampled.mean(), rel=0.01)
    assert exact.std() == pytest.approx(sampled.std(), rel=0.1)


def test_limits_have_closed_forms() -> None:
    # Input-bound: cores over core-seconds, where the way costs nothing.
    slow = job_of(core_seconds=1.0, travel_s_per_byte=0.0)
    assert float(steady(slow, fleet_of(1, 2), 64).samples_per_s) == pytest.approx((3 + 2 * 16) / 1.0, rel=1e-6)
    # Device-bound: samples over the step's time.
    fast = job_of(core_seconds=1e-5)
    assert float(steady(fast, fleet_of(1, 0), 64).samples_per_s) == pytest.approx(64 / 0.1, rel=1e-6)
    # Link-bound: what the worker's card carries, and what its own cores make.
    wide = job_of(core_seconds=0.01, wire_bytes=1e7, travel_s_per_byte=0.0, link_share=0.8, step_s=1e-3)
    link = 0.8 * HOST.network_gbps * 1e9 / 8 / 1e7
    assert float(steady(wide, fleet_of(1, 20), 64).samples_per_s) == pytest.approx(link + 3 / 0.01, rel=1e-6)
    # Bound by the hub: blocks a second times their rows.
    many = job_of(core_seconds=0.001, hub=HubCost(), feeds=1, step_s=1e-3)
    limit = flow(many, fleet_of(64, 300), local_batch=64)
    assert float(limit.hub) == pytest.approx(float(limit.rows_per_block) / HubCost().block_s(64))
    assert float(steady(many, fleet_of(64, 300), 64 * 64).samples_per_s) == pytest.approx(float(limit.hub), rel=1e-6)


@given(st.floats(1e-5, 1.0), st.floats(1e3, 1e6), st.integers(1, 600))
@settings(max_examples=30, deadline=None)
def test_blocks_are_as_large_as_the_feed_makes_them(core_seconds: float, wire_bytes: float, helpers: int) -> None:
    job = replace(job_of(core_seconds, wire_bytes), host_cpus=4.0)  # the GPU node's cores do not preprocess
    fleet = replace(fleet_of(1, helpers), host=replace(HOST, memory_gib=1e-3))
    _, far = block_rows(job, fleet, 1.0)
    cost = SampleCost(core_seconds_per_sample=core_seconds, bytes_per_sample=wire_bytes)
    room = block_bytes(0.3 * HELPER.memory_gib * 2**30, HELPER.vcpus)
    assert float(far) == pytest.approx(rows_per_task(cost, room, cores=16 * helpers), rel=1e-3, abs=1)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_more_cores_are_never_slower(seed: int) -> None:
    question = random_question(seed)
    counts = np.arange(40)
    for spot in ("none", "cpu"):
        fleet = Fleet(host=question.hosts[0], hosts=np.array(2), helper=question.helpers[0], helpers=counts)
        goodput = steady(question.job, fleet, question.job.batches[0], spot=spot).goodput
        assert (np.diff(goodput) >= -1e-3 * goodput[1:]).all()


def test_gpus_that_do_not_train_leave_their_cores_to_preprocessing() -> None:
    job = job_of(core_seconds=0.1, travel_s_per_byte=0.0)
    half = replace(fleet_of(4, 0), training=2)
    assert float(half.near_cores(job)) == 4 * 4 - 2
    assert float(steady(job, half, 128).samples_per_s) == pytest.approx(14 / 0.1, rel=1e-6)
    assert float(steady(job, fleet_of(4, 0), 128).samples_per_s) == pytest.approx(12 / 0.1, rel=1e-6)


def test_several_feeds_end_later() -> None:
    job = job_of(0.001, 150_000.0, hub=HubCost())
    ends = [hub.ends_at(replace(job, feeds=feeds), HOST, HELPER, 8) for feeds in (1, 2, 4)]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]
    assert {row["sample"] for row in hub.table()} == set(hub.SAMPLES)


def small_question(seed: int) -> Question:
    """A random question about 8 GPUs and few CPU nodes."""
    question = next(each for each in map(random_question, range(seed, seed + 200)) if each.gpus == 8)
    return replace(question, helpers=question.helpers[:1], hosts=question.hosts[:1])


def test_nobody_beats_the_optimum() -> None:
    for seed in (0, 60):
        question = small_question(seed)
        fixed = replace(question, job=replace(question.job, batches=(question.job.batches[0],) * 2))
        view = View(fixed, seed)
        _, best = optimum(fixed)
        for name, policy in regret.CHOOSERS.items():
            choice = policy(view)
            assert choice.hosts * choice.host.gpus == 8, name
            assert value_of(fixed, choice) >= best * (1 - 1e-9), name


def test_a_seed_says_everything() -> None:
    question = small_question(0)
    assert question == small_question(0)
    first, again = ([policy(View(question, 5)) for policy in POLICIES.values()] for _ in range(2))
    assert first == again
    rows = [{"regret": dict.fromkeys(regret.CHOOSERS, 0.01 * i)} for i in range(11)]
    summary = regret.summary(rows)["Pecan"]
    assert (summary["median"], summary["worst"], summary["above_10_percent"]) == (0.05, 0.1, 0)


def test_a_plan_that_misses_the_goal_is_told_what_it_could_not_know() -> None:
    (row,) = regret.regrets([424], hub=True)
    assert row["regret"]["offload plan"] > regret.GOAL_WORST
    assert row["told"]["interruptions"]["offload plan"] <= regret.GOAL_WORST
    (row,) = regret.regrets([0], hub=True)
    assert "told" not in row


def test_a_job_measures_its_rate_while_it_trains() -> None:
    kind = replace(HOST, spot_usd_per_hour=0.5)
    fleet = Fleet(host=kind, hosts=np.array(4), helper=HELPER, helpers=np.array(4))
    often, never = (
        steady(job_of(interruptions_per_hour={kind.name: rate}), fleet, 256, spot="all") for rate in (9.0, 0.0)
    )
    assert float(often.samples_per_s) < 0.9 * float(never.samples_per_s)
    assert float(often.seen_samples_per_s) == pytest.approx(float(never.seen_samples_per_s))


def test_a_run_trains_every_sample_once_and_pays_for_its_time() -> None:
    job = job_of()
    fleet = fleet_of(2, 3)
    outcome = train(job, fleet, 128, 1e6)
    at = steady(job, fleet, 128)
    assert outcome.trained == pytest.approx(1e6, rel=1e-12)
    assert outcome.seconds == pytest.approx(START_S + 1e6 / float(at.goodput))
    assert outcome.usd == pytest.approx(outcome.seconds / 3600 * float(fleet.usd_per_hour()))
    assert (outcome.host_losses, outcome.helper_losses) == (0, 0)
    with pytest.raises(ValueError, match="no core that preprocesses"):
        train(replace(job, host_cpus=4.0), fleet_of(2, 0), 128, 1e6)


@pytest.mark.parametrize("spot", ["cpu", "all"])
def test_interruptions_cost_what_their_means_say(spot: str) -> None:
    kinds = [replace(kind, spot_usd_per_hour=0.5 * kind.usd_per_hour) for kind in (HOST, HELPER)]
    rates = {kind.name: 0.5 for kind in kinds}
    job = job_of(core_seconds=0.03, interruptions_per_hour=rates, restart_s=20.0)
    fleet = Fleet(host=kinds[0], hosts=np.array(4), helper=kinds[1], helpers=np.array(4))
    at = steady(job, fleet, 256, spot=spot)
    samples = 2e8 if spot == "cpu" else 4e7
    runs = [train(job, fleet, 256, samples, spot=spot, seed=seed) for seed in range(4)]
    lost = [run.helper_losses + run.host_losses for run in runs]
    assert min(lost) > 5
    assert all(run.trained == pytest.approx(samples, rel=1e-9) for run in runs)
    rate = np.mean([run.trained / (run.seconds - START_S) for run in runs])
    assert rate == pytest.approx(float(at.goodput), rel=0.03)
    usd = np.mean([run.usd / run.seconds * 3600 for run in runs])
    assert usd == pytest.approx(float(at.usd_per_hour), rel=0.03)


def test_runs_with_the_plans_own_inputs_are_within_the_goal() -> None:
    rows = [row for row in validation.table() if row["record"] in ("prediction.json", "model_links.json")]
    assert len(rows) >= 36
    assert max(abs(row["error"]) for row in rows) <= validation.GOAL


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "simulation.json"
    ran = CliRunner().invoke(simulation.main, ["--part", "hub", "--json", "-o", str(file)])
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout)
    assert printed == json.loads(file.read_text())
    assert printed["hub"]["rows"]
    file.write_text(json.dumps({**printed, "hub": {"rows": ["kept"]}}))
    again = CliRunner().invoke(simulation.main, ["--part", "hub", "--json", "--resume", "-o", str(file)])
    assert json.loads(again.stdout)["hub"] == json.loads(file.read_text())["hub"] == {"rows": ["kept"]}
    shown = CliRunner().invoke(simulation.main, ["--part", "hub"])
    assert "jpeg" in shown.stdout
    drawn = CliRunner().invoke(plot_simulation.main, [str(file), "-o", str(tmp_path / "plot.png")])
    assert drawn.exit_code == 2
    assert "no part scale and regret" in drawn.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "weather"], "'weather' is not one of"),
        (["--gpus", "7"], "7 GPUs are not simulated. Give one of 8, 16"),
        (["--questions", "0"], "0 is not in the range"),
        (["-o", "/no/such/folder/x.json"], "the folder /no/such/folder of x.json does not exist"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(simulation.main, arguments, env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert said in " ".join(ran.stderr.split()), ran.stderr
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("case", ["stood-1000", "real-64-1-2", "stood-1000-64-0", "weather-1-1"])
def test_a_case_of_the_hub_that_cannot_be_is_named(case: str) -> None:
    ran = CliRunner().invoke(scale.main, ["--case", case], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert f"'{case}' is no case. Give kind, cores and workers, such as stood-1000-64" in " ".join(ran.stderr.split())


def test_typical_jobs_fill_their_gpus() -> None:
    for question in typical(16):
        assert all(16 % kind.gpus == 0 for kind in question.hosts)
        assert question.most_helpers(question.helpers[0]) > 0
