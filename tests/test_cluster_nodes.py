"""Which nodes a run uses, and what it asks for: pure, on clusters made up here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.adapt.core_speed import core_speeds
from offload.adapt.losses import FLAPS, FORGET_S
from offload.adapt.observe import Size
from offload.model.placement import (
    NodeResources,
    WorkerResources,
    nodes_for,
    on_fewest_nodes,
    one_gpu_type,
    place_workers,
)
from offload.train import resizing
from offload.train.demand import Bundle, bundle_of
from offload.train.monitor import News, Orders
from offload.train.nodes import Nodes
from offload.train.resizing import GRANT_S, REFUSED_S, Workers

GIB = 1 << 30
WORKER = WorkerResources(cpus=1, gpus=1)
RUNNING = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=(), running=True)


def gpu_node(name: str, kind: str | None = "A10G", gpus: float = 1) -> NodeResources:
    return NodeResources(name=name, node_id=name, cpus=4, gpus=gpus, gpu_type=kind, instance_type=f"ml.{kind}")


def cpu_node(name: str, node_id: str = "", cpus: float = 8) -> NodeResources:
    return NodeResources(name=name, node_id=node_id or name, cpus=cpus, instance_type="ml.c5.2xlarge")


class Cluster:
    """Nodes that a test changes, and what a run tells and asks meanwhile."""

    def __init__(self, *nodes: NodeResources, mixed: bool = False, workers: int = 2) -> None:
        self.now_s = 0.0
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.nodes = Nodes(
            nodes, WORKER, workers, mixed=mixed, asked=None, tell=lambda kind, **values: self.told.append((kind, values)),
            enough=lambda rest: any(node.gpus for node in rest), now=lambda: self.now_s,
        )  # fmt: skip

    def look(self, *nodes: NodeResources, leaving: Sequence[str] = (), failing: Sequence[str] = ()) -> Any:
        return self.nodes.look(
            nodes, leaving=leaving, failing=failing, used={node.node_id for node in self.nodes.usable}
        )

    @property
    def excluded(self) -> list[str]:
        return [name for kind, values in self.told if kind == "node_excluded" for name in values["nodes"]]


def test_a_node_under_notice_has_not_joined_again_because_the_notice_is_not_seen_any_more() -> None:
    # The cluster drops the notice as the node ends, and the two are read one after the other.
    gpu, leaving = gpu_node("gpu"), cpu_node("10.0.0.7", "drained")
    cluster = Cluster(gpu, leaving)
    assert cluster.look(gpu, leaving, leaving=["drained"]).leaving == ("10.0.0.7",)
    assert cluster.look(gpu, leaving) is None
    assert cluster.look(gpu) is None


def test_nodes_whose_memory_holds_fewer_processes_than_seemed_give_fewer_cores() -> None:
    gpu, small = gpu_node("gpu"), replace(cpu_node("small"), memory_bytes=4 * GIB)
    cluster = Cluster(gpu, small)
    assert cluster.told == []
    assert cluster.nodes.look([gpu, small], leaving=(), failing=(), used=(), process_bytes=GIB // 4) is None
    change = cluster.nodes.look([gpu, small], leaving=(), failing=(), used=(), process_bytes=GIB)
    assert (change.left, change.leaving, change.joined) == ((), (), ())
    assert place_workers(cluster.nodes.usable, WORKER, (1, 1)).cores_by_node == (3, 3)
    assert cluster.told == [("short_of_memory", {"nodes": ["small"], "cores": [3], "process_bytes": GIB})]
    assert cluster.nodes.look([gpu, small], leaving=(), failing=(), used=(), process_bytes=GIB) is None


# --- machines that come and go ----------------------------------------------------------------------------------------


def flap(cluster: Cluster, times: int, notice: bool = False) -> None:
    gpu = gpu_node("gpu")
    for i in range(times):
        cluster.look(gpu, cpu_node("10.0.0.7", f"life {i}"))
        if notice:
            cluster.look(gpu, cpu_node("10.0.0.7", f"life {i}"), leaving=[f"life {i}"])
        cluster.look(gpu)


def test_a_machine_that_flaps_is_done_without_until_it_is_forgotten() -> None:
    cluster = Cluster(gpu_node("gpu"))
    flap(cluster, FLAPS)
    again = cpu_node("10.0.0.7", "another life")
    assert cluster.look(gpu_node("gpu"), again) is None
    assert cluster.excluded == ["10.0.0.7"]
    (reason,) = [values["reason"] for kind, values in cluster.told if kind == "node_excluded"]
    assert reason == "lost 3 times within an hour"
    cluster.now_s = FORGET_S + 1
    change = cluster.look(gpu_node("gpu"), again)
    assert change is not None
    assert change.joined == ("10.0.0.7",)


def test_a_machine_that_was_lost_twice_or_left_by_notice_is_used_again() -> None:
    for times, notice in ((FLAPS - 1, False), (2 * FLAPS, True)):
        cluster = Cluster(gpu_node("gpu"))
        flap(cluster, times, notice)
        change = cluster.look(gpu_node("gpu"), cpu_node("10.0.0.7", "another life"))
        assert change is not None
        assert change.joined == ("10.0.0.7",)
        assert not cluster.excluded


def test_the_only_node_that_can_train_is_never_excluded() -> None:
    cluster = Cluster(gpu_node("gpu"), cpu_node("cpu"))
    assert cluster.look(gpu_node("gpu"), cpu_node("cpu"), failing=["gpu"]) is None
    assert not cluster.excluded
    other = gpu_node("gpu 2")
    change = cluster.look(gpu_node("gpu"), cpu_node("cpu"), other, failing=["gpu"])
    assert cluster.excluded == ["gpu"]
    assert change is not None
    assert {node.name for node in cluster.nodes.usable} == {"cpu", "gpu 2"}
    assert cluster.nodes.without_workers == ("gpu",)


# --- GPUs of several kinds --------------------------------------------------------------------------------------------


def test_workers_train_on_the_kind_of_gpu_that_holds_the_most_and_the_others_nodes_preprocess() -> None:
    cluster = Cluster(gpu_node("a", "T4"), gpu_node("b", "A10G"), gpu_node("c", "A10G"))
    assert cluster.nodes.gpu_type == "A10G"
    placement = place_workers(cluster.nodes.usable, WORKER, (1, 3))
    assert placement.held == (0, 1, 1)
    assert placement.cores_by_node == (4, 3, 3)
    assert cluster.nodes.without_workers == ("a",)


def test_the_kind_stays_while_it_is_there_and_changes_when_it_is_gone() -> None:
    cluster = Cluster(gpu_node("a", "T4"), gpu_node("b", "A10G"), gpu_node("c", "A10G"))
    cluster.look(gpu_node("a", "T4"), gpu_node("d", "T4"), gpu_node("b", "A10G"))
    assert cluster.nodes.gpu_type == "A10G"
    cluster.look(gpu_node("a", "T4"), gpu_node("d", "T4"))
    assert place_workers(cluster.nodes.usable, WORKER, (1, 3)).workers == 2
    assert cluster.nodes.without_workers == ()


def test_kinds_are_mixed_where_that_is_asked_for() -> None:
    cluster = Cluster(gpu_node("a", "T4"), gpu_node("b", "A10G"), mixed=True)
    assert place_workers(cluster.nodes.usable, WORKER, (1, 2)).workers == 2


@given(kinds=st.lists(st.sampled_from(["T4", "A10G", None]), min_size=1, max_size=6))
def test_no_two_kinds_hold_workers_and_no_core_is_lost(kinds: list[str | None]) -> None:
    nodes = [gpu_node(f"{i}", kind) for i, kind in enumerate(kinds)]
    usable = nodes_for(nodes, one_gpu_type(nodes, WORKER, 6))
    assert len({node.gpu_type for node in usable if node.gpus}) == 1
    assert sum(node.gpus for node in usable) == max(kinds.count(kind) for kind in kinds)
    assert [node.cpus for node in usable] == [node.cpus for node in nodes]


# --- cores of several speeds ------------------------------------------------------------------------------------------


def test_a_new_node_is_taken_to_be_as_fast_as_others_of_its_type() -> None:
    nodes = [gpu_node("gpu"), cpu_node("a"), cpu_node("b")]
    speeds = core_speeds(nodes, {"gpu": 1.2, "a": 0.6}, used=[2, 2, 0])
    assert speeds[1] == pytest.approx(speeds[2])
    assert speeds[0] == pytest.approx(2 * speeds[1])
    assert 2 * speeds[0] + 2 * speeds[1] == pytest.approx(4)  # the cores of now count as so many


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_task_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that makes room goes on doing so."""
    monkeypatch.setattr(resizing.ray, "wait", lambda waited, timeout: ([], waited))


