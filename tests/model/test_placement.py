"""How many workers fit so that preprocessing keeps its cores, and what a user is told where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.model.placement import (
    MEMORY_SHARE,
    PROCESS_BYTES,
    NodeResources,
    Placement,
    WorkerResources,
    place_workers,
    within_memory,
)


def cpu_hosts(*cpus: float) -> list[NodeResources]:
    return [NodeResources(name=f"host{i}", cpus=c) for i, c in enumerate(cpus)]


def gpu_hosts(count: int, *, cpus: float = 8, gpus: float = 1) -> list[NodeResources]:
    return [NodeResources(name=f"gpu{i}", cpus=cpus, gpus=gpus) for i in range(count)]


def refusal(nodes: list[NodeResources], worker: WorkerResources, workers: tuple[int, int], floor: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        place_workers(nodes, worker, workers, cpu_floor=floor)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- how many ---------------------------------------------------------------------------------------------------------

nodes_ = st.lists(
    st.builds(NodeResources, name=st.just("n"), cpus=st.integers(0, 12), gpus=st.integers(0, 4)), min_size=1, max_size=5
)
workers_ = st.builds(WorkerResources, cpus=st.sampled_from([0, 0.01, 0.5, 1, 2, 3]), gpus=st.sampled_from([0, 1, 2]))


@settings(deadline=None)
@given(nodes=nodes_, worker=workers_, least=st.integers(1, 4), more=st.integers(0, 8), floor=st.integers(1, 4))
def test_the_most_workers_that_keep_the_floor(
    nodes: list[NodeResources], worker: WorkerResources, least: int, more: int, floor: int
) -> None:
    def placed(low: int, high: int) -> Placement | None:
        try:
            return place_workers(nodes, worker, (low, high), cpu_floor=floor)
        except ConfigError:
            return None

    best = placed(least, least + more)
    each = {k: p for k in range(least, least + more + 1) if (p := placed(k, k)) is not None}
    assert (best.workers if best else None) == max(each, default=None)
    if best is not None:
        assert best.cores >= floor
        assert len(best.free_cpus) == len(nodes)
        assert min(best.free_cpus) >= -1e-6
        used = sum(n.cpus for n in nodes) - sum(best.free_cpus)
        assert used == pytest.approx(best.workers * worker.cpus)
        if worker.gpus:
            assert best.workers <= sum(int(n.gpus // worker.gpus) for n in nodes)


def test_a_gpu_host_and_cpu_hosts() -> None:
    placement = place_workers([*gpu_hosts(1, cpus=4), *cpu_hosts(16, 16)], WorkerResources(cpus=1, gpus=1), (1, 8))
    assert (placement.workers, placement.free_cpus, placement.cores) == (1, (3, 16, 16), 35)


def test_workers_fill_gpu_hosts_and_leave_cpu_hosts_alone() -> None:
    nodes = [*cpu_hosts(64), *gpu_hosts(2, cpus=8, gpus=4)]
    assert place_workers(nodes, WorkerResources(cpus=1, gpus=1), (8, 8)).free_cpus == (64, 4, 4)


def test_fractions_of_a_gpu() -> None:
    # 1.0 // 0.1 is 9 in floating point.
    assert place_workers(gpu_hosts(1, cpus=16), WorkerResources(cpus=1, gpus=0.1), (1, 12)).workers == 10


def test_two_one_core_hosts_with_a_worker_that_reserves_next_to_nothing() -> None:
    placement = place_workers(cpu_hosts(1, 1), WorkerResources(cpus=0.01), (1, 1))
    assert placement.cores == 2  # the worker's host preprocesses too
    assert placement.task_cpus == 0.99  # beside the worker, and one on each host


# --- nodes with little memory -----------------------------------------------------------------------------------------


@given(
    cpus=st.integers(1, 16),
    memory=st.floats(1 << 20, 64 << 30),
    each=st.floats(1 << 20, 8 << 30),
    more=st.floats(0, 8 << 30),
)
def test_processes_fit_into_the_memory_and_workers_stay(cpus: int, memory: float, each: float, more: float) -> None:
    node = NodeResources(name="n", cpus=cpus + 1, gpus=1, memory_bytes=memory)
    worker = WorkerResources(cpus=1, gpus=1)
    (limited,) = within_memory([node], each)
    placement = place_workers([limited], worker, (1, 1))
    assert placement.workers == 1
    assert 1 <= placement.cores <= cpus
    full = max(each, PROCESS_BYTES) * placement.cores <= MEMORY_SHARE * memory
    assert full or placement.cores == 1
    assert placement.cores == cpus or max(each, PROCESS_BYTES) * (placement.cores + 1) > MEMORY_SHARE * memory
    fewer = place_workers(within_memory([node], each + more), worker, (1, 1))
    assert fewer.cores <= placement.cores


def test_a_node_that_does_not_tell_its_memory_is_used_whole() -> None:
    nodes = [NodeResources(name="n", cpus=8)]
    assert place_workers(within_memory(nodes), WorkerResources(cpus=1), (1, 1)).cores == 7


# --- what a core counts as --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(nodes=nodes_, worker=workers_, workers=st.integers(1, 6))
def test_every_node_holds_as_many_as_it_has_cores(
    nodes: list[NodeResources], worker: WorkerResources, workers: int
) -> None:
    try:
        placement = place_workers(nodes, worker, (1, workers))
    except ConfigError:
        return
    asked = placement.task_cpus
    assert 0 < asked <= 1
    for free in placement.free_cpus:
        # In Ray's fixed point of 1e-4 CPUs.
        assert int(free + 0.5) * round(asked * 1e4) <= round(free * 1e4)


@pytest.mark.parametrize("cpus", [1, 2, 4, 16, 96])
def test_a_whole_core_counts_as_one(cpus: int) -> None:
    assert place_workers(cpu_hosts(cpus, cpus), WorkerResources(cpus=0), (1, 1)).task_cpus == 1.0


def test_a_large_host_beside_a_small_one_is_not_crowded() -> None:
    placement = place_workers(cpu_hosts(1, 96), WorkerResources(cpus=0.01), (1, 1))
    assert placement.cores == 97
    assert int(96 / placement.task_cpus) == 96


def test_without_a_free_core_there_is_nothing_to_count() -> None:
    with pytest.raises(ValueError, match="no node has a core free"):
        _ = Placement(workers=1, held=(1, 0), free_cpus=(0.0, 0.2)).task_cpus


# --- what a user is told ----------------------------------------------------------------------------------------------


def test_more_gpus_than_exist() -> None:
    text = refusal(gpu_hosts(2), WorkerResources(cpus=1, gpus=1), (4, 8))
    assert "4 workers ask for 4 GPUs (1 each), but the cluster has 2" in text
    assert "workers=2" in text
    assert "add GPU nodes" in text


def test_a_gpu_where_there_is_none() -> None:
    text = refusal(cpu_hosts(8), WorkerResources(cpus=1, gpus=1), (1, 1))
    assert "1 worker asks for 1 GPU" in text
    assert "the cluster has 0" in text
    assert "workers=0" not in text  # no remedy
    assert "use_gpu=False" in text
    assert "use_gpu=False" in text


def test_workers_that_fit_in_sum_but_on_no_node() -> None:
    text = refusal(gpu_hosts(2, cpus=4), WorkerResources(cpus=6, gpus=1), (1, 2))
    assert "2 workers" not in text
    assert "1 worker of 6 CPUs and 1 GPU each" in text
    assert "gpu0: 4 CPUs, 1 GPU, gpu1: 4 CPUs, 1 GPU" in text
    assert "resources_per_worker" in text


def test_workers_that_reserve_every_cpu() -> None:
    # Ray would hang without a word.
    text = refusal(cpu_hosts(2), WorkerResources(cpus=1), (2, 2))
    assert "reserve 2 of the cluster's 2 CPUs" in text
    assert "at least 1 whole core" in text
    assert "fewer workers" in text
    assert "add a CPU node" in text
    assert place_workers(cpu_hosts(2), WorkerResources(cpus=1), (1, 2)).workers == 1


def test_a_higher_floor() -> None:
    assert place_workers(cpu_hosts(4), WorkerResources(cpus=1), (1, 4), cpu_floor=2).workers == 2
    assert "at least 4 whole cores" in refusal(cpu_hosts(4), WorkerResources(cpus=1), (1, 4), floor=4)


def test_an_empty_cluster() -> None:
    assert "no nodes" in refusal([], WorkerResources(cpus=1), (1, 1))


def test_custom_resources_say_on_which_nodes_workers_fit() -> None:
    nodes = (NodeResources(name="a", cpus=4), NodeResources(name="b", cpus=4, others={"slot": 1.0}))
    worker = WorkerResources(cpus=2, others={"slot": 1.0})
    assert place_workers(nodes, worker, (1, 4)) == Placement(workers=1, held=(0, 1), free_cpus=(4.0, 2.0))
    with pytest.raises(
        ConfigError, match=r"2 workers of 2 CPUs and 0 GPUs, 1 slot each cannot fit .*b: 4 CPUs, 0 GPUs, 1 slot"
    ):
        place_workers(nodes, worker, (2, 2))
