"""Run directories as runs write them, made from a few numbers: for tests of the report, and for its pictures in docs/report.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offload.model.placement import NodeResources
from offload.report.run_dir import EVENTS, METRICS, RunDirectory, to_json

START = 1_790_000_000.0
EVERY_S = 2.0
OVERLAP = 8.0


def write_event(run_dir: Path, kind: str, *, at: float = START, **values: Any) -> None:
    """Append an event with any values, such as those of another version."""
    with open(run_dir / EVENTS, "a", encoding="utf-8") as file:
        file.write(to_json({"event": kind, "at": at, **values}) + "\n")


def gpu_node(number: int = 0, **changes: Any) -> NodeResources:
    """An ml.g5.xlarge."""
    values: dict[str, Any] = {
        "name": f"10.0.0.{number + 1}",
        "node_id": f"{number:02}gpu" * 8,
        "cpus": 4.0,
        "gpus": 1.0,
    }
    return NodeResources(**{**values, "instance_type": "ml.g5.xlarge", "gpu_type": "A10G", **changes})


def cpu_node(number: int = 0, **changes: Any) -> NodeResources:
    """An ml.c5.4xlarge."""
    values: dict[str, Any] = {"name": f"10.0.1.{number + 1}", "node_id": f"{number:02}cpu" * 8, "cpus": 16.0}
    return NodeResources(**{**values, "instance_type": "ml.c5.4xlarge", **changes})


@dataclass
class Writer:
    """Write a run of some GPU nodes, with a worker each, and some CPU nodes.

    Args:
        path: the run directory.
        cpu_nodes: nodes beside the GPU nodes.
        core_seconds: the cost of a sample.
        device_samples_per_s: what one GPU could train.
        batch: the global batch.
        samples, epochs: the samples of an epoch, and how many epochs the user wants.
        noise: the relative standard deviation of an interval's rate.
        gpu_nodes: the GPU nodes from the beginning.
        handed_out_per_s: samples/s that the hub hands out at most.
    """

    path: Path
    cpu_nodes: int = 1
    core_seconds: float = 0.029
    device_samples_per_s: float = 610.0
    batch: int = 64
    noise: float = 0.04
    seed: int = 0
    samples: int = 36_000
    epochs: int = 4
    at: float = START
    step: int = 0
    epoch: int = 0
    trained: float = 0.0
    cores: int = 0
    gpu_nodes: int = 1
    handed_out_per_s: float = math.inf
    nodes: list[NodeResources] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.directory = RunDirectory(self.path)
        self.nodes = [*map(gpu_node, range(self.gpu_nodes)), *map(cpu_node, range(self.cpu_nodes))]
        self.cores = self.near_cores + 16 * self.cpu_nodes

    @property
    def near_cores(self) -> int:
        """The cores of the GPU nodes that preprocess."""
        return 3 * self.gpu_nodes

    def event(self, kind: str, **values: Any) -> None:
        """Write an event now."""
        write_event(self.path, kind, at=self.at, **values)

    def begin(self, *, resumed: bool = False) -> None:
        """Start or resume."""
        self.event(
            "run_resumed" if resumed else "run_started",
            workers=self.gpu_nodes,
            preprocessing_cores=self.cores,
            local_batch_size=self.batch // self.gpu_nodes,
            accum_steps=0,
            global_batch_size=self.batch,
            nodes=[dataclasses.asdict(node) for node in self.nodes],
            usd_per_hour={"ml.g5.xlarge": 1.408, "ml.c5.4xlarge": 0.816},
            datasets={"train": {"source": "image_folder(s3://bucket/train)", "samples": self.samples}},
        )
        self.at += 6
        for node in self.nodes:
            self.event("node_preprocesses", rank=None, node=node.node_id)
        self.at += 4
        self.event("training_nodes", nodes=[gpu_node(number).node_id for number in range(self.gpu_nodes)])
        if resumed:
            self.event(
                "resumed",
                rank=0,
                attempt=1,
                epoch=self.epoch,
                step=self.step,
                trained=0,
                epoch_starts_again=None,
                damaged=[],
            )
        self.event("first_batch", rank=0, epoch=self.epoch, seconds=0.4)
        self.event("first_step", rank=0, step=self.step + 1, workers=self.gpu_nodes)

    def train(self, intervals: int, **changes: Any) -> None:
        """So many intervals at the present size, with a report at the end of each epoch."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.writelines(to_json(document) + "\n" for document in self._intervals(intervals, changes))

    def _intervals(self, count: int, changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            self.at += EVERY_S
            yield self._interval(changes)
            if self.trained >= self.samples * (self.epoch + 1):
                self.report()
                self.epoch += 1

    def _interval(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        ceiling = self.cores / self.core_seconds
        working_s = self.batch / (self.device_samples_per_s * self.gpu_nodes)
        waiting_s = self.batch / min(0.93 * ceiling, self.handed_out_per_s)
        step_s = (working_s**OVERLAP + waiting_s**OVERLAP) ** (1 / OVERLAP)
        step_s *= math.exp(float(self.rng.normal(0, self.noise)))
        rate = self.batch / max(step_s, working_s)
        steps = rate * EVERY_S / self.batch
        self.step += round(steps)
        self.trained += rate * EVERY_S
        stepping_s = EVERY_S * self.gpu_nodes  # of all workers together
        compute_s = stepping_s * min(working_s / step_s, 1.0)
        on_gpu_node = min(self.near_cores / self.cores, 1.0)
        busy = min(rate / ceiling, 1.0)
        groups = {
            "ml.g5.xlarge": {
                "cores": self.near_cores,
                "busy_s": EVERY_S * min(1.06 * busy, 1.0) * self.cores * on_gpu_node,
            }
        }
        if self.cores > self.near_cores:
            spent = EVERY_S * busy * self.cores * (1 - on_gpu_node)
            groups["ml.c5.4xlarge"] = {"cores": self.cores - self.near_cores, "busy_s": spent}
        return {
            "at": self.at,
            "epoch": self.epoch,
            "step": self.step,
            "samples_per_s": rate,
            "goodput": rate,
            "stall": 1 - compute_s / stepping_s,
            "input_ceiling_samples_per_s": ceiling * (1 + float(self.rng.normal(0, 0.01))),
            "core_seconds_per_sample": self.core_seconds,
            "variation": 0.2,
            "wire_bytes_per_sample": 150_528.0,
            "input_pace_samples_per_s": 0.95 * ceiling,
            "blocked": 0.02,
            "device_ceiling_samples_per_s": self.device_samples_per_s,
            "device": "GPU",
            "step_time_s": stepping_s,
            "data_wait_s": 0.98 * (stepping_s - compute_s),
            "peer_wait_s": 0.0,
            "compute_s": 0.98 * compute_s,
            "sync_s": 0.0,
            "pass_start_s": 0.0,
            "workers": self.gpu_nodes,
            "local_batch_size": self.batch // self.gpu_nodes,
            "accum_steps": 0,
            "global_batch_size": self.batch,
            "preprocessing_cores": self.cores,
            "useful": self.trained,
            "goal": float(self.epochs * self.samples),
            "metrics": {},
            "seconds": EVERY_S,
            "preprocessing": groups,
            **changes,
        }

    def report(self, **metrics: float) -> None:
        """The user's report of an epoch, and its checkpoint."""
        loss = 0.4 + 2.2 * math.exp(-0.9 * (self.epoch + 1))
        self.event(
            "report",
            rank=0,
            epoch=self.epoch,
            step=self.step,
            metrics={"accuracy": 1 - loss / 3, "loss": loss, **metrics},
        )
        self.event(
            "checkpoint", rank=0, reason="epoch", epoch=self.epoch + 1, step=self.step, seconds=0.412, waited=True
        )

    def join(self, number: int) -> None:
        """A CPU node joins."""
        node = cpu_node(number)
        self.nodes.append(node)
        self.cores += 16
        self._changed(joined=[node])
        self.at += 3
        self.event("node_preprocesses", rank=None, node=node.node_id)

    def lose(self, number: int, *, notice: bool) -> None:
        """A CPU node leaves, announced or not."""
        node = next(each for each in self.nodes if each.node_id == cpu_node(number).node_id)
        self.nodes.remove(node)
        self.cores -= 16
        if notice:
            self.event(
                "spot_notice", node=node.name, node_id=node.node_id, action="terminate", deadline_at=self.at + 120
            )
            self._changed(leaving=[node])
            self.train(15)
        self._changed(left=[node])

    def _changed(self, **changes: list[NodeResources]) -> None:
        names = {verb: [node.name for node in changes.get(verb, ())] for verb in ("left", "leaving", "joined")}
        self.event(
            "cluster_changed",
            **names,
            joined_nodes=[dataclasses.asdict(node) for node in changes.get("joined", ())],
            workers=1,
            preprocessing_cores=self.cores,
        )

    def rebatch(self, batch: int) -> None:
        """A decision for another batch, and what it brought."""
        predicted = min(self.device_samples_per_s * 1.15, 0.9 * self.cores / self.core_seconds)
        self.event(
            "decided",
            decision="rebatch",
            reason="a larger batch computes faster: +12% goodput",
            samples_per_s=480.0,
            stall=0.1,
            nodes=1,
            workers=1,
            local_batch_size=batch,
            accum_steps=0,
            global_batch_size=batch,
            predicted_samples_per_s=predicted,
            predicted_goodput=0.97 * predicted,
        )
        self.batch = batch
        self.device_samples_per_s *= 1.12
        self.at += 1
        self.event(
            "rebatched",
            rank=0,
            epoch=self.epoch,
            step=self.step,
            local_batch_size=batch,
            accum_steps=0,
            global_batch_size=batch,
        )
        self.train(2)
        self.event("measured", predicted_samples_per_s=predicted, measured_samples_per_s=0.94 * predicted)

    def lose_worker(self) -> None:
        """A worker dies, and all start again from the last checkpoint."""
        self.event("worker_lost", rank=None, reason="the worker on 10.0.0.1 was killed by SIGKILL")
        self.at += 18
        self.step = max(self.step - 120, 0)
        self.event(
            "resumed",
            rank=0,
            attempt=2,
            epoch=self.epoch,
            step=self.step,
            trained=900,
            epoch_starts_again=None,
            damaged=[],
        )
        self.event("first_step", rank=0, step=self.step + 1, workers=1)

    def skip(self, count: int) -> None:
        """Samples that could not be read."""
        for number in range(count):
            self.directory.skipped(
                {
                    "at": self.at,
                    "rank": 0,
                    "dataset": "train",
                    "sample_id": 1000 + number,
                    "reason": f"s3://bucket/train/{1000 + number}.jpg: OSError: image file is truncated",
                    "epoch": self.epoch,
                }
            )

    def end(self, status: str = "finished", error: str | None = None) -> None:
        """The end of the run, with its summary."""
        self.event("run_finished", status=status, error=error, samples=round(self.trained), steps=self.step)
        self.directory.summary(
            {
                "schema": "offload.summary/1",
                "status": status,
                "error": error,
                "samples": round(self.trained),
                "steps": self.step,
                "device": "GPU",
                "input": {"train": {"core_seconds_per_sample": self.core_seconds, "wire_bytes_per_sample": 150_528.0}},
                "skipped": 0,
                "checkpoint": str(self.path / "checkpoints" / "checkpoint_9"),
                "run_dir": str(self.path),
                "versions": {"python": "3.11.7", "ray": "2.60.0"},
            }
        )


def plain(path: Path, *, cpu_nodes: int = 1, intervals: int = 120, seed: int = 0, **changes: Any) -> Path:
    """A run without incidents."""
    run = Writer(path, cpu_nodes=cpu_nodes, seed=seed, **changes)
    run.begin()
    run.train(intervals)
    run.end()
    return path


def eventful(path: Path, *, ends: bool = True, core_seconds: float = 0.029) -> Path:
    """A run with everything: nodes that join and leave, decisions, a lost worker, skipped samples, and a resumption."""
    run = Writer(path, cpu_nodes=1, samples=52_000, epochs=15, core_seconds=core_seconds)
    run.begin()
    run.train(70)
    run.join(1)
    run.train(60)
    run.rebatch(128)
    run.skip(23)
    run.train(60)
    run.lose(0, notice=True)
    run.train(50)
    run.lose_worker()
    run.train(40)
    run.at += 5400  # stopped for an hour and a half
    run.begin(resumed=True)
    run.join(2)
    run.train(60)
    run.rebatch(192)
    run.train(30)
    if ends:
        run.end()
    return path
