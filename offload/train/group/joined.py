"""Join the processes of a group: the environment that a torch user expects, the device, the rendezvous and the process group."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.train.group.in_worker import Member

TIMEOUT = timedelta(minutes=30)  # torch's own, for NCCL and gloo alike
# A failed collective ends the process instead of hanging it.
DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
LOOPBACK = "lo"
_stores: Any = dist  # torch's stubs do not name the stores


def open_store(host: str) -> Any:
    """Rank 0's store, at a free port of this host, at which the other ranks find each other."""
    # Without waiting: the others learn its port only after this call.
    return _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def members(attempt: int, nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[Member]:
    """The places of processes that run on these ``nodes`` (ids) and own these ``gpus`` (ids), in the order of the processes.

    Ranks are contiguous within a node, as torchrun makes them. Nodes are in the order of their first process.
    """
    # By GPU within a node: neighbouring ranks then use neighbouring GPUs.
    order = sorted(range(len(nodes)), key=lambda at: (nodes.index(nodes[at]), *map(_number, gpus[at])))
    node_ids = list(dict.fromkeys(nodes))
    by_process: dict[int, Member] = {}
    for rank, at in enumerate(order):
        here = [other for other in order if nodes[other] == nodes[at]]
        of_node = tuple(dict.fromkeys(gpu for other in here for gpu in gpus[other]))
        by_process[at] = Member(
            attempt=attempt,
            rank=rank,
            world_size=len(nodes),
            local_rank=here.index(at),
            local_world_size=len(here),
            node_rank=node_ids.index(nodes[at]),
            node=nodes[at],
            homes=() if rank else tuple(nodes[other] for other in order),
            gpus=of_node,
            gpu=of_node.index(gpus[at][0]) if gpus[at] else None,
        )
    return [by_process[at] for at in range(len(nodes))]


def _number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (sys.maxsize, gpu)


@contextmanager
def joined(member: Member, store: Any = None) -> Iterator[torch.device]:
    """A context in which this process is a member of its group; it yields the device of the model and the batches.

    All members must enter it. ``store``: the store that this process has opened, on rank 0 alone.
    """
    _set_environment(member)
    device = _device(member)
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = store or _store_of(member)
    dist.init_process_group(backend, store=own, rank=member.rank, world_size=member.world_size, timeout=TIMEOUT)
    try:
        yield device
    finally:
        # Not destroyed: the other ranks may still need this one. It ends with the process.
        sys.stdout.flush()
        sys.stderr.flush()


def _set_environment(member: Member) -> None:
    """Set torchrun's variables, and let the process see the GPUs of all members of its node: NCCL connects them directly."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ |= {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(member.world_size),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(member.local_world_size),
        "NODE_RANK": str(member.node_rank),
        "GROUP_RANK": str(member.node_rank),
        "MASTER_ADDR": member.master,
        "MASTER_PORT": str(member.port),
    }
    if member.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(member.gpus)
    if member.store and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # nothing of a group on one machine listens elsewhere


def _device(member: Member) -> torch.device:
    if member.gpu is None or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", member.gpu)
    torch.cuda.set_device(device)
    return device


def _store_of(member: Member) -> Any:
    if member.world_size == 1:
        return _stores.HashStore()
    if member.store:
        return _stores.FileStore(member.store, member.world_size)
    return _stores.TCPStore(member.master, member.port, is_master=False, timeout=TIMEOUT)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
