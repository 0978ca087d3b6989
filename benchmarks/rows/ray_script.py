"""Rows `ray-1-host` and `ray-2-hosts`: the straightforward Ray script of the reference article, on today's API.

`ray.data.range` → `map_batches(synthetic)` → `map_batches(transform)` → `TorchTrainer` with `iter_torch_batches`.
Ray has since replaced the article's BatchMapper and Chain with `map_batches`. Nothing is tuned.
"""

import logging
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks import tables, workloads
from benchmarks.rows import protocol

Batch = dict[str, np.ndarray[Any, Any]]

# A custom resource that only the host with the (stand-in for a) GPU has, in place of {"GPU": 1}. The worker requests no CPU:
# on a host with one core, any fraction for the worker would leave less than the one CPU that a preprocessing task requests,
# and Ray Data would wait forever.
TRAIN_RESOURCE = "train_host"


def dataset(task: protocol.Task) -> ray.data.Dataset:
    if task.workload in tables.NAMES:
        rows = ray.data.read_parquet(str(protocol.folder(task)))
        return rows.map_batches(tables.TRANSFORMS[task.workload], batch_size=task.batch_size)
    workload = workloads.get(task.workload, task.data_folder)

    def synthetic(batch: Batch) -> Batch:
        return workloads.stack(workload.load(int(sample_id)) for sample_id in batch["id"])

    def transform(batch: Batch) -> Batch:
        rows = ({key: column[row] for key, column in batch.items()} for row in range(len(batch["label"])))
        return workloads.stack(workload.transform(row) for row in rows)

    def decode_and_augment(batch: Batch) -> Batch:
        return workloads.stack(workload.make(int(sample_id)) for sample_id in batch["id"])

    if task.workload == "jpeg":  # decoded images differ in size, so both steps go into one function
        return ray.data.range(task.samples).map_batches(decode_and_augment, batch_size=task.batch_size)
    # One block per batch. By default Ray makes two tasks per CPU that yield blocks of 128 MB, which hold 850 uint8 images. A core
    # takes half a minute to blur such a block. Then a short run has no steady state, and a long one begins with half a minute
    # without batches. So this setting favours Ray.
    ids = ray.data.range(task.samples, override_num_blocks=task.samples // task.batch_size)
    return ids.map_batches(synthetic, batch_size=task.batch_size).map_batches(transform, batch_size=task.batch_size)


def train_loop_per_worker(config: dict[str, Any]) -> protocol.Result:
    task = protocol.Task(**config["task"])
    shard = ray.train.get_dataset_shard("train")
    result = protocol.consume(task, lambda: shard.iter_torch_batches(batch_size=task.batch_size))
    # Counted from fit(), including the start of the training worker. All processes of the machine share this clock.
    return replace(result, extra={"fit_to_first_batch_s": result.first_batch_at_s - config["launched"]})


def main() -> None:
    task = protocol.parse()
    ray.init(logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    trainer = TorchTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # Train v2 accepts a return value, but its annotation does not
        train_loop_config={"task": asdict(task), "launched": time.monotonic()},
        datasets={"train": dataset(task)},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={TRAIN_RESOURCE: 1}),
    )
    result = trainer.fit().return_value  # type: ignore[attr-defined]  # Train v2's Result, the default at run time
    assert isinstance(result, protocol.Result)
    protocol.answer(result)


if __name__ == "__main__":
    main()
