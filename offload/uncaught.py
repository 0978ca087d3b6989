"""Let Python show an error that explains itself, and that no program catches, with the program's own frames alone.

A traceback of this package tells a user nothing that the error's text does not. Whoever catches the error finds all of its frames. Where it
stops: defects of this package, and errors of other code, keep their whole traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
TELLS_ALL = "offload_tells_all"  # attribute of an error whose message needs no traceback

_Error = TypeVar("_Error", bound=BaseException)
_installed = False


def tells_all(error: _Error) -> _Error:
    """Mark an error of another type as one whose text tells all."""
    with contextlib.suppress(Exception):  # some classes of errors are frozen
        setattr(error, TELLS_ALL, True)
    install()
    return error


def install() -> None:
    """Let Python show uncaught errors this way from now on. What has shown them so far still does."""
    global _installed
    if not _installed:
        _installed = True
        sys.excepthook = _shown_by(sys.excepthook)


def _shown_by(show: Callable[..., Any]) -> Callable[..., None]:
    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) or getattr(error, TELLS_ALL, False):
            trace = of_program(trace)
            with contextlib.suppress(Exception):
                error.__traceback__ = trace  # Python prints this one
        show(kind, error, trace)

    return shown


def of_program(trace: TracebackType | None) -> TracebackType | None:
    """The frames before the first of this package, and after it those of neither this package nor a library."""
    kept, within = [], False
    for frame in _frames(trace):
        own = _is_own(frame)
        within = within or own
        if not own and not (within and any(part in _file(frame) for part in LIBRARIES)):
            kept.append(frame)
    return _linked(kept)


def without_own(trace: TracebackType | None) -> TracebackType | None:
    """The frames that are not of this package; all, if there are no others."""
    return _linked([frame for frame in _frames(trace) if not _is_own(frame)]) or trace


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    linked: TracebackType | None = None
    for frame in reversed(frames):
        linked = TracebackType(linked, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return linked


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _is_own(trace: TracebackType) -> bool:
    return _file(trace).startswith(PACKAGE)
