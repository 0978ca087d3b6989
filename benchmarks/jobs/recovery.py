"""The training of :mod:`benchmarks.recovery`: small steps that leave marks.

    python benchmarks/jobs/recovery.py FOLDER LEAST MOST EPOCHS [EPOCH=WORKERS …]

Each step appends a line to FOLDER/marks.jsonl: the rank, its process, and when the step ended. With a schedule, the number of workers
follows it. The file FOLDER/fit holds the time at which fit() was called. The training ends early once FOLDER/done exists.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import offload

SAMPLES, BATCH, STEP_S = 256, 16, 0.05


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Points near a line."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([number / SAMPLES, 1.0])}


def train(ctx: Any) -> None:
    folder = Path(ctx.config["folder"])
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            time.sleep(STEP_S)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
            mark = {"rank": ctx.rank, "process": f"{socket.gethostname()}:{os.getpid()}", "at_s": time.monotonic()}
            with open(folder / "marks.jsonl", "a", encoding="utf-8") as marks:
                marks.write(json.dumps(mark) + "\n")
        if ctx.sum(float((folder / "done").exists())):  # whoever has seen it: all end together
            return


def main() -> None:
    folder, least, most, epochs = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    entries = {int(epoch): int(workers) for epoch, workers in (entry.split("=") for entry in sys.argv[5:])}
    trainer = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Points())},
        batch_size=BATCH,
        workers=(least, most),
        adaptation=offload.Adaptation(schedule=entries) if entries else None,
        checkpoints=offload.Checkpoints(every_s=0.5),
        # A host has room for one worker, so that each host holds one.
        scaling_config=_one_per_host(),
        train_loop_config={"folder": str(folder), "epochs": epochs},
    )
    (folder / "fit").write_text(str(time.monotonic()))
    trainer.fit(run_dir=folder / "run", address="auto", quiet=True)


def _one_per_host() -> Any:
    import ray.train

    return ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5, "place": 1})


if __name__ == "__main__":
    main()
