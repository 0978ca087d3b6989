"""The rendezvous of a job's hosts: they meet here, and all of them learn the outcome.

The head listens. Every other host connects, gives its name, and stays connected; both sides prove that they know the job's token
(:mod:`offload.launch.sagemaker.container.handshake`). The host then sends its versions once it is prepared, and reports that it is
ready, or why it failed. The head's messages (start Ray; the outcome) reach it at once. Silence means that the other side is gone. Ray's
own connections would end late and give no reason.

One thread of the head serves all connections, and only this thread closes them: a descriptor that another thread closes during a read may
by then be another host's connection. Anyone in the network may connect and say nothing. Such peers cost no thread, and have few places.

Where it stops: other modules start Ray and the user's script. It needs only the standard library, so that hosts can meet before anything
is installed on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

from offload.errors import ConfigError, RunError
from offload.launch.sagemaker.container import handshake
from offload.launch.sagemaker.container.handshake import GREETING_BYTES, HEADER_BYTES, MESSAGE_BYTES

MEETING_PORT = 6378
ALIVE_S = 3.0  # time between two signs of life
SILENT_S = 15.0  # time without one after which the other side counts as gone
HANDSHAKE_S = 10.0
FLUSH_S = 5.0  # time for the hosts' sockets to take the outcome
RETRY_S = 0.2
BACKLOG = 128
UNPROVEN = 64
"""The most peers at once that have not proven the token. One more takes the place of the oldest: a host needs its place for one round trip,
and comes again if it loses it."""

Address = tuple[str, int]


class HeadLost(RunError):
    """The head ended without reporting an outcome."""


class AnotherToken(Exception):
    """The other side does not know this side's token."""


