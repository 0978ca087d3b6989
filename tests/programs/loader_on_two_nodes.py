"""Run by test_programs.py, in a process of its own: a DataLoader takes batches of another raylet, whose sender dies, and which is lost at
last. Prints what it saw."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

import offload
from offload.loader.job import session
from offload.pipeline.blocks import receiver
from offload.train.cluster.ray_processes import minimal_agents
from tests.programs.direct_blocks import sender_processes, wait_for

SAMPLES = 96


class Watched(receiver.DirectBlocks):
    """Counts the blocks that came without Ray."""

    came = 0

    def fetch(self, *block: Any) -> Callable[[], Any] | None:
        if (coming := super().fetch(*block)) is None:
            return None

        def found() -> Any:
            made = coming()
            Watched.came += made is not None
            return made

        return found


def sample(number: int) -> tuple[torch.Tensor, int, str]:
    return torch.full((3, 64, 64), number, dtype=torch.uint8), number, f"sample {number}"


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        if number == 50:
            raise LookupError("sample 50 is missing")
        return sample(number)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        about = torch.utils.data.get_worker_info()
        assert about is not None
        return map(sample, range(about.id, SAMPLES, about.num_workers))


def read(loader: Any) -> bool:
    """Read an epoch. Return whether some of its batches came without Ray."""
    before, batches, failed = Watched.came, [], 0
    iterator = iter(loader)
    while True:
        try:
            batches.append(next(iterator))
        except LookupError as error:
            failed += "sample 50 is missing" in str(error)
        except StopIteration:
            break
    images = torch.cat([images for images, _, _ in batches])
    numbers = torch.cat([numbers for _, numbers, _ in batches])
    texts = [text for _, _, texts in batches for text in texts]
    expected = set(range(SAMPLES))
    if failed:
        expected -= set(range(48, 56))  # its batch
    assert set(numbers.tolist()) == expected
    assert len(numbers) == len(expected)
    assert texts == [f"sample {number}" for number in numbers.tolist()]
    assert (images == numbers.to(torch.uint8)[:, None, None, None]).all()
    batches[0][0].add_(1)  # the user may write
    return Watched.came > before


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    session.DirectBlocks = Watched  # type: ignore[misc]
    receiver.AGAIN_S = receiver.ASK_AGAIN_S = 0.0
    told: dict[str, Any] = {}
    try:
        loader = offload.DataLoader(Images(), batch_size=8)
        wait_for(lambda: read(loader))
        for process in sender_processes():
            process.kill()
            process.wait()
        read(loader)  # in any case
        wait_for(lambda: read(loader))
        told["after its sender died"] = True
        wait_for(lambda: read(offload.DataLoader(Stream(), batch_size=8, num_workers=2)))
        told["iterable"] = True
        cluster.remove_node(other, allow_graceful=False)
        wait_for(lambda: not read(loader))  # the lost raylet's processes may live for a while
        told["without the node"] = True
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    with minimal_agents():
        main()
