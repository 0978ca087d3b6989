"""What the programs share: a training that writes down which samples it trained, and the check that each came once."""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import offload
from tests.emulation.history import each_pass, log_batch, read_history

SAMPLES, BATCH, EPOCHS = 96, 8, 2
CPUS_PER_WORKER = 0.5
"""Two workers and the preprocessing of two cores fit beside each other."""
TRAINED_AT_MOST = 500  # epochs, for a run that something else ends


class Failed(Exception):
    """The outcome is not the expected one."""


def expect(condition: bool, words: str) -> None:
    if not condition:
        raise Failed(words)


def model_of(ctx: offload.Context) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    prepared: tuple[torch.nn.Module, torch.optim.Optimizer] = ctx.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.02)
    )
    return prepared


def train(ctx: offload.Context) -> None:
    """Train, and write down which samples, by attempt and rank. ``ctx.config["at"]``: a function that hears of each step."""
    model, _ = model_of(ctx)
    at_step: Callable[[offload.Context], None] | None = ctx.config.get("at_step")
    for _ in ctx.epochs(ctx.config.get("epochs", EPOCHS)):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]), ctx.config.get("driver", 0))
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
            if at_step is not None:
                at_step(ctx)


def trainer(folder: Path, train: Callable[[offload.Context], None] = train, **settings: Any) -> offload.Trainer:
    """A trainer on SAMPLES numbers, whose workers write down what they trained in a folder of ``folder``."""
    from tests.emulation.numbers import Numbers

    os.environ.setdefault("RAY_ADDRESS", "local")  # the matrix is about releases of Ray
    log = folder / "log"
    log.mkdir(exist_ok=True)
    config: Mapping[str, Any] = {"log": str(log), **settings.pop("config", {})}
    made = offload.Trainer(
        train,
        datasets=settings.pop("datasets", None) or {"train": offload.from_torch(Numbers(SAMPLES))},
        batch_size=BATCH,
        train_loop_config=config,
        **settings,
    )
    return made.with_workers(cpus_per_worker=CPUS_PER_WORKER)


def history(folder: Path) -> list[dict[str, Any]]:
    return read_history(folder / "log")


def expect_each_once(folder: Path, epochs: int | None = EPOCHS) -> int:
    """Check that each pass trained each sample exactly once. Returns the number of passes, ``epochs`` if that is given."""
    passes = each_pass(history(folder))
    expect(epochs is None or len(passes) == epochs, f"{len(passes)} passes were trained, of {epochs}")
    for epoch, counts in passes.items():
        expect(counts == Counter(range(SAMPLES)), f"pass {epoch} trained {wrong(counts)}")
    return len(passes)


def wrong(counts: Counter[int]) -> str:
    missing = sorted(set(range(SAMPLES)) - counts.keys())
    again = sorted(sample for sample, count in counts.items() if count > 1)
    return f"never: {missing}, more than once: {again}"


def run(program: Callable[[Path], Mapping[str, Any]]) -> None:
    """Run a program in a folder of its own, and print its outcome."""
    with tempfile.TemporaryDirectory(prefix="m-", dir=os.environ.get("TMPDIR")) as name:
        try:
            outcome = program(Path(name))
        except Failed as reason:
            sys.exit(f"{type(reason).__name__}: {reason}")
    print(json.dumps({"outcome": "as expected", **outcome}), flush=True)
