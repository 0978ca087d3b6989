"""The role of one of torch's worker processes, as data sets and collate functions see it. Only this module touches torch's private
state of worker processes.

Code that runs in the role finds ``torch.utils.data.get_worker_info()`` as it would in that worker.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data._utils import collate, worker


@contextmanager
def in_role(number: int, num_workers: int, seed: int, dataset: Any) -> Iterator[None]:
    """A context in which this process is worker ``number`` of an iteration with this seed. ``num_workers=0``: it is no worker."""
    if not num_workers:
        yield
        return
    worker._worker_info = worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed + number, dataset=dataset)
    torch.utils.data.get_worker_info = _worker_info
    try:
        yield
    finally:
        worker._worker_info = None


def _worker_info() -> worker.WorkerInfo | None:
    """torch's ``get_worker_info``. It hides the role from torch's collate function, which would allocate shared memory for torch's own
    queues; here, each batch is copied into Ray's shared memory anyway."""
    caller = sys._getframe(1)
    return None if caller.f_globals is vars(collate) else worker.get_worker_info()


def seed_as_torch(number: int, seed: int) -> None:
    """Seed this process's generators as torch seeds worker ``number`` of an iteration with this seed."""
    random.seed(seed + number)
    torch.manual_seed(seed + number)
    np.random.seed(worker._generate_state(seed, number))  # type: ignore[no-untyped-call]


def once(initialise: Callable[[int], None] | None, number: int, seed: int, known: set[int]) -> None:
    """Call ``worker_init_fn`` for a worker that is not ``known`` yet, with the generators seeded as torch seeds them."""
    if number not in known:
        seed_as_torch(number, seed)
        if initialise is not None:
            initialise(number)
        known.add(number)
