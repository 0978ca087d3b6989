"""One side of the demo's comparison, as a program: a loop over a DataLoader, torch's or offload's, which notes when batches come.

``python -m offload.cli.demo.side torch|offload IMAGES SECONDS ALL_CORES CORES FILE`` writes a JSON document to FILE. Its process and those
of its loader use the first CORES of the CPUs in ALL_CORES (``0,1``). The loop, the data set and the step are the same for both loaders.
The one with torch's loader first measures what the model needs to predict the other: what an image costs while all cores work.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from offload.cli.demo.workload import BATCH_SIZE, training_step, training_transform
from offload.machine import core_wait_s
from offload.paced import PacedAccelerator

PACED_IMAGES_PER_S = 5000.0  # far above what a few cores preprocess, as a GPU is
ENDLESS = 1_000_000_000  # samples of an epoch: the loop ends by time, before an epoch would
COSTS_S = 2.0  # enough for dozens of batches of each core
STEPS = 5

Step = Callable[[Any, Any], None]


def main(loader: str, images: str, seconds: str, all_cores: str, cores: str, file: str) -> None:
    """Run the loop, and write its measurements."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an exception, so that those which it has started end too
    every, used = list(map(int, all_cores.split(","))), int(cores)
    costly = loader == "torch"
    # Before torch starts threads, which keep the cores of their start.
    os.sched_setaffinity(0, every if costly else every[:used])
    device, step = accelerator()
    document: dict[str, Any] = {"device": device}
    if costly:
        document["costs"] = measured_costs(Path(images), step, workers=len(every))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), every[:used])
    document |= measured(batches(loader, Path(images), used), step, float(seconds))
    part = Path(f"{file}.part")
    part.write_text(json.dumps(document))
    part.replace(file)


def accelerator() -> tuple[str, Step]:
    """A name, and a step of training on the GPU; without one, on a paced accelerator."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), training_step(torch.device("cuda"))
    paced = PacedAccelerator(0.0, 1 / PACED_IMAGES_PER_S)
    return f"{paced.name} of {PACED_IMAGES_PER_S:,.0f} images/s", lambda images, labels: paced.step(len(images))


def batches(loader: str, images: Path, workers: int, collate_fn: Callable[[Any], Any] | None = None) -> Iterable[Any]:
    """The batches of one of the two loaders."""
    import torch.utils.data
    from torchvision.datasets import ImageFolder

    import offload

    data = ImageFolder(str(images), training_transform())
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=ENDLESS)
    loader_class = torch.utils.data.DataLoader if loader == "torch" else offload.DataLoader
    return loader_class(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=workers, collate_fn=collate_fn)


def measured(
    batches: Iterable[Any],
    step: Step,
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


def measured_costs(images: Path, step: Step, *, workers: int, seconds: float = COSTS_S) -> dict[str, float]:
    """What the model needs, from torch's loader with a worker on every core: ``core_seconds_per_sample``, CPU time of the workers;
    ``core_share``, the share of a core that each of them gets beside this loop and other programs; ``step_s_per_sample``;
    ``batch_size``."""
    used: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    began = 0.0
    batch: tuple[Any, Any] | None = None
    for loaded, (worker, cpu_s, wait_s) in batches("torch", images, workers, collate_and_tell):
        used[worker].append((cpu_s, wait_s))
        if batch is None:
            batch, began = loaded, time.monotonic()
        elif time.monotonic() - began >= seconds and min(map(len, used.values())) > 1:
            break
    assert batch is not None
    # From the first batch of each worker on: what came before is its start.
    cpu_s, wait_s = (sum(told[-1][clock] - told[0][clock] for told in used.values()) for clock in (0, 1))
    made = sum(len(told) - 1 for told in used.values()) * BATCH_SIZE
    steps = []
    for _ in range(STEPS):
        at = time.monotonic()
        step(*batch)
        steps.append(time.monotonic() - at)
    return {
        "core_seconds_per_sample": cpu_s / made,
        "core_share": cpu_s / (cpu_s + wait_s) if math.isfinite(wait_s) else 1.0,
        "step_s_per_sample": statistics.median(steps) / BATCH_SIZE,
        "batch_size": BATCH_SIZE,
    }


def collate_and_tell(samples: list[Any]) -> tuple[Any, tuple[int, float, float]]:
    """A batch, with the worker that made it, and the seconds for which this one has used a core and waited for one so far."""
    import torch.utils.data

    info = torch.utils.data.get_worker_info()
    assert info is not None
    return torch.utils.data.default_collate(samples), (info.id, time.process_time(), core_wait_s())


if __name__ == "__main__":
    main(*sys.argv[1:])
