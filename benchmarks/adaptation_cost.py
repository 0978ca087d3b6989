"""The cost of adaptation that changes nothing: samples/s with everything on, and the time of a step whose gradient is measured.

    python benchmarks/adaptation_cost.py [--json] [-o benchmarks/results/adaptation_cost.json]

`loop`: two workers train the digits' CNN on a *paced accelerator*, alternately in two ways. One run has a fixed batch and no commits
within epochs. The other has a range of batches that leaves no room for a change, gradient noise, scaled learning rates and commits in the
background.

`noise`: forward, backward and step of ResNet-18 (SGD) and of a small ViT (AdamW) on this machine's CPU. Steps alternate between running
with and without the meter.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ray.train
import timm
import torch
import torchvision
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks.rows.digits import Digits, train
from benchmarks.side_by_side import machine, versions
from offload.train.worker.steps.gradient_noise import EAGER, EVERY, NoiseMeter

BATCH, EPOCHS = 64, 30
ALPHA_S, BETA_S = 0.02, 0.0004
STEPS = 8 * EVERY
IMAGE_SIDE, NOISE_BATCH = 96, 16


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True, help="Repeats of each measurement; medians count.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, as_json: bool, output: Path | None) -> None:
    loops = [(_loop(everything=False), _loop(everything=True)) for _ in range(repeats)]
    document = {
        "loop": {
            "samples_per_s": [pair[0] for pair in loops],
            "samples_per_s_with_everything_on": [pair[1] for pair in loops],
            "cost": 1 - statistics.median(on / off for off, on in loops),
        },
        "noise": {
            name: _noise(make, optimizer, workers, repeats)
            for name, make, optimizer, workers in (
                ("resnet18, one worker", torchvision.models.resnet18, _sgd, 1),
                ("resnet18, several workers", torchvision.models.resnet18, _sgd, 2),
                ("vit_tiny, one worker", _vit, torch.optim.AdamW, 1),
                ("vit_tiny, several workers", _vit, torch.optim.AdamW, 2),
            )
        },
        "accelerator": "paced accelerator",
        "machine": machine(),
        "versions": versions(),
        "command": f"python {' '.join(sys.argv)}",
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
    else:
        Console(stderr=True).print_json(json.dumps({k: document[k] for k in ("loop", "noise")}))


def _loop(*, everything: bool) -> float:
    """Samples/s."""
    batch = offload.BatchSize(initial=BATCH, max=BATCH + 1)
    with tempfile.TemporaryDirectory() as name:
        trainer = offload.Trainer(
            train,
            datasets={"train": offload.from_torch(Digits(0.0))},
            batch_size=batch if everything else BATCH,
            workers=(1, 2) if everything else 2,
            adaptation=offload.Adaptation(interval_s=5.0, schedule={0: 2}),
            checkpoints=offload.Checkpoints(every_epochs=1000, every_s="auto" if everything else None),
            scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
            train_loop_config={
                "model": "cnn", "alpha_s": ALPHA_S, "beta_s": BETA_S, "epochs": EPOCHS, "log": str(Path(name) / "log"),
            },
        )  # fmt: skip
        return float(trainer.fit(run_dir=Path(name) / "run", quiet=True).document["samples_per_s"])


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _vit() -> torch.nn.Module:
    model: torch.nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=IMAGE_SIDE, num_classes=1000)
    return model


def _noise(make: Callable[[], Any], optimizer: Callable[[Any], Any], workers: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a step without the meter and of a measured step, and the meter's share of a run's time."""
    torch.set_num_threads(1)
    net = make().train()
    steps = optimizer(net.parameters())
    images = torch.randn(NOISE_BATCH, 3, IMAGE_SIDE, IMAGE_SIDE)
    labels = torch.randint(0, 1000, (NOISE_BATCH,))
    meter = NoiseMeter([steps], workers)
    plain: list[float] = []
    metered: list[float] = []
    for _ in range(repeats):
        for step in range(STEPS):
            for times, on in ((plain, False), (metered, True)):
                began = time.perf_counter()
                if on:
                    meter.begin(EAGER + step, 1, lambda: 1.0)
                loss: Any = torch.nn.functional.cross_entropy(net(images), labels)
                loss.backward()
                if on:
                    meter.finish(EAGER + step, local_batch_size=NOISE_BATCH, whole=True)
                steps.step()
                steps.zero_grad(set_to_none=True)
                times.append(time.perf_counter() - began)
    # The meter measures one step in EVERY. With one worker, the step before it keeps its gradient.
    cycles = [sum(metered[i : i + EVERY]) / sum(plain[i : i + EVERY]) for i in range(0, len(plain), EVERY)]
    return {
        "step_ms": 1000 * statistics.median(plain),
        "measured_step_ms": 1000 * statistics.median(metered[::EVERY]),
        "cost": statistics.median(cycles) - 1,
    }


if __name__ == "__main__":
    main()
