"""Run by test_predict.py, in a process of its own: predictions on a Ray cluster of several raylets that loses model workers, first without
GPUs, then with two of them, at last with one that another program takes. Prints what it saw."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray
import torch
from ray.cluster_utils import Cluster

import offload
from offload.inference import on_ray
from offload.train.cluster.ray_processes import minimal_agents
from tests.helpers import eventually
from tests.programs.predicted import build_model, data


@ray.remote(num_cpus=0, num_gpus=1)
class Other:
    """Another program, which holds a GPU."""

    def holds(self) -> bool:
        return True


def predicted(images: Path, folder: Path, lost: int) -> tuple[bool, set[int]]:
    """Predict, and lose this many model workers. Return whether every sample is there once, and the numbers of workers of all rounds."""
    folder.mkdir()

    def outputs(model: torch.nn.Module, batch: Any) -> Any:
        (folder / f"of {os.environ.get('WORLD_SIZE', 1)}").touch()
        for number in range(lost):
            try:
                (folder / f"lost {number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os._exit(1)
        return model(batch["image"])

    weights = folder / "weights.pt"
    torch.save(build_model().state_dict(), weights)
    predictor = offload.Predictor(build_model, data(images), outputs=outputs)
    prediction = offload.predict(predictor, weights, folder / "out.parquet", batch_size=8, quiet=True)
    assert len(list(folder.glob("lost *"))) == lost
    whole = pq.read_table(prediction.output).column("sample_id").to_pylist() == list(range(103))
    return whole, {int(seen.name.split()[1]) for seen in folder.glob("of *")}


def stale(look: Callable[[], Any]) -> Callable[[], Any]:
    """Ray's free resources, which are those of now at the first look, too: what Ray says is some tenths of a second old."""
    earlier = [look()]
    return lambda: earlier.pop() if earlier else look()


def main(images: Path, folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    told: dict[str, Any] = {}
    try:
        whole, workers = predicted(images, folder / "cpus", lost=1)
        told["two nodes"] = whole and workers == {2}
        cluster.add_node(num_cpus=1, num_gpus=2)
        cluster.wait_for_nodes()
        whole, workers = predicted(images, folder / "gpus", lost=1)
        told["two GPUs"] = whole and workers == {2}
        eventually(lambda: ray.available_resources().get("GPU") == 2.0)
        on_ray.free_resources = stale(on_ray.free_resources)
        other: Any = Other.remote()  # type: ignore[attr-defined]
        ray.get(other.holds.remote())
        whole, workers = predicted(images, folder / "taken", lost=0)
        told["a GPU that another program took"] = whole and workers == {2}
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    with minimal_agents():
        main(*map(Path, sys.argv[1:]))
