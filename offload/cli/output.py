"""The output of a command, which under --json is one document on stdout and nothing else."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from offload.cli.parameters import options_of
from offload.errors import OffloadError
from offload.process.interrupts import INTERRUPTED
from offload.report.run_dir import to_json

Emit = Callable[[dict[str, Any], str], None]


@contextmanager
def stdout_for_json(as_json: bool) -> Iterator[Emit]:
    """Yield a function (document, text) that prints one of the two. Under --json, only this function writes to stdout: until the
    process ends, all other output, including that of the user's script and native libraries, goes to stderr. A command that fails or is
    interrupted before it has printed a document prints one that says so."""
    if not as_json:
        yield lambda document, text: click.echo(text)
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    printed = False

    def emit(document: dict[str, Any], text: str) -> None:
        nonlocal printed
        printed = True
        rest = memoryview((to_json(document, indent=2) + "\n").encode())
        while rest:
            try:
                rest = rest[os.write(kept, rest) :]
            except BlockingIOError:  # a pipe that another program made non-blocking is full
                select.select([], [kept], [])

    try:
        yield emit
    except OffloadError as error:
        if not printed:
            emit(error_document(error), "")
        raise
    except (KeyboardInterrupt, SystemExit, click.exceptions.Exit) as end:
        if not printed and _exit_code(end) == INTERRUPTED:
            emit(said_document("interrupted", INTERRUPTED), "")
        raise
    finally:
        sys.stdout.flush()
        os.close(kept)


def print_error(text: str, exit_code: int) -> None:
    """Print the document of a command that --json asked for, and that failed before it began."""
    click.echo(to_json(said_document(text, exit_code), indent=2))


def error_document(error: OffloadError) -> dict[str, Any]:
    """The document of a failed command."""
    text = error.naming(options_of(click.get_current_context().command))
    return said_document(text, error.exit_code)


def _exit_code(end: BaseException) -> Any:
    if isinstance(end, SystemExit):
        return end.code
    return end.exit_code if isinstance(end, click.exceptions.Exit) else INTERRUPTED


def said_document(text: str, exit_code: int) -> dict[str, Any]:
    """The document of a command that has nothing to print but a sentence."""
    return {"schema": "offload.error/1", "error": text, "exit_code": exit_code}
