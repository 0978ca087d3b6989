"""Receives blocks of other nodes in a process that trains, over connections from :mod:`offload.pipeline.blocks.sender`.

The worker, or the process with a DataLoader, listens on its node's address, on a port that the system chooses. It accepts a block
only over a connection that shows a secret, which it has sent to the block's node through Ray. So only programs of the cluster can send it
blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from offload.pipeline.blocks import stream
from offload.pipeline.blocks.memory import ReusedMemory
from offload.pipeline.blocks.sender import SECRET_BYTES, STALLED_S, Address, NoBlockError, Rows, Ticket
from offload.process import forks

_T_co = TypeVar("_T_co", covariant=True)


class Pending(Protocol[_T_co]):
    """An answer that is still to come."""

    def done(self) -> bool:
        """Return whether it has arrived."""

    def result(self) -> _T_co:
        """Wait for it. Raises its error."""


KEPT_BYTES = 256 << 20
# Bytes of blocks in use here, beyond which Ray carries blocks, into a store that can spill to disk
MOST_BYTES = 1 << 30
STRANGERS = 64  # connections that have shown no secret yet
SECRET_S = 10.0  # time for a connection to show one
ACCEPT_AGAIN_S = 0.1
CONNECTED_S = 30.0  # time for a sender to connect: it may have other blocks to send first
ASK_AGAIN_S = 1.0  # time before a sender that starts is asked for again
AGAIN_S, AGAIN_MOST_S = 30.0, 3600.0  # until a sender that failed is tried again: after the first failure, and at most


@dataclass(frozen=True)
class Missed:
    """The reason why a block did not come.

    Args:
        reason: an error in a line.
        way: the connection failed, so other blocks would fail, too.
        tell: a firewall may be the reason, which is worth a remark.
    """

    reason: str
    way: bool = True
    tell: bool = False


class Expected:
    """A block that a sender was asked for."""

    def __init__(self) -> None:
        self.ticket: Ticket = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
        self.connected = threading.Event()
        self._outcome: Future[Any | Missed] = Future()

    def settle(self, outcome: Any | Missed) -> None:
        """Note how it ended. The first outcome counts."""
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_result(outcome)

    def wait(self) -> Any | Missed:
        """Wait for the block."""
        with contextlib.suppress(TimeoutError):
            return self._outcome.result(CONNECTED_S)
        if not self.connected.is_set():
            # If the connection comes at this moment, the outcome that is settled first counts, and the block comes
            # through Ray.
            self.settle(Missed("no connection to the worker", tell=True))
        return self._outcome.result()  # the receiver settles a connection without progress


class BlockReceiver:
    """The port on which a worker receives blocks. Raises OSError if it cannot listen on ``host``."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Port 0: the system chooses a free one. A fork must not keep it open when this process ends.
        self._listener = forks.closes(socket.create_server((host, 0), family=family, backlog=128))
        self.address: Address = self._listener.getsockname()[:2]
        self.reached = False  # by any sender
        self._closed = False
        self._memory = ReusedMemory(KEPT_BYTES)
        # By the secret that its sender will show.
        self._expected: dict[bytes, Expected] = {}
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        threading.Thread(target=self._accept, daemon=True, name="block-receiver").start()

    @property
    def full(self) -> bool:
        """Whether the blocks in use take as much memory as they may."""
        return self._memory.lent_bytes() > MOST_BYTES

    def expect(self) -> Expected:
        """Expect a block, with new secrets."""
        expected = Expected()
        self._expected[expected.ticket[0]] = expected
        return expected

    def forget(self, expected: Expected) -> None:
        """Stop accepting this block."""
        self._expected.pop(expected.ticket[0], None)

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections

    def _accept(self) -> None:
        with self._listener:  # only this thread closes it: its descriptor may be another listener's afterwards
            self._accept_all()

    def _accept_all(self) -> None:
        while not self._closed:
            # Before accepting: beyond the limit, connections wait in the kernel's queue and take no thread of this
            # process.
            self._strangers.acquire()
            connection: socket.socket | None = None
            try:
                connection, _ = self._listener.accept()
                forks.closes(connection)
                # A thread for each connection: it sleeps in the kernel while the block comes, without Python's lock.
                threading.Thread(target=self._receive, args=(connection,), daemon=True, name="receive-block").start()
            except (OSError, RuntimeError):  # a limit on files or threads, or the connection has ended
                self._strangers.release()
                if connection is not None:
                    connection.close()
                if not self._closed:
                    time.sleep(ACCEPT_AGAIN_S)

    def _receive(self, connection: socket.socket) -> None:
        with connection:
            try:
                expected = self._identify(connection)
            finally:
                self._strangers.release()
            if expected is None:
                return
            expected.connected.set()
            self.reached = True
            try:
                # The sender sends nothing before it has seen this: another program may have taken over the port.
                connection.sendall(expected.ticket[1])
                stream.time_out(connection, STALLED_S)
                expected.settle(stream.receive(connection, self._memory.lend))
            except BaseException as error:  # a column's own type may raise anything
                expected.settle(Missed(_line(error)))

    def _identify(self, connection: socket.socket) -> Expected | None:
        """The expected block whose secret this connection shows. None for a stranger."""
        with contextlib.suppress(OSError):
            stream.time_out(connection, SECRET_S)
            # Popped, so that each secret works once: a copy of it is worth nothing afterwards.
            return self._expected.pop(connection.recv(SECRET_BYTES, socket.MSG_WAITALL), None)
        return None


