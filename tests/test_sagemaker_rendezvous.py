"""A job's hosts find together over a real socket, and all learn its outcome."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from launchers.sagemaker import rendezvous
from launchers.sagemaker.rendezvous import HeadLost, Rendezvous, follow, join
from offload.errors import ConfigError

TOKEN = "a-token"
VERSIONS = {"Python": "3.11", "Ray": "2.60.0"}


@pytest.fixture
def head() -> Iterator[Rendezvous]:
    meeting = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1", "algo-3"}, VERSIONS)
    yield meeting
    meeting.close({"exit": 1})


def comes(head: Rendezvous, host: str, versions: dict[str, str] = VERSIONS, token: str = TOKEN) -> Any:
    return join(head.address, token, host, versions, deadline_s=10)


def test_all_come_and_all_learn_the_outcome(head: Rendezvous) -> None:
    connections = [comes(head, host) for host in ("algo-3", "algo-1")]
    head.gather(10)
    head.tell({"ray": "127.0.0.1:6379"})
    head.close({"exit": 3, "reason": "ValueError: no"})
    for connection in connections:
        assert list(follow(connection)) == [
            {"ray": "127.0.0.1:6379"},
            {"outcome": {"exit": 3, "reason": "ValueError: no"}},
        ]


def test_a_host_that_never_comes_is_named(head: Rendezvous) -> None:
    comes(head, "algo-1")
    with pytest.raises(ConfigError, match=r"algo-3 did not come within 0.5 s; 1 of 2 other hosts are here"):
        head.gather(0.5)


def test_a_host_of_other_versions_is_refused_with_both(head: Rendezvous) -> None:
    comes(head, "algo-1")
    refused = comes(head, "algo-3", {"Python": "3.12", "Ray": "2.60.0"})
    with pytest.raises(
        ConfigError, match=r"algo-3 has Python 3.12 and the head 3.11: all hosts of a job need the same"
    ):
        head.gather(10)
    head.close({"exit": 1})
    assert list(follow(refused)) == [{"outcome": {"exit": 1}}]  # it must not wait for what never comes


def test_who_has_another_token_or_none_is_refused_and_the_job_is_unharmed(head: Rendezvous) -> None:
    with pytest.raises(ConfigError, match=r"has another token: this host is no part of its job"):
        comes(head, "algo-1", token="another")
    with socket.create_connection(head.address) as silent, socket.create_connection(head.address) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for host in ("algo-1", "algo-3"):
            comes(head, host)
        head.gather(10)
        assert silent.fileno() >= 0


def test_who_is_not_of_the_job_is_not_counted(head: Rendezvous) -> None:
    for host in ("algo-1", "algo-7"):
        comes(head, host)
    with pytest.raises(ConfigError, match="algo-3 did not come"):
        head.gather(0.5)


def test_what_a_host_says_is_not_unpickled(head: Rendezvous) -> None:
    odd = Client(head.address, authkey=TOKEN.encode())
    odd.send({"host": "algo-1", "versions": VERSIONS})  # a pickle
    comes(head, "algo-3")
    with pytest.raises(ConfigError, match="algo-1 did not come"):
        head.gather(0.5)


def test_a_head_that_starts_later_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(join(address, TOKEN, "algo-1", VERSIONS, deadline_s=20)))
    waiting.start()
    head = Rendezvous(address, TOKEN, {"algo-1"}, VERSIONS)
    head.gather(20)
    waiting.join(20)
    assert found
    head.close({"exit": 0})


def test_a_head_that_never_starts_is_named() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    with pytest.raises(ConfigError, match=rf"the head at 127.0.0.1:{address[1]} could not be reached within 0.3 s"):
        join(address, TOKEN, "algo-1", VERSIONS, deadline_s=0.3)


def test_a_head_that_dies_or_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.3)
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    with pytest.raises(HeadLost, match=r"was not heard of for 0.3 s"):
        list(follow(connection))
    theirs.close()
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    message = json.dumps({"ray": "x"}).encode()
    Connection(theirs.detach()).send_bytes(message)  # and is dropped, which closes it
    heard = follow(connection)
    assert next(heard) == {"ray": "x"}
    with pytest.raises(HeadLost, match="ended without saying"):
        next(heard)
