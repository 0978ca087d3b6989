"""The cores of this machine that a rank's preprocessing uses. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping


def share_of(cores: int, env: Mapping[str, str]) -> int:
    """The cores of this process, of ``cores`` that it and the other ranks on this machine may use; at least 1.

    torchrun and its kind tell a process its place among them in ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. The first ranks get what remains.
    """
    with contextlib.suppress(KeyError, ValueError):
        rank, ranks = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        if 0 <= rank < ranks:
            return max(cores // ranks + (rank < cores % ranks), 1)
    return max(cores, 1)
