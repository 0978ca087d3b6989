"""A job's hosts find together over a real socket, and all learn its outcome."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.launch.sagemaker.container import rendezvous
from offload.launch.sagemaker.container.rendezvous import Follower, HeadLost, Rendezvous

TOKEN = "a-token"
VERSIONS = {"Python": "3.11", "Ray": "2.60.0"}


@pytest.fixture
def head() -> Iterator[Rendezvous]:
    meeting = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1", "algo-3"})
    yield meeting
    meeting.close({"exit": 1})


def comes(head: Rendezvous, host: str, versions: dict[str, str] = VERSIONS, token: str = TOKEN) -> Follower:
    follower = Follower(head.address, token, host, deadline_s=60)
    follower.say(versions=versions)
    return follower


def test_all_come_and_all_learn_the_outcome(head: Rendezvous) -> None:
    connections = [comes(head, host) for host in ("algo-3", "algo-1")]
    head.gather(VERSIONS, 10)
    head.tell({"ray": "127.0.0.1:6379"})
    head.close({"exit": 3, "reason": "ValueError: no"})
    for connection in connections:
        assert list(connection.messages()) == [
            {"ray": "127.0.0.1:6379"},
            {"outcome": {"exit": 3, "reason": "ValueError: no"}},
        ]


def test_a_host_that_never_comes_is_named(head: Rendezvous) -> None:
    comes(head, "algo-1")
    with pytest.raises(ConfigError, match=r"algo-3 did not come within 0.5 s; 1 of 2 other hosts are here"):
        head.gather(VERSIONS, 0.5)


def test_a_host_that_does_not_finish_installing_is_named(head: Rendezvous) -> None:
    comes(head, "algo-1")
    Follower(head.address, TOKEN, "algo-3", deadline_s=60)
    with pytest.raises(ConfigError, match=r"algo-3 came, but did not finish installing within 0.5 s"):
        head.gather(VERSIONS, 0.5)


def test_a_host_that_fails_before_it_is_prepared_ends_the_waiting_for_others(head: Rendezvous) -> None:
    Follower(head.address, TOKEN, "algo-3", deadline_s=60).say(failed="pip could not")
    with pytest.raises(ConfigError, match=r"^algo-3: pip could not$"):
        head.gather(VERSIONS, 60)
    with pytest.raises(ConfigError, match="algo-3: pip could not"):
        head.check()  # which the head also asks while it installs


def test_a_host_that_comes_after_the_head_has_failed_is_told_at_once(head: Rendezvous) -> None:
    first = comes(head, "algo-1")
    closing = threading.Thread(target=lambda: head.close({"exit": 1, "reason": "no GPU"}, late_s=60))
    closing.start()
    told = [{"outcome": {"exit": 1, "reason": "no GPU"}}]
    assert list(first.messages()) == told
    assert closing.is_alive()  # for the other
    assert list(Follower(head.address, TOKEN, "algo-3", deadline_s=60).messages()) == told
    closing.join(10)
    assert not closing.is_alive()


def test_a_host_of_other_versions_is_refused_with_both(head: Rendezvous) -> None:
    comes(head, "algo-1")
    refused = comes(head, "algo-3", {"Python": "3.12", "Ray": "2.60.0"})
    with pytest.raises(
        ConfigError, match=r"algo-3 has Python 3.12 and the head 3.11: all hosts of a job need the same"
    ):
        head.gather(VERSIONS, 10)
    head.close({"exit": 1})
    assert list(refused.messages()) == [{"outcome": {"exit": 1}}]  # it must not wait for what never comes


def test_who_has_another_token_or_none_is_refused_and_the_job_is_unharmed(head: Rendezvous) -> None:
    with pytest.raises(ConfigError, match=r"has another token: this host does not belong to its job"):
        comes(head, "algo-1", token="another")
    with socket.create_connection(head.address) as silent, socket.create_connection(head.address) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for host in ("algo-1", "algo-3"):
            comes(head, host)
        head.gather(VERSIONS, 10)
        assert silent.fileno() >= 0


def test_who_is_not_of_the_job_is_not_counted(head: Rendezvous) -> None:
    for host in ("algo-1", "algo-7"):
        comes(head, host)
    with pytest.raises(ConfigError, match="algo-3 did not come"):
        head.gather(VERSIONS, 0.5)


def test_what_a_host_says_is_not_unpickled(head: Rendezvous) -> None:
    odd = Client(head.address, authkey=TOKEN.encode())
    odd.send({"host": "algo-1"})  # a pickle
    comes(head, "algo-3")
    with pytest.raises(ConfigError, match="algo-1 did not come"):
        head.gather(VERSIONS, 0.5)


def test_a_head_that_starts_later_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(Follower(address, TOKEN, "algo-1", deadline_s=60)))
    waiting.start()
    head = Rendezvous(address, TOKEN, {"algo-1"})
    waiting.join(20)
    assert found
    found[0].say(versions=VERSIONS)
    head.gather(VERSIONS, 20)
    head.close({"exit": 0})


def test_a_head_that_never_starts_is_named() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    with pytest.raises(ConfigError, match=rf"the head at 127.0.0.1:{address[1]} could not be reached within 0.3 s"):
        Follower(address, TOKEN, "algo-1", deadline_s=0.3)


def test_a_head_that_falls_silent_is_lost(head: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.3)
    with pytest.raises(HeadLost, match=r"has been silent for 0.3 s"):
        list(comes(head, "algo-1").messages())


def test_a_head_that_dies_is_lost() -> None:
    def dies() -> None:
        with listener.accept() as connection:
            connection.send_bytes(json.dumps({"ray": "x"}).encode())

    with Listener(("127.0.0.1", 0), authkey=TOKEN.encode()) as listener:
        dying = threading.Thread(target=dies)
        dying.start()
        heard = Follower(listener.address, TOKEN, "algo-1", deadline_s=60).messages()  # type: ignore[arg-type]
        assert next(heard) == {"ray": "x"}
        with pytest.raises(HeadLost, match="ended without reporting"):
            next(heard)
        dying.join(10)


def test_hosts_are_waited_for_until_they_are_ready(head: Rendezvous) -> None:
    first, second = (comes(head, host) for host in ("algo-1", "algo-3"))
    head.gather(VERSIONS, 10)
    first.say(ready=True)
    with pytest.raises(ConfigError, match=r"Ray did not start within 0.3 s on algo-3"):
        head.await_ready(0.3)
    second.say(ready=True)
    head.await_ready(10)


def test_why_a_host_is_not_ready_is_told(head: Rendezvous) -> None:
    first, second = (comes(head, host) for host in ("algo-1", "algo-3"))
    head.gather(VERSIONS, 10)
    first.say(ready=True)
    second.say(failed="port 6380 is taken")
    with pytest.raises(ConfigError, match=r"algo-3: port 6380 is taken"):
        head.await_ready(10)


def test_a_host_that_leaves_is_reported_and_one_that_leaves_at_the_end_is_not() -> None:
    lost: queue.Queue[str] = queue.Queue()
    head = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1", "algo-3"}, lost.put)
    first, second = (comes(head, host) for host in ("algo-1", "algo-3"))
    head.gather(VERSIONS, 10)
    first.close()
    assert lost.get(timeout=300) == "algo-1"
    with pytest.raises(ConfigError, match=r"algo-1 left before training began"):
        head.await_ready(10)
    head.close({"exit": 0})
    assert list(second.messages()) == [{"outcome": {"exit": 0}}]
    assert lost.empty()


def test_a_host_that_falls_silent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.3)
    lost: queue.Queue[str] = queue.Queue()
    head = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1"}, lost.put)
    comes(head, "algo-1")
    assert lost.get(timeout=300) == "algo-1"
    head.close({"exit": 0})