class Senders(Protocol):
    """The feed, which knows the senders of its nodes."""

    def sender(self, node: str) -> Pending[Any]:
        """See :meth:`offload.pipeline.blocks.sender.BlockSenders.of`."""

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """Report that the blocks of a node do not reach this process directly."""


@dataclass
class _Route:
    """The way to a node. ``closed_until``: a time before which blocks come through Ray."""

    sender: Any = None
    asked: Pending[Any] | None = None
    closed_until: float = 0.0
    failures: int = 0

    def close(self) -> None:
        """Do not use it for a while. Each failure doubles the time."""
        self.sender = None
        self.closed_until = time.monotonic() + min(AGAIN_S * 2 ** min(self.failures, 16), AGAIN_MOST_S)
        self.failures += 1


def _here() -> tuple[str, str]:
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]


class DirectBlocks:
    """Brings blocks of other nodes to this process, where that works.

    ``here``: tells this node's id and address; ``home``: the id, if it is known already.
    """

    def __init__(self, senders: Senders, here: Callable[[], tuple[str, str]] = _here, home: str = "") -> None:
        self._senders, self._here = senders, here
        self._home: str = home
        self._listens = False
        self._receiver: BlockReceiver | None = None
        self._routes: dict[str, _Route] = {}
        self._all = _Route()  # closed for a while after a failure, if no sender has ever reached this worker
        self._lock = threading.Lock()

    def fetch(self, ref: Any, node: str, rows: Rows = None) -> Callable[[], Any] | None:
        """Ask for a block of this node, or for some of its rows.

        Return a function that waits for the block, and returns None if it did not come. Return None if it must come through Ray.
        """
        if node in ("", self._home):
            return None
        with self._lock:
            if not self._listens:
                self._listens = True
                self._home, address = self._here()
                self._receiver = _listen(address)
            receiver = self._receiver
            # A block of this node lies in the object store, which is shared memory.
            if receiver is None or node == self._home or time.monotonic() < self._all.closed_until:
                return None
            route = self._routes.setdefault(node, _Route())
            sender = self._sender(node, route)
        if sender is None or receiver.full:
            return None
        return self._ask(receiver, route, sender, ref, node, rows)

    def close(self) -> None:
        """Receive no more."""
        with self._lock:
            if self._receiver is not None:
                self._receiver.close()
                self._receiver = None

    def _sender(self, node: str, route: _Route) -> Any:
        """The sender of a node. None until it has started, and while its route is closed."""
        now = time.monotonic()
        if route.sender is None and now >= route.closed_until:
            # Not awaited: until the sender has started, blocks come through Ray.
            route.asked = route.asked or self._senders.sender(node)
            if route.asked.done():
                asked, route.asked = route.asked, None
                route.closed_until = now + ASK_AGAIN_S
                with contextlib.suppress(Exception):  # whatever keeps the feed from starting one
                    route.sender = asked.result()
        return route.sender

    def _ask(
        self, receiver: BlockReceiver, route: _Route, sender: Any, ref: Any, node: str, rows: Rows
    ) -> Callable[[], Any] | None:
        expected = receiver.expect()
        try:
            call = sender.send.remote([ref], rows, receiver.address, expected.ticket)
            sent: Future[None] = call.future()
        except Exception as error:  # such as of an actor that has been killed
            self._miss(receiver, route, sender, node, expected, Missed(_line(error)))
            return None

        def settle(sent: Future[None]) -> None:
            if (error := sent.exception()) is not None:
                receiver.forget(expected)
                way, tell = not isinstance(error, NoBlockError), isinstance(error, OSError)
                expected.settle(Missed(_line(error), way, tell))

        sent.add_done_callback(settle)

        def block() -> Any:
            outcome = expected.wait()
            if isinstance(outcome, Missed):
                if not sent.done():  # it may wait behind others, and would keep its block
                    import ray

                    ray.cancel(call)
                self._miss(receiver, route, sender, node, expected, outcome)
                return None
            route.failures = 0
            return outcome

        return block

    def _miss(
        self, receiver: BlockReceiver, route: _Route, sender: Any, node: str, expected: Expected, missed: Missed
    ) -> None:
        receiver.forget(expected)
        with self._lock:
            if not missed.way or route.sender is not sender:  # an earlier failure has closed this route
                return
            route.close()
            # If no sender has ever come through, a firewall may close this host to all of them. Trying each node in
            # turn would cost CONNECTED_S for every one.
            if not receiver.reached and time.monotonic() >= self._all.closed_until:
                self._all.close()
        if missed.tell and not receiver.reached:
            self._senders.blocks_through_ray(node, missed.reason)


def _listen(address: str) -> BlockReceiver | None:
    # These connections are as open as Ray's own without TLS.
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return None
    try:
        return BlockReceiver(address)
    except (OSError, RuntimeError):  # such as an address that only other hosts know, or a limit on threads
        return None


def _line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # of an actor's
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