class Asked:
    def __init__(self) -> None:
        self.missing: dict[Bundle, int] = {}

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None:
        self.missing = dict(missing)

    def close(self) -> None:
        self.missing = {}


def workers_on(cluster: Cluster, bounds: tuple[int, int], **given: Any) -> tuple[Workers, Asked, dict[str, Any]]:
    asked, done = Asked(), {}  # type: ignore[var-annotated]

    def remember(name: str) -> Any:
        return SimpleNamespace(remote=lambda *values: done.update({name: values}))

    hub = SimpleNamespace(**{name: remember(name) for name in ("reshape", "avoid", "order", "replace_workers")})
    started = given.pop("started", 1)
    settings: dict[str, Any] = {"chosen": True, "grows": True, "usd_per_hour": {}, "cores": None, **given}
    workers = Workers(
        cluster.nodes, WORKER, bounds, place_workers(cluster.nodes.usable, WORKER, (started, started)), hub=hub, demand=asked,
        tell=lambda kind, **values: cluster.told.append((kind, values)), allowed=lambda count: True, core_cpus=1.0,
        now=lambda: cluster.now_s, **settings,
    )  # fmt: skip
    return workers, asked, done


ONE_MORE = bundle_of({"CPU": 1.0, "GPU": 1.0})


def test_counts_that_do_not_fit_are_options_where_nodes_can_be_asked_for() -> None:
    nodes = gpu_node("gpu"), cpu_node("cpu")
    workers, asked, _ = workers_on(Cluster(*nodes), (1, 3))
    assert [(o.workers, o.nodes, o.cores) for o in workers.options()] == [(1, 1, 11), (2, 2, 14), (3, 3, 17)]
    assert not asked.missing
    workers.want_workers(3)
    workers.look(RUNNING, nodes)
    assert asked.missing == {ONE_MORE: 2}
    workers.look(replace(RUNNING, running=False), nodes)
    assert not asked.missing, "what is asked for could take the room of workers that are being started"
    workers.look(RUNNING, nodes)
    assert asked.missing == {ONE_MORE: 2}
    workers.want_workers(1)
    workers.look(RUNNING, nodes)
    assert not asked.missing
    fixed, _, _ = workers_on(Cluster(gpu_node("gpu"), cpu_node("cpu")), (1, 3), grows=False)
    assert [o.workers for o in fixed.options()] == [1]


