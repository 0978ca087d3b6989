"""What a task of offload adds to the CPU time of a sample, and what a process of Ray adds to both.

    python benchmarks/task_cost.py [--repeats 9] -o result.json

A plain loop makes samples and stacks them to batches of 64: in a process of its own, and in an actor of Ray. offload makes the same samples
in tasks of 64 and of 640: called in the first process, and as calls of the actor, which then also stores the blocks in Ray's object store.
Every case runs on the machine's last core, one after the other, interleaved. The samples are JPEG files, as in the workload `jpeg`, and
copies of one image, whose CPU time is nearly all offload's. Actors' figures count all threads of their process.
"""

import functools
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa
import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import reference, side_by_side, workloads
from benchmarks.raw_images import IMAGE_SIZE
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.preprocessor import Preprocessor
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.processing import process
from offload.train.cluster.connection import connected

BATCH = 64
TASKS = (64, 640)  # samples of a task
KEPT = 4  # blocks in the object store at a time
SAMPLES = {"jpeg": 2_560, "copies": 25_600}  # of a case: some seconds


class Copies:
    """Copies of one image, as large as those of `jpeg`."""

    def __init__(self) -> None:
        self._image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)

    def make(self, sample_id: int) -> workloads.Sample:
        """A copy."""
        return {"image": self._image.copy(), "label": np.int64(sample_id)}


class Samples(torch.utils.data.Dataset[Any]):
    """The samples of a workload."""

    def __init__(self, workload: Any, samples: int) -> None:
        self.workload, self.samples = workload, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> workloads.Sample:
        sample: workloads.Sample = self.workload.make(number)
        return sample


def plain(data: Samples) -> None:
    """The loop without a library."""
    for start in range(0, len(data), BATCH):
        workloads.stack(data[number] for number in range(start, min(start + BATCH, len(data))))


def on_last_core() -> None:
    """Keep all threads of this process on the machine's last core."""
    last = {max(os.sched_getaffinity(0))}
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), last)


class Measured(Preprocessor):
    """A preprocessing process that also runs the plain loop."""

    def start(self) -> int:
        """Move to the last core. Return the process id."""
        on_last_core()
        return os.getpid()

    def plain(self, data: Samples) -> None:
        """See :func:`plain`."""
        torch.set_num_threads(1)
        plain(data)


class Case:
    """The samples of one workload, made in all ways."""

    def __init__(self, data: Samples, actor: Any, pid: int) -> None:
        self._data, self._actor, self._process = data, actor, psutil.Process(pid)
        pipeline = offload.from_torch(data)
        assert pipeline.list is not None
        self._index = pipeline.list()
        recipe = pipeline.recipe(self._index, seed=0)
        self._packed = PackedRecipe.of(recipe)
        self._recipe, self._scratch = recipe.ready(), Scratch()
        ray.get(actor.warm.remote(self._packed))

    def ways(self) -> dict[str, Callable[[], float]]:
        """Functions that run a pass each, and return the CPU microseconds of a sample."""
        ways = {"plain loop": lambda: self._here(lambda: plain(self._data))}
        for size in TASKS:
            ways[f"tasks of {size}"] = functools.partial(self._here, functools.partial(self._tasks, size))
        ways["plain loop in an actor"] = lambda: self._there(lambda: ray.get(self._actor.plain.remote(self._data)))
        for size in TASKS:
            ways[f"tasks of {size} in an actor"] = functools.partial(self._there, functools.partial(self._calls, size))
        return ways

    def _here(self, run: Callable[[], None]) -> float:
        began = time.process_time()
        run()
        return (time.process_time() - began) / len(self._data) * 1e6

    def _there(self, run: Callable[[], None]) -> float:
        before = self._process.cpu_times()
        run()
        after = self._process.cpu_times()
        return (after.user + after.system - before.user - before.system) / len(self._data) * 1e6

    def _rows(self, size: int) -> list[pa.Table]:
        table, count = self._index.table, len(self._data)
        numbers = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
        return [
            table.take(pa.array(each)).append_column(SAMPLE_ID, [each]).append_column(POSITION, [each])
            for each in numbers
        ]

    def _tasks(self, size: int) -> None:
        for rows in self._rows(size):
            process(self._recipe, rows, epoch=0, scratch=self._scratch)

    def _calls(self, size: int) -> None:
        method = self._actor.process.options(num_returns=2)
        calls: deque[Any] = deque()
        kept: deque[Any] = deque(maxlen=KEPT)
        for rows in self._rows(size):
            calls.append(method.remote(rows, self._packed, 0))
            if len(calls) > 1:  # one waits at the process, as in a run
                kept.append(calls.popleft())
                ray.get(kept[-1][1])
        for _, cost in calls:
            ray.get(cost)


@click.command(help=__doc__)
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(min=1))
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the JPEG files; missing files are made there.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(repeats: int, data: Path | None, output: Path | None) -> None:
    torch.set_num_threads(1)
    photos = workloads.get("jpeg", workloads.jpeg_files(data or reference.folder_of("jpeg")))
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    with connected("local"):
        actor: Any = ray.remote(Measured).options(num_cpus=1).remote()
        pid: int = ray.get(actor.start.remote())
        on_last_core()
        for name, workload in {"jpeg": photos, "copies": Copies()}.items():
            ways = Case(Samples(workload, SAMPLES[name]), actor, pid).ways()
            found: dict[str, list[float]] = {way: [] for way in ways}
            for repeat in range(repeats + 1):
                for way, run in ways.items():
                    took = run()
                    if repeat:  # the first pass of each warms up
                        found[way].append(took)
            base = found["plain loop"]
            figures[name] = {
                way: {
                    "cpu_us_per_sample": statistics.median(took),
                    "over_plain": statistics.median(one / other for one, other in zip(took, base, strict=True)),
                    "range": [min(took), max(took)],
                }
                for way, took in found.items()
            }
            for way, each in figures[name].items():
                print(f"{name}, {way}: {each['cpu_us_per_sample']:,.0f} µs, {each['over_plain']:.3f}", flush=True)
    result = {
        "benchmark": "task_cost",
        "samples": SAMPLES,
        "figures": figures,
        "repeats": repeats,
        "command": f"python benchmarks/task_cost.py --repeats {repeats}",
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
