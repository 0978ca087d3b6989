"""A small training as three scripts: with offload, with a torch DataLoader, and with Ray Train's TorchTrainer.

    python -m benchmarks.jobs.start_and_end KIND MARKS

It appends a line to the file MARKS at each moment that :mod:`benchmarks.startup` compares. Each kind imports only what its script would.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SAMPLES, BATCH, EPOCHS = 208, 16, 2


class Line(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Points near a line."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([number / SAMPLES, 1.0])
        return {"x": x, "y": x[0] * 2 - 1}


def mark(path: str, what: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "at_s": time.monotonic()}) + "\n")


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
    return loss


def dataloader(path: str) -> None:
    """A plain loop over a DataLoader with two processes."""
    mark(path, "fit")
    _plain_loop(path)
    mark(path, "returned")


def _plain_loop(path: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(Line(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if epoch == number == 0:
                mark(path, "first step")
    mark(path, "last step")


def ray_train(path: str) -> None:
    """Ray Train with one worker, which runs the plain loop."""
    import ray
    import ray.train
    import ray.train.torch

    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            lambda: _plain_loop(path),
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(name="run", storage_path=folder),
        )
        mark(path, "fit")
        ray.init(address="local", num_cpus=len(os.sched_getaffinity(0)), log_to_driver=False)
        trainer.fit()
        ray.shutdown()
        mark(path, "returned")


def offloaded(path: str) -> None:
    """offload.Trainer with one worker."""
    import offload

    def train(ctx: Any) -> None:
        model = torch.nn.Linear(2, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        first = True
        for _ in ctx.epochs(EPOCHS):
            for batch in ctx.batches("train"):
                ctx.backward(loss_of(model, batch))
                ctx.step()
                if first:
                    mark(path, "first step")
                first = False
        mark(path, "last step")

    with tempfile.TemporaryDirectory() as folder:
        trainer = offload.Trainer(train, datasets={"train": offload.from_torch(Line())}, workers=1, batch_size=BATCH)
        mark(path, "fit")
        trainer.fit(run_dir=Path(folder, "run"), quiet=True)
        mark(path, "returned")


KINDS = {"dataloader": dataloader, "ray train": ray_train, "offload": offloaded}

if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2])
