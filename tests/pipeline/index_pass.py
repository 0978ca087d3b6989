"""A pass over an indexed source, whose tasks run in this process."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np

from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.feed.datasets import FeedDataset
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.passes import Pass, PassKey, PassRequest
from offload.pipeline.feed.tasks import IndexTasks
from offload.pipeline.index.source import Index
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.preprocessing.watchdog import NoReports, Watch


def listed(pipeline: Pipeline) -> Index:
    assert pipeline.list is not None
    return pipeline.list()


def stream_of(pipeline: Pipeline, *, seed: int = 7, shuffle: bool = True) -> FeedDataset:
    index = listed(pipeline)
    recipe: Any = pipeline.recipe(index, seed=seed)
    return FeedDataset(
        recipe=recipe, rows=index.rows, groups=index.groups, draws=index.draws, shuffle=shuffle, seed=seed
    )


class Ref:
    def hex(self) -> str:
        return str(id(self))


def a_pass(stream: FeedDataset, *, epoch: int = 0, done: Any = (), first_rows: int = 8) -> dict[int, dict[str, Any]]:
    """All rows that the tasks of a pass return, by their position."""
    request = PassRequest(world_size=1, first_rows=first_rows, epoch=epoch, done=tuple(done))
    assert stream.samples is not None
    assert stream.rows is not None
    visit = Pass(PassKey(attempt=1, name="train", number=epoch), request, stream.samples - len(Ranges(request.done)))
    cores: Any = lambda: _Cores()  # noqa: E731
    tasks = IndexTasks(stream, stream.rows, visit, Meter(lambda: Counter()), cores)
    rows: dict[int, dict[str, Any]] = {}
    while (assignment := tasks.next_task("node")) is not None:
        task = assignment.task
        recipe = cast(Any, task.recipe)
        if isinstance(recipe, Recipe):
            block = process(recipe, task.rows, epoch=task.epoch)
        else:
            block = recipe.process(task.rows, epoch=task.epoch, scratch=Scratch(), watch=Watch(NoReports()))
        cost = Cost(rows=block.num_rows, size_bytes=block.nbytes, cpu_s=0.1, wall_s=0.1)
        assignment.finished(Block(ref=cast(Any, Ref()), cost=cost))
        columns = wire.decode(block)
        for i, position in enumerate(np.asarray(columns[POSITION]).tolist()):
            assert position not in rows, "each position once"
            rows[position] = {name: column[i] for name, column in columns.items()}
    return rows


class _Cores:
    cores, store_bytes, stores, by_node = 2, 1e9, {"node": 1e9}, Counter({"node": 2})
