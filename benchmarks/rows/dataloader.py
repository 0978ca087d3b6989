"""Row `dataloader-1-host`: torch's DataLoader as its documentation shows it, one worker process per core."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks import tables, workloads
from benchmarks.rows import protocol


class Samples(Dataset[workloads.Sample]):
    """Map-style data set over the workload's ids."""

    def __init__(self, task: protocol.Task) -> None:
        self._samples = task.samples
        self._workload = workloads.get(task.workload, task.data_folder)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> workloads.Sample:
        return self._workload.make(index)


class OfTables(IterableDataset[Mapping[str, Any]]):
    """Ready-made batches; each worker process reads its own row groups."""

    def __init__(self, task: protocol.Task) -> None:
        self._batches = tables.Batches(task.workload, protocol.folder(task), task.batch_size)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        worker = get_worker_info()
        groups = self._batches.groups()
        for batch in self._batches.of(groups if worker is None else groups[worker.id :: worker.num_workers]):
            yield {name: torch.from_numpy(column) for name, column in batch.items()}


def main() -> None:
    task = protocol.parse()
    if task.workload in tables.NAMES:
        torch.set_num_threads(1)
        cores = len(os.sched_getaffinity(0))
        batches = DataLoader(OfTables(task), batch_size=None, num_workers=cores, multiprocessing_context="spawn")
        protocol.answer(protocol.consume(task, lambda: batches))
        return
    samples = Samples(task)
    samples[0]
    torch.set_num_threads(1)
    loader = DataLoader(
        samples,
        batch_size=task.batch_size,
        num_workers=len(os.sched_getaffinity(0)),
        # Start workers afresh, as every other row does, and as a training process with CUDA must.
        multiprocessing_context="spawn",
    )
    protocol.answer(protocol.consume(task, lambda: loader))


if __name__ == "__main__":
    main()
