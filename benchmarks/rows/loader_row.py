"""Rows `loader-1-host` and `loader-2-hosts`: offload.DataLoader in the place of torch's, on the same samples as every row."""

import logging
from typing import Any

import ray
import torch

import offload
from benchmarks import tables
from benchmarks.rows import protocol
from benchmarks.rows.dataloader import OfTables, Samples


def main() -> None:
    task = protocol.parse()
    torch.set_num_threads(1)
    if task.workload in tables.NAMES:
        ray.init(address="auto", logging_level=logging.ERROR)
        cores = int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]
        loader: Any = offload.DataLoader(OfTables(task), batch_size=None, num_workers=cores)
    else:
        loader = offload.DataLoader(Samples(task), batch_size=task.batch_size)
    protocol.answer(protocol.consume(task, lambda: loader))


if __name__ == "__main__":
    main()
