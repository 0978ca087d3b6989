"""Run by test_notices.py, in a process of its own: a training run on a Ray cluster of several raylets, some of which are spot
nodes whose metadata service gives notice, or that are drained by Ray's command. Prints the run's events and what it trained."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster

import offload
from offload.report.run_dir import CHECKPOINTS, read_lines
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import Storage
from offload.train.cluster.ray_processes import minimal_agents
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.metadata_service import MetadataService
from tests.emulation.numbers import Numbers
from tests.programs.nodes_come_and_go import SAMPLES

EPOCHS = 6
LABELS = {"ray.io/market-type": "spot"}
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
PLACE = {"place": 1.0}
DEADLINE_S = 800.0
SILENT = "http://127.0.0.1:9"  # where nobody listens


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    seen = Path(ctx.config["seen"])
    for _ in ctx.epochs(EPOCHS):
        for batch in ctx.batches("train"):
            log_batch(ctx, batch, Path(ctx.config["log"]), ctx.config["driver"])
            time.sleep(0.02 if seen.exists() else 0.5)  # the run must not end before that
            ctx.backward(model(batch["x"]).mean())
            ctx.step()


def wait_for(what: Callable[[], bool], ended: threading.Event) -> None:
    """Until it is so, or the run is over."""
    until = time.monotonic() + DEADLINE_S
    while not what() and not ended.is_set() and time.monotonic() < until:
        time.sleep(0.1)


def alive() -> set[str]:
    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def watchers() -> int:
    """How many there are, of this process's cluster."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += "".join(process.cmdline()[:1]).startswith("ray::Watcher")
    return found


def drain(address: str, node_id: str) -> None:
    """As an autoscaler or Kubernetes does."""
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={address}", f"--node-id={node_id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=60",
        ],
        check=True, capture_output=True,
    )  # fmt: skip


def main(scenario: str, folder: Path) -> None:
    log, seen, events = folder / "log", folder / "seen", folder / "run" / "events.jsonl"
    log.mkdir(exist_ok=True)
    told: dict[str, Any] = {"left": False, "watchers": []}
    ended = threading.Event()
    outcome: list[Any] = []

    def batches() -> int:
        return max((len(path.read_text().splitlines()) for path in log.glob("*-0.jsonl")), default=0)

    def happened(kind: str) -> bool:
        return events.exists() and any(event["event"] == kind for event in read_lines(events))

    def fit() -> None:
        workers = 2 if scenario in ("replaced", "spare") else (1, 2)
        try:
            outcome.append(
                offload.Trainer(
                    train,
                    datasets={"train": offload.from_torch(Numbers(SAMPLES, seconds=0.002))},
                    workers=workers,
                    batch_size=16,
                    adaptation=offload.Adaptation(schedule={0: 2}) if workers == (1, 2) else None,
                    checkpoints=offload.Checkpoints(every_s=None, every_epochs=100),
                    scaling_config=ray.train.ScalingConfig(
                        resources_per_worker={"CPU": 0.5, **PLACE}, placement_strategy="SPREAD"
                    ),
                    train_loop_config={"log": str(log), "seen": str(seen), "driver": int(scenario == "again")},
                ).fit(run_dir=folder / "run", quiet=True)
            )
        finally:
            ended.set()

    with MetadataService() as service:
        common = {"num_cpus": 2, "resources": PLACE}
        spot = {**common, "labels": LABELS, "env_vars": {ENDPOINT: service.url}}
        heads = {"head": spot, "notice": {**spot, "env_vars": {ENDPOINT: SILENT}}}
        watched = 2 if scenario == "notice" else 1
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**heads.get(scenario, common), "include_dashboard": False},
        )
        node = cluster.add_node(**common if scenario in ("head", "again") else spot)
        ray.init(address=cluster.address, log_to_driver=False)
        threading.Thread(target=fit, daemon=True).start()
        if scenario != "again":
            wait_for(lambda: batches() >= 5 and watchers() == watched and bool(service.asked), ended)
            told["watchers"].append(watchers())
            if scenario == "notice":
                wait_for(lambda: happened("spot_unwatched"), ended)
                service.recommend_rebalance()
                wait_for(lambda: happened("spot_rebalance"), ended)
            if scenario == "spare":
                cluster.add_node(**common)  # Ray starts nodes from the main thread only
                wait_for(lambda: happened("cluster_changed"), ended)
            told["noticed_at"] = time.time()
            if scenario == "spare":
                drain(cluster.address, node.node_id)
            else:
                service.give_notice()
            if scenario == "replaced":
                kept = RunFolder(Storage(path=str(folder / "run")), CHECKPOINTS)
                wait_for(lambda: bool(kept.whole()), ended)
                cluster.remove_node(node, allow_graceful=False)  # it is taken back
                wait_for(lambda: happened("worker_lost"), ended)
                cluster.add_node(**common)
            if scenario != "head":  # which must not finish before it is stopped
                wait_for(lambda: node.node_id not in alive(), ended)
                told["left"] = node.node_id not in alive()
                seen.touch()
        ended.wait()
        seen.touch()
        wait_for(lambda: watchers() == 0, threading.Event())
        told["watchers"].append(watchers())
        (result,) = outcome
        history = read_history(log)
        steps = [line["step"] for path in log.glob("*-0.jsonl") for line in read_lines(path)]
        told |= {
            "status": result.status,
            "service": service.url,
            "right": each_pass(history) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)},
            "events": read_lines(events),
            "repeated_steps": len(steps) - len(set(steps)),
            "workers": [line["workers"] for path in sorted(log.glob("*-0.jsonl")) for line in read_lines(path)],
        }
        print(json.dumps(told))
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    with minimal_agents():
        main(sys.argv[1], Path(sys.argv[2]))
