"""Run by test_ray_forks.py, in a process of its own: a run whose training function and whose callback fork. Prints what it saw."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch

import offload

EPOCHS, SAMPLES = 2, 40
EXIT_CODE = 7


class Squares(torch.utils.data.Dataset[int]):
    """Squares, for a loader that nobody ported."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * index


def squares() -> int:
    """The sum that a loader of torch's with forked workers reads."""
    theirs = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    return sum(int(batch.sum()) for batch in theirs)


def ends() -> int:
    """The exit code of a fork that leaves its parent's function as programs end."""
    pid = os.fork()
    if pid == 0:
        sys.exit(EXIT_CODE)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(ctx: offload.Context) -> None:
    """Train, and fork in each epoch."""
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"][:, None]).mean())
            ctx.step()
        ctx.report(squares=float(squares()), ended=float(ends()))


class Forks(offload.Callback):
    """Forks in the middle of the run. One fork outlives it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.pipe = os.pipe()
        self.outlives: int | None = None

    def metrics(self, metrics: Any) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            mapped = pool.map(abs, [-1, 2])
        self.seen.append([mapped, ends()])
        if self.outlives is None:
            self.outlives = os.fork()
            if not self.outlives:
                os.close(self.pipe[1])
                os.read(self.pipe[0], 1)
                os._exit(0)


def main() -> None:
    """Run twice in one directory, while a fork of the first run still lives."""
    rows = [{"x": np.float32(i)} for i in range(SAMPLES)]
    folder = tempfile.mkdtemp()
    forks = Forks()

    def fit() -> dict[str, float]:
        trainer = offload.Trainer(
            train, datasets={"train": offload.from_torch(rows)}, workers=1, batch_size=4, callbacks=[forks]
        )
        return trainer.fit(run_dir=folder, address="local", overwrite=True, quiet=True).metrics

    first = fit()
    parts = forks.seen[:]
    assert forks.outlives is not None
    alive = os.waitpid(forks.outlives, os.WNOHANG) == (0, 0)
    second = fit()
    os.close(forks.pipe[1])
    os.waitpid(forks.outlives, 0)
    print(json.dumps({"metrics": [first, second], "parts": parts, "alive": alive, "after": squares()}))


if __name__ == "__main__":
    main()
