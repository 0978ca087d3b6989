"""`offload.Trainer` with two workers: two epochs, each sample once in each, and a checkpoint at the end."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.matrix.programs.common import expect, expect_each_once, history, run, trainer


def program(folder: Path) -> dict[str, Any]:
    result = trainer(folder, workers=2).fit(run_dir=folder / "run", quiet=True)
    expect(result.status == "finished", f"the run is {result.status}")
    expect({line["workers"] for line in history(folder)} == {2}, "not two workers trained")
    passes = expect_each_once(folder)
    expect(result.checkpoint is not None, "there is no checkpoint")
    state = torch.load(Path(str(result.checkpoint)) / "model.pt", weights_only=True)
    expect(set(state) == {"weight", "bias"}, f"the checkpoint has {sorted(state)}")
    return {"passes": passes}


if __name__ == "__main__":
    run(program)
