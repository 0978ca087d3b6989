"""Write the output of other processes to this program's standard output and standard error, each to its own."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def write_line(stream: str, line: str) -> None:
    """Write a line to ``stdout`` or ``stderr``, as they are now. Where one is gone, such as that of a closed pipe, its lines are lost, and
    the program goes on."""
    file: Any = sys.stdout if stream == "stdout" else sys.stderr
    if file is None:  # in a program that was started without one
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        try:
            file.write(f"{line}\n")
        except UnicodeEncodeError:
            file.write(f"{line}\n".encode(file.encoding, "backslashreplace").decode(file.encoding))
        file.flush()


def is_terminal(stream: str) -> bool:
    """Return whether this stream shows its lines on a terminal."""
    file: Any = sys.stdout if stream == "stdout" else sys.stderr
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return bool(file.isatty())
    return False
