"""Run by test_autoscaling.py, in namespaces of its own: a training run on a Ray cluster with an autoscaler that starts real
raylets. The accelerator is fast for some epochs, and slow for those after. Prints the run's events and each pass's samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch

import offload
from offload.report.run_dir import read_lines
from offload.testing.history import each_pass, log_batch, read_history

SAMPLES, EPOCHS, SLOW_FROM = 400, 13, 9
BATCH = 16
SAMPLE_S = 0.02  # of a core: 50 samples/s
FAST_S, SLOW_S = 0.11, 0.5  # of a step: 145 and 32 samples/s

# Ray's stand-in for a provider of machines: each is a raylet on this one.
CLUSTER: dict[str, Any] = {
    "cluster_name": "autoscaled",
    "max_workers": 4,
    "provider": {
        "type": "fake_multinode", "disable_node_updaters": True, "disable_launch_config_check": True,
        "worker_liveness_check": False,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 2, "place": 1}, "node_config": {}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 4},
    },
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.25,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{
        name: []
        for name in (
            "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
            "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
        )
    },
    "file_mounts_sync_continuously": False,
}  # fmt: skip


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(SAMPLE_S)
        return {"x": np.full(2, i / SAMPLES, dtype=np.float32)}


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for epoch in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]))
            time.sleep(FAST_S if epoch < SLOW_FROM else SLOW_S)
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def main(folder: Path) -> None:
    log = folder / "log"
    log.mkdir()
    config = folder / "cluster.json"  # YAML holds JSON
    config.write_text(json.dumps(CLUSTER))
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--num-cpus=2",
            '--resources={"place": 1}',
            f"--autoscaling-config={config}",
        ],
        env={**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"},
        check=True,
        stdout=sys.stderr,
    )
    ray.init(address="auto", log_to_driver=False)
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers())},
        batch_size=BATCH,
        workers=1,
        adaptation=offload.Adaptation(preprocessing_cores=(1, 7), interval_s=5.0),
        checkpoints=offload.Checkpoints(every_epochs=100),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5, "place": 1}),
        train_loop_config={"log": str(log)},
    ).fit(run_dir=folder / "run", quiet=True)
    passes = each_pass(read_history(log))
    print(
        json.dumps(
            {
                "status": result.status,
                "right": passes == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)},
                "events": read_lines(folder / "run" / "events.jsonl"),
            }
        )
    )
    ray.shutdown()  # the rest ends with the namespace of its processes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