def test_a_node_for_workers_that_holds_none_is_left_so_that_it_can_be_given_back() -> None:
    nodes = gpu_node("gpu"), gpu_node("spare"), cpu_node("cpu")
    workers, asked, done = workers_on(Cluster(gpu_node("gpu"), cpu_node("cpu")), (1, 2))
    workers.look(RUNNING, nodes)
    assert "spare" not in done["reshape"][0]
    assert not asked.missing
    workers.want_workers(2)
    workers.look(RUNNING, [*nodes, cpu_node("another")])
    assert done["reshape"][0].count("spare") == 4  # it works until its worker comes


def test_what_a_lost_worker_needs_is_asked_for_again() -> None:
    cluster = Cluster(gpu_node("gpu"), cpu_node("cpu"))
    workers, asked, _ = workers_on(cluster, (1, 1))
    workers.look(RUNNING, [cpu_node("cpu")])
    assert workers.wanted == 0
    assert asked.missing == {ONE_MORE: 1}
    workers.look(RUNNING, [cpu_node("cpu"), gpu_node("new")])
    assert workers.wanted == 1
    assert not asked.missing


def test_a_run_that_waits_for_a_node_goes_on_asking_and_one_that_trains_asks_again_later() -> None:
    cluster = Cluster(gpu_node("gpu"), cpu_node("cpu"))
    workers, asked, _ = workers_on(cluster, (1, 2))
    workers.want_workers(2)
    times = [0.0, GRANT_S + 1, GRANT_S + REFUSED_S + 2]
    seen = []
    for cluster.now_s in times:
        workers.look(RUNNING, [gpu_node("gpu"), cpu_node("cpu")])
        workers.look(RUNNING, [gpu_node("gpu"), cpu_node("cpu")])
        seen.append(bool(asked.missing))
    assert seen == [True, False, True]
    for hours in range(3):
        cluster.now_s += 3600.0 * hours
        workers.look(RUNNING, [cpu_node("cpu")])
        workers.want_cores(3)  # nothing can be placed, and nothing breaks
        assert asked.missing
    assert workers.wanted == 0


