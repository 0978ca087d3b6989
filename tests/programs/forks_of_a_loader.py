"""Run by test_ray_forks.py, in a process of its own: it reads from offload.DataLoader, and forks again and again in the middle of an
iteration. Prints what it saw."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ray
import torch

import offload
from offload.train.cluster.ray_processes import own_processes

SAMPLES, BATCH, ROUNDS = 300, 5, 4
PIXELS = 100_000  # large enough for the object store
EXIT_CODE = 7

held: list[torch.Tensor] = []
"""Batches that lie in the object store, which forks inherit."""


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Pictures of one colour, which is the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((PIXELS,), index, dtype=torch.int32)


def forget(anything: Any = None) -> Any:
    """Drop all that this process holds of Ray's, as a fork does sooner or later."""
    held.clear()
    gc.collect()
    return anything


def forked(work: Callable[[], None]) -> int:
    """The exit code of a fork that does this work, and then ends as the work says."""
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(EXIT_CODE)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_exit_at_once() -> bool:
    def work() -> None:
        forget()
        os._exit(0)

    return forked(work) == 0


def by_exit_in_order() -> bool:
    return forked(forget) == EXIT_CODE


def by_pool() -> bool:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(forget, range(8)) == list(range(8))


def by_loader_of_torch() -> bool:
    theirs = torch.utils.data.DataLoader(
        Pictures(), batch_size=50, num_workers=2, multiprocessing_context="fork", worker_init_fn=forget
    )
    return torch.equal(torch.cat([batch[:, 0] for batch in theirs]), torch.arange(SAMPLES, dtype=torch.int32))


def by_subprocess() -> bool:
    return subprocess.run(["true"], preexec_fn=forget, check=False).returncode == 0


def refusals() -> list[str]:
    """What a fork is told that uses Ray."""
    ours, its = socket.socketpair()
    said: list[str] = []

    def work() -> None:
        uses: list[Callable[[], Any]] = [
            lambda: next(iter(offload.DataLoader(Pictures(), address="local"))),
            lambda: offload.Trainer(print, datasets={"train": [1, 2]}, batch_size=1).fit(
                run_dir="run-of-a-fork", address="local"
            ),
            ray.init,
            lambda: ray.put(1),
        ]
        for use in uses:
            try:
                use()
                said.append("nothing")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        its.sendall(json.dumps(said).encode())

    assert forked(work) == EXIT_CODE
    its.close()
    with ours.makefile() as answer:
        return list(json.load(answer))


def main() -> None:
    """Fork in each way, several times, between batches."""
    ours = offload.DataLoader(Pictures(), batch_size=BATCH, num_workers=2, address="local")
    batches = iter(ours)
    seen: list[torch.Tensor] = []

    def read(count: int) -> None:
        for _ in range(count):
            batch = next(batches)
            held.append(batch)
            seen.append(batch[:, 0].clone())

    read(3)
    ways = [by_exit_at_once, by_exit_in_order, by_pool, by_loader_of_torch, by_subprocess]
    failed = []
    for number in range(ROUNDS):
        for way in ways:
            if not way():
                failed.append(f"{way.__name__} in round {number}")
            read(1)
    said = refusals()
    read(SAMPLES // BATCH - len(seen))
    again = sum(len(batch) for batch in ours)
    ended = [name for name, process in own_processes().items() if process.poll() is not None]
    print(
        json.dumps(
            {
                "failed": failed,
                "exact": torch.equal(torch.cat(seen), torch.arange(SAMPLES, dtype=torch.int32)),
                "again": again,
                "ended": ended,
                "refusals": said,
            }
        )
    )


if __name__ == "__main__":
    main()
