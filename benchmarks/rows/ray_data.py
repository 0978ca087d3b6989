"""Rows `ray-data-1-host` and `ray-data-2-hosts`: Ray Data as its guides show it, read by the program that consumes, without Ray Train."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

from benchmarks import workloads
from benchmarks.raw_images import labelled_files
from benchmarks.rows import protocol, ray_script


def dataset(task: protocol.Task) -> ray.data.Dataset:
    if task.workload != "jpeg":
        return ray_script.dataset(task)
    workload = workloads.get("jpeg", task.data_folder)
    files, labels = labelled_files(protocol.folder(task))
    label_of = {Path(file).parent.name: label for file, label in zip(files, labels, strict=True)}

    def transform(row: dict[str, Any]) -> dict[str, Any]:
        label = np.int64(label_of[Path(row["path"]).parent.name])
        return dict(workload.transform({"image": row["image"], "label": label}))

    paths = [files[number % len(files)] for number in range(task.samples)]
    return ray.data.read_images(paths, mode="RGB", include_paths=True).map(transform)


def main() -> None:
    task = protocol.parse()
    ray.init(logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = dataset(task)
    protocol.answer(protocol.consume(task, lambda: data.iter_torch_batches(batch_size=task.batch_size)))


if __name__ == "__main__":
    main()
