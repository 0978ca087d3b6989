"""Ray Train's own elastic resize: the seconds without training steps when a node for a second worker joins.

The script prints them as JSON. Its imports and model are those of `benchmarks/elastic.py`.
"""

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torchvision  # noqa: F401  # as a user's script would import it
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

STEP_S = 0.05
STEPS_BEFORE = 60
STEPS_AFTER = 100


def train_loop_per_worker(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        step = state["step"]
    joined = ray.train.torch.prepare_model(model)
    world_size = ray.train.get_context().get_world_size()
    after = 0
    while after < STEPS_AFTER:
        loss = joined(torch.randn(8, 32)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        step += 1
        after += world_size == 2
        if ray.train.get_context().get_world_rank() == 0:
            with open(config["log"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"at": time.time(), "workers": world_size, "step": step}) + "\n")
        if step % 20 == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if ray.train.get_context().get_world_rank() == 0:
                    plain = getattr(joined, "module", joined)
                    torch.save({"model": plain.state_dict(), "step": step}, Path(folder) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=saved)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"place": 1}})
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        trainer = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={"log": str(log)},
            scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]  # typed as version 1's
                num_workers=(1, 2),  # type: ignore[arg-type]
                resources_per_worker={"CPU": 1, "place": 1},
                elastic_resize_monitor_interval_s=1.0,
            ),
            run_config=ray.train.RunConfig(storage_path=folder, name="elastic"),
        )
        fitting = threading.Thread(target=trainer.fit, daemon=True)
        fitting.start()
        while fitting.is_alive() and (not log.exists() or len(log.read_text().splitlines()) < STEPS_BEFORE):
            time.sleep(0.2)
        cluster.add_node(num_cpus=2, resources={"place": 1})  # works only on the main thread
        fitting.join()
        lines = [json.loads(text) for text in log.read_text().splitlines()]
    before = max(line["at"] for line in lines if line["workers"] == 1)
    after = min(line["at"] for line in lines if line["workers"] == 2)
    print(json.dumps({"without_steps_s": after - before}))
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
