"""A training on one machine whose worker, preprocessing or function fails as asked, once.

    python on_one_machine.py FOLDER FAULT [ADDRESS]

It writes a line for each batch to FOLDER/batches: the epoch and the samples. FAULT:

* ``none``
* ``kill``: a preprocessing process dies in the first epoch, and the worker in the second.
* ``raise``: the function raises in the first epoch, and in the next run in the second.
* ``wait``: in the second epoch, the worker makes FOLDER/waits, and waits for FOLDER/go.
* ``resize``: two workers train, then one, then two.

It prints the exit of the run and a checksum of the model.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import offload

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
ADDRESS = sys.argv[3] if len(sys.argv) > 3 else None
SAMPLES, EPOCHS = 96, 3


def once(fault: str, event: str) -> bool:
    """Whether this fault is asked for, and this event of it has not happened."""
    if fault != FAULT:
        return False
    try:
        (FOLDER / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Data(torch.utils.data.Dataset):
    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self.fault = folder, fault

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == SAMPLES // 2 and once("kill", "preprocessing-killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.epochs(EPOCHS):
        for number, (values, indices) in enumerate(ctx.batches("train", "image", "label")):
            if number == 2:
                if epoch == 1 and once("kill", "worker-killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if epoch < 2 and once("raise", f"raised-{epoch}"):
                    raise ValueError("a mistake in the loop")
                if epoch == 1 and once("wait", "waited"):
                    (FOLDER / "waits").touch()
                    while not (FOLDER / "go").exists():
                        time.sleep(0.01)
            with (FOLDER / "batches").open("a") as file:
                file.write(f"{epoch} {' '.join(map(str, indices.tolist()))}\n")
            ctx.backward(model(values).square().mean())
            ctx.step()


if __name__ == "__main__":
    trainer = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Data(FOLDER, FAULT))},
        batch_size=16,
        deterministic=True,
        workers=(1, 2) if FAULT == "resize" else 1,
        adaptation=offload.Adaptation(schedule={0: 2, 1: 1, 2: 2} if FAULT == "resize" else None),
    ).with_workers(cpus_per_worker=0)  # so that two fit where there is one core
    result = trainer.fit(run_dir=FOLDER / "run", address=ADDRESS)
    weights = torch.load(f"{result.checkpoint}/model.pt")
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    print(result.status, "ray" if sys.modules.get("ray") else "no ray", digest, flush=True)
