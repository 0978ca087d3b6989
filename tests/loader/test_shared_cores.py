"""What else needs the cores on which a DataLoader preprocesses: other tasks of the program, a run, another loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.utils.data as torch_data

import offload
from tests.helpers import end_loaders
from tests.loops import one_epoch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
N = 4000


class Numbers(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> float:
        return float(i)


@pytest.fixture(autouse=True)
def _fresh_loaders() -> Iterator[None]:
    """Loaders that reserve cores anew."""
    end_loaders()
    yield
    end_loaders()


@ray.remote(num_cpus=1)
def doubled(x: int) -> int:
    return 2 * x


def test_a_task_of_the_loop_that_iterates_runs_although_the_loader_has_all_cores() -> None:
    """As a ray.data pipeline does that the loop reads."""
    seen = 0
    for step, batch in enumerate(offload.DataLoader(Numbers(), batch_size=8)):
        seen += len(batch)
        if step == 3:
            assert ray.get([doubled.remote(i) for i in range(3)], timeout=800) == [0, 2, 4]
    assert seen == N


def test_a_run_and_another_loader_find_cores_in_the_middle_of_an_iteration(tmp_path: Path) -> None:
    first = iter(offload.DataLoader(Numbers(), batch_size=8))
    next(first)
    second = iter(offload.DataLoader(Numbers(), batch_size=8, placement="this_node"))
    next(second)
    data = torch_data.TensorDataset(torch.zeros(64, 1))
    trainer = offload.Trainer(
        one_epoch, datasets={"train": offload.from_torch(data, columns=["x"])}, batch_size=16, workers=1
    )
    assert trainer.fit(run_dir=tmp_path / "run", quiet=True).document["samples"] == len(data)
    assert [sum(1 for _ in each) for each in (first, second)] == [N // 8 - 1] * 2
