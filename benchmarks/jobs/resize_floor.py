"""The least that a resize with new processes takes on Ray, for :mod:`benchmarks.recovery`: no training, no checkpoint, no data.

    python benchmarks/jobs/resize_floor.py FOLDER

An actor ends with its placement group; two start in another, with torch and offload imported ahead, as a run's workers do. They join
through gloo, and each makes one step of an optimizer. The file FOLDER/floor holds the seconds from the order to the end to the second step.
"""

import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offload import preload

BUNDLE = {"CPU": 0.5, "place": 1.0}


class Worker:
    """One process of a group."""

    def host(self) -> str:
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open(self, host: str) -> int:
        self._store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def step(self, rank: int, ranks: int, host: str, port: int) -> None:
        own = self._store if rank == 0 else dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()


def group(workers: int, env: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A placement group and its actors, which have made a step."""
    room = placement_group([BUNDLE] * workers)
    actor: Any = ray.remote(Worker)
    actors = [
        actor.options(
            num_cpus=BUNDLE["CPU"],
            resources={"place": 1.0},
            runtime_env=env,
            scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=at),
        ).remote()
        for at in range(workers)
    ]
    host: str = ray.get([worker.host.remote() for worker in actors])[0]
    port = ray.get(actors[0].open.remote(host))
    ray.get([worker.step.remote(rank, workers, host, port) for rank, worker in enumerate(actors)])
    return room, actors


def end(room: Any, actors: list[Any]) -> None:
    for worker in actors:
        ray.kill(worker)
    remove_placement_group(room)


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    env = preload.runtime_env({}, also=preload.TRAINING)
    end(*group(2, env))  # imports
    present = group(1, env)
    began = time.monotonic()
    end(*present)
    end(*group(2, env))
    Path(sys.argv[1], "floor").write_text(str(time.monotonic() - began))


if __name__ == "__main__":
    main()
