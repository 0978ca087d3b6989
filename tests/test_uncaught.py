"""How Python shows errors that no program catches."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from types import TracebackType
from typing import Any

import pytest

from offload import uncaught
from offload.errors import ConfigError
from offload.model.checks import check_count


def shown(error: BaseException) -> list[str]:
    """The functions of the traceback that Python would show."""
    told: list[TracebackType | None] = []
    uncaught._shown_by(lambda kind, error, trace: told.append(trace))(type(error), error, error.__traceback__)
    assert error.__traceback__ is told[0]
    return [frame.name for frame in traceback.extract_tb(told[0])]


def raised(call: Any, *args: Any) -> BaseException:
    try:
        call(*args)
    except BaseException as error:
        return error
    raise AssertionError


def refused() -> None:
    check_count("batch_size", 0, least=1, sane="such as 64")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that takes no attributes."""


def test_an_error_for_users_has_the_frames_of_their_program_alone() -> None:
    error = raised(refused)
    assert isinstance(error, ConfigError)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1].startswith("check_")
    assert shown(error) == ["raised", "refused"]


def test_other_errors_keep_theirs_unless_their_text_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(uncaught, "_installed", False)

    def through() -> None:
        uncaught._linked(None)  # type: ignore[arg-type]

    error = raised(through)
    assert shown(error) == ["raised", "through", "_linked"]
    hook = sys.excepthook
    uncaught.tells_all(error)
    uncaught.tells_all(error)
    assert shown(error) == ["raised", "through"]
    assert sys.excepthook is not hook
    assert type(uncaught.tells_all(Frozen())) is Frozen
    assert sys.excepthook.__closure__ is not None


def test_an_interruption_within_this_package_is_shown_where_the_program_waits() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def waits() -> None:
        uncaught._shown_by(lambda *args: interrupted())(ValueError, ValueError(), None)

    assert shown(raised(waits)) == [
        "raised",
        "waits",
        "<lambda>",
        "interrupted",
    ]  # all of this file, which is a program's


def test_without_frames_of_others_all_stay() -> None:
    error = raised(uncaught._linked, None)
    assert error.__traceback__ is not None
    own = error.__traceback__.tb_next
    assert uncaught.without_own(own) is own
    assert uncaught.without_own(None) is None
