"""The errors a user can see, each with the exit code of the command line.

Where it stops: only mistakes and failures that a user can act on are of these types; a defect of offload itself stays
an ordinary exception.
"""

from __future__ import annotations

from collections.abc import Iterator


class OffloadError(Exception):
    """A failure that a user can act on: the text names the thing, the value found and the remedy.

    ``exit_code`` is what the command line ends with: 2 for what is found before the first step, 1 for a run that
    failed later.
    """

    exit_code = 1


class ConfigError(OffloadError):
    """Found before the first step: usage, input or environment (exit code 2)."""

    exit_code = 2


class RunError(OffloadError):
    """A run that failed after it had begun: a raising transform, a corrupt file, a full disk (exit code 1)."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and everything it was raised from, outermost first, each once.

    Ray wraps what a task raised in layers of its own (``.cause``, ``__cause__``, and the ``worker_failures`` of a
    training run); the error that a user can act on sits somewhere inside.
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
        failures = getattr(current, "worker_failures", None)
        if isinstance(failures, dict):
            nested += failures.values()
        todo += [n for n in nested if isinstance(n, BaseException)]


def find_offload_error(error: BaseException) -> OffloadError | None:
    """The first error meant for users inside ``error``, or None."""
    return next((e for e in causes(error) if isinstance(e, OffloadError)), None)
