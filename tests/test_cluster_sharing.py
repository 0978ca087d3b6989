"""The policies that the benchmarks of a shared cluster put into published simulators, on a few made-up jobs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import cluster_sharing, cluster_sharing_sia
from benchmarks.cluster_sharing import CORES_PER_GPU, GPUS, POLICIES, Results, fit_error

SHARED_NODES = 2
FITTED = SimpleNamespace(alpha_c=0.05, beta_c=0.01, alpha_n=0.1, beta_n=0.01, alpha_r=0.02, beta_r=0.001, gamma=2.0)


class Application:
    """One that trains 4 to 32 samples at a time, with batches from 32 to 512."""

    name = "made-up"
    init_batch_size, max_batch_size, min_local_bsz, max_local_bsz = 32, 512, 4, 32
    max_epochs = 3

    def get_progress(self, epoch: int) -> float:
        """Steps of the initial batch until the end of an epoch."""
        return 1000.0 * epoch

    def get_throughput(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """Step and synchronisation time."""
        return 0.05 + 0.01 * local, 0.0


def jobs_of(names: list[str]) -> list[Any]:
    return [
        SimpleNamespace(name=name, application=Application(), perf_params=FITTED, grad_params=(1e-3, 0.1), progress=0.0)
        for name in names
    ]


def shared_by(policy: str, names: list[str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    sharing = cluster_sharing.Sharing(None, policy, input_bound=True)
    sharing.cluster = SimpleNamespace(jobs=jobs_of(names))
    infos = {name: SimpleNamespace(max_replicas=8, age=1000.0, num_restarts=0) for name in names}
    placed, _ = sharing.optimize(infos, range(SHARED_NODES), {}, None)
    return placed, sharing.cores


@pytest.mark.parametrize("policy", POLICIES)
def test_no_node_gives_more_than_it_has(policy: str) -> None:
    names = [f"job-{i}" for i in range(5)]
    placed, cores = shared_by(policy, names)
    assert max(Counter(node for nodes in placed.values() for node in nodes).values()) <= GPUS
    assert sum(cores.values()) <= SHARED_NODES * GPUS * CORES_PER_GPU
    assert all(placed[name] for name in names)  # there is a GPU for everybody


def test_cores_go_where_the_input_is_the_limit() -> None:
    # Every second job is input-bound, and needs 2.94 or 2.4 times as many cores as there are for each GPU.
    names = ["job-0", "job-1", "job-4", "job-5"]
    per_gpu = {}
    for policy in POLICIES:
        placed, cores = shared_by(policy, names)
        per_gpu[policy] = {name: cores[name] / len(placed[name]) for name in names}
    assert set(per_gpu["proportional"].values()) == {CORES_PER_GPU}
    for policy in ("tuned", "joint"):
        assert per_gpu[policy]["job-0"] > CORES_PER_GPU > per_gpu[policy]["job-1"]


def test_the_simulators_best_batches_are_searched_once_and_arrays_are_left_alone() -> None:
    asked = []

    class GoodputFunction:
        def __init__(self, perf: Any, grad: Any, initial: int) -> None:
            self._perf_params, self._grad_params, self._init_batch_size = perf, grad, initial

        def optimize(self, num_nodes: Any, num_replicas: Any, largest: int, accumulation: bool = False) -> Any:
            asked.append(num_replicas)
            return num_replicas * self._grad_params[0], largest, accumulation

    cluster_sharing.optimised_once(SimpleNamespace(GoodputFunction=GoodputFunction))
    for noise in (1.0, 1.0, 2.0):
        fitted = GoodputFunction((0.1,), (noise, 1.0), 32)
        assert fitted.optimize(1, 2, 512, accumulation=True) == (2 * noise, 512, True)
    assert asked == [2, 2]
    assert list(fitted.optimize(np.array([1, 1]), np.array([1, 2]), 512)[0]) == [2.0, 4.0]


def test_rows_are_kept_and_not_measured_twice(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    Results(file, ["python", "benchmarks/x.py"], {}).add({"workload": "w-1", "policy": "joint"}, {"average": 2.0})
    again = Results(file, ["python", "benchmarks/x.py"], {})
    assert again.has({"workload": "w-1", "policy": "joint"})
    assert not again.has({"workload": "w-1", "policy": "tuned"})
    again.add({"workload": "w-2", "policy": "joint"}, {"average": 3.0})
    assert [row["average"] for row in json.loads(file.read_text())["rows"]] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("command", "option", "missing"),
    [(cluster_sharing.main, "--pollux", "simulator.py"), (cluster_sharing_sia.main, "--sia", "cluster.py")],
)
def test_a_folder_without_the_simulator_is_refused(tmp_path: Path, command: Any, option: str, missing: str) -> None:
    ended = CliRunner().invoke(command, [option, str(tmp_path)])
    assert ended.exit_code == 1
    assert f"holds no {missing}: give a checkout of" in ended.output


def sia_job(name: str, measured_on: tuple[str, ...]) -> Any:
    kinds = cluster_sharing_sia.KINDS
    return SimpleNamespace(
        name=name,
        applications={kind: Application() for kind in kinds},
        perf_params={kind: FITTED if kind in measured_on else None for kind in kinds},
        grad_params=(1e-3, 0.1) if measured_on else None,
        max_rescale_time=30,
        progress=0.0,
    )


def sia_info(**changes: Any) -> Any:
    kinds = cluster_sharing_sia.KINDS
    speed = dict(zip(kinds, (1.0, 4.0, 2.0), strict=True))
    ratios = {kind: {other: speed[kind] / speed[other] for other in kinds} for kind in kinds}
    values = {"max_replicas": dict.fromkeys(kinds, 8), "age": 1000.0, "num_restarts": 0, "scaling_underway": False}
    return SimpleNamespace(cluster_throughput_ratios=ratios, **values | changes)


@pytest.mark.parametrize("policy", ["joint", "shorter"])
def test_gpus_of_three_types_are_shared_and_who_starts_is_let_start(policy: str) -> None:
    sharing = cluster_sharing_sia.Sharing(policy)
    names = [f"job-{i}" for i in range(40)]
    sharing.cluster = SimpleNamespace(jobs=[sia_job(name, ("rtx",) if i % 3 else ()) for i, name in enumerate(names)])
    infos = {name: sia_info(scaling_underway=name == "job-1") for name in names}
    held = {"job-1": ("aws", [0, 0, 3])}
    placed = sharing.optimize(infos, None, held)
    used = Counter((kind, node) for kind, nodes in placed.values() for node in nodes)
    assert all(count <= cluster_sharing_sia.KINDS[kind][1] for (kind, _), count in used.items() if kind)
    assert placed["job-1"] == held["job-1"]
    assert all(kind for kind, _ in placed.values())
    assert sum(used.values()) == cluster_sharing_sia.GPUS


def test_a_type_without_measurements_is_as_much_faster_as_its_traces_say() -> None:
    job = sia_job("job-0", ("rtx",))
    here, there = (cluster_sharing_sia._step_time(job, sia_info(), kind, ["rtx"]) for kind in ("rtx", "dgx-ext"))
    assert here.predict(1, 4, 8, 1) == pytest.approx(2 * there.predict(1, 4, 8, 1))


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_of_a_fit_is_that_of_its_error(seed: int) -> None:
    draw = np.random.default_rng(seed)
    workers = draw.integers(1, 9, 6) if seed else np.ones(6)
    nodes = np.where(workers > 4, 2.0, 1.0)
    sizes = draw.integers(4, 64, 6).astype(float)
    data = (nodes, workers, sizes, draw.uniform(0.1, 1, 6), draw.uniform(0.2, 2, 6))
    at = np.append(draw.uniform(0.01, 0.2, 6), draw.uniform(1, 9))
    _, slope = fit_error(at, *data)
    near = [[fit_error(at + sign * 1e-6 * (np.arange(7) == i), *data)[0] for sign in (1, -1)] for i in range(7)]
    assert slope == pytest.approx([(above - below) / 2e-6 for above, below in near], rel=1e-4, abs=1e-6)
