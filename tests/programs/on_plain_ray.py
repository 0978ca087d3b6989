"""A DataLoader and a ray.data.Dataset on whatever this Ray offers: prints what came out, and which parts of Ray were in use.

    python -m tests.programs.on_plain_ray

tests/ray_private runs it with all parts left out; run by hand, it says whether offload works with another release of Ray.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from torch.utils.data import Dataset

import offload
from offload.pipeline.blocks import wire
from offload.pipeline.feed.datasets import Cores
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.pool.pool import Pool
from offload.pipeline.raydata.dataset_source import units_of
from offload.ray_private.parts import found_parts
from offload.train.driver.listed import Listed

SAMPLES, ROWS = 50, 200


class Squares(Dataset[Any]):
    """The squares of the first numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class Failing(Squares):
    """One of its samples is broken."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == SAMPLES // 2:
            raise ValueError("broken")
        return super().__getitem__(index)


def loaded() -> list[list[int]]:
    """The numbers of two epochs of a loader."""
    loader: Any = offload.DataLoader(Squares(), batch_size=8, num_workers=2, address="local")
    return [[int(number) for batch in loader for number in batch] for _ in range(2)]


def failure() -> str:
    """What a loader says of a sample that raises."""
    try:
        list(offload.DataLoader(Failing(), batch_size=8, num_workers=2, address="local"))
    except Exception as error:
        return str(error)
    return ""


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """The step of the Dataset."""
    return {"id": batch["id"], "twice": 2 * batch["id"]}


def preprocessed() -> tuple[str | None, list[int]]:
    """(why Ray Data executes the Dataset, if it does; the numbers of one pass over it)"""
    dataset = ray.data.range(ROWS, override_num_blocks=4).map_batches(doubled)
    units = units_of(dataset)
    executed = isinstance(units, str)
    pipeline = offload.from_ray(dataset, id_column="id")
    listed = Listed(
        name="train",
        pipeline=pipeline,
        index=None,
        units=None if isinstance(units, str) else units,
        shuffle=not executed,
    )
    node = ray.get_runtime_context().get_node_id()
    cores = Cores(nodes=(node,), task_cpus=1.0, stores={node: 1e9})
    feed = Feed({"train": listed.stream(seed=1, put=ray.put)}, cores, pool=Pool)
    key = PassKey(attempt=1, name="train", number=0)
    feed.begin(1)
    feed.open(key, PassRequest(world_size=1, first_rows=16, epoch=0), 0)
    numbers: list[int] = []
    over = False
    while not over:
        pieces, over = feed.next_slices(key, 0, want=4)
        for piece in pieces:
            columns = wire.decode(ray.get(piece.ref).slice(piece.start, piece.stop - piece.start))
            numbers += np.asarray(columns["twice"]).tolist()
    feed.leave(key, 0)
    feed.reshape((), {}, 60.0)
    return (units if isinstance(units, str) else None), sorted(numbers)


def main() -> None:
    """Print one line of JSON."""
    sigterm = signal.getsignal(signal.SIGTERM)
    loads, says = loaded(), failure()
    parts = found_parts()
    document = {
        "ray": ray.__version__,
        "parts": {part.name: part.active for part in parts},
        "loaded": loads,
        "failure": says,
        "sigterm_is_kept": signal.getsignal(signal.SIGTERM) is sigterm,
    }
    reason, numbers = preprocessed()
    print(json.dumps({**document, "executed_since": reason, "numbers": numbers, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main()
