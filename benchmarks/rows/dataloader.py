"""Row `dataloader-1-host`: torch's DataLoader as its documentation shows it, one worker process per core."""

import os

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import workloads
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


def main() -> None:
    task = protocol.parse()
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
