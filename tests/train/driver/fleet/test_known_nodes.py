"""Which nodes a run uses: pure, on clusters made up here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.adapt.cores import core_speeds
from offload.adapt.failures import FLAPS, FORGET_S
from offload.model.placement import (
    PROCESS_BYTES,
    NodeResources,
    nodes_for,
    on_fewest_nodes,
    one_gpu_type,
    place_workers,
)
from offload.report.events import NodeExcluded, ShortOfMemory
from offload.train.driver.fleet.known_nodes import KnownNodes, NodesChange, Selection
from tests.train.driver.fleet.made_up import WORKER, cpu_node, gpu_node

GIB = 1 << 30


class Cluster:
    """Nodes that a test changes, and what a run makes of them."""

    def __init__(self, *nodes: NodeResources, mixed: bool = False, workers: int = 2) -> None:
        self.now_s = 0.0
        selection = Selection(worker=WORKER, most=workers, mixed=mixed)
        self.nodes, self.told = KnownNodes.at_start(nodes, selection, 0.0)

    def look(
        self,
        *nodes: NodeResources,
        leaving: Sequence[str] = (),
        failing: Sequence[str] = (),
        process_bytes: int = PROCESS_BYTES,
    ) -> NodesChange | None:
        self.nodes, change, told = self.nodes.followed(
            nodes,
            leaving=leaving,
            failing=failing,
            used={node.node_id for node in self.nodes.usable},
            enough=lambda rest: any(node.gpus for node in rest),
            now_s=self.now_s,
            process_bytes=process_bytes,
        )
        self.told += told
        return change

    def joined(self, *nodes: NodeResources) -> tuple[str, ...]:
        change = self.look(*nodes)
        assert change is not None
        return change.joined

    @property
    def excluded(self) -> list[str]:
        return [name for event in self.told if isinstance(event, NodeExcluded) for name in event.nodes]


def test_a_node_under_notice_has_not_joined_again_because_the_notice_is_not_seen_any_more() -> None:
    # The cluster drops the notice as the node ends, and the two are read one after the other.
    gpu, leaving = gpu_node("gpu"), cpu_node("10.0.0.7", "drained")
    cluster = Cluster(gpu, leaving)
    change = cluster.look(gpu, leaving, leaving=["drained"])
    assert change is not None
    assert change.leaving == ("10.0.0.7",)
    assert cluster.look(gpu, leaving) is None
    assert cluster.look(gpu) is None


def test_nodes_whose_memory_holds_fewer_processes_than_seemed_give_fewer_cores() -> None:
    gpu, small = gpu_node("gpu"), replace(cpu_node("small"), memory_bytes=4 * GIB)
    cluster = Cluster(gpu, small)
    assert cluster.told == []
    assert cluster.look(gpu, small, process_bytes=GIB // 4) is None
    assert cluster.look(gpu, small, process_bytes=GIB) == NodesChange(left=(), leaving=(), joined=())
    assert place_workers(cluster.nodes.usable, WORKER, (1, 1)).cores_by_node == (3, 3)
    (told,) = cluster.told
    assert told == ShortOfMemory(nodes=["small"], cores=[3], process_bytes=GIB)
    assert cluster.look(gpu, small, process_bytes=GIB) is None


# --- machines that come and go ----------------------------------------------------------------------------------------


def flap(cluster: Cluster, times: int, notice: bool = False) -> None:
    gpu = gpu_node("gpu")
    for i in range(times):
        cluster.look(gpu, cpu_node("10.0.0.7", f"life {i}"))
        if notice:
            cluster.look(gpu, cpu_node("10.0.0.7", f"life {i}"), leaving=[f"life {i}"])
        cluster.look(gpu)


def test_a_machine_that_flaps_is_excluded_until_it_is_forgotten() -> None:
    cluster = Cluster(gpu_node("gpu"))
    flap(cluster, FLAPS)
    again = cpu_node("10.0.0.7", "another life")
    assert cluster.look(gpu_node("gpu"), again) is None
    assert cluster.excluded == ["10.0.0.7"]
    (reason,) = [event.reason for event in cluster.told if isinstance(event, NodeExcluded)]
    assert reason == "lost 3 times within an hour"
    cluster.now_s = FORGET_S + 1
    assert cluster.joined(gpu_node("gpu"), again) == ("10.0.0.7",)


def test_a_machine_that_was_lost_twice_or_left_by_notice_is_used_again() -> None:
    for times, notice in ((FLAPS - 1, False), (2 * FLAPS, True)):
        cluster = Cluster(gpu_node("gpu"))
        flap(cluster, times, notice)
        assert cluster.joined(gpu_node("gpu"), cpu_node("10.0.0.7", "another life")) == ("10.0.0.7",)
        assert not cluster.excluded


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


def test_the_only_node_that_can_train_is_never_excluded() -> None:
    cluster = Cluster(gpu_node("gpu"), cpu_node("cpu"))
    assert cluster.look(gpu_node("gpu"), cpu_node("cpu"), failing=["gpu"]) is None
    assert not cluster.excluded
    change = cluster.look(gpu_node("gpu"), cpu_node("cpu"), gpu_node("gpu 2"), failing=["gpu"])
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


def test_a_kind_of_gpu_that_is_there_alone_stays_the_runs_when_more_of_another_kind_come() -> None:
    cluster = Cluster(gpu_node("a", "A10G"))
    cluster.look(gpu_node("a", "A10G"), gpu_node("b", "T4"), gpu_node("c", "T4"))
    assert cluster.nodes.gpu_type == "A10G"
    assert cluster.nodes.needed_gpu_type == "A10G"
    assert set(cluster.nodes.without_workers) == {"b", "c"}


def test_kinds_are_mixed_where_the_user_asks_for_it() -> None:
    cluster = Cluster(gpu_node("a", "T4"), gpu_node("b", "A10G"), mixed=True)
    assert place_workers(cluster.nodes.usable, WORKER, (1, 2)).workers == 2


@given(kinds=st.lists(st.sampled_from(["T4", "A10G", None]), min_size=1, max_size=6))
def test_no_two_kinds_hold_workers_and_no_core_is_lost(kinds: list[Any]) -> None:
    nodes = [gpu_node(f"{i}", kind) for i, kind in enumerate(kinds)]
    usable = nodes_for(nodes, one_gpu_type(nodes, WORKER, 6))
    assert len({node.gpu_type for node in usable if node.gpus}) == 1
    assert sum(node.gpus for node in usable) == max(kinds.count(kind) for kind in kinds)
    assert [node.cpus for node in usable] == [node.cpus for node in nodes]


# --- cores ------------------------------------------------------------------------------------------------------------


def test_a_new_node_is_taken_to_be_as_fast_as_others_of_its_type() -> None:
    nodes = [gpu_node("gpu"), cpu_node("a"), cpu_node("b")]
    speeds = core_speeds(nodes, {"gpu": 1.2, "a": 0.6}, used=[2, 2, 0])
    assert speeds[1] == pytest.approx(speeds[2])
    assert speeds[0] == pytest.approx(2 * speeds[1])
    assert 2 * speeds[0] + 2 * speeds[1] == pytest.approx(4)  # the present cores count as so many


def test_spare_nodes_are_the_last_to_preprocess() -> None:
    placement = place_workers([gpu_node("gpu"), gpu_node("spare"), cpu_node("cpu")], WORKER, (1, 1))
    spare = [False, placement.held[1] == 0, False] if placement.held[0] else [True, False, False]
    cores = on_fewest_nodes(placement, 11, spare=spare)
    assert cores[spare.index(True)] == 0
    assert sum(cores) == 11
