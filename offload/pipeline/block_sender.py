"""Sends the blocks of a node to workers on other nodes, over connections of its own.

Ray's daemons copy a block from one node's object store into the other's, which takes the CPU of both nodes more than twice as long as
a TCP connection does. Here, an actor on the block's node reads it in the object store and writes it to a connection. The worker reads it
into its own memory (:mod:`offload.train.worker.block_receiver`). The block stays in the object store until the worker has it: Ray keeps
account of it as before, and where a connection fails, the worker fetches the block through Ray.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.pipeline import block_stream

AT_ONCE = 32  # blocks that one node sends at a time
HERE_S = 5.0  # time to find a block that should be on this node
CONNECT_S = 5.0
STALLED_S = 30.0  # time without progress after which a connection counts as broken
SECRET_BYTES = 16

Address = tuple[str, int]
"""A host and a port."""

Ticket = tuple[bytes, bytes]
"""Two secrets of SECRET_BYTES each: what the sender shows, and what the worker shows in return."""


class NoBlockError(LookupError):
    """A block is not on its node, or it is no table."""


class BlockSender:
    """The actor of one node."""

    def ready(self) -> None:
        """Answer: the actor runs."""

    def send(self, refs: list[ray.ObjectRef[pa.Table]], to: Address, ticket: Ticket) -> None:
        """Send the block of the only reference to the worker that made the ticket.

        The reference lies in a list because Ray would otherwise wait for its block before the call. Raises NoBlockError, and OSError if the
        worker cannot be reached.
        """
        block = _block(*refs)
        mine, theirs = ticket
        with socket.create_connection(to, timeout=CONNECT_S) as connection:
            connection.settimeout(STALLED_S)
            connection.sendall(mine)
            if not hmac.compare_digest(connection.recv(SECRET_BYTES), theirs):
                raise PermissionError("another program listens on the worker's port")
            block_stream.send(connection, block)


def _block(ref: ray.ObjectRef[pa.Table]) -> pa.Table:
    try:
        found = ref.future().result(
            HERE_S
        )  # not ray.get, which would hold up all other threads if the block is not here
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise NoBlockError(f"{type(error).__name__}: {error}") from None
    if not isinstance(found, pa.Table):
        raise NoBlockError(f"{type(found).__name__} is no Arrow table")
    return found


class BlockSenders:
    """The senders of a run's nodes, each of which starts with the first request. ``runtime_env``: of their processes."""

    def __init__(self, runtime_env: Mapping[str, Any]) -> None:
        self._actor: Any = ray.remote(BlockSender)
        # Ray restarts a process that dies. It needs no CPU of its own: it works in place of Ray's daemons.
        self._options = {
            "num_cpus": 0,
            "max_concurrency": AT_ONCE,
            "max_restarts": -1,
            "runtime_env": dict(runtime_env) or None,
        }
        self._started: dict[str, tuple[Any, Future[None]]] = {}
        self._lock = threading.Lock()

    def of(self, node: str) -> Any:
        """The sender of a node; None while it starts."""
        with self._lock:
            if node not in self._started:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                sender = self._actor.options(**self._options, scheduling_strategy=where).remote()
                self._started[node] = sender, sender.ready.remote().future()
            sender, ready = self._started[node]
            if not ready.done():
                return None
            if ready.exception() is not None:  # the next request starts another
                del self._started[node]
                return None
            return sender

    def keep(self, nodes: Collection[str]) -> None:
        """End the senders of all other nodes: a process without work would keep an autoscaler from giving its node back."""
        with self._lock:
            for node in self._started.keys() - set(nodes):
                ray.kill(self._started.pop(node)[0])
