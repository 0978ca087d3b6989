"""The errors that a user can see, each with the exit code of the command line.

Where it stops: these types are only for mistakes and failures that a user can act on; a defect of offload itself stays an ordinary
exception.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator

from offload import uncaught

# Marks around an argument within an error's text: Unicode's invisible operators, which no user's text contains.
_OPEN, _BETWEEN = "\u2063", "\u2062"
_ARGUMENT = re.compile(f"{_OPEN}([^{_OPEN}]*){_BETWEEN}([^{_OPEN}]*){_BETWEEN}([^{_OPEN}]*){_OPEN}")


def argument(name: str, value: object = None, *, python: str | None = None) -> str:
    """An argument for the text of an error: in Python, it reads as an argument of the API, on the command line as its option.

    ``argument("overwrite", True)`` is ``overwrite=True`` and ``--overwrite``; ``argument("storage_path")`` is ``storage_path`` and
    ``--storage-path``; ``argument("max_workers", 4)`` is ``max_workers=4`` and ``--max-workers 4``. ``python``: for an argument
    that Python spells in another way. A command without such an option shows Python's form.
    """
    if python is None:
        python = name if value is None else f"{name}={value!r}"
    return f"{_OPEN}{name}{_BETWEEN}{'' if value in (None, True) else value}{_BETWEEN}{python}{_OPEN}"


FAILURES = (Exception, SystemExit)
"""Errors of the user's code: a process that exits would lose other samples too."""


class OffloadError(Exception):
    """A failure that a user can act on: the text names the thing, the value found and the remedy.

    ``exit_code`` is the exit code of the command line: 2 for an error before the first step, 1 for a run that failed later.
    """

    exit_code = 1
    offload_tells_all = True  # see offload.uncaught

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if threading.current_thread() is threading.main_thread():  # other threads may make errors that nobody sees
            uncaught.install()

    def __str__(self) -> str:
        return _ARGUMENT.sub(lambda match: match[3], super().__str__())

    def naming(self, options: Collection[str]) -> str:
        """The text with the options of a command (``--overwrite``) instead of the arguments that they stand for."""

        def shown(match: re.Match[str]) -> str:
            option = f"--{match[1].replace('_', '-')}"
            return f"{option} {match[2]}".rstrip() if option in options else match[3]

        return _ARGUMENT.sub(shown, super().__str__())


class ConfigError(OffloadError):
    """An error found before the first step, in usage, input or environment (exit code 2)."""

    exit_code = 2


class VersionError(ConfigError, ImportError):
    """An installed version that offload cannot work with, found while offload is imported: ``except ImportError`` catches it, too."""


class RunError(OffloadError):
    """A run that failed after it had begun: a raising transform, a corrupt file, a full disk (exit code 1)."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all its causes, outermost first, each once.

    Ray wraps a task's error in layers of its own (``.cause``, ``__cause__``); the error that a user can act on is somewhere inside.
    """
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        nested: list[object] = [getattr(current, "cause", None), current.__cause__, current.__context__]
        todo += [n for n in nested if isinstance(n, BaseException)]


def find_offload_error(error: BaseException) -> OffloadError | None:
    """The first error meant for users inside ``error``, or None."""
    found = next((e for e in causes(error) if isinstance(e, OffloadError)), None)
    # Ray's wrapper of a task's error has the type of that error, too, and a remote traceback as its text.
    while isinstance(inner := getattr(found, "cause", None), OffloadError):
        found = inner
    return found
