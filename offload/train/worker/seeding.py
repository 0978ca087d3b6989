"""Seed the random generators of a worker: torch's, NumPy's and Python's."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_at_start(seed: int, rank: int) -> None:
    """Seed the generators before the user's function runs: torch's the same on all ranks, which build the same model, the others by
    rank."""
    torch.manual_seed(seed)
    np.random.seed((seed + rank) & 0xFFFFFFFF)
    random.seed(seed + rank)


def seed_at_step(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a run that goes on at this step with another number of workers. The checkpoint holds no generators for
    them."""
    words = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, rank, step]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
