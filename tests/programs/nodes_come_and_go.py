"""Run by test_nodes.py, in a process of its own: a training run on a Ray cluster of several raylets, one of which is lost,
followed by another, or kills its workers. Prints the run's events and each pass's samples."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster

import offload
from offload.report.run_dir import read_lines
from offload.train.cluster.ray_processes import minimal_agents
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Numbers

SAMPLES, EPOCHS = 400, 6
# A dataset keeps so much in each preprocessing process, and this memory of a node with four cores holds four processes of one that
# keeps nothing.
KEPT_BYTES = 400 << 20
SMALL_MEMORY = 1600 << 20


class Keeping(Numbers):
    """``kept_bytes``: what a process keeps in its memory from its first sample on."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__(SAMPLES, seconds=0.002)
        self.kept_bytes = kept_bytes
        self.kept: Any = None

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self.kept is None:
            self.kept = np.ones(self.kept_bytes, dtype=np.uint8)
        return super().__getitem__(i)


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    folder = Path(ctx.config["log"])
    node = ray.get_runtime_context().get_node_id()
    for epoch in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            while epoch == EPOCHS - 1 and not Path(ctx.config["seen"]).exists():  # the run must not end before that
                time.sleep(0.05)
            log_batch(ctx, batch, folder, ctx.config["driver"])
            if ctx.config["deadly"] and node != ctx.config["head"] and ctx.global_step % 5 == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def _batches(log: Path) -> int:
    return max((len(path.read_text().splitlines()) for path in log.glob("*-0.jsonl")), default=0)


def main(scenario: str, folder: Path, driver: int) -> None:
    log = folder / "log"
    log.mkdir(exist_ok=True)
    seen = folder / "seen"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"place": 1}, "include_dashboard": False}
    )
    if scenario != "driver":
        other = cluster.add_node(num_cpus=2, resources={"place": 1} if scenario != "preprocessing" else {})
    ray.init(address=cluster.address, log_to_driver=False)
    head = ray.get_runtime_context().get_node_id()

    def disturb() -> None:
        while not ended.is_set() and _batches(log) < 20:
            time.sleep(0.1)
        if scenario == "preprocessing":
            cluster.remove_node(other, allow_graceful=False)
            changed(1)  # the run must see it
            cluster.add_node(num_cpus=4, memory=SMALL_MEMORY)
            changed(2)
        seen.touch()

    def changed(times: int) -> None:
        events = folder / "run" / "events.jsonl"
        while not ended.is_set() and events.read_text().count('"cluster_changed"') < times:
            time.sleep(0.1)

    def fit() -> None:
        workers = 1 if scenario in ("preprocessing", "driver") else (1, 2)
        try:
            outcome.append(
                offload.Trainer(
                    train,
                    datasets={"train": offload.from_torch(Keeping(KEPT_BYTES if scenario == "preprocessing" else 0))},
                    workers=workers,
                    batch_size=16,
                    adaptation=offload.Adaptation(schedule={0: 2}) if workers == (1, 2) else None,
                    checkpoints=offload.Checkpoints(every_s=1.0, every_epochs=100),
                    scaling_config=ray.train.ScalingConfig(
                        resources_per_worker={"CPU": 0.5, "place": 1}, placement_strategy="SPREAD"
                    ),
                    train_loop_config={
                        "log": str(log),
                        "deadly": scenario == "deadly",
                        "head": head,
                        "driver": driver,
                        "seen": str(seen),
                    },
                ).fit(run_dir=folder / "run", quiet=True)
            )
        finally:
            ended.set()

    outcome: list[Any] = []
    ended = threading.Event()
    threading.Thread(target=fit, daemon=True).start()
    disturb()  # Ray starts nodes from the main thread only
    ended.wait()
    (result,) = outcome
    events = read_lines(folder / "run" / "events.jsonl")
    history = read_history(log)
    right = each_pass(history) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    steps = [line["step"] for path in log.glob("*-0.jsonl") for line in read_lines(path)]
    print(
        json.dumps(
            {
                "status": result.status,
                "right": right,
                "events": events,
                "repeated_steps": len(steps) - len(set(steps)),
                "workers": [line["workers"] for path in sorted(log.glob("*-0.jsonl")) for line in read_lines(path)],
            }
        )
    )
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    with minimal_agents():
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
