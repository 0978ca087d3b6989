"""A worker takes blocks from whoever has a ticket, and asks Ray for those that do not come."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offload.pipeline import block_stream, wire
from offload.pipeline.block_sender import SECRET_BYTES, NoBlockError
from offload.pipeline.passes import Slice
from offload.train.worker import block_receiver
from offload.train.worker.block_receiver import BlockReceiver, DirectBlocks, Expected, Missed
from tests.helpers import ROOT, eventually

BLOCK = wire.encode({"x": np.arange(5000.0).reshape(50, 100)})
PIECE = Slice(None, 0, 50, 0, "away")  # type: ignore[arg-type]


@pytest.fixture
def receiver() -> BlockReceiver:
    return BlockReceiver("127.0.0.1")


def connect(receiver: BlockReceiver, secret: bytes) -> socket.socket:
    connection = socket.create_connection(receiver.address)
    connection.sendall(secret)
    return connection


def known(receiver: BlockReceiver, expected: Expected) -> socket.socket:
    """A connection that has shown the secret of an expected block."""
    connection = connect(receiver, expected.ticket[0])
    assert connection.recv(SECRET_BYTES) == expected.ticket[1]
    return connection


def send(receiver: BlockReceiver, expected: Expected, block: pa.Table = BLOCK) -> None:
    with known(receiver, expected) as connection:
        block_stream.send(connection, block)


def ended(connection: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    connection.settimeout(60.0)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_blocks_arrive_in_any_order(receiver: BlockReceiver) -> None:
    first, second = receiver.expect(), receiver.expect()
    other = wire.encode({"y": np.arange(3)})
    send(receiver, second, other)
    assert second.wait().equals(other)
    send(receiver, first)
    assert first.wait().equals(BLOCK)


def test_a_ticket_counts_once(receiver: BlockReceiver) -> None:
    expected = receiver.expect()
    send(receiver, expected)
    assert expected.wait().equals(BLOCK)
    with connect(receiver, expected.ticket[0]) as connection:
        assert ended(connection)


def test_strangers_get_nothing_and_disturb_nobody(receiver: BlockReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "SECRET_S", 0.2)
    expected = receiver.expect()
    silent = [socket.create_connection(receiver.address) for _ in range(2 * block_receiver.STRANGERS)]
    with connect(receiver, b"x" * SECRET_BYTES) as stranger:
        send(receiver, expected)
        assert expected.wait().equals(BLOCK)
        assert ended(stranger)
    for each in silent:
        assert ended(each)
        each.close()


def test_a_forgotten_block_is_not_taken(receiver: BlockReceiver) -> None:
    expected = receiver.expect()
    receiver.forget(expected)
    with connect(receiver, expected.ticket[0]) as connection:
        assert ended(connection)


@pytest.mark.parametrize("content", [b"", struct.pack("!Q", 1000) + b"a part", struct.pack("!Q", 4) + b"junk"])
def test_a_block_that_breaks_off(receiver: BlockReceiver, content: bytes) -> None:
    expected = receiver.expect()
    with known(receiver, expected) as connection:
        connection.sendall(content)
    assert isinstance(expected.wait(), Missed)


def test_a_block_that_stalls(receiver: BlockReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "STALLED_S", 0.1)
    monkeypatch.setattr(block_receiver, "CONNECTED_S", 0.05)  # a connection that is there may take longer
    expected = receiver.expect()
    with known(receiver, expected) as connection:
        connection.sendall(struct.pack("!Q", 1000) + b"a part")
        assert isinstance(expected.wait(), Missed)


def test_nobody_connects(receiver: BlockReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "CONNECTED_S", 0.05)
    expected = receiver.expect()
    assert expected.wait() == Missed("no connection to the worker", tell=True)


def test_memory_in_use_has_a_bound(receiver: BlockReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver, "MOST_BYTES", 10_000)
    expected = receiver.expect()
    send(receiver, expected)
    block = expected.wait()
    assert receiver.full
    del block, expected
    eventually(lambda: not receiver.full)  # the thread that received it ends


class Told:
    """The pending answer of an actor or the hub."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._answer

    def future(self) -> Future[None]:
        future: Future[None] = Future()
        if isinstance(self._answer, BaseException):
            future.set_exception(self._answer)
        else:
            future.set_result(None)
        return future


