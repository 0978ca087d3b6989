"""Numbers of workers and what they reserve, said in place of the script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.errors import ConfigError
from offload.model.placement import NodeResources
from offload.train.config import WorkerOverrides
from offload.train.driver.run import Run


def trainer(**more: Any) -> offload.Trainer:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    return offload.Trainer(lambda ctx: None, datasets={"train": data}, batch_size=4, **more)


def reserved(changed: offload.Trainer, *, gpus: float = 0) -> tuple[float, float]:
    """CPUs and GPUs of a worker, on a node that has so many GPUs."""
    node = NodeResources(name="n", node_id="1", cpus=8, gpus=gpus)
    run: Any = SimpleNamespace(trainer=changed, cluster=SimpleNamespace(whole=(node,)))
    worker = Run._worker_resources(run)
    return worker.cpus, worker.gpus


def test_what_is_not_said_stays_as_the_script_has_it() -> None:
    scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": 3, "slot": 1})
    same = trainer(workers=(2, 5), scaling_config=scaling).with_workers()
    assert same.workers == (2, 5)
    assert reserved(same) == (3, 0)
    assert reserved(trainer().with_workers(max_workers=3), gpus=2) == (0, 1)


@pytest.mark.parametrize(
    ("script", "most", "becomes"),
    [(None, 3, (1, 3)), (4, 2, (2, 2)), (4, 8, (4, 8)), ((2, 6), 4, (2, 4)), ((2, 6), 1, (1, 1)), ((2, 6), 9, (2, 9))],
)
def test_at_most_so_many_workers(script: Any, most: int, becomes: tuple[int, int]) -> None:
    first = trainer(workers=script)
    before = first.workers
    assert first.with_workers(max_workers=most).workers == becomes
    assert first.workers == before  # the script's own is another


@given(st.tuples(st.integers(1, 50), st.integers(0, 50)), st.integers(1, 100))
def test_the_range_is_one_and_ends_where_it_is_said(script: tuple[int, int], most: int) -> None:
    bounds = WorkerOverrides(max_workers=most).bounds((script[0], script[0] + script[1]))
    assert bounds is not None
    assert 1 <= bounds[0] <= bounds[1] == most
    assert bounds[0] <= script[0]


def test_what_a_worker_reserves() -> None:
    on_gpus = trainer(scaling_config=ray.train.ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 3, "GPU": 2}))
    assert reserved(on_gpus, gpus=4) == (3, 2)
    assert reserved(on_gpus.with_workers(cpus_per_worker=2, gpus_per_worker=1), gpus=4) == (2, 1)
    # The process of a GPU shares the cores with preprocessing, as Ray Train's own default has it; that of a CPU keeps one.
    assert reserved(trainer(), gpus=4) == (0, 1)
    assert reserved(trainer(), gpus=0) == (1, 0)
    assert reserved(on_gpus.with_workers(gpus_per_worker=0), gpus=4) == (3, 0)
    # One that says nothing of GPUs goes on taking one where there are any.
    assert reserved(trainer().with_workers(cpus_per_worker=2), gpus=4) == (2, 1)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"max_workers": 0}, "max_workers must be at least 1 .*found 0"),
        ({"cpus_per_worker": -0.5}, "cpus_per_worker must be at least 0 .*found -0.5"),
        ({"cpus_per_worker": float("nan")}, "cpus_per_worker must be a number .*found NaN"),
        (
            {"gpus_per_worker": 1.5},
            "gpus_per_worker must be a whole number, or a share of one GPU such as 0.5, found 1.5",
        ),
        ({"gpus_per_worker": float("inf")}, "found inf"),
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer().with_workers(**numbers)


def test_a_schedule_that_asks_for_more() -> None:
    scheduled = trainer(workers=(1, 4), adaptation=offload.Adaptation(schedule={0: 2, 3: 4}))
    with pytest.raises(
        ConfigError, match=r"the schedule asks for 4 workers in epoch 4, and workers=\(1, 2\) allows 1 to 2"
    ):
        scheduled.with_workers(max_workers=2)
