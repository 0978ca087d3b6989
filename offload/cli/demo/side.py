"""One side of the demo's comparison, as a program: a loop over a DataLoader, torch's or offload's, which notes when batches come.

``python -m offload.cli.demo.side torch|offload IMAGES SECONDS WORKERS CORES FILE`` writes a JSON document to FILE. Its process and
those of torch's loader use the CPUs of CORES (``0,1``) alone. The loop, the data set and the step are the same for both loaders.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from offload.cli.demo.workload import BATCH_SIZE, training_step, training_transform
from offload.paced import PacedAccelerator

PACED_IMAGES_PER_S = 5000.0  # far above what a few cores preprocess, as a GPU is
ENDLESS = 1_000_000_000  # samples of an epoch: the loop ends by time, before an epoch would


def main(loader: str, images: str, seconds: str, workers: str, cores: str, file: str) -> None:
    """Run the loop, and write its measurements."""
    os.sched_setaffinity(0, set(map(int, cores.split(","))))  # before torch starts threads
    from offload.loader.job.session import end_unused

    device, step = accelerator()
    measurements = measured(batches(loader, Path(images), int(workers)), step, float(seconds))
    part = Path(f"{file}.part")
    part.write_text(json.dumps({"device": device, **measurements}))
    part.replace(file)
    end_unused()  # the loop left its loader in the middle of an epoch


def accelerator() -> tuple[str, Callable[[Any, Any], None]]:
    """A name, and a step of training on the GPU; without one, on a paced accelerator."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), training_step(torch.device("cuda"))
    paced = PacedAccelerator(0.0, 1 / PACED_IMAGES_PER_S)
    return f"{paced.name}, {PACED_IMAGES_PER_S:,.0f} images/s", lambda images, labels: paced.step(len(images))


def batches(loader: str, images: Path, workers: int) -> Iterable[Any]:
    """The batches of one of the two loaders."""
    import torch.utils.data
    from torchvision.datasets import ImageFolder

    import offload

    data = ImageFolder(str(images), training_transform())
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=ENDLESS)
    loader_class = torch.utils.data.DataLoader if loader == "torch" else offload.DataLoader
    return loader_class(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=workers)


def measured(
    batches: Iterable[Any],
    step: Callable[[Any, Any], None],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Take batches until ``seconds`` after the first: ``at``, the seconds after each further step; ``samples``, the samples of each
    such step; ``waited_s``, the time without a batch."""
    at: list[float] = []
    samples: list[int] = []
    waited_s, began, free = 0.0, 0.0, 0.0
    for number, (images, labels) in enumerate(batches):
        waited_s += clock() - free if number else 0.0
        step(images, labels)
        free = clock()
        if not number:  # the start of workers is not the loop
            began = free
            continue
        at.append(free - began)
        samples.append(len(images))
        if at[-1] >= seconds:
            break
    return {"at": at, "samples": samples, "waited_s": waited_s}


if __name__ == "__main__":
    main(*sys.argv[1:])