class Sender:
    """A sender that sends ``BLOCK`` from a thread, or fails."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.asked = error, 0
        self.send = self

    def remote(self, refs: list[Any], to: tuple[str, int], ticket: tuple[bytes, bytes]) -> Told:
        self.asked += 1
        if self.error is not None:
            return Told(self.error)

        def run() -> None:
            with socket.create_connection(to) as connection:
                connection.sendall(ticket[0])
                assert connection.recv(SECRET_BYTES) == ticket[1]
                block_stream.send(connection, BLOCK)

        threading.Thread(target=run).start()
        return Told()


class Hub:
    """A hub with a sender for each node, after some requests."""

    def __init__(self, sender: Sender, *, starts: int = 0) -> None:
        self._sender, self._starts = sender, starts
        self.asked: list[str] = []
        self.told: list[tuple[str, str]] = []

    def blocks_through_ray(self, node: str, reason: str) -> None:
        self.told.append((node, reason))

    def sender(self, node: str) -> Told:
        self.asked.append(node)
        return Told(self._sender if len(self.asked) > self._starts else None)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(block_receiver, "time", made)
    return made


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one of a cluster, without Ray."""

    class Context:
        def get_node_id(self) -> str:
            return "home"

    monkeypatch.setattr(block_receiver.ray, "get_runtime_context", Context)
    monkeypatch.setattr(block_receiver.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.delenv("RAY_USE_TLS", raising=False)


def test_blocks_of_this_node_and_of_unknown_ones_come_through_ray() -> None:
    hub = Hub(Sender())
    direct = DirectBlocks(hub)  # type: ignore[arg-type]
    assert direct.fetch(PIECE._replace(node="home")) is None
    assert direct.fetch(PIECE._replace(node="")) is None
    assert not hub.asked


def test_blocks_of_other_nodes_come_from_a_sender_once_it_runs(clock: Clock) -> None:
    hub = Hub(Sender(), starts=1)
    direct = DirectBlocks(hub)  # type: ignore[arg-type]
    assert direct.fetch(PIECE) is None, "it starts"
    assert direct.fetch(PIECE) is None, "it is not asked for again at once"
    clock.now += block_receiver.ASK_AGAIN_S
    for _ in range(3):
        coming = direct.fetch(PIECE)
        assert coming is not None
        assert coming().equals(BLOCK)
    assert hub.asked == ["away", "away"]


def outcome(coming: Any) -> Any:
    assert coming is not None
    return coming()


def test_after_a_failure_blocks_come_through_ray_for_a_while_and_longer_each_time(clock: Clock) -> None:
    sender = Sender()
    hub = Hub(sender)
    direct = DirectBlocks(hub)  # type: ignore[arg-type]
    assert outcome(direct.fetch(PIECE)).equals(BLOCK)
    sender.error = OSError("no route to host")
    for seconds in (block_receiver.AGAIN_S, 2 * block_receiver.AGAIN_S):
        several = [direct.fetch(PIECE) for _ in range(3)]  # they fail together, and count once
        assert [outcome(each) for each in several] == [None] * 3
        clock.now += seconds - 1
        assert direct.fetch(PIECE) is None
        assert direct.fetch(PIECE._replace(node="another")) is not None, "the worker was reached before"
        clock.now += 1
    sender.error = None
    assert outcome(direct.fetch(PIECE)).equals(BLOCK)
    sender.error = OSError("again")
    assert outcome(direct.fetch(PIECE)) is None
    clock.now += block_receiver.AGAIN_S
    assert direct.fetch(PIECE) is not None, "a success ends the count of failures"
    assert hub.told[0] == ("away", "OSError: no route to host")


def test_a_worker_that_nobody_ever_reached_is_tried_by_no_other_sender_for_a_while(clock: Clock) -> None:
    direct = DirectBlocks(Hub(Sender(OSError("no route to host"))))  # type: ignore[arg-type]
    assert outcome(direct.fetch(PIECE)) is None
    another = PIECE._replace(node="another")
    assert direct.fetch(another) is None
    clock.now += block_receiver.AGAIN_S
    assert direct.fetch(another) is not None


def test_a_block_that_is_not_there_says_nothing_about_others(clock: Clock) -> None:
    sender = Sender(NoBlockError("lost"))
    hub = Hub(sender)
    direct = DirectBlocks(hub)  # type: ignore[arg-type]
    assert outcome(direct.fetch(PIECE)) is None
    sender.error = None
    assert outcome(direct.fetch(PIECE)).equals(BLOCK)
    assert not hub.told


def test_a_hub_that_cannot_start_a_sender_is_no_reason_to_fail() -> None:
    class Broken(Hub):
        def sender(self, node: str) -> Told:
            raise_later = Told()
            raise_later.result = lambda: 1 / 0  # type: ignore[method-assign]
            return raise_later

    assert DirectBlocks(Broken(Sender())).fetch(PIECE) is None  # type: ignore[arg-type]


def test_with_tls_all_blocks_come_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert DirectBlocks(Hub(Sender())).fetch(PIECE) is None  # type: ignore[arg-type]


def test_a_worker_that_cannot_listen_takes_all_blocks_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_receiver.ray.util, "get_node_ip_address", lambda: "203.0.113.1")
    assert DirectBlocks(Hub(Sender())).fetch(PIECE) is None  # type: ignore[arg-type]


@pytest.mark.ray
@pytest.mark.slow
def test_real_senders_send_and_die_and_blocks_come_as_long_as_their_node_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.direct_blocks"], capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"first": False, "next": [True] * 5, "restarted": 1, "lost": True}
