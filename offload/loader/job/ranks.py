"""The job that this process belongs to: the ranks that share the cluster's cores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed

_SHARED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
_RANK = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A job's name, which all its ranks know, and this process's place in it."""

    name: str
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Ranks:
        """The job that the environment describes, as set by torchrun, Ray Train and most launchers, or that torch.distributed has joined.

        Without either, it is a job of this process alone.
        """
        rank, world_size, described = _place(env)
        if world_size <= 1:
            return cls(name=uuid.uuid4().hex)
        if env.get("LOCAL_WORLD_SIZE") == str(world_size):
            import psutil  # takes as long to import as a small data set to load: only where ranks share a machine

            # All ranks have one parent, which tells this job from an earlier one with the same address.
            parent = psutil.Process(os.getppid())
            described += f"\0{socket.gethostname()}\0{parent.pid}\0{parent.create_time()}"
        return cls(name=hashlib.sha256(described.encode()).hexdigest()[:32], rank=rank, world_size=world_size)

    def variables(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment variables that tell a process of this rank its place; none for a job of one process."""
        if self.world_size <= 1:
            return {}
        own = {name: env[name] for name in _RANK if name in env}
        return {**own, "RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}


def _place(env: Mapping[str, str]) -> tuple[int, int, str]:
    """(this process's rank, the number of ranks, a text that tells this job from others)"""
    described = "\0".join(env.get(name, "") for name in _SHARED)
    met = torch.distributed.is_available() and torch.distributed.is_initialized()
    name = _agreed() if met and "MASTER_PORT" not in env else described
    with contextlib.suppress(KeyError, ValueError):
        return int(env["RANK"]), int(env["WORLD_SIZE"]), name or described
    # torch.multiprocessing.spawn and Lightning's own launcher tell a process's rank to torch alone.
    if met and name:
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), name
    return 0, 1, ""


def _agreed() -> str:
    """A name for the job on which its ranks agree, through the store of torch.distributed by which they met. Empty without a store.

    The environment tells nothing about an ``init_method`` such as ``tcp://host:port``.
    """
    with contextlib.suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        return str(store.compare_set("offload/job", "", uuid.uuid4().hex).decode())
    return ""
