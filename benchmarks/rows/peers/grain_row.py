"""Row `grain`: Grain's MapDataset with prefetching processes, as its documentation advises for costly Python transforms."""

from pathlib import Path
from typing import Any

import grain

from benchmarks import tables, workloads
from benchmarks.rows import protocol
from benchmarks.rows.peers import common


def of_images(task: protocol.Task) -> Any:
    workload = workloads.get(task.workload, task.data_folder)
    workload.make(0)
    data = grain.MapDataset.range(task.samples).shuffle(seed=0).map(workload.make)
    return data.batch(task.batch_size)


def of_tables(task: protocol.Task) -> Any:
    files = sorted(map(str, Path(protocol.folder(task)).glob("*.parquet")))
    data = grain.experimental.ParquetIterDataset(files)
    return data.batch(task.batch_size, batch_fn=common.Rows(task.workload))


def main() -> None:
    task = protocol.parse()
    workers = grain.MultiprocessingOptions(num_workers=common.cores())
    if task.workload in tables.NAMES:
        data = of_tables(task)
    else:
        # One thread for each process: the transform has the core to itself.
        data = of_images(task).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=task.batch_size))
    common.answer(task, lambda: data.mp_prefetch(workers))


if __name__ == "__main__":
    main()
