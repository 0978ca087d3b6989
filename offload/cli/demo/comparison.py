"""The demo's comparison: the same loop with torch's DataLoader on the GPU host's share of this machine's cores, then offloaded to all.

It emulates two hosts with one: some cores stand for the GPU host, the rest for a CPU host beside it. The model predicts the offloaded rate
before that loop runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offload.errors import RunError
from offload.formatting import count, figure
from offload.machine import usable_cores
from offload.model.catalog import NodeType, Shape
from offload.model.goodput import JointGoodput
from offload.model.input_rate import InputRate
from offload.model.step_time import StepTime

SECONDS = 5.0  # duration of each loop
DEADLINE_S = 180.0
END_S = 10.0  # for a loop's process to end after a signal, with those that it has started
HOST_SHARE = 4  # an ml.g5.xlarge has 4 of the 20 vCPUs of itself and an ml.c5.4xlarge


@dataclass(frozen=True, kw_only=True)
class Side:
    """The loop with one loader: its ``cores``, and per step the seconds since the first batch and the samples."""

    name: str
    cores: int
    device: str
    at: list[float]
    samples: list[int]
    waited_s: float

    @property
    def samples_per_s(self) -> float:
        """The mean rate after the first batch."""
        return sum(self.samples) / self.at[-1]

    @property
    def stall(self) -> float:
        """The share of the time in which the loop waited for a batch."""
        return self.waited_s / self.at[-1]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both loops, and the rate that the model predicted for the second one before it ran.

    ``core_share``: the share of a core that a process got while all cores preprocessed. Other programs had the rest.
    """

    alone: Side
    offloaded: Side
    predicted_samples_per_s: float
    core_share: float

    @property
    def gain(self) -> float:
        """The rate of the second loop over that of the first."""
        return self.offloaded.samples_per_s / self.alone.samples_per_s

    def document(self) -> dict[str, Any]:
        """The comparison as numbers: rates in images/s, stalls as shares of the time."""
        sides = [
            {
                "loader": side.name,
                "cores": side.cores,
                "samples_per_s": side.samples_per_s,
                "stall": side.stall,
                "seconds": side.at[-1],
                "predicted_samples_per_s": self.predicted_samples_per_s if side is self.offloaded else None,
            }
            for side in (self.alone, self.offloaded)
        ]
        return {"device": self.alone.device, "emulated": True, "core_share": self.core_share, "sides": sides}


def host_cores(cores: int) -> int:
    """The cores that stand for the GPU host: a quarter, at least one."""
    return max(cores // HOST_SHARE, 1)


def compare(images: Path, console: Console, *, seconds: float = SECONDS) -> Comparison | None:
    """Run the loop with each loader on the images in ``images``, and say on ``console`` what runs; None on a machine with one core.

    Raises RunError if a loop fails.
    """
    cores = usable_cores()
    if cores < 2:
        return None
    mine = host_cores(cores)
    all_cores = sorted(os.sched_getaffinity(0))[:cores]
    with _saying(console, f"a DataLoader on {mine} of {count(cores, 'core')}, the share of a GPU host"):
        alone = _side("torch", images, seconds, all_cores, mine)
    costs = alone.pop("costs")
    predicted = predicted_samples_per_s(costs, cores)
    console.print(f"the model predicts {figure(predicted)} images/s with all {cores} cores", soft_wrap=True)
    with _saying(console, f"the same loop offloaded to all {cores} cores"):
        offloaded = _side("offload", images, seconds, all_cores, cores)
    return Comparison(
        alone=Side(name="torch DataLoader", cores=mine, **alone),
        offloaded=Side(name="offload", cores=cores, **offloaded),
        predicted_samples_per_s=predicted,
        core_share=costs["core_share"],
    )


def predicted_samples_per_s(costs: dict[str, float], cores: int) -> float:
    """The rate of the loop on one machine with these cores, from the joint model of input and accelerator. ``costs``: as
    :func:`offload.cli.demo.side.measured_costs` returns them."""
    machine = NodeType(
        name="this machine", vcpus=cores, gpus=1, core_speed=costs["core_share"],
        memory_gib=1.0, network_gbps=1.0, usd_per_hour=1.0,  # of no effect on the rate of one machine
    )  # fmt: skip
    input_rate = InputRate(
        core_seconds_per_sample=costs["core_seconds_per_sample"],
        wire_bytes_per_sample=0.0,
        host_cpus_per_worker=0.0,  # the share of a core already leaves out what the loop takes
    )
    joint = JointGoodput(
        StepTime(alpha_compute=0.0, beta_compute=costs["step_s_per_sample"]),
        noise=None,
        input_samples_per_s=input_rate.samples_per_s(Shape({machine: 1}), 1),
    )
    return float(joint.throughput(1, 1, costs["batch_size"], 0))


@contextmanager
def _saying(console: Console, words: str) -> Iterator[None]:
    """A context that says what runs: with the time so far on a terminal, in a line elsewhere."""
    if not console.is_terminal:
        console.print(words, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(words, total=None)
        yield


def _side(loader: str, images: Path, seconds: float, all_cores: list[int], cores: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="offload-demo-") as folder:
        file = Path(folder) / "measured.json"
        words = (loader, str(images), str(seconds), ",".join(map(str, all_cores)), str(cores), str(file))
        with subprocess.Popen(
            [sys.executable, "-m", "offload.cli.demo.side", *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                _, printed = process.communicate(timeout=DEADLINE_S)
            except BaseException as error:
                _end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RunError(
                    f"the demo's comparison ({loader}) took longer than {DEADLINE_S:.0f} s. Leave it out with --no-compare."
                ) from None
        # The file is whole or absent. What ends after the last batch may still fail.
        if not file.exists():
            last = (printed.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise RunError(f"the demo's comparison ({loader}) failed: {last}. Leave it out with --no-compare.")
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured


def _end(process: subprocess.Popen[str]) -> None:
    """End a loop's process, which ends those that it has started if it gets the time."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
