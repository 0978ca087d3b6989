"""What a run and the DataLoaders of one process share: neither ends the other's Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload.loader import session as sessions
from offload.train.cluster import connection, idle


class Session:
    """A session that no loader uses any more, and what was done to it."""

    is_shared, is_idle, ended = False, False, False

    def __init__(self) -> None:
        self.done: list[str] = []

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
    monkeypatch.setattr(connection, "_describe", lambda *, ours: None)
    with connection.connected(None):
        sessions.end_unused()  # some seconds after the last loader is gone
        with connection.connected(None):
            pass
        assert (session.done, later) == (["gave back its cores"], [])
    assert later == ["look again"]
    sessions.end_unused()
    assert session.done == ["gave back its cores", "ended Ray"]
