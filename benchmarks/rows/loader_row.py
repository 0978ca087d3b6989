"""Rows `loader-1-host` and `loader-2-hosts`: offload.DataLoader in the place of torch's, on the same samples as every row."""

import torch

import offload
from benchmarks.rows import protocol
from benchmarks.rows.dataloader import Samples


def main() -> None:
    task = protocol.parse()
    torch.set_num_threads(1)
    loader = offload.DataLoader(Samples(task), batch_size=task.batch_size)
    protocol.answer(protocol.consume(task, lambda: loader))


if __name__ == "__main__":
    main()