class Rendezvous:
    """The head's side of the rendezvous. It listens from the start.

    Args:
        address: the address of this host, on the job's network; port 0 for any.
        token: the token of the job.
        hosts: the names of the expected hosts.
        lost: a callback, on another thread, with the name of a host that is gone before the end.
    """

    def __init__(
        self, address: Address, token: str, hosts: Collection[str], lost: Callable[[str], None] = lambda host: None
    ) -> None:
        self._token, self._hosts = token, frozenset(hosts)
        self._lost = lost
        self._began = time.monotonic()
        listener = socket.create_server(address, backlog=BACKLOG)
        self.address: Address = listener.getsockname()
        """The address where it listens."""
        # Other threads read these under the lock. Only the loop's thread changes them.
        self._changed = threading.Condition()
        self._here: dict[str, StreamWriter] = {}
        self._came: set[str] = set()
        self._versions: dict[str, dict[str, str]] = {}
        self._ready: set[str] = set()
        self._failed: str | None = None
        # Otherwise, a call could reach the loop just after its end, and wait for ever.
        self._asking, self._closed = threading.Lock(), False
        # These are the loop's own.
        self._loop = asyncio.new_event_loop()
        self._unproven: dict[StreamWriter, None] = {}  # the oldest first
        self._peers: set[asyncio.Task[None]] = set()
        # Kept, for hosts that come after the end.
        self._outcome: Mapping[str, Any] | None = None
        self._over = asyncio.Event()
        threading.Thread(target=self._run, args=(listener,), name="rendezvous", daemon=True).start()

    def check(self) -> None:
        """Raise ConfigError if a host has failed, with its name and its reason, or has left."""
        with self._changed:
            self._check()

    def gather(self, versions: Mapping[str, str], deadline_s: float) -> None:
        """Wait until all hosts are prepared, with the same versions as this one, such as ``{"Ray": "2.60.0"}``.

        Raises ConfigError, with names and reasons, if hosts are late, have other versions, or failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._trouble or self._difference(versions) or self._hosts <= self._versions.keys(), deadline_s
            )
            self._check()
            if difference := self._difference(versions):
                raise ConfigError(difference)
            missing, late = sorted(self._hosts - self._came), sorted(self._came - self._versions.keys())
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} did not come within {deadline_s:g} s; {len(self._came)} of {len(self._hosts)} other hosts are "
                "here. The job's log has the output of these hosts; in a VPC, the security group must allow all TCP from itself."
            )
        if late:
            raise ConfigError(
                f"{', '.join(late)} came, but did not finish installing within {deadline_s:g} s: see the job's log, or launch with a "
                "longer deadline (offload launch sagemaker --hosts-deadline)."
            )

    def await_ready(self, deadline_s: float) -> None:
        """Wait until all hosts have reported that they are ready.

        Raises ConfigError, with names and reasons, if hosts are late or failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._trouble or self._hosts <= self._ready, deadline_s)
            self._check()
            late = sorted(self._hosts - self._ready)
        if late:
            raise ConfigError(f"Ray did not start within {deadline_s:g} s on {', '.join(late)}.")

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to all hosts that are still connected."""
        self._do(self._tell(message))

    def close(self, outcome: Mapping[str, Any], late_s: float = 0.0) -> None:
        """Tell the outcome to all hosts, and end.

        A host that has not come yet would look for the head until its own deadline. The head tells it the outcome if it comes within
        ``late_s`` of the start.
        """
        self._do(self._conclude({"outcome": dict(outcome)}))  # a host that leaves from now on is not lost
        with self._changed:
            self._changed.wait_for(lambda: self._hosts <= self._came, max(self._began + late_s - time.monotonic(), 0.0))
        self._do(self._end(), last=True)

    @property
    def _trouble(self) -> bool:
        return self._failed is not None or not self._came <= self._here.keys()

    def _check(self) -> None:
        if self._failed is not None:
            raise ConfigError(self._failed)
        if gone := sorted(self._came - self._here.keys()):
            raise ConfigError(f"{', '.join(gone)} left before training began: the job's log has the last output.")

    def _difference(self, versions: Mapping[str, str]) -> str | None:
        """The first host whose versions differ from this one's, in words; None if all agree."""
        differ = sorted(host for host, theirs in self._versions.items() if theirs != versions)
        return _difference(differ[0], self._versions[differ[0]], versions) if differ else None

    # --- on the loop's thread ---

    def _do(self, act: Coroutine[Any, Any, None], *, last: bool = False) -> None:
        """Carry this out on the loop's thread, and wait for it. Nothing is carried out after the last one."""
        with self._asking:
            if self._closed:
                act.close()
                return
            self._closed = last
            done = asyncio.run_coroutine_threadsafe(act, self._loop)
        done.result()

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._admit, sock=listener, limit=GREETING_BYTES, backlog=BACKLOG)
        life = asyncio.create_task(self._show_life())
        await self._over.wait()
        server.close()
        life.cancel()
        for writer in self._unproven:
            writer.transport.abort()
        # The hosts hang up once they have read the outcome. To close first might discard it.
        while self._peers:
            await asyncio.wait(self._peers)

    async def _show_life(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            await self._tell({})

    async def _tell(self, message: Mapping[str, Any]) -> None:
        for writer in self._here.values():
            writer.write(handshake.frame(message))

    async def _conclude(self, outcome: Mapping[str, Any]) -> None:
        self._outcome = outcome
        await self._tell(outcome)

    async def _end(self) -> None:
        """Wait until the hosts' sockets have taken everything, and let the loop end."""
        taken = [asyncio.create_task(_drained(writer)) for writer in self._here.values()]
        if taken:
            await asyncio.wait(taken, timeout=FLUSH_S)
        self._over.set()

    async def _admit(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Admit a host that knows the token, and receive its messages until it is gone. Drop any other peer, and one that stays silent."""
        task = asyncio.current_task()
        assert task is not None, "a server calls this in a task"
        self._peers.add(task)
        task.add_done_callback(self._peers.discard)
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, ValueError, TypeError, AnotherToken):
            self._unproven[writer] = None
            if len(self._unproven) > UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.transport.abort()  # which ends its task
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    host = await self._handshake(reader, writer)
                lost_place = writer not in self._unproven
            finally:
                self._unproven.pop(writer, None)
            # A peer that lost its place has been cut off already, and comes again.
            if host in self._hosts and not lost_place:
                await self._listen(host, reader, writer)

    async def _handshake(self, reader: StreamReader, writer: StreamWriter) -> str:
        """The name of the host at the other side. Raises AnotherToken if it does not know the token."""
        of_head = handshake.new_nonce()
        writer.write(handshake.frame({"nonce": of_head}))
        host, of_host, proof = handshake.texts(await _received(reader, GREETING_BYTES), "host", "nonce", "proof")
        prove = partial(handshake.proof, self._token, of_head=of_head, of_host=of_host, host=host)
        if not handshake.same(proof, prove("host")):
            writer.write(handshake.frame({"refused": True}))
            raise AnotherToken
        writer.write(handshake.frame({"proof": prove("head")}))
        await _received(reader, GREETING_BYTES)  # a host that has given up meanwhile comes again: it is not lost
        return host

    async def _listen(self, host: str, reader: StreamReader, writer: StreamWriter) -> None:
        """Receive a host's messages until it is gone."""
        if self._outcome is not None:
            writer.write(handshake.frame(self._outcome))
        with self._changed:
            before, self._here[host] = self._here.get(host), writer
            self._came.add(host)
            self._changed.notify_all()
        if before is not None:  # the host has started again
            before.transport.abort()
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    said = await _received(reader, MESSAGE_BYTES)
                self._note(host, said)
        finally:
            writer.transport.abort()
            with self._changed:
                if gone := self._here.get(host) is writer:
                    del self._here[host]
                self._changed.notify_all()
            if gone and self._outcome is None:
                # On a thread of its own: a callback that waits must not keep the head from showing life.
                threading.Thread(target=self._lost, args=(host,), daemon=True).start()

    def _note(self, host: str, said: Mapping[str, Any]) -> None:
        with self._changed:
            if "versions" in said:
                self._versions[host] = dict(said["versions"])
            if "ready" in said:
                self._ready.add(host)
            if "failed" in said:
                self._failed = self._failed or f"{host}: {said['failed']}"
            self._changed.notify_all()


async def _received(reader: StreamReader, most_bytes: int) -> dict[str, Any]:
    """The next message. Raises EOFError at the end, and ValueError for anything but a message."""
    header = await reader.readexactly(HEADER_BYTES)
    return handshake.message_of(await reader.readexactly(handshake.length(header, most_bytes)))


async def _drained(writer: StreamWriter) -> None:
    """Wait until a connection's socket has taken everything, or the connection is gone."""
    # With a limit of 0, drain returns only once everything is written.
    writer.transport.set_write_buffer_limits(high=0)
    with contextlib.suppress(OSError):
        await writer.drain()


class Follower:
    """The side of any other host, which connects to the head. The head may start later.

    Raises ConfigError if the head does not answer within the deadline, or has another token.
    """

    def __init__(self, address: Address, token: str, host: str, deadline_s: float) -> None:
        self._socket = _connect(address, token, host, deadline_s)
        self._saying, self._closed = threading.Lock(), threading.Event()
        self._read = False  # whether messages() reads, which then closes the socket
        threading.Thread(target=self._show_life, daemon=True).start()

    def say(self, **message: Any) -> None:
        """Send a message to the head, if it is still connected; :meth:`messages` notices if not."""
        with self._saying:
            try:
                self._socket.sendall(handshake.frame(message))
            except OSError:
                # The message may be there in part, so that none may follow it. What the head has sent can still be read.
                self._shut(socket.SHUT_WR)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the head's messages; the last is ``{"outcome": …}``. Raises HeadLost if the head falls silent earlier."""
        with self._saying:
            self._read = True
        try:
            while True:
                try:
                    message = _receive(self._socket, MESSAGE_BYTES)
                except TimeoutError:
                    raise HeadLost(
                        f"the head has been silent for {SILENT_S:g} s: its host or its process is gone."
                    ) from None
                except (OSError, EOFError, ValueError):
                    raise HeadLost("the head's process ended without reporting the job's outcome.") from None
                if message:
                    yield message
                if "outcome" in message:
                    return
        finally:
            self._read = False
            self.close()

    def close(self) -> None:
        """Leave. :meth:`messages` ends, on whatever thread it runs."""
        self._closed.set()
        self._shut(socket.SHUT_RDWR)
        with self._saying:
            if not self._read:  # otherwise the descriptor could become another connection's before the read ends
                self._socket.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # it is closed, or the head is gone
            self._socket.shutdown(how)

    def _show_life(self) -> None:
        while not self._closed.wait(ALIVE_S):
            self.say()


def _connect(address: Address, token: str, host: str, deadline_s: float) -> socket.socket:
    """A connection to the head, on which both sides have proven the token."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            return _admitted(address, token, host, min(HANDSHAKE_S, max(until - time.monotonic(), RETRY_S)))
        except AnotherToken:
            raise ConfigError(
                f"the head at {address[0]} has another token: this host does not belong to its job."
            ) from None
        except (OSError, EOFError, ValueError) as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"the head at {address[0]}:{address[1]} could not be reached within {deadline_s:g} s ({error})."
                ) from None
            time.sleep(RETRY_S)


def _admitted(address: Address, token: str, host: str, limit_s: float) -> socket.socket:
    by = time.monotonic() + limit_s
    link = socket.create_connection(address, timeout=limit_s)
    try:
        (of_head,) = handshake.texts(_receive(link, GREETING_BYTES, by), "nonce")
        of_host = handshake.new_nonce()
        prove = partial(handshake.proof, token, of_head=of_head, of_host=of_host, host=host)
        link.sendall(handshake.frame({"host": host, "nonce": of_host, "proof": prove("host")}))
        said = _receive(link, GREETING_BYTES, by)
        if "refused" in said:
            raise AnotherToken
        (proof,) = handshake.texts(said, "proof")
        if not handshake.same(proof, prove("head")):
            raise AnotherToken
        link.sendall(handshake.frame({}))
        link.settimeout(SILENT_S)
    except BaseException:
        link.close()
        raise
    return link


def _receive(link: socket.socket, most_bytes: int, by: float | None = None) -> dict[str, Any]:
    """The next message. Raises EOFError at the end, TimeoutError if it comes too late, and ValueError for anything but a message.

    ``by``: the time, of ``time.monotonic``, by which it must be complete; None: the socket's own timeout limits each part.
    """
    header = _exactly(link, HEADER_BYTES, by)
    return handshake.message_of(_exactly(link, handshake.length(header, most_bytes), by))


def _exactly(link: socket.socket, size: int, by: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        if by is not None:
            if (left_s := by - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            link.settimeout(left_s)
        part = link.recv(size - len(received))
        if not part:
            raise EOFError("it hung up")
        received += part
    return bytes(received)


def _difference(host: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    differ = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    versions = ", ".join(f"{name} {theirs.get(name, 'none')} and the head {ours.get(name, 'none')}" for name in differ)
    return f"{host} has {versions}: all hosts of a job need the same. Use one image, and pin the packages in requirements.txt."
