"""A worker takes blocks from whoever has a ticket, and asks Ray for those that do not come."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offload.pipeline.blocks import receiver as block_receiver
from offload.pipeline.blocks import sender as block_sender
from offload.pipeline.blocks import stream, wire
from offload.pipeline.blocks.receiver import BlockReceiver, DirectBlocks, Expected, Missed
from offload.pipeline.blocks.sender import SECRET_BYTES, BlockSenders, NoBlockError
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.feed.passes import Slice
from offload.train.worker.data.feed_client import HubFeed
from tests.helpers import ROOT, eventually

HEAD = stream._HEAD.pack
BLOCK = wire.encode({"x": np.arange(5000.0).reshape(50, 100)})
PIECE = Slice(None, 0, 50, 0, "away")  # type: ignore[arg-type]


@pytest.fixture
def receiver() -> Iterator[BlockReceiver]:
    made = BlockReceiver("127.0.0.1")
    yield made
    made.close()


def connect(receiver: BlockReceiver, secret: bytes) -> socket.socket:
    connection = socket.create_connection(receiver.address, timeout=60.0)
    connection.sendall(secret)
    return connection


def known(receiver: BlockReceiver, expected: Expected) -> socket.socket:
    """A connection that has shown the secret of an expected block."""
    connection = connect(receiver, expected.ticket[0])
    assert connection.recv(SECRET_BYTES) == expected.ticket[1]
    return connection


def send(receiver: BlockReceiver, expected: Expected, block: pa.Table = BLOCK) -> None:
    with known(receiver, expected) as connection:
        stream.send(connection, block)


def ended(connection: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
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
    silent = [socket.create_connection(receiver.address, timeout=60.0) for _ in range(2 * block_receiver.STRANGERS)]
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


@pytest.mark.parametrize(
    "content", [b"", HEAD(0, 1000) + b"a part", HEAD(0, 4) + b"junk", HEAD(1, 12) + b"not a pickle"]
)
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
        connection.sendall(HEAD(0, 1000) + b"a part")
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

    def remote(self, refs: list[Any], rows: tuple[int, int], to: tuple[str, int], ticket: tuple[bytes, bytes]) -> Told:
        self.asked += 1
        if self.error is not None:
            return Told(self.error)

        def run() -> None:
            with socket.create_connection(to) as connection:
                connection.sendall(ticket[0])
                assert connection.recv(SECRET_BYTES) == ticket[1]
                stream.send(connection, BLOCK.slice(rows[0], rows[1] - rows[0]))

        threading.Thread(target=run, daemon=True).start()
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


Make = Callable[..., DirectBlocks]


def fetch(direct: DirectBlocks, node: str = "away") -> Callable[[], Any] | None:
    return direct.fetch(None, node, (0, 50))  # type: ignore[arg-type]


@pytest.fixture
def direct_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a worker's :class:`DirectBlocks`, without Ray."""
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    made: list[DirectBlocks] = []

    def make(hub: Hub, address: str = "127.0.0.1") -> DirectBlocks:
        made.append(DirectBlocks(hub, lambda: ("home", address)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_blocks_of_this_node_and_of_unknown_ones_come_through_ray(direct_to: Make) -> None:
    hub = Hub(Sender())
    direct = direct_to(hub)
    assert fetch(direct, "home") is None
    assert fetch(direct, "") is None
    assert not hub.asked


def test_blocks_of_other_nodes_come_from_a_sender_once_it_runs(clock: Clock, direct_to: Make) -> None:
    hub = Hub(Sender(), starts=1)
    direct = direct_to(hub)
    assert fetch(direct) is None, "it starts"
    assert fetch(direct) is None, "it is not asked for again at once"
    clock.now += block_receiver.ASK_AGAIN_S
    for _ in range(3):
        coming = fetch(direct)
        assert coming is not None
        assert coming().equals(BLOCK)
    assert hub.asked == ["away", "away"]


def outcome(coming: Any) -> Any:
    assert coming is not None
    return coming()


def test_after_a_failure_blocks_come_through_ray_for_a_while_and_longer_each_time(
    clock: Clock, direct_to: Make
) -> None:
    sender = Sender()
    hub = Hub(sender)
    direct = direct_to(hub)
    assert outcome(fetch(direct)).equals(BLOCK)
    sender.error = OSError("no route to host")
    for seconds in (block_receiver.AGAIN_S, 2 * block_receiver.AGAIN_S):
        several = [fetch(direct) for _ in range(3)]  # they fail together, and count once
        assert [outcome(each) for each in several] == [None] * 3
        clock.now += seconds - 1
        assert fetch(direct) is None
        assert fetch(direct, "another") is not None, "the worker was reached before"
        clock.now += 1
    sender.error = None
    assert outcome(fetch(direct)).equals(BLOCK)
    sender.error = OSError("again")
    assert outcome(fetch(direct)) is None
    clock.now += block_receiver.AGAIN_S
    assert fetch(direct) is not None, "a success ends the count of failures"
    assert not hub.told, "no firewall is between"


def test_a_worker_that_nobody_ever_reached_is_tried_by_no_other_sender_for_a_while(
    clock: Clock, direct_to: Make
) -> None:
    hub = Hub(Sender(OSError("no route to host")))
    direct = direct_to(hub)
    assert outcome(fetch(direct)) is None
    assert hub.told == [("away", "OSError: no route to host")]
    assert fetch(direct, "another") is None
    clock.now += block_receiver.AGAIN_S
    assert fetch(direct, "another") is not None


def test_a_block_that_is_not_there_says_nothing_about_others(clock: Clock, direct_to: Make) -> None:
    sender = Sender(NoBlockError("lost"))
    hub = Hub(sender)
    direct = direct_to(hub)
    assert outcome(fetch(direct)) is None
    sender.error = None
    assert outcome(fetch(direct)).equals(BLOCK)
    assert not hub.told


def test_a_hub_that_cannot_start_a_sender_is_no_reason_to_fail(direct_to: Make) -> None:
    class Broken(Hub):
        def sender(self, node: str) -> Told:
            raise_later = Told()
            raise_later.result = lambda: 1 / 0  # type: ignore[method-assign]
            return raise_later

    assert fetch(direct_to(Broken(Sender()))) is None


def test_with_tls_all_blocks_come_through_ray(monkeypatch: pytest.MonkeyPatch, direct_to: Make) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert fetch(direct_to(Hub(Sender()))) is None


def test_a_worker_that_cannot_listen_takes_all_blocks_through_ray(direct_to: Make) -> None:
    assert fetch(direct_to(Hub(Sender()), "203.0.113.1")) is None


def test_passes_of_one_worker_share_a_port(direct_to: Make) -> None:
    direct = direct_to(Hub(Sender()))
    ports = set()
    for _ in range(3):
        columns = HubFeed(Hub(Sender()), direct).fetch(PIECE._replace(start=7, stop=11))()  # type: ignore[arg-type]
        np.testing.assert_array_equal(columns["x"], np.arange(5000.0).reshape(50, 100)[7:11])
        assert columns[POSITION].tolist() == columns[SAMPLE_ID].tolist() == [7, 8, 9, 10]
        assert direct._receiver is not None
        ports.add(direct._receiver.address)
    assert len(ports) == 1


def test_a_receiver_that_is_closed_listens_no_more(receiver: BlockReceiver) -> None:
    receiver.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(receiver.address, timeout=60.0)


class Started:
    """A sender's actor, as :class:`BlockSenders` starts it."""

    def __init__(self, made: list[Started], error: BaseException | None) -> None:
        made.append(self)
        self.killed = False
        self.ready = SimpleNamespace(remote=lambda: Told(error))


A, B, C = (letter * 56 for letter in "abc")  # node ids


def test_senders_start_once_per_node_and_end_when_their_node_makes_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Started] = []
    nodes, error = {A, B}, None
    senders = BlockSenders({}, lambda: nodes)
    monkeypatch.setattr(senders, "_start", lambda node: Started(made, error))
    monkeypatch.setattr(senders, "_end", lambda actor: setattr(actor, "killed", True))
    assert senders.of(A) is senders.of(A) is made[0]
    assert senders.of(B) is made[1]
    assert senders.of(C) is None, "it makes no blocks"
    nodes = {B}
    senders.end_unused()
    assert [each.killed for each in made] == [True, False]
    assert senders.of(A) is None
    assert senders.of(B) is made[1]


def test_a_sender_that_cannot_start_is_started_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    made: list[Started] = []
    error: BaseException | None = OSError("no room")
    senders = BlockSenders({}, lambda: {A})
    monkeypatch.setattr(block_sender, "time", clock)
    monkeypatch.setattr(senders, "_start", lambda node: Started(made, error))
    assert senders.of(A) is senders.of(A) is None
    assert len(made) == 1
    clock.now += block_sender.START_AGAIN_S + 1
    error = None
    assert senders.of(A) is made[1]


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
def test_real_senders_send_and_die_and_blocks_come_as_long_as_their_node_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.direct_blocks"], capture_output=True, text=True, timeout=800, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"first": False, "next": [True] * 5, "restarted": 1, "without_senders": False, "lost": True}
