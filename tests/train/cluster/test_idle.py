"""What a run and the DataLoaders of one process share: neither ends the other's Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload.loader.job import session as sessions
from offload.train.cluster import connection, idle


class Session:
    """A session that no loader uses any more, and what was done to it."""

    is_shared, is_idle, is_programs, ended = False, False, False, False

    def __init__(self) -> None:
        self.done: list[str] = []

    def forget(self, loader: str) -> None: ...

    def make_room(self) -> None: ...

    def give_back(self) -> None:
        self.done.append("gave back its cores")

    def close(self) -> None:
        self.done.append("ended Ray")


@contextmanager
def _connected(*options: Any) -> Iterator[bool]:
    yield False


def test_a_session_that_no_loader_uses_ends_only_after_the_run_that_uses_its_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, later = Session(), []
    monkeypatch.setattr(sessions, "_sessions", {(None, "any"): session})
    monkeypatch.setattr(sessions, "_users", {})
    monkeypatch.setattr(idle, "_waiting", [lambda: later.append("look again")])
    monkeypatch.setattr(connection, "_opened", _connected)
    monkeypatch.setattr(connection, "_describe", lambda *, ours, looks: None)
    with connection.connected(None):
        sessions.end_unused()  # some seconds after the last loader is gone
        with connection.connected(None):
            pass
        assert (session.done, later) == (["gave back its cores"], [])
    assert later == ["look again"]
    sessions.end_unused()
    assert session.done == ["gave back its cores", "ended Ray"]


def test_a_loader_that_begins_while_the_last_session_ends_does_not_join_its_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    ending, begun = threading.Event(), threading.Event()

    class Ending(Session):
        def close(self) -> None:
            ending.set()
            begun.wait(0.5)  # until another has begun, which it must not
            happened.append("one has ended")

    class Beginning(Session):
        def __init__(self, address: str | None, placement: str) -> None:
            super().__init__()
            happened.append("another begins")
            begun.set()

        def renew(self) -> None:
            pass

    monkeypatch.setattr(sessions, "FeedSession", Beginning)
    monkeypatch.setattr(sessions, "_end_later", list)
    monkeypatch.setattr(sessions, "_sessions", {(None, "all"): Ending()})
    monkeypatch.setattr(sessions, "_users", {})
    thread = threading.Thread(target=sessions.end_unused)
    thread.start()
    assert ending.wait(800)
    user = sessions.User()
    user.session(None, "all")
    thread.join()
    assert happened == ["one has ended", "another begins"]


def test_a_ray_that_the_program_uses_stays_until_the_program_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    monkeypatch.setattr(session, "is_programs", True)
    monkeypatch.setattr(sessions, "_sessions", {(None, "all"): session})
    monkeypatch.setattr(sessions, "_users", {})
    sessions.end_unused()
    assert session.done == ["gave back its cores"]
    monkeypatch.setattr(session, "ended", True)
    sessions.end_unused()
    assert session.done == ["gave back its cores", "ended Ray"]


def test_a_session_lingers_after_the_last_of_several_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    class Timer:
        daemon = False

        def __init__(self, wait_s: float, call: Any, arguments: tuple[Any, ...] = ()) -> None:
            looks.append(lambda: call(*arguments))

        def start(self) -> None:
            pass

    session = Session()
    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(sessions, "_sessions", {(None, "all"): session})
    monkeypatch.setattr(sessions, "_users", {(None, "all"): {"train", "val"}})
    sessions._release("train")
    sessions._release("val")
    first, second = looks
    first()  # a moment after the end of the other loader
    assert session.done == []
    second()
    assert session.done == ["ended Ray"]
