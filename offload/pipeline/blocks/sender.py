"""Sends the blocks of a node to workers on other nodes, over connections of its own.

Ray's daemons copy a block from one node's object store into the other's. That takes more than twice the CPU time of a TCP connection. Here,
an actor on the block's node reads it in the object store and writes it to a connection. The worker reads it
into its own memory (:mod:`offload.pipeline.blocks.receiver`). The block stays in the object store until the worker has it, so Ray still
counts it. If a connection fails, the worker fetches the block through Ray.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from offload.pipeline.blocks import stream

AT_ONCE = 32  # blocks that one node sends at a time
HERE_S = 5.0  # time to find a block that should be on this node
CONNECT_S = 5.0
STALLED_S = 30.0  # time without progress after which a connection counts as broken
START_AGAIN_S = 30.0  # time before another sender is started in place of one that could not start
SECRET_BYTES = 16

Address = tuple[str, int]
"""A host and a port."""

Rows = tuple[int, int] | None
"""The rows ``[start, stop)`` of a block that is a table; None for a whole block of any type."""

Ticket = tuple[bytes, bytes]
"""Two secrets of SECRET_BYTES each: the one that the sender shows, and the one that the worker shows in return."""


class NoBlockError(LookupError):
    """A block is not on its node, or it has no rows."""


class BlockSender:
    """The actor of one node."""

    def __repr__(self) -> str:
        return "block sender"

    def ready(self) -> None:
        """Answer: the actor runs."""

    def send(self, refs: list[Any], rows: Rows, to: Address, ticket: Ticket) -> None:
        """Send these rows of the block ``refs[0]`` to the worker at ``to``, which made the ticket.

        The reference lies in a list because Ray would otherwise wait for its block before the call. Raises NoBlockError, and OSError if the
        connection fails.
        """
        (ref,) = refs
        block = _block(ref, rows)
        mine, theirs = ticket
        with socket.create_connection(to, timeout=CONNECT_S) as connection:
            connection.settimeout(STALLED_S)
            # Each side shows a secret that only the other one can know, since anybody in the network may listen or
            # connect.
            connection.sendall(mine)
            shown = connection.recv(SECRET_BYTES)
            if not shown:
                raise ConnectionAbortedError("the worker does not want the block any more")
            if not hmac.compare_digest(shown, theirs):
                raise PermissionError("another program listens on the worker's port")
            stream.send(connection, block)


def _block(ref: Any, rows: Rows) -> Any:
    """These rows of a block on this node. Raises NoBlockError."""
    import ray

    try:
        # Not ray.get, which would hold up all other threads if the block is not here.
        block = ref.future().result(HERE_S)
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise NoBlockError(f"{type(error).__name__}: {error}") from None
    if rows is None:
        return block
    if not isinstance(block, pa.Table):
        raise NoBlockError(f"{type(block).__name__} is no Arrow table")
    start, stop = rows
    return block.slice(start, stop - start)


@dataclass(frozen=True)
class _Started:
    """A sender, the answer that it runs, and the time at which it was started."""

    actor: Any
    ready: Future[None]
    at: float


class BlockSenders:
    """The senders of a run's nodes, each of which starts with the first request.

    ``runtime_env``: of their processes; ``nodes``: the present nodes that make blocks.
    """

    def __init__(self, runtime_env: Mapping[str, Any], nodes: Callable[[], Collection[str]]) -> None:
        # A sender reserves no CPU: it works in place of Ray's daemons. Ray restarts it if its process dies.
        self._options = {
            "num_cpus": 0,
            "max_concurrency": AT_ONCE,
            "max_restarts": -1,
            "runtime_env": dict(runtime_env) or None,
        }
        self._nodes = nodes
        self._started: dict[str, _Started] = {}
        self._lock = threading.Lock()

    def of(self, node: str) -> Any:
        """The sender of a node. None while it starts, if it could not start, and if the node makes no blocks."""
        with self._lock:
            self._end_unused()
            if node not in self._nodes():
                return None
            now, started = time.monotonic(), self._started.get(node)
            if started is None or (_failed(started) and now > started.at + START_AGAIN_S):
                actor = self._start(node)
                started = self._started[node] = _Started(actor, actor.ready.remote().future(), now)
            # Never wait here: a worker that fetches its block through Ray in the meantime loses less.
            return started.actor if started.ready.done() and not _failed(started) else None

    def end_unused(self) -> None:
        """End the senders of nodes that make no blocks: a process without work would keep an autoscaler from giving such a node back."""
        with self._lock:
            self._end_unused()

    def _end_unused(self) -> None:
        for node in self._started.keys() - set(self._nodes()):
            self._end(self._started.pop(node).actor)

    def _start(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        sender: Any = ray.remote(BlockSender)
        return sender.options(
            **self._options, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()

    def _end(self, actor: Any) -> None:
        import ray

        ray.kill(actor)


def _failed(started: _Started) -> bool:
    return started.ready.done() and started.ready.exception() is not None
