"""A `ray.data.Dataset` as a data set of the Trainer: its steps run, and each row is trained once in each epoch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

import offload
from benchmarks.matrix.programs.common import EPOCHS, SAMPLES, expect, model_of, run, trainer, wrong


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    x = batch["id"].astype(np.float32) / 2
    return {"row": batch["id"], "x": np.stack([x, x], axis=1)}


def train(ctx: offload.Context) -> None:
    model, _ = model_of(ctx)
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            line = {"epoch": ctx.epoch, "rows": batch["row"].tolist(), "x": batch["x"][:, 0].tolist()}
            with open(Path(ctx.config["log"]) / f"{ctx.rank}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def program(folder: Path) -> dict[str, Any]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.range(SAMPLES, override_num_blocks=4).map_batches(halves)
    result = trainer(folder, train, datasets={"train": dataset}).fit(run_dir=folder / "run", quiet=True)
    ray.shutdown()
    expect(result.status == "finished", f"the run is {result.status}")
    lines = [json.loads(line) for path in (folder / "log").iterdir() for line in path.read_text().splitlines()]
    for epoch in range(EPOCHS):
        rows = Counter(row for line in lines if line["epoch"] == epoch for row in line["rows"])
        expect(rows == Counter(range(SAMPLES)), f"epoch {epoch} trained {wrong(rows)}")
    expect(
        all(x == row / 2 for line in lines for row, x in zip(line["rows"], line["x"], strict=True)), "x is not row / 2"
    )
    return {"rows": sum(len(line["rows"]) for line in lines)}


if __name__ == "__main__":
    run(program)
