"""A plan recommends what exhaustive enumeration would, and says why; what cannot be met is said with what it would take."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.formatting import usd
from offload.model import Catalog, InputRate, JointGoodput, NodeType, Plan, Profile, Shape, StepTime, plan
from offload.model.overlap import mean_overlapped, overlapped
from offload.model.profile import Uncertainty
from offload.prices import built_in
from offload.report.run_dir import to_json
from offload.report.terminal.plan_table import format_plan
from tests.model.test_profile import WHOLE
from tests.strategies import cpu_types, gpu_types, input_rates, noises, step_times

PROFILE = Profile.from_document(WHOLE)
G5, C5 = "ml.g5.xlarge", "ml.c5.4xlarge"


def planned(profile: Profile = PROFILE, catalog: Catalog | None = None, **asked: Any) -> Plan:
    return plan(profile, catalog or built_in(), **{"gpu_types": [G5], "cpu_types": [C5], **asked})


def batches(most: int, workers: int, largest_local: float) -> list[tuple[int, int, int]]:
    """Every (global batch, local batch, accumulation) worth having."""
    found = []
    for local in range(1, int(min(most // workers, largest_local)) + 1):
        found += [(workers * local * micro, local, micro - 1) for micro in range(1, most // (workers * local) + 1)]
    return found


# --- the best ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step=step_times,
    noise=noises,
    rate=input_rates,
    gpu=gpu_types,
    cpu=cpu_types,
    growth=st.sampled_from([1, 2, 8]),
    limit=st.sampled_from([16, 64, math.inf]),
    overlap=st.sampled_from([1.0, 2.0, 8.0, 64.0, math.inf]),
)
def test_nothing_that_was_enumerated_is_better(
    step: StepTime,
    noise: Any,
    rate: InputRate,
    gpu: NodeType,
    cpu: NodeType,
    growth: int,
    limit: float,
    overlap: float,
) -> None:
    most = int(noise.batch_size) * growth
    profile = Profile(input=rate, step_time=step, noise=noise, overlap=overlap, max_local_batch_size=limit)
    best: dict[tuple[int, int], float] = {}
    for nodes, cpus in itertools.product((1, 2), (0, 1, 3)):
        shape = Shape({gpu: nodes, cpu: cpus})
        for workers in range(1, min(nodes * gpu.gpus, int(noise.batch_size)) + 1):
            delivered = rate.samples_per_s(shape, workers)
            if delivered == 0:
                continue
            joint = JointGoodput(step, noise, delivered, overlap=overlap)
            whole = [b for b in batches(most, workers, limit) if b[0] >= noise.batch_size]
            if whole:
                _, local, accum = zip(*whole, strict=True)
                top = float(max(joint.goodput(nodes, workers, local, accum)))
                best[nodes, cpus] = max(best.get((nodes, cpus), 0.0), top)
    if not best:
        return
    asked = {
        "gpu_types": ["gpu"],
        "cpu_types": ["cpu"],
        "gpu_nodes": (1, 2),
        "cpu_nodes": (0, 3),
        "max_batch_size": most,
    }
    made = plan(profile, Catalog({"gpu": gpu, "cpu": cpu}), **asked)
    least = min(Shape({gpu: n, cpu: c}).usd_per_hour / top for (n, c), top in best.items())
    assert made.best.usd_per_hour / made.best.goodput <= least * 1.01
    fastest = plan(profile, Catalog({"gpu": gpu, "cpu": cpu}), objective="time", **asked)
    assert fastest.best.goodput >= max(best.values()) * 0.99


UNSURE = 0.3  # 95 % half-width
DEAR_GPUS = Catalog(
    {
        "gpu": NodeType(name="gpu", vcpus=4, memory_gib=16, gpus=1, network_gbps=10, usd_per_hour=20.0),
        "cpu": NodeType(name="cpu", vcpus=4, memory_gib=16, network_gbps=10, usd_per_hour=0.2),
    }
)


def balanced(**unsure: float) -> Profile:
    """Eight workers take 4,096 samples a second, which about a hundred CPU nodes make."""
    return Profile(
        input=InputRate(core_seconds_per_sample=0.1, wire_bytes_per_sample=10_000),
        step_time=StepTime(0.0, 1 / 512),
        batch_size=512,
        overlap=64.0,
        uncertainty=Uncertainty(**unsure),
    )


def beside_dear_gpus(profile: Profile) -> Plan:
    asked: dict[str, Any] = {"gpu_nodes": (8, 8), "cpu_nodes": (50, 200), "batch_size": 512}
    return plan(profile, DEAR_GPUS, gpu_types=["gpu"], cpu_types=["cpu"], **asked)


def test_the_best_of_what_may_be_true_is_recommended_not_the_best_of_the_estimates() -> None:
    unsure, sure = beside_dear_gpus(balanced(core_seconds_per_sample=UNSURE)), beside_dear_gpus(balanced())
    # Every number of nodes under a thousand costs of a sample that the profile allows.
    rng = np.random.default_rng(0)
    costs = 0.1 * np.exp(math.log1p(UNSURE) / 1.96 * rng.standard_normal(1000))
    counts, step_s = np.arange(201), balanced().step_time.predict(8, 8, 64)
    shape = Shape({DEAR_GPUS["gpu"]: 8, DEAR_GPUS["cpu"]: counts})
    mean = np.zeros(201)
    for cost in costs:
        true = dataclasses.replace(balanced().input, core_seconds_per_sample=cost)
        took_s = overlapped(step_s, 512 / true.samples_per_s(shape, 8, 64), 64.0)
        mean += took_s * (8 * 20.0 + counts * 0.2)
    best, of_the_estimates = unsure.best.shape["cpu"], sure.best.shape["cpu"]
    assert best > of_the_estimates
    assert mean[best] <= min(mean) * 1.002
    assert mean[of_the_estimates] > mean[best] * 1.01
    # The first of the list is the one that is recommended, and the plan says why it is not the cheapest by the estimates.
    assert unsure.recommended == sure.recommended == 0
    assert f"8 × gpu + {of_the_estimates} × cpu would cost" in unsure.explanation
    assert "would cost" not in sure.explanation


def test_a_step_that_may_be_shorter_asks_for_more_cores() -> None:
    sure, unsure = (beside_dear_gpus(balanced(step=step)).best.shape["cpu"] for step in (0.0, 0.2))
    assert unsure > sure


@given(
    first=st.floats(1e-3, 1e3),
    ratio=st.floats(0.1, 10.0),
    power=st.sampled_from([1.0, 2.0, 8.0, 64.0, math.inf]),
    spread=st.floats(0.0, 0.5),
)
def test_what_is_unsure_never_shortens_the_mean(first: float, ratio: float, power: float, spread: float) -> None:
    mean = float(mean_overlapped(first, first * ratio, power, spread))
    at = float(overlapped(first, first * ratio, power))
    assert mean >= at * (1 - 1e-6)
    assert float(mean_overlapped(first, first * ratio, power, 0.0)) == pytest.approx(at)
    # The mean over both, drawn: first is log-normal with mean 1.
    drawn = first * np.exp(spread * NORMAL - spread**2 / 2)
    assert mean == pytest.approx(float(np.mean(overlapped(drawn, first * ratio, power))), rel=0.02)


NORMAL = scipy.special.ndtri((np.arange(20_000) + 0.5) / 20_000)


def test_a_candidate_is_what_the_joint_model_says() -> None:
    made = planned(gpu_nodes=(1, 2), cpu_nodes=(0, 4))
    assert len(made.candidates) == 2 * 5
    catalog = built_in()
    for one in made.candidates:
        shape = catalog.shape(one.shape)
        rate = PROFILE.input.samples_per_s(shape, one.workers)
        joint = JointGoodput(PROFILE.step_time, PROFILE.noise, rate, overlap=PROFILE.overlap)
        at = (one.shape[G5], one.workers, one.local_batch_size, one.accum_steps)
        assert one.step_time_s == pytest.approx(joint.step_time_s(*at))
        assert one.samples_per_s == pytest.approx(joint.throughput(*at))
        assert one.goodput == pytest.approx(joint.goodput(*at))
        assert one.usd_per_hour == pytest.approx(shape.usd_per_hour)
        assert one.usd_per_million_samples == pytest.approx(one.usd_per_hour / 3600 / one.samples_per_s * 1e6)
        gpu_s = PROFILE.step_time.predict(*at)
        assert one.stall == pytest.approx(1 - gpu_s / one.step_time_s)
        assert one.samples_per_s_low <= one.samples_per_s <= one.samples_per_s_high
        assert one.hours is None
        assert one.usd is None


def test_the_baseline_is_the_same_gpu_nodes_alone_and_always_listed() -> None:
    made = planned(gpu_nodes=(2, 3), cpu_nodes=(2, 4))
    baseline = made.candidates[made.baseline]
    assert baseline.shape == {G5: made.best.shape[G5]}
    assert made.best.shape[C5] >= 2
    assert planned(cpu_types=[]).best == planned(cpu_types=[]).candidates[planned(cpu_types=[]).baseline]


def test_a_node_that_changes_nothing_is_never_bought() -> None:
    gpu_bound = Profile(
        input=InputRate(core_seconds_per_sample=1e-5, wire_bytes_per_sample=1000),
        step_time=StepTime(0.1, 0.01),
        batch_size=64,
    )
    for objective in ("cost", "time"):
        made = planned(gpu_bound, objective=objective)
        assert made.best.shape == {G5: 1}
        assert made.best.bottleneck == "gpu"
    assert "alone is the better buy" in planned(gpu_bound).explanation
    costs = [c.usd_per_million_samples for c in sorted(planned(gpu_bound).candidates, key=lambda c: c.usd_per_hour)]
    assert costs == sorted(costs)


def test_where_the_input_binds_the_batch_stays_small_and_gpus_few() -> None:
    starved = Profile.from_document(
        {**WHOLE, "input": {"core_seconds_per_sample": 1.0, "wire_bytes_per_sample": 150528}}
    )
    made = planned(starved, gpu_nodes=(1, 4), cpu_nodes=(0, 2), max_batch_size=4096)
    assert made.best.batch_size <= 70
    assert made.best.shape[G5] == 1
    assert made.best.bottleneck == "cpu"


def test_no_core_is_bought_beyond_what_all_feeds_hand_out() -> None:
    # Light samples: a CPU node fills a dozen blocks a second. 16 feeds hand out some 600, if each takes seven times as long as measured.
    light = {**WHOLE["input"], "core_seconds_per_sample": 0.004, "ingest_samples_per_s_per_worker": None}
    step = {**WHOLE["step"], "alpha_compute": 0.001, "beta_compute": 0.0001}
    document = {**WHOLE, "input": light, "step": step, "noise": None}

    def on(hub_block_s: float) -> Plan:
        profile = Profile.from_document({**document, "input": {**light, "hub_block_s": hub_block_s}})
        return planned(profile, gpu_nodes=(64, 64), cpu_nodes=(0, 40), batch_size=64 * 64)

    free, limited = on(0.0), on(0.035)
    assert free.best.shape[C5] == 40 > limited.best.shape[C5] > 0
    assert on(0.005).best.shape[C5] == 40, "the run divides its ranks among several feeds"
    binds = {each.shape.get(C5, 0): each.bottleneck for each in limited.candidates}
    assert (binds[0], binds[40]) == ("cpu", "hub")
    rates = {each.shape.get(C5, 0): each.samples_per_s for each in limited.candidates}
    assert rates[40] < 0.8 * free.best.samples_per_s
    assert all(each.bottleneck != "hub" for each in free.candidates)
    # A profile that says nothing of it has the measured time.
    assert Profile.from_document(document).input.hub_block_s == pytest.approx(0.005)


def test_a_fixed_batch_that_does_not_divide_is_uneven() -> None:
    made = planned(gpu_types=["ml.g5.12xlarge"], cpu_types=[], batch_size=66)
    four = made.best
    assert four.workers == 4
    assert (four.batch_size, four.local_batch_size) == (66, 17)
    assert four.samples_per_s == pytest.approx(66 / four.step_time_s)


def test_memory_limits_the_local_batch() -> None:
    made = planned(batch_size=1000, cpu_types=[])
    assert (made.best.local_batch_size, made.best.accum_steps) == (250, 3)


def test_uncertainty_widens_the_range() -> None:
    sure = planned(dataclasses.replace(PROFILE, uncertainty=Uncertainty())).best
    assert sure.samples_per_s_low == pytest.approx(sure.samples_per_s) == pytest.approx(sure.samples_per_s_high)
    unsure = dataclasses.replace(PROFILE, uncertainty=Uncertainty(core_seconds_per_sample=0.2, step=0.0))
    starved = planned(unsure, cpu_nodes=(0, 0)).best
    assert starved.samples_per_s_low == pytest.approx(starved.samples_per_s / 1.2, rel=0.03)
    assert starved.samples_per_s_high > starved.samples_per_s * 1.1


# --- large spaces -----------------------------------------------------------------------------------------------------


def test_ten_thousand_gpus_and_a_hundred_thousand_cpus_are_searched_not_enumerated() -> None:
    made = planned(
        gpu_types=["ml.g5.48xlarge"], gpu_nodes=(1, 1250), cpu_nodes=(0, 6250), max_batch_size=65536, objective="cost"
    )
    assert Plan.from_document(json.loads(to_json(made.document())), "plan.json").best.shape == made.best.shape
    # Exactly what enumerating a neighbourhood of it gives.
    nodes, cpus = made.best.shape["ml.g5.48xlarge"], made.best.shape.get(C5, 0)
    near = planned(
        gpu_types=["ml.g5.48xlarge"],
        gpu_nodes=(max(1, nodes - 2), nodes + 2),
        cpu_nodes=(max(0, cpus - 20), cpus + 20),
        max_batch_size=65536,
    )
    ours, best = (p.best.usd_per_hour / p.best.goodput for p in (made, near))
    assert ours <= best * 1.01
    assert len(made.candidates) <= 10_000


def test_more_than_ten_thousand_candidates_become_the_pareto_front() -> None:
    made = planned(gpu_nodes=(1, 16), cpu_nodes=(0, 1000))
    assert len(made.candidates) < 10_000
    marked = {made.recommended, made.baseline}
    front = sorted((c for i, c in enumerate(made.candidates) if i not in marked), key=lambda c: c.usd_per_hour)
    assert [c.goodput for c in front] == sorted(c.goodput for c in front)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_time_under_a_budget_and_cost_under_a_deadline() -> None:
    free = planned(objective="time", samples=10_000_000, cpu_nodes=(0, 16))
    assert free.best.hours is not None
    assert free.best.usd is not None
    cheap = planned(objective="time", samples=10_000_000, cpu_nodes=(0, 16), budget_usd=free.best.usd * 0.9)
    assert cheap.best.usd is not None
    assert cheap.best.usd <= free.best.usd * 0.9
    assert cheap.best.goodput < free.best.goodput
    late = planned(samples=10_000_000, cpu_nodes=(0, 16))
    assert late.best.hours is not None
    soon = planned(samples=10_000_000, cpu_nodes=(0, 16), deadline_hours=free.best.hours * 1.01)
    assert soon.best.hours is not None
    assert soon.best.hours <= free.best.hours * 1.01
    # What is cheaper is too late: the plan names nothing as the choice of its estimates.
    assert soon.best.usd_per_million_samples > late.best.usd_per_million_samples * 1.01
    assert soon.best.shape.keys() == late.best.shape.keys()
    assert "would cost" not in soon.explanation


def test_a_budget_that_nothing_meets_is_answered_with_what_the_cheapest_costs() -> None:
    cheapest = planned(samples=10_000_000).best
    with pytest.raises(ConfigError, match=r"within \$1\.00\. The cheapest, .* costs \$") as caught:
        planned(samples=10_000_000, budget_usd=1.0)
    assert f"{cheapest.usd:,.2f}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"within 0\.01 hours.*the fastest, .* takes"):
        planned(samples=10_000_000, deadline_hours=0.01)


# --- spot, burst, other hosts -----------------------------------------------------------------------------------------


def spot_catalog(interruptions: float | None) -> Catalog:
    def kind(name: str, **more: Any) -> NodeType:
        return NodeType(
            name=name,
            vcpus=16,
            memory_gib=32,
            network_gbps=25,
            usd_per_hour=1.0,
            spot_usd_per_hour=0.4,
            interruptions_per_hour=interruptions,
            **more,
        )

    return Catalog({"g": kind("g", gpus=1, gpu_model="NVIDIA A10G"), "c": kind("c")})


def test_spot_is_cheaper_and_its_interruptions_are_counted() -> None:
    asked = {"gpu_types": ["g"], "cpu_types": ["c"], "cpu_nodes": (2, 2)}
    dear = planned(catalog=spot_catalog(0.1), **asked).best
    cpu = planned(catalog=spot_catalog(0.1), spot="cpu", **asked).best
    everything = planned(catalog=spot_catalog(0.1), spot="all", **asked).best
    assert dear.usd_per_hour == pytest.approx(3.0)
    assert cpu.usd_per_hour == pytest.approx(1.8)
    assert everything.usd_per_hour == pytest.approx(1.2)
    assert everything.goodput < cpu.goodput < dear.goodput
    calm = planned(catalog=spot_catalog(0.0), spot="all", **asked).best
    assert calm.goodput == pytest.approx(dear.goodput)
    assert any(
        "0.05 times an hour is assumed" in w for w in planned(catalog=spot_catalog(None), spot="cpu", **asked).warnings
    )
    with pytest.raises(ConfigError, match=r"no spot price of ml.c5.4xlarge"):
        planned(spot="cpu")


def test_a_network_that_only_bursts_is_warned_of() -> None:
    fat = Profile.from_document(
        {**WHOLE, "input": {"core_seconds_per_sample": 0.02, "wire_bytes_per_sample": 5_000_000}}
    )
    made = planned(fat)
    assert any("ml.g5.xlarge" in w and "bursts" in w for w in made.warnings)
    assert not any("bursts" in w for w in planned().warnings)


def on_a10g(*, core_seconds_per_sample: float) -> Profile:
    return Profile(
        input=InputRate(core_seconds_per_sample=core_seconds_per_sample, wire_bytes_per_sample=150528),
        step_time=StepTime(0.01, 0.0016),
        device="NVIDIA A10G",
        batch_size=64,
    )


def test_a_bigger_host_is_named_where_it_is_the_better_buy() -> None:
    # A little more preprocessing than four vCPUs can do, which a host of eight does for $0.107 more.
    profile = on_a10g(core_seconds_per_sample=0.012)
    made = planned(profile)
    assert made.alternative is not None
    assert made.alternative.shape == {"ml.g5.2xlarge": 1}
    assert "A bigger GPU host is cheaper still: 1 × ml.g5.2xlarge alone" in made.explanation
    assert planned(profile, gpu_types=[G5, "ml.g5.2xlarge"]).best.shape == {"ml.g5.2xlarge": 1}


def test_rates_of_samples_that_take_seconds_are_not_rounded_to_nothing() -> None:
    videos = on_a10g(core_seconds_per_sample=12.0)
    said = planned(videos, cpu_types=[], cpu_nodes=(0, 0)).explanation
    assert "1 × ml.g5.xlarge alone: 0.25 samples/s at $" in said
    assert "ml.g5.16xlarge alone, 5.2 samples/s at $" in said


def test_prices_of_light_rows_are_not_rounded_to_nothing() -> None:
    rows = Profile(
        input=InputRate(core_seconds_per_sample=1e-6, wire_bytes_per_sample=100),
        step_time=StepTime(0.001, 1e-6),
        device="NVIDIA A10G",
        batch_size=4096,
    )
    made = planned(rows, cpu_types=[], cpu_nodes=(0, 0), samples=1_000_000)
    assert 0 < made.best.usd_per_million_samples < 0.005
    price = usd(made.best.usd_per_million_samples)
    assert f"samples/s at {price} per million" in made.explanation
    assert f"  {price.removeprefix('$')}" in format_plan(made.document())
    with pytest.raises(ConfigError, match=r"within \$0.0001. The cheapest, 1 × ml.g5.xlarge, costs \$0.000[1-9]"):
        planned(rows, cpu_types=[], cpu_nodes=(0, 0), samples=1_000_000, budget_usd=0.0001)


def test_another_host_is_called_what_it_is() -> None:
    def explained(core_seconds: float, **asked: Any) -> str:
        profile = Profile(
            input=InputRate(core_seconds_per_sample=core_seconds, wire_bytes_per_sample=150528),
            step_time=StepTime(0.01, 0.0016),
            device="NVIDIA A10G",
            batch_size=64,
        )
        return planned(profile, cpu_types=[], cpu_nodes=(0, 0), **asked).explanation

    # Cheap samples keep a GPU busy from four vCPUs, too.
    assert "A smaller GPU host is cheaper still: 1 × ml.g5.xlarge" in explained(0.001, gpu_types=["ml.g5.16xlarge"])
    # The fastest host costs three times as much a sample.
    dearer = explained(0.012, gpu_types=["ml.g5.2xlarge"], objective="time")
    assert "A bigger GPU host is faster still: 1 × ml.g5.16xlarge" in dearer


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpu_types": ["ml.g5.xlrage"]}, r"no instance type 'ml.g5.xlrage'. Nearest: ml.g5.xlarge"),
        ({"gpu_types": [C5]}, r"ml.c5.4xlarge has no GPU"),
        ({"gpu_types": []}, r"needs a GPU type"),
        ({"gpu_nodes": (4, 1)}, r"range of GPU nodes, 4..1, is empty"),
        ({"gpu_nodes": (0, 1)}, r"number of GPU nodes must be at least 1"),
        ({"cpu_nodes": (0, 10**6)}, r"number of CPU nodes must be at most 100,000, found 1000000"),
        ({"cpu_nodes": (3, 2)}, r"range of CPU nodes, 3..2, is empty"),
        (
            {"cpu_nodes": (2, 3), "cpu_types": []},
            r"cpu_nodes asks for at least 2 CPU nodes, and cpu_types names no CPU type",
        ),
        ({"batch_size": 32}, r"batch size 32 is below the 64"),
        ({"batch_size": 0}, r"batch_size must be at least 1"),
        ({"max_batch_size": 32}, r"at least the initial batch 64, found 32"),
        ({"max_batch_size": 128, "batch_size": 64}, r"not both"),
        ({"budget_usd": 10.0}, r"a budget needs the amount of work"),
        ({"deadline_hours": 10.0}, r"a deadline needs the amount of work"),
        ({"samples": 0}, r"samples must be at least 1"),
        ({"objective": "fun"}, r"objective must be one of cost, time"),
        ({"gpu_speed": -1}, r"gpu_speed must be at least 0.0001"),
        ({"gpu_speed": {G5: 0.0}}, r"gpu_speed of ml.g5.xlarge must be at least 0.0001"),
        ({"gpu_speed": {"ml.p3.2xlarge": 2.0}}, r"gpu_speed names ml.p3.2xlarge, which is none of the GPU types ml.g5"),
    ],
)
def test_what_cannot_be_planned_is_said(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**asked)


def test_a_batch_size_must_come_from_somewhere() -> None:
    bare = Profile(input=PROFILE.input, step_time=PROFILE.step_time)
    with pytest.raises(ConfigError, match=r"names no batch_size"):
        planned(bare)
    with pytest.raises(ConfigError, match=r"needs the profile's gradient noise"):
        planned(bare, max_batch_size=128)
    assert planned(bare, batch_size=64).best.batch_size == 64


def test_a_host_without_a_core_to_preprocess_is_said() -> None:
    greedy = dataclasses.replace(PROFILE, input=dataclasses.replace(PROFILE.input, host_cpus_per_worker=8.0))
    with pytest.raises(ConfigError, match=r"has a core left to preprocess: each worker keeps 8"):
        planned(greedy, cpu_types=[])


def test_a_gpu_of_unknown_model_will_do_where_its_step_is_known() -> None:
    bare = NodeType(name="box", vcpus=8, memory_gib=32, gpus=1, network_gbps=10, usd_per_hour=1.0)
    catalog = Catalog({"box": bare})
    with pytest.raises(ConfigError, match=r"box has a GPU of unknown model: give its speed"):
        planned(catalog=catalog, gpu_types=["box"], cpu_types=[])
    measured_there = dataclasses.replace(PROFILE, device=None)
    assert planned(measured_there, catalog, gpu_types=["box"], cpu_types=[]).best.workers == 1


def test_another_gpu_needs_its_speed_or_step() -> None:
    as_fast = planned(gpu_types=["ml.p3.2xlarge"], gpu_speed=2.0, cpu_nodes=(4, 4)).best
    stepped = planned(gpu_types=["ml.p3.2xlarge"], step=(0.005, 0.0008), cpu_nodes=(4, 4)).best
    assert as_fast.step_time_s == pytest.approx(stepped.step_time_s)


def test_a_wide_table_cuts_no_number() -> None:
    made = planned(
        gpu_types=["ml.p4d.24xlarge"],
        cpu_types=["ml.c6i.24xlarge"],
        gpu_nodes=(16, 16),
        cpu_nodes=(120, 121),
        samples=10**10,
    )
    text = format_plan(made.document())
    assert "16 × ml.p4d.24xlarge + 120 × ml.c6i.24xlarge" in text
    assert "…" not in text


# --- plan.json --------------------------------------------------------------------------------------------------------


def test_a_plan_knows_its_limits() -> None:
    tight = planned(samples=10**6, budget_usd=100.0, deadline_hours=1.0)
    read = Plan.from_document(json.loads(to_json(tight.document())), "plan.json")
    assert (read.budget_usd, read.deadline_hours) == (100.0, 1.0)
    assert read.allows(read.best)
    assert not read.allows(read.candidates[-1])


def test_what_was_written_is_read_as_it_was() -> None:
    made = planned()
    document = json.loads(to_json(made.document()))
    assert Plan.from_document(document, "plan.json") == made
    assert Plan.from_document(document, "plan.json").document() == made.document()
