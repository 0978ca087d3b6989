"""The real feed on a simulated clock, with links that carry less than the CPU nodes make."""

from __future__ import annotations

import pytest

from benchmarks.model_check import Case
from benchmarks.simulated import Node, World, simulate

SECONDS = 30.0


def case(cpu_nodes: int, *, gbps: float = 10.0, size_bytes: float = 602e3, gpu_nodes: int = 1) -> Case:
    return Case(gpu_nodes, 31, cpu_nodes, 16, gbps, 0.010, size_bytes, workers=2)


@pytest.mark.parametrize(("gbps", "size_bytes"), [pytest.param(10.0, 602e3, marks=pytest.mark.soak), (2.0, 150e3)])
def test_more_cpu_nodes_never_make_training_slower(gbps: float, size_bytes: float) -> None:
    fastest = 0.0
    for cpu_nodes in (0, 1, 2, 4):
        now = case(cpu_nodes, gbps=gbps, size_bytes=size_bytes)
        found = simulate(now.world(SECONDS, ordered=False)).samples_per_s
        assert found > 0.95 * fastest
        assert found == pytest.approx(now.model(), rel=0.05)
        fastest = max(fastest, found)


def test_what_gpu_nodes_make_stays_on_them() -> None:
    found = simulate(case(0, gpu_nodes=3).world(SECONDS, ordered=False))
    assert found.near_share > 0.9


def test_a_pass_of_fixed_order_loses_a_part_and_not_most() -> None:
    now = case(4, gbps=5.0)
    assert simulate(now.world(SECONDS, ordered=True)).samples_per_s > 0.7 * now.model()


@pytest.mark.parametrize(
    ("near_cores", "mbit_per_s", "size_bytes", "core_seconds"),
    [
        (3, 40, 100e3, 0.02),
        (3, 40, 200e3, 0.02),
        (9, 40, 200e3, 0.02),
        (9, 160, 200e3, 0.02),
        (3, 40, 600e3, 0.02),
        (3, 40, 200e3, 0.002),
        (30, 100, 600e3, 0.01),
    ],
)
def test_one_epoch_with_a_cpu_node_takes_no_longer_than_without(
    near_cores: int, mbit_per_s: float, size_bytes: float, core_seconds: float
) -> None:
    """The last block of a slow link must not come after the near cores are done."""

    def seconds(far_cores: int) -> float:
        gpu = Node(name="gpu", cores=near_cores, bytes_per_s=1e9, workers=1)
        cpu = Node(name="cpu", cores=far_cores, bytes_per_s=mbit_per_s * 1e6 / 8)
        world = World(
            nodes=(gpu, cpu) if far_cores else (gpu,),
            core_seconds_per_sample=core_seconds,
            bytes_per_sample=size_bytes,
            samples=int(18 * near_cores / core_seconds),
            epochs=1,
            local_batch_size=20,
        )
        return simulate(world).seconds

    assert seconds(8) < 1.02 * seconds(0)
