"""A job's hosts find together over a real socket, and all learn its outcome."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.launch.sagemaker.container import handshake, rendezvous
from offload.launch.sagemaker.container.rendezvous import Follower, HeadLost, Rendezvous

TOKEN = "a-token"
VERSIONS = {"Python": "3.11", "Ray": "2.60.0"}


@pytest.fixture
def head() -> Iterator[Rendezvous]:
    meeting = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1", "algo-3"})
    yield meeting
    meeting.close({"exit": 1})


def comes(head: Rendezvous, host: str, versions: dict[str, str] = VERSIONS, token: str = TOKEN) -> Follower:
    follower = Follower(head.address, token, host, deadline_s=800)
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
    Follower(head.address, TOKEN, "algo-3", deadline_s=800)
    with pytest.raises(ConfigError, match=r"algo-3 came, but did not finish installing within 0.5 s"):
        head.gather(VERSIONS, 0.5)


def test_a_host_that_fails_before_it_is_prepared_ends_the_waiting_for_others(head: Rendezvous) -> None:
    Follower(head.address, TOKEN, "algo-3", deadline_s=800).say(failed="pip could not")
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
    assert list(Follower(head.address, TOKEN, "algo-3", deadline_s=800).messages()) == told
    closing.join(800)
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


@pytest.mark.parametrize(
    "said",
    [pickle.dumps({"ready": True}), b"[1]", b"null", b"no JSON", b"[" * 100_000, b"", b'{"versions": 5}'],
    ids=["pickle", "list", "null", "text", "deep", "nothing", "fields"],
)
def test_a_host_that_says_anything_but_messages_is_lost(head: Rendezvous, said: bytes) -> None:
    comes(head, "algo-3")
    with proven(head, "algo-1") as odd:
        odd.sendall(len(said).to_bytes(4, "big") + said)
        with pytest.raises(ConfigError, match="algo-1 left before training began"):
            head.gather(VERSIONS, 300)


def test_a_message_without_end_is_refused_at_its_header(head: Rendezvous) -> None:
    comes(head, "algo-3")
    with proven(head, "algo-1") as odd:
        odd.sendall((handshake.MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ConfigError, match="algo-1 left before training began"):
            head.gather(VERSIONS, 300)


def test_a_long_reason_is_shortened(head: Rendezvous) -> None:
    host = Follower(head.address, TOKEN, "algo-1", deadline_s=800)
    host.say(failed="\N{SNOWMAN}" * (1 << 21))
    with pytest.raises(ConfigError) as caught:
        head.gather(VERSIONS, 300)
    assert str(caught.value) == f"algo-1: {'☃' * (handshake.TEXT_CHARS - 1)}…"
    head.close({"exit": 1, "reason": str(caught.value) * 1000})
    assert [len(message["outcome"]["reason"]) for message in host.messages()] == [handshake.TEXT_CHARS]


def test_a_head_that_starts_later_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(Follower(address, TOKEN, "algo-1", deadline_s=800)))
    waiting.start()
    head = Rendezvous(address, TOKEN, {"algo-1"})
    waiting.join(800)
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


def test_a_head_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_listens(link: socket.socket) -> None:
        while link.recv(1 << 12):
            pass

    monkeypatch.setattr(rendezvous, "SILENT_S", 0.3)
    with another_head(only_listens) as address, pytest.raises(HeadLost, match=r"has been silent for 0.3 s"):
        list(Follower(address, TOKEN, "algo-1", deadline_s=800).messages())


def test_a_head_that_dies_is_lost() -> None:
    with another_head(lambda link: link.sendall(handshake.frame({"ray": "x"}))) as address:
        heard = Follower(address, TOKEN, "algo-1", deadline_s=800).messages()
        assert next(heard) == {"ray": "x"}
        with pytest.raises(HeadLost, match="ended without reporting"):
            next(heard)


def test_a_follower_that_leaves_on_another_thread_ends_its_reading(head: Rendezvous) -> None:
    follower, _ = (comes(head, host) for host in ("algo-1", "algo-3"))
    head.gather(VERSIONS, 300)
    head.tell({"ray": "x"})
    heard, ends = queue.Queue[dict[str, Any]](), list[str]()

    def reads() -> None:
        try:
            for message in follower.messages():
                heard.put(message)
        except HeadLost as error:
            ends.append(str(error))

    reading = threading.Thread(target=reads)
    reading.start()
    assert heard.get(timeout=800) == {"ray": "x"}
    follower.close()
    reading.join(800)
    assert ends == ["the head's process ended without reporting the job's outcome."]
    follower.say(ready=True)  # which nobody hears


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
    assert lost.get(timeout=800) == "algo-1"
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
    assert lost.get(timeout=800) == "algo-1"
    head.close({"exit": 0})


# --- peers without the token ------------------------------------------------------------------------------------------


def test_silent_peers_that_speak_after_the_time_limit_take_no_host_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that closes a descriptor while a thread reads it lets that thread read a later connection of the same number."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.3)
    lost: queue.Queue[str] = queue.Queue()
    head = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1", "algo-3"}, lost.put)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(head.address)) for _ in range(8)]
        dropped = [hangs_up(peer) for peer in silent]
        hosts = [Follower(head.address, TOKEN, host, deadline_s=300) for host in ("algo-1", "algo-3")]
        for peer in silent:
            with contextlib.suppress(OSError):
                peer.sendall(b"\0")
        for host in hosts:
            host.say(versions=VERSIONS)
        head.gather(VERSIONS, 300)
        for host in hosts:
            host.say(ready=True)
        head.await_ready(300)
        head.close({"exit": 0})
        assert all(list(host.messages()) == [{"outcome": {"exit": 0}}] for host in hosts)
    assert lost.empty(), f"{lost.get()} is lost"
    assert all(dropped)


def test_silent_peers_cost_no_thread_and_a_host_finds_its_place_among_them(head: Rendezvous) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(head.address)) for _ in range(200)]
        for peer in silent[: 200 - rendezvous.UNPROVEN]:  # each newer one took the place of the oldest
            assert hangs_up(peer)
        assert all(greeted(peer) for peer in silent[-rendezvous.UNPROVEN :])
        assert threading.active_count() <= threads  # those of other tests may end meanwhile
        for host in ("algo-1", "algo-3"):
            comes(head, host)
        head.gather(VERSIONS, 300)
        assert hangs_up(silent[-rendezvous.UNPROVEN])
        assert greeted(silent[-1])


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"host": "algo-1"},
        {"host": "algo-1", "nonce": "", "proof": ""},
        {"host": 1, "nonce": [], "proof": None},
        {"host": "algo-1", "nonce": "\ud800", "proof": "\ud800"},
    ],
)
def test_who_proves_nothing_is_no_host(head: Rendezvous, said: dict[str, Any]) -> None:
    with socket.create_connection(head.address) as peer:
        peer.sendall(handshake.frame(said))
        assert hangs_up(peer)
    with pytest.raises(ConfigError, match=r"algo-1, algo-3 did not come"):
        head.gather(VERSIONS, 0.1)


def test_a_host_that_gives_up_before_it_is_in_is_not_lost() -> None:
    lost: queue.Queue[str] = queue.Queue()
    head = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1"}, lost.put)
    with socket.create_connection(head.address) as link:
        proof = handshake.proof(TOKEN, "host", of_head=read(link)["nonce"], of_host="n", host="algo-1")
        link.sendall(handshake.frame({"host": "algo-1", "nonce": "n", "proof": proof}))
        assert read(link)["proof"]
    again = comes(head, "algo-1")
    head.gather(VERSIONS, 300)
    head.close({"exit": 0})
    assert list(again.messages()) == [{"outcome": {"exit": 0}}]
    assert lost.empty()


def test_a_host_that_starts_again_takes_its_own_place() -> None:
    lost: queue.Queue[str] = queue.Queue()
    head = Rendezvous(("127.0.0.1", 0), TOKEN, {"algo-1"}, lost.put)
    first = comes(head, "algo-1")
    head.gather(VERSIONS, 300)
    again = comes(head, "algo-1")
    with pytest.raises(HeadLost):
        list(first.messages())
    again.say(ready=True)
    head.await_ready(300)
    head.close({"exit": 0})
    assert list(again.messages()) == [{"outcome": {"exit": 0}}]
    assert lost.empty()


def test_the_heads_own_words_prove_nothing(head: Rendezvous) -> None:
    """Whoever relays between two connections, or plays back what a host said on an earlier one, is refused."""
    with socket.create_connection(head.address) as first, socket.create_connection(head.address) as second:
        nonces = [read(peer)["nonce"] for peer in (first, second)]
        assert nonces[0] != nonces[1]
        proof = handshake.proof(TOKEN, "host", of_head=nonces[0], of_host="n", host="algo-1")
        first.sendall(handshake.frame({"host": "algo-1", "nonce": "n", "proof": proof}))
        of_head = read(first)["proof"]
        second.sendall(handshake.frame({"host": "algo-1", "nonce": "n", "proof": proof}))
        assert read(second) == {"refused": True}
    with socket.create_connection(head.address) as third:
        nonce = read(third)["nonce"]
        third.sendall(handshake.frame({"host": "algo-1", "nonce": nonce, "proof": of_head}))
        assert read(third) == {"refused": True}


@pytest.mark.parametrize("answer", [{"proof": ""}, {"proof": "0" * 64}, {"refused": True}])
def test_a_head_that_proves_nothing_is_none(answer: dict[str, Any]) -> None:
    def pretends(link: socket.socket) -> None:
        link.sendall(handshake.frame({"nonce": "n"}))
        told.append(read(link))
        link.sendall(handshake.frame(answer))

    told = list[dict[str, Any]]()
    with (
        another_head(pretends, greets=False) as address,
        pytest.raises(ConfigError, match="this host does not belong to its job"),
    ):
        Follower(address, TOKEN, "algo-1", deadline_s=800)
    assert TOKEN not in json.dumps(told)


def test_a_head_that_says_its_peers_proof_back_is_none() -> None:
    def reflects(link: socket.socket) -> None:
        link.sendall(handshake.frame({"nonce": "n"}))
        link.sendall(handshake.frame({"proof": read(link)["proof"]}))

    with another_head(reflects, greets=False) as address, pytest.raises(ConfigError, match="has another token"):
        Follower(address, TOKEN, "algo-1", deadline_s=800)


@pytest.mark.parametrize("said", [b"", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"SSH-2.0-OpenSSH\r\n"])
def test_what_listens_is_no_head(said: bytes) -> None:
    with another_head(lambda link: link.sendall(said), greets=False) as address, pytest.raises(ConfigError) as caught:
        Follower(address, TOKEN, "algo-1", deadline_s=0.1)
    assert "could not be reached within 0.1 s" in str(caught.value)


def hangs_up(peer: socket.socket) -> bool:
    """Wait until the head has closed a connection; False if it does not."""
    peer.settimeout(60)
    try:
        while peer.recv(1 << 12):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def greeted(peer: socket.socket) -> bool:
    """Wait until the head has said something on a connection; False if it closes it. What it said can still be read."""
    peer.settimeout(60)
    try:
        return peer.recv(1, socket.MSG_PEEK) != b""
    except OSError:
        return False


def read(link: socket.socket) -> dict[str, Any]:
    link.settimeout(60)
    size = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")
    return handshake.message_of(link.recv(size, socket.MSG_WAITALL))


@contextlib.contextmanager
def proven(head: Rendezvous, host: str) -> Iterator[socket.socket]:
    """A connection to the head on which a host has proven the token."""
    with socket.create_connection(head.address) as link:
        proof = handshake.proof(TOKEN, "host", of_head=read(link)["nonce"], of_host="n", host=host)
        link.sendall(handshake.frame({"host": host, "nonce": "n", "proof": proof}))
        assert read(link)["proof"] != proof
        link.sendall(handshake.frame({}))
        yield link


@contextlib.contextmanager
def another_head(act: Callable[[socket.socket], None], *, greets: bool = True) -> Iterator[tuple[str, int]]:
    """A head that acts so on each connection, and hangs up. ``greets``: it first proves the token."""

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                if greets:
                    link.sendall(handshake.frame({"nonce": "n"}))
                    said = read(link)
                    proof = handshake.proof(TOKEN, "head", of_head="n", of_host=said["nonce"], host=said["host"])
                    link.sendall(handshake.frame({"proof": proof}))
                    read(link)
                act(link)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            serving.join(800)
