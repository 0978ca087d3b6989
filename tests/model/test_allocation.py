"""Laws of the allocation, over random clusters and jobs: nothing is exceeded, what is promised is kept, and the counts are the best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.model import StepTime
from offload.model.allocation.allocate import allocate, decide
from offload.model.allocation.choices import Choices
from offload.model.allocation.counts import Counted, Programme, choose, cost_of
from offload.model.allocation.values import Allotment, Holding, Job, Rules
from offload.model.placement import NodeResources, WorkerResources
from tests.strategies import noises, step_times

KINDS = ("A", "B")
# A step that scales: twice the workers do nearly twice the work.
SCALES = StepTime(0.001, 0.01, 0.001, 0.0, 0.002, 0.0)


def node(name: str, gpus: float = 4, cpus: float = 16, kind: str = "A") -> NodeResources:
    return NodeResources(name=name, cpus=cpus, gpus=gpus, gpu_type=kind if gpus else None)


def job(name: str, **changes: Any) -> Job:
    values: dict[str, Any] = {"step_times": {"A": SCALES}, "batch_size": 64, "workers": (1, 8), "age_s": 1000.0}
    return Job(name=name, **{**values, **changes})


@st.composite
def nodes_of(draw: Any) -> list[NodeResources]:
    count = draw(st.integers(1, 5))
    return [
        node(
            f"n{i}",
            draw(st.sampled_from([0, 1, 2, 4])),
            draw(st.sampled_from([4, 8, 16])),
            draw(st.sampled_from(KINDS)),
        )
        for i in range(count)
    ]


@st.composite
def jobs_of(draw: Any, nodes: list[NodeResources]) -> list[Job]:
    """Random jobs, measured on some kinds or on none; together, they hold no more than there is."""
    free = {n.name: [n.gpus, n.cpus] for n in nodes}
    jobs = []
    for j in range(draw(st.integers(1, 6))):
        least = draw(st.integers(0, 2))
        present = Holding()
        home = draw(st.sampled_from(nodes))
        room = int(min(free[home.name]))
        if room and draw(st.booleans()):
            workers = draw(st.integers(1, room))
            cores = draw(st.integers(0, int(free[home.name][1]) - workers))
            present = Holding(
                kind=home.gpu_type, workers={home.name: workers}, cores={home.name: cores} if cores else {}
            )
            free[home.name] = [free[home.name][0] - workers, free[home.name][1] - workers - cores]
        jobs.append(
            Job(
                name=f"j{j}",
                step_times={kind: draw(step_times) for kind in KINDS if draw(st.booleans())},
                noise=draw(st.none() | noises),
                batch_size=64,
                max_batch_size=4096,
                core_seconds_per_sample=draw(st.sampled_from([0.0, 0.001, 0.02])),
                worker=WorkerResources(cpus=draw(st.sampled_from([1.0, 0.25, 0.01])), gpus=1.0),
                workers=(least, least + draw(st.integers(0, 6))),
                weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
                priority=draw(st.integers(0, 2)),
                preemptible=draw(st.booleans()),
                present=present,
                age_s=draw(st.floats(0.0, 1e4)),
                restarts=draw(st.integers(0, 3)),
                work_left=draw(st.none() | st.floats(0.0, 1e6)),
            )
        )
    return jobs


worlds = nodes_of().flatmap(lambda nodes: st.tuples(st.just(nodes), jobs_of(nodes)))
fairness = st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(worlds, fairness)
def test_no_node_holds_more_than_it_has_and_every_promise_is_kept(world: Any, power: float) -> None:
    nodes, jobs = world
    allotments = allocate(jobs, nodes, Rules(fairness=power))
    assert list(allotments) == [j.name for j in jobs]
    for n in nodes:
        held = [(j, allotments[j.name].holding) for j in jobs]
        workers = sum(h.workers.get(n.name, 0) * j.worker.gpus for j, h in held)
        cpus = sum(h.workers.get(n.name, 0) * j.worker.cpus + h.cores.get(n.name, 0) for j, h in held)
        assert workers <= n.gpus
        assert cpus <= n.cpus + 1e-6
    for j in jobs:
        mine = allotments[j.name]
        assert mine.reason
        if j.pinned:
            assert all(mine.holding.workers.get(name, 0) >= n for name, n in j.present.workers.items())
            assert mine.holding.core_count >= j.present.core_count
            assert j.measured or mine.holding == j.present
            assert mine.restarts == (not mine.holding.same_workers(j.present))
            continue
        count = mine.holding.worker_count
        assert count == 0 or max(j.workers[0], 1) <= count <= j.workers[1]
        if count:
            assert {n.gpu_type for n in nodes if mine.holding.workers.get(n.name)} == {mine.holding.kind}
            # Where no node is of a kind that it was measured on, it is measured anew on another one.
            elsewhere = not {n.gpu_type for n in nodes} & j.step_times.keys() or mine.goodput is None
            assert not j.measured or mine.holding.kind in j.step_times or elsewhere
            assert not (j.measured and j.core_seconds_per_sample) or mine.holding.core_count >= 1
        assert mine.restarts == (bool(count and j.present.workers) and not mine.holding.same_workers(j.present))


@settings(max_examples=30, deadline=None)
@given(worlds, st.randoms())
def test_the_same_cluster_is_shared_the_same_way_in_whatever_order_it_is_listed(world: Any, random: Any) -> None:
    nodes, jobs = world
    shuffled = random.sample(jobs, len(jobs))
    assert allocate(shuffled, nodes, Rules()) == {
        j.name: a for j in shuffled for a in [allocate(jobs, nodes, Rules())[j.name]]
    }


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_while_nothing_changes_workers_restart_only_where_that_is_worth_it(world: Any) -> None:
    nodes, jobs = world
    # Everything starts from nothing. Cores are no concern: they move without a restart.
    fresh = [
        replace(j, present=Holding(), age_s=1000.0, restarts=0, work_left=None, core_seconds_per_sample=0.0)
        for j in jobs
    ]
    first = allocate(fresh, nodes, Rules())
    now = [replace(j, present=first[j.name].holding, preemptible=True) for j in fresh]
    then = allocate(now, nodes, Rules())
    assert all(then[j.name].holding.worker_count >= 1 for j in fresh if first[j.name].holding.worker_count)
    if not any(a.restarts for a in then.values()):
        return
    kept = 1000 / 1030  # the share of its goodput that a job keeps which restarts for 30 s at this age

    def cost(allotments: dict[str, Allotment]) -> float:
        worth = [
            (a.speedup or 0.0) * (kept if a.restarts else 1.0) for j in jobs if j.measured for a in [allotments[j.name]]
        ]
        weights = np.array([j.weight for j in jobs if j.measured])
        return float(np.sum(weights**2 * cost_of(np.array(worth), -1.0)))

    assert cost(then) <= cost(first) * (1 + 1e-6)


def brute_force(programme: Programme, must: list[bool]) -> float:
    ends = [*programme.first[1:], len(programme.cost)]
    ranges = [
        range(low + (1 if forced and high - low > 1 else 0), high)
        for low, high, forced in zip(programme.first, ends, must, strict=True)
    ]
    fitting = (np.array(c) for c in itertools.product(*ranges) if programme.fits(np.array(c)))
    return min((programme.total(c) for c in fitting), default=np.inf)


@st.composite
def programmes(draw: Any) -> tuple[list[Choices], dict[str, float], float]:
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 5))
        gpus = np.array([0, *(draw(st.integers(1, 4)) for _ in range(count))], dtype=float)
        cpus = np.array([0, *(draw(st.integers(1, 8)) for _ in range(count))], dtype=float)
        worth = np.array([0, *(draw(st.floats(0.1, 3.0)) for _ in range(count))])
        kinds = (None, *(draw(st.sampled_from(KINDS)) for _ in range(count)))
        rest = dict.fromkeys(("workers", "nodes", "cores", "goodput", "stands", "enough"), gpus)
        tables.append(
            Choices(
                kinds=kinds, gpus=gpus, cpus=cpus, usd_per_hour=gpus, worth=worth, fair_goodput=1.0, others={}, **rest
            )
        )
    return tables, {"A": draw(st.integers(0, 8)), "B": draw(st.integers(0, 8))}, draw(st.integers(0, 16))


def solve(world: Any, power: float, *, exact: bool, more: float = 0.0) -> tuple[Programme, Counted]:
    tables, gpus, cpus = world
    bigger = {kind: count + more for kind, count in gpus.items()}
    programme = Programme.of(
        tables, [1.0] * len(tables), power, bigger, cpus + more, {}, None, list(range(len(tables)))
    )
    return programme, choose(programme, [False] * len(tables), 10**6 if exact else 0)


@settings(max_examples=60, deadline=None)
@given(programmes(), fairness)
def test_counts_are_the_best_there_are(world: Any, power: float) -> None:
    programme, counted = solve(world, power, exact=True)
    best = brute_force(programme, [False] * programme.jobs)
    assert programme.fits(programme.first + np.array(counted.chosen))
    assert counted.cost <= best + 1e-3 * abs(best) + 1e-6
    assert counted.bound <= best + 1e-6 * abs(best) + 1e-6


@settings(max_examples=40, deadline=None)
@given(programmes(), fairness)
def test_more_nodes_are_never_worse(world: Any, power: float) -> None:
    tables, *_ = world
    # The small price of idle resources is relative to all there are, so compare what the choices are worth.
    costs = [solve(world, power, exact=True, more=more)[1].chosen for more in (0.0, 3.0)]
    programme, _ = solve(world, power, exact=True, more=3.0)
    few, many = (programme.total(programme.first + np.array(chosen)) for chosen in costs)
    assert many <= few + 1e-3 * abs(few) + 1e-6
    assert len(tables) == programme.jobs


def test_rounding_a_large_programme_is_within_two_percent_of_its_bound() -> None:
    rng = np.random.default_rng(0)
    jobs = [
        job(
            f"j{i:03}",
            step_times={"A": StepTime(*10 ** rng.uniform([-3, -4, -3, -4, -3, -4], [-1, -2, -1.5, -3, -1, -3]), 2.0)},
            core_seconds_per_sample=10 ** rng.uniform(-4, -2),
        )
        for i in range(40)
    ]
    decision = decide(jobs, [node(f"n{i}", 8, 64) for i in range(16)], Rules(exact_up_to=0))
    assert decision.cost <= 1.02 * decision.bound


def counts(allotments: dict[str, Allotment]) -> dict[str, int]:
    return {name: a.holding.worker_count for name, a in allotments.items()}


def test_a_job_of_higher_priority_has_its_least_before_others_have_any() -> None:
    nodes = [node("n0", 4)]
    low = [job(f"low{i}", present=Holding(kind="A", workers={"n0": 1})) for i in range(4)]
    high = job("high", workers=(3, 3), priority=1)
    shared = counts(allocate([*low, high], nodes, Rules()))
    assert shared["high"] == 3
    assert sorted(shared[j.name] for j in low) == [0, 0, 0, 1]
    assert "priority" in next(
        a.reason for a in allocate([*low, high], nodes, Rules()).values() if not a.holding.workers
    )


def test_what_is_not_preemptible_yields_to_no_priority() -> None:
    keeps = job("keeps", preemptible=False, present=Holding(kind="A", workers={"n0": 3}, cores={"n0": 2}))
    shared = allocate([keeps, job("high", priority=9, workers=(1, 4))], [node("n0", 4)], Rules())
    assert shared["keeps"].holding == keeps.present
    assert shared["high"].holding.worker_count == 1


def test_what_is_not_preemptible_takes_what_all_others_leave() -> None:
    present = Holding(kind="A", workers={"n0": 3}, cores={"n0": 2})
    keeps = job("keeps", preemptible=False, present=present, core_seconds_per_sample=0.01)
    other = job("other", workers=(2, 2), present=Holding(kind="A", workers={"n1": 2}))
    grown = allocate([keeps, other], [node("n0", 4), node("n1", 2)], Rules())["keeps"]
    assert grown.holding.workers == {"n0": 4}
    assert grown.holding.core_count > 2
    assert grown.restarts
    again = allocate([replace(keeps, present=grown.holding), other], [node("n0", 4), node("n1", 2)], Rules())
    assert again["keeps"].holding == grown.holding


@settings(max_examples=60, deadline=None)
@given(
    nodes=nodes_of(),
    least=st.integers(1, 4),
    measured=st.booleans(),
    preemptible=st.booleans(),
    cores=st.integers(0, 3),
    cpus=st.sampled_from([0.5, 1.0]),
)
def test_a_newcomer_has_its_least_workers_on_a_free_cluster(
    nodes: list[NodeResources], least: int, measured: bool, preemptible: bool, cores: int, cpus: float
) -> None:
    """Whether it may lose them later, and whether it holds cores already."""
    kind = nodes[0].gpu_type
    room = sum(int(min(n.gpus, n.cpus / cpus)) for n in nodes if n.gpu_type == kind)
    new = job(
        "new",
        step_times={kind: SCALES} if measured and kind else {},
        worker=WorkerResources(cpus=cpus, gpus=1.0),
        workers=(least, 8),
        cores=(1, 64),
        core_seconds_per_sample=0.002,
        preemptible=preemptible,
        present=Holding(cores={nodes[0].name: cores} if cores else {}),
    )
    held = allocate([new], nodes, Rules())["new"].holding
    if kind and room >= least and sum(n.cpus for n in nodes) >= round(least * cpus) + 1:
        assert held.worker_count >= least


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=3), st.integers(1, 2), st.sampled_from([-4.0, -1.0, 0.0, 0.5]))
def test_equal_jobs_share_in_the_ratio_of_their_weights(weights: list[int], times: int, power: float) -> None:
    proportional = StepTime(0.0, 0.01, 0.0, 0.0, 0.0, 0.0)
    jobs = [
        job(f"j{w}", step_times={"A": proportional}, batch_size=5040, weight=float(weight), workers=(1, 18))
        for w, weight in enumerate(weights)
    ]
    shared = counts(allocate(jobs, [node("n0", times * sum(weights), 64)], Rules(fairness=power)))
    assert [shared[j.name] for j in jobs] == [times * weight for weight in weights]


@settings(max_examples=30, deadline=None)
@given(st.floats(1e4, 1e7), st.floats(2.0, 100.0), st.sampled_from([0.25, 0.35, 1.0]))
def test_who_ends_sooner_has_more_workers(left: float, longer: float, exponent: float) -> None:
    jobs = [job("long", work_left=left * longer), job("short", work_left=left)]
    shared = counts(allocate(jobs, [node("n0", 16, 64)], Rules(shorter_first=exponent)))
    assert shared["short"] >= shared["long"]
    crowded = counts(allocate(jobs, [node("n0", 8, 64)], Rules(shorter_first=exponent)))
    assert crowded["short"] >= crowded["long"]


def test_shorter_first_is_a_choice_and_unknown_work_counts_as_the_median() -> None:
    jobs = [job("short", work_left=1e4), job("long", work_left=1e6), job("unknown")]
    nodes = [node("n0", 12, 64)]
    assert set(counts(allocate(jobs, nodes, Rules())).values()) == {4}
    shared = counts(allocate(jobs, nodes, Rules(shorter_first=0.35)))
    assert shared["short"] > shared["unknown"] > shared["long"] >= 1


def test_a_pinned_job_on_a_kind_that_it_was_not_measured_on_keeps_what_it_holds() -> None:
    held = Holding(kind="B", workers={"n0": 1}, cores={"n0": 2})
    kept = allocate([job("j", preemptible=False, present=held)], [node("n0", kind="B")], Rules())["j"]
    assert kept.holding == held


def test_an_input_bound_job_gets_cores_and_a_device_bound_one_the_gpus() -> None:
    nodes = [node("n0", 4, 16)]
    bound = job("input", core_seconds_per_sample=0.5, workers=(1, 4))
    device = job("device", core_seconds_per_sample=0.001, workers=(1, 4))
    shared = allocate([bound, device], nodes, Rules())
    assert shared["input"].holding.worker_count == 1
    assert shared["device"].holding.worker_count == 3
    assert shared["input"].holding.core_count > 8 > shared["device"].holding.core_count >= 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-4.0, 2.0), min_size=1, max_size=4), st.integers(0, 8))
def test_a_job_never_waits_for_more_cores_than_others_leave(powers: list[float], spare: int) -> None:
    """However much preprocessing costs: a worker and a core make progress."""
    jobs = [job(f"j{j}", core_seconds_per_sample=10.0**power) for j, power in enumerate(powers)]
    nodes = [node("n0", len(jobs), 2 * len(jobs) + spare)]
    shared = allocate(jobs, nodes, Rules())
    assert all(a.holding.worker_count == 1 and a.holding.core_count >= 1 for a in shared.values())


def test_where_workers_leave_fewer_whole_cores_who_has_the_most_gives_one_up() -> None:
    share = WorkerResources(cpus=0.25, gpus=1.0)
    nodes = [node(name, 3, 6) for name in ("n0", "n1")]
    bound = job(
        "bound",
        core_seconds_per_sample=0.25,
        worker=share,
        workers=(1, 1),
        present=Holding(kind="A", workers={"n0": 1}, cores={"n0": 4, "n1": 5}),
    )
    fed = job("fed", step_times={"A": StepTime(0.02, 0.05, 0.0, 0.0, 0.0, 0.0)}, batch_size=60, worker=share,
              workers=(5, 5), core_seconds_per_sample=0.015)  # fmt: skip
    shared = allocate([bound, fed], nodes, Rules())
    assert {name: a.holding.core_count for name, a in shared.items()} == {"bound": 8, "fed": 2}


def test_of_its_cores_a_job_keeps_those_beside_its_workers() -> None:
    share = WorkerResources(cpus=0.25, gpus=1.0)
    present = Holding(kind="A", workers={"n1": 1}, cores={"n0": 4, "n1": 3})
    old = job("old", step_times={}, worker=share, workers=(1, 1), present=present)
    new = job("new", step_times={}, worker=share, workers=(1, 1), age_s=0.0)
    shared = allocate([old, new], [node(name, 1, 4) for name in ("n0", "n1")], Rules())
    assert shared["old"].holding == replace(present, cores={"n1": 3})
    assert shared["new"].holding == Holding(kind="A", workers={"n0": 1}, cores={"n0": 3})


def test_a_job_without_measurements_gets_a_little_to_be_measured_with() -> None:
    new, paid = job("new", step_times={}, workers=(1, 8)), Rules(first_cores=3, usd_per_core_hour=0.01)
    shared = allocate([new], [node("n0", 4)], paid)
    assert (shared["new"].holding.worker_count, shared["new"].holding.core_count) == (1, 3)
    assert "measured" in shared["new"].reason


def test_cores_that_nobody_needs_go_to_those_that_were_not_measured_yet() -> None:
    new = [job(f"new{i}", step_times={}, workers=(1, 8), cores=(1, most)) for i, most in enumerate((4, 64, 64))]
    old = job("old", core_seconds_per_sample=0.001, workers=(1, 1))
    shared = allocate([old, *new], [node("n0", 4, 32)], Rules(first_cores=2))
    cores = {name: allotment.holding.core_count for name, allotment in shared.items()}
    assert cores["new0"] == 4
    assert abs(cores["new1"] - cores["new2"]) <= 1
    assert sum(cores.values()) == 32 - 4, "none is idle"
    assert cores["old"] == allocate([old], [node("n0", 1, 32)], Rules())["old"].holding.core_count


def test_newcomers_share_the_few_cores_of_a_small_cluster() -> None:
    new = [
        job(f"new{i}", step_times={}, worker=WorkerResources(cpus=1.0), workers=(1, 2), cores=(1, 64)) for i in range(2)
    ]
    shared = allocate(new, [node("n0", 0, 4)], Rules(first_cores=2))
    assert {(a.holding.worker_count, a.holding.core_count) for a in shared.values()} == {(1, 1)}


def test_a_job_grows_to_at_most_twice_what_it_was_measured_with() -> None:
    assert counts(allocate([job("j", measured_workers=2)], [node("n0", 8)], Rules())) == {"j": 4}


def test_a_restart_that_costs_more_than_it_gains_does_not_happen() -> None:
    nodes = [node("n0", 8)]
    here = job("j", present=Holding(kind="A", workers={"n0": 2}), restart_s=60.0)
    ends = replace(here, work_left=100.0)
    assert counts(allocate([here], nodes, Rules())) == {"j": 8}
    assert counts(allocate([ends], nodes, Rules())) == {"j": 2}


def test_nodes_are_packed_when_a_job_would_span_two() -> None:
    nodes = [node("n0", 4), node("n1", 4)]
    slow_network = StepTime(0.001, 0.01, 0.001, 0.0, 5.0, 0.0)
    small = [
        job(f"small{i}", workers=(2, 2), present=Holding(kind="A", workers={f"n{i}": 2}), age_s=1e6) for i in range(2)
    ]
    wide = job("wide", step_times={"A": slow_network}, workers=(4, 4))
    shared = allocate([*small, wide], nodes, Rules())
    assert len(shared["wide"].holding.workers) == 1
    assert sum(a.restarts for a in shared.values()) == 1


def test_workers_on_the_kind_of_gpu_that_suits_them() -> None:
    nodes = [node("n0", 4, kind="A"), node("n1", 4, kind="B")]
    fast_on = {
        "a": {"A": SCALES, "B": SCALES.on_faster_device(0.2)},
        "b": {"A": SCALES.on_faster_device(0.2), "B": SCALES},
    }
    shared = allocate([job(name, step_times=times, workers=(1, 4)) for name, times in fast_on.items()], nodes, Rules())
    assert {name: a.holding.kind for name, a in shared.items()} == {"a": "A", "b": "B"}


def test_all_allotments_together_stay_within_the_budget() -> None:
    rules = Rules(usd_per_gpu_hour={"A": 2.0}, usd_per_core_hour=0.05, usd_per_hour=7.0)
    shared = allocate([job("a", core_seconds_per_sample=0.01), job("b")], [node("n0", 8, 32)], rules)
    spent = sum(2.05 * a.holding.worker_count + 0.05 * a.holding.core_count for a in shared.values())
    assert 6.0 < spent <= 7.0


def test_workers_without_gpus_share_cores_with_preprocessing() -> None:
    cpu = job("cpu", step_times={"without GPU": SCALES}, worker=WorkerResources(cpus=2.0), core_seconds_per_sample=0.01)
    held = allocate([cpu], [node("n0", 0, 8)], Rules())["cpu"].holding
    assert held.worker_count >= 2
    assert held.core_count >= 1
    assert 2 * held.worker_count + held.core_count <= 8


@pytest.mark.parametrize(
    ("jobs", "nodes", "says"),
    [
        ([job("j"), job("j")], [node("n0")], "two jobs are named j"),
        ([job("j")], [node("n0"), node("n0")], "two nodes are named n0"),
        (
            [job("j", preemptible=False, present=Holding(kind="A", workers={"n0": 9}))],
            [node("n0", 4)],
            "hold 9 GPUs of node n0, which has 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(jobs: list[Job], nodes: list[NodeResources], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        allocate(jobs, nodes, Rules())


@pytest.mark.parametrize("bad", [{"weight": 0.0}, {"workers": (2, 1)}, {"age_s": -1.0}, {"work_left": -1.0}])
def test_a_jobs_values_are_checked_and_name_the_job(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of job j"):
        job("j", **bad)


@settings(max_examples=20)
@given(st.data())
def test_the_local_batch_is_limited_on_each_kind(data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(1, 8), st.integers(16, 64))
    small, large = data.draw(pairs), data.draw(pairs)
    both = {
        "step_times": dict.fromkeys(KINDS, data.draw(step_times)),
        "noise": data.draw(noises),
        "max_batch_size": 8192,
    }

    def goodput(kind: str, limits: Any) -> float | None:
        alone = job("a", local_batch_sizes=limits, **both)
        return allocate([alone], [node("n", kind=kind)], Rules())["a"].goodput

    for kind, pair in zip(KINDS, (small, large), strict=True):
        assert goodput(kind, dict(zip(KINDS, (small, large), strict=True))) == goodput(kind, pair)


SCALES = StepTime(alpha_compute=0.05, beta_compute=0.002, alpha_inter=0.01, beta_inter=0.001, gamma=1.5)
TWO_NODES = [NodeResources(name=name, cpus=32, gpus=4, gpu_type="A") for name in ("n1", "n2")]


def a_run(name: str, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "step_times": {"A": SCALES},
        "batch_size": 256,
        "core_seconds_per_sample": 0.005,
        "worker": WorkerResources(cpus=0.0, gpus=1.0),
        "age_s": 3600.0,
    }
    return Job(name=name, **{**values, **changes})


SPREAD = Holding(kind="A", workers={"n1": 1, "n2": 1}, cores={"n1": 2})
WHOLE_NODE = WorkerResources(cpus=0.0, gpus=4.0)


@pytest.mark.parametrize("step_times", [{}, {"A": SCALES}], ids=["new", "measured"])
def test_a_job_that_fits_no_gap_keeps_nobody_from_the_room_that_there_is(step_times: Any) -> None:
    standing = a_run("standing", workers=(2, 2), present=SPREAD)
    big = a_run("big", worker=WHOLE_NODE, workers=(1, 1), step_times={}, age_s=5.0)
    small = a_run("small", workers=(3, 3), step_times=step_times, age_s=4.0)
    shared = allocate([standing, big, small], TWO_NODES, Rules())
    assert {name: a.holding.worker_count for name, a in shared.items()} == {"standing": 2, "big": 0, "small": 3}
    assert shared["big"].reason == "waits: 1 worker fit the cluster, but not the gaps between the others"


@pytest.mark.parametrize("most", [2, 4])
def test_whoever_is_less_urgent_moves_out_of_the_way(most: int) -> None:
    standing = a_run("standing", workers=(2, most), present=SPREAD)
    urgent = a_run("urgent", worker=WHOLE_NODE, workers=(1, 1), priority=5)
    shared = allocate([standing, urgent], TWO_NODES, Rules())
    assert shared["urgent"].holding.worker_count == 1
    assert shared["standing"].holding.worker_count >= 2
    assert not {*shared["urgent"].holding.workers} & {*shared["standing"].holding.workers}


def test_the_more_urgent_one_gets_the_only_custom_resource() -> None:
    node = NodeResources(name="n1", cpus=32, gpus=4, gpu_type="A", others={"fast": 1.0})
    needs = WorkerResources(cpus=0.0, gpus=1.0, others={"fast": 1.0})
    here = Holding(kind="A", workers={"n1": 1}, cores={"n1": 2})
    for present in (Holding(), here):
        jobs = [a_run("a", worker=needs, present=present), a_run("b", worker=needs, priority=5)]
        shared = allocate(jobs, [node], Rules())
        assert {name: a.holding.worker_count for name, a in shared.items()} == {"a": 0, "b": 1}


def test_a_job_measured_on_gpus_that_are_gone_is_measured_on_those_that_are_left() -> None:
    left = NodeResources(name="n1", cpus=32, gpus=4, gpu_type="B")
    allotment = allocate([a_run("run")], [left], Rules())["run"]
    assert (allotment.holding.kind, allotment.holding.worker_count) == ("B", 1)
    assert "to be measured" in allotment.reason


def test_the_budget_counts_what_jobs_cost_that_keep_what_they_hold() -> None:
    rules = Rules(usd_per_hour=6.0, usd_per_gpu_hour={"A": 3.0})
    keeps = a_run("keeps", preemptible=False, workers=(1, 2), present=Holding(kind="A", workers={"n1": 2}))
    shared = allocate([keeps, a_run("comes")], TWO_NODES, rules)
    assert shared["comes"].holding == Holding()
    assert shared["comes"].reason == "waits: 1 worker of it would cost 3 dollars an hour, and the budget has 0 left"


@pytest.mark.parametrize("weight", [0.001, 0.5, 100.0])
@pytest.mark.parametrize("power", [-20.0, -1.0, 0.5])
def test_a_job_alone_gets_the_same_whatever_its_weight(weight: float, power: float) -> None:
    rules = Rules(fairness=power)
    alone = allocate([a_run("run")], TWO_NODES, rules)["run"].holding
    assert alone.worker_count == 8
    assert allocate([a_run("run", weight=weight)], TWO_NODES, rules)["run"].holding == alone


def test_light_jobs_get_the_room_that_a_heavy_one_leaves() -> None:
    light = [a_run(f"light {i}", weight=0.001, step_times={}, age_s=9.0) for i in range(2)]
    shared = allocate([a_run("heavy", weight=100.0, workers=(2, 2)), *light], TWO_NODES, Rules())
    assert all(shared[job.name].holding.worker_count for job in light)
