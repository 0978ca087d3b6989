"""The least that rows of tables cost when another process makes them: the plain loop, a copy into shared memory, and a copy out of it.

    python benchmarks/tables_floor.py --repeats 5

A maker runs the plain loop, and copies its batches into blocks of shared memory that it uses again and again. A reader maps them, and
copies each batch into tensors of its own. There is no object store, no order of a pass and no other process. CPU time counts; the plain
loop runs before and after, in a process of the same kind. What offload takes beyond this floor is its own.

offload's tasks make the same rows, too, in a process without Ray: up to their blocks, which nothing stores. In a run, storing them, the
worker, the hub and Ray's daemons add to that.
"""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import reference, side_by_side, tables
from offload.pipeline.index.rows import Picked, Runs
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import epoch_permutation
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.environment import keep_freed_memory
from offload.pipeline.preprocessing.processing import process

FILES = {"tabular": 8, "text": 4}
BLOCK_BYTES = 64 << 20
BLOCKS = 2
TASK_ROWS = {"tabular": 1 << 19, "text": 1 << 13}  # large ones, as in the steady state of a run
WARM = 4  # row groups that do not count: pages are fresh and imports incomplete
ALIGNED = 64

Layout = list[tuple[str, str, tuple[int, ...], int]]
"""The columns of a batch in a block: name, type, shape, and offset."""


def plain(batches: tables.Batches, connection: Connection) -> None:
    """Run the plain loop, and send its CPU seconds for a row."""
    torch.set_num_threads(1)
    groups, rows, began = batches.groups(), 0, 0.0
    for part in (groups[:WARM], groups[WARM:]):
        began, rows = time.process_time(), 0
        for batch in batches.of(part):
            tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
            rows += len(tensors["label"])
    connection.send((time.process_time() - began) / rows)


def tasks(batches: tables.Batches, connection: Connection) -> None:
    """Make the rows in offload's tasks, and send their CPU seconds for a row. The first task does not count."""
    torch.set_num_threads(1)
    keep_freed_memory()
    pipeline = offload.parquet(batches.folder, tables.TRANSFORMS[batches.name])
    assert pipeline.list is not None
    index = pipeline.list()
    assert isinstance(index.rows, Runs)
    recipe, scratch = pipeline.recipe(index, seed=0).ready(), Scratch()
    order = epoch_permutation(len(index.rows), seed=0, epoch=0, groups=index.rows.groups)
    size, began = TASK_ROWS[batches.name], 0.0
    for start in range(0, len(order), size):
        if start == size:
            began = time.process_time()
        ids = order[start : start + size]
        positions = Ranges(((start, start + len(ids)),))
        process(
            recipe, Picked(ids=ids, source=index.rows, positions=positions, wanted=positions), epoch=0, scratch=scratch
        )
    connection.send((time.process_time() - began) / (len(order) - size))


def make(batches: tables.Batches, connection: Connection, names: list[str]) -> None:
    """Write the batches of the plain loop into blocks, tell the reader about each block, and send the CPU seconds and the rows."""
    torch.set_num_threads(1)
    blocks = [SharedMemory(name) for name in names]
    groups, rows, began, number = batches.groups(), 0, 0.0, 0
    for part, counts in ((groups[:WARM], False), (groups[WARM:], True)):
        began, rows, used = time.process_time(), 0, 0
        layouts: list[Layout] = []
        for batch in batches.of(part):
            if used + sum(column.nbytes + ALIGNED for column in batch.values()) > BLOCK_BYTES:
                number, used, layouts = _pass_on(connection, number, layouts, counts), 0, []
            layout: Layout = []
            for name, column in batch.items():
                np.ndarray(column.shape, column.dtype, blocks[number].buf, used)[:] = column
                layout.append((name, column.dtype.str, column.shape, used))
                used += -(-column.nbytes // ALIGNED) * ALIGNED
            layouts.append(layout)
            rows += len(batch["label"])
        number = _pass_on(connection, number, layouts, counts)
    connection.send((time.process_time() - began, rows))


def _pass_on(connection: Connection, number: int, layouts: list[Layout], counts: bool) -> int:
    """Hand a block to the reader, and return the number of the next one once it is free."""
    connection.send((number, layouts, counts))
    connection.recv()
    return (number + 1) % BLOCKS


def read(connection: Connection, blocks: list[SharedMemory]) -> tuple[float, float]:
    """Copy all batches into tensors; return the CPU seconds of a row in the maker and in this process."""
    torch.set_num_threads(1)
    spent_s = 0.0
    for _ in range(BLOCKS - 1):  # so many blocks may be full at a time
        connection.send(True)
    while len(told := connection.recv()) == 3:
        number, layouts, counts = told
        began = time.process_time()
        for layout in layouts:
            for _, dtype, shape, offset in layout:
                torch.from_numpy(np.ndarray(shape, dtype, blocks[number].buf, offset).copy())
        spent_s += (time.process_time() - began) if counts else 0.0
        connection.send(True)
    maker_s, rows = told
    return maker_s / rows, spent_s / rows


def _alone_s(run: Callable[[tables.Batches, Connection], None], batches: tables.Batches) -> float:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=run, args=(batches, theirs))
    child.start()
    found: float = mine.recv()
    child.join()
    return found


def _floor_s(batches: tables.Batches) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    blocks = [SharedMemory(create=True, size=BLOCK_BYTES) for _ in range(BLOCKS)]
    try:
        child = context.Process(target=make, args=(batches, theirs, [block.name for block in blocks]))
        child.start()
        found = read(mine, blocks)
        child.join()
        return found
    finally:
        for block in blocks:
            block.close()
            block.unlink()


def measure(name: str, repeats: int) -> Mapping[str, Any]:
    """Medians over the repeats, in nanoseconds of CPU time a row."""
    rows = FILES[name] * tables.ROWS_PER_FILE[name]
    batches = tables.Batches(name, tables.files(name, reference.folder_of(name), rows), tables.BATCH_SIZES[name])
    found: list[dict[str, float]] = []
    before = _alone_s(plain, batches)
    for _ in range(repeats):
        maker, reader = _floor_s(batches)
        task = _alone_s(tasks, batches)
        after = _alone_s(plain, batches)
        mean = (before + after) / 2
        found.append(
            {
                "plain": mean * 1e9,
                "maker": maker * 1e9,
                "reader": reader * 1e9,
                "task": task * 1e9,
                "floor_over_plain": (maker + reader) / mean,
                "task_over_plain": task / mean,
            }
        )
        before = after
    return {
        "workload": name,
        **{key: statistics.median(each[key] for each in found) for key in found[0]},
        "repeats": found,
    }


@click.command()
@click.option("--workload", "names", multiple=True, type=click.Choice(tables.NAMES), help="[default: all]")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(names: tuple[str, ...], repeats: int, output: Path | None) -> None:
    """Measure the floor of rows of tables beside the plain loop."""
    result = {
        "rows": [measure(name, repeats) for name in names or tables.NAMES],
        "command": " ".join(
            ["python benchmarks/tables_floor.py", *(f"--workload {name}" for name in names), f"--repeats {repeats}"]
        ),
        "machine": side_by_side.machine(),
        "versions": side_by_side.versions(),
    }
    text = json.dumps(result, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
