"""A Trainer in a script that torchrun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.train.driver.torchrun import check_alone

SCRIPT = """
import torch
import offload

def train(ctx):
    model = torch.nn.Linear(4, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["image"]).mean())
            ctx.step()

samples = [(torch.zeros(4), 0)] * 64
result = offload.Trainer(train, datasets={"train": offload.from_torch(samples)}, batch_size=16).fit(run_dir="run", quiet=True)
print("trained", result.document["samples"])
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_script_that_torchrun_started_trains(tmp_path: Path) -> None:
    """Its workers do not wait at the store of torchrun."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 64" in done.stdout


def test_several_processes_of_a_script_are_refused() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
    with pytest.raises(
        ConfigError, match=r"torchrun has started 2 processes of this script.*Start the script with python"
    ):
        check_alone({**torchrun, "WORLD_SIZE": "2"})
    check_alone({**torchrun, "WORLD_SIZE": "1"})
    check_alone({"WORLD_SIZE": "2", "RANK": "0"})  # such as of a worker of Ray Train