def test_a_node_that_joins_does_not_end_a_change_that_is_under_way() -> None:
    nodes = gpu_node("gpu"), gpu_node("gpu 2"), cpu_node("cpu")
    workers, _, done = workers_on(Cluster(*nodes), (1, 2))
    size = Size(nodes=2, workers=2, local_batch_size=8, accum_steps=0)
    workers.change(size, Orders(), RUNNING)
    workers.look(RUNNING, [*nodes, cpu_node("late")])
    assert workers.busy
    assert done["reshape"][0].count("late") == 0  # it begins to preprocess when the change is through
    assert "replace_workers" not in done


def test_what_was_lost_is_used_again_where_the_number_is_not_chosen() -> None:
    nodes = gpu_node("gpu"), gpu_node("gpu 2"), cpu_node("cpu")
    workers, asked, done = workers_on(Cluster(*nodes), (1, 2), chosen=False, started=2)
    workers.look(RUNNING, [nodes[0], nodes[2]])
    assert done["replace_workers"] == (1,)
    assert asked.missing == {ONE_MORE: 1}
    workers.look(RUNNING, [nodes[0], nodes[2], gpu_node("new")])
    assert workers.busy
    assert not asked.missing


def test_on_a_cluster_that_is_not_asked_for_nodes_workers_come_back_too() -> None:
    nodes = gpu_node("gpu"), gpu_node("gpu 2"), cpu_node("cpu")
    workers, asked, _ = workers_on(Cluster(*nodes), (1, 2), chosen=False, grows=False, started=2)
    workers.look(RUNNING, [nodes[0], nodes[2]])
    assert workers.wanted == 1
    workers.look(RUNNING, nodes)
    assert workers.busy
    assert not asked.missing


def test_a_kind_of_gpu_that_is_there_alone_stays_the_runs_when_more_of_another_kind_come() -> None:
    cluster = Cluster(gpu_node("a", "A10G"))
    cluster.look(gpu_node("a", "A10G"), gpu_node("b", "T4"), gpu_node("c", "T4"))
    assert cluster.nodes.gpu_type == "A10G"
    assert cluster.nodes.needed_gpu_type == "A10G"
    assert set(cluster.nodes.without_workers) == {"b", "c"}


def test_a_machine_that_restarts_faster_than_its_loss_is_found_flaps_too() -> None:
    cluster = Cluster(gpu_node("gpu"))
    before = cpu_node("10.0.0.7", "life 0")
    cluster.look(gpu_node("gpu"), before)
    for i in range(1, FLAPS + 2):
        cluster.now_s += 5.0
        after = cpu_node("10.0.0.7", f"life {i}")
        cluster.look(gpu_node("gpu"), before, after)
        cluster.look(gpu_node("gpu"), after)
        before = after
    assert cluster.excluded == ["10.0.0.7"]


def test_dollars_count_the_cores_that_more_workers_would_need() -> None:
    prices = {"ml.A10G": 1.4, "ml.c5.2xlarge": 0.4}
    workers, _, _ = workers_on(
        Cluster(gpu_node("gpu"), cpu_node("cpu")), (1, 2), usd_per_hour=prices, cores=(1, 100)
    )  # fmt: skip
    workers.want_cores(11)  # 3 on the worker's node, 8 beside it
    one, two = workers.options()
    assert (one.cores, two.cores) == (11, 22)
    assert one.usd_per_hour == pytest.approx(1.4 + 8 * 0.05)
    assert two.usd_per_hour == pytest.approx(2 * 1.4 + 16 * 0.05)


def test_spare_nodes_are_the_last_to_preprocess() -> None:
    placement = place_workers([gpu_node("gpu"), gpu_node("spare"), cpu_node("cpu")], WORKER, (1, 1))
    spare = [False, placement.held[1] == 0, False] if placement.held[0] else [True, False, False]
    cores = on_fewest_nodes(placement, 11, spare=spare)
    assert cores[spare.index(True)] == 0
    assert sum(cores) == 11
