"""Row `spdl`: SPDL's pipeline, as its guide shows it: stages in threads of one process, here on the same functions as the plain loop."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from spdl.pipeline import Pipeline, PipelineBuilder

from benchmarks import tables, workloads
from benchmarks.rows import protocol
from benchmarks.rows.peers import common


def of_images(task: protocol.Task) -> Pipeline[Any]:
    workload = workloads.get(task.workload, task.data_folder)
    workload.make(0)
    builder = PipelineBuilder().add_source(range(task.samples))
    builder = builder.pipe(workload.make, concurrency=common.cores())
    return builder.aggregate(task.batch_size).pipe(workloads.stack).add_sink(3).build(num_threads=common.cores())


def of_tables(task: protocol.Task) -> Pipeline[Any]:
    batches = tables.Batches(task.workload, protocol.folder(task), task.batch_size)

    def of_group(group: tuple[Path, int]) -> Iterator[Mapping[str, Any]]:
        yield from batches.of([group])  # SPDL iterates over what a generator function yields

    builder = PipelineBuilder().add_source(batches.groups()).pipe(of_group, concurrency=common.cores())
    return builder.add_sink(3).build(num_threads=common.cores())


def main() -> None:
    task = protocol.parse()
    pipeline = of_tables(task) if task.workload in tables.NAMES else of_images(task)

    def batches() -> Iterator[Mapping[str, Any]]:
        with pipeline.auto_stop():
            for batch in pipeline:
                yield {name: torch.from_numpy(column) for name, column in batch.items()}

    common.answer(task, batches)


if __name__ == "__main__":
    main()
