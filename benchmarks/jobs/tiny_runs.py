"""Trains on 203 samples several times in one process. Prints a line of JSON after each run, with its seconds."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import offload
from offload.train.cluster.connection import connected
from tests.emulation.numbers import Line


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for _ in ctx.epochs(2):
        for batch in ctx.batches("train"):
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)
    sys.stdin.readline()  # until the CPU time so far was read


def main(runs: int) -> None:
    began = time.monotonic()
    with connected("local"), tempfile.TemporaryDirectory() as folder:
        tell(what="Ray started", seconds=time.monotonic() - began)
        for number in range(runs):
            began = time.monotonic()
            trainer = offload.Trainer(
                train, datasets={"train": offload.from_torch(Line(203, noise=1.0))}, workers=1, batch_size=16
            )
            result = trainer.fit(run_dir=Path(folder, str(number)), quiet=True)
            assert result.document["samples"] == 2 * 203
            tell(what="run", seconds=time.monotonic() - began, first_batch_s=result.document["first_batch_s"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
