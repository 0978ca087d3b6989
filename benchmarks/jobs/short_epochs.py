"""Short epochs of one library's DataLoader, once warm.

    python -m benchmarks.jobs.short_epochs (torch|offload) EPOCHS

It prints a line of JSON for each loader of :mod:`benchmarks.epoch_price`: its name, and the milliseconds of each epoch.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

BATCHES, BATCH, WIDTH = 10, 8, 16
WARM = 2  # epochs before those that count
WORKERS = (0, 1, 3)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(number))


class Stream(IterableDataset[torch.Tensor]):
    """The same samples. Each worker reads whole batches, so that any number of workers makes ten."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for batch in range(first, BATCHES, step):
            for number in range(batch * BATCH, (batch + 1) * BATCH):
                yield torch.full((WIDTH,), float(number))


KINDS: dict[str, type[Any]] = {"map-style": Numbers, "iterable": Stream}


def names(library: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The kind of data set and the arguments of each loader, by name."""
    # offload's processes stay in any case.
    persistent = (False, True) if library == "torch" else (False,)
    found = [
        (kind, workers, stay) for kind in KINDS for workers in WORKERS for stay in persistent if workers or not stay
    ]
    return {
        f"{library}, {kind}, {workers} workers{', persistent' if stay else ''}": (
            kind,
            {"num_workers": workers, "persistent_workers": stay},
        )
        for kind, workers, stay in found
    }


def epochs_ms(loader: Any, count: int) -> list[float]:
    """The milliseconds of each epoch."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        batches = sum(1 for _ in loader)
        found.append(1000 * (time.perf_counter() - began))
        assert batches == BATCHES, f"{batches} batches"
    return found


def main(library: str, epochs: int) -> None:
    if library == "offload":
        from offload import DataLoader as made
    else:
        from torch.utils.data import DataLoader as made  # type: ignore[assignment]
    warnings.filterwarnings("ignore", "This DataLoader will create")  # torch's advice about three workers on two cores
    for name, (kind, named) in names(library).items():
        loader: Any = made(KINDS[kind](), batch_size=BATCH, **named)
        epochs_ms(loader, WARM)
        print(json.dumps({"loader": name, "epochs_ms": epochs_ms(loader, epochs)}), flush=True)
        del loader


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
