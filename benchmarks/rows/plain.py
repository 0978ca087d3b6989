"""Row `plain`: one process, one core, no library in between. It shows what a core can do; the ideal is the sum over all cores."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks import tables, workloads
from benchmarks.rows import protocol


def of_tables(task: protocol.Task) -> Iterator[Mapping[str, Any]]:
    """Batches of rows of Parquet files, as tensors."""
    batches = tables.Batches(task.workload, protocol.folder(task), task.batch_size)
    for batch in batches.of(batches.groups()):
        yield {name: torch.from_numpy(column) for name, column in batch.items()}


def main() -> None:
    task = protocol.parse()
    if task.workload in tables.NAMES:
        protocol.answer(protocol.consume(task, lambda: of_tables(task)))
        return
    workload = workloads.get(task.workload, task.data_folder)
    workload.make(0)  # does the imports of the first sample

    def batches() -> Iterator[Mapping[str, Any]]:
        for start in range(0, task.samples, task.batch_size):
            ids = range(start, min(start + task.batch_size, task.samples))
            yield workloads.stack(workload.make(sample_id) for sample_id in ids)

    protocol.answer(protocol.consume(task, batches))


if __name__ == "__main__":
    main()
