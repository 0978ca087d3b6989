"""Read what a run directory's files have gained since the last look, and parse their lines.

The files may lie on another host: the run's hub then reads them.

Where it stops: :mod:`offload.report.page.records` knows what the lines mean.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.report.run_dir import EVENTS, METRICS, SKIPPED, SUMMARY


class RunOverError(Exception):
    """A run has ended, and this host does not see its files."""


FILES = (EVENTS, METRICS, SKIPPED, SUMMARY)
MOST_BYTES = 4 << 20  # bytes read of each file at a time


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What a file holds from an offset on.

    Args:
        data: at most ``MOST_BYTES`` bytes.
        size: the bytes of the whole file.
        file: a number that changes if another file takes the name.
    """

    data: bytes
    size: int
    file: int


Tails = dict[str, Tail]
Look = Callable[[Mapping[str, int]], Tails]
"""A function that gets offsets by file name, and returns the tails of those files that exist."""


def tails_in(path: Path) -> Look:
    """A function that reads the files of a run directory on this host. It raises ConfigError if one cannot be read."""
    return lambda offsets: {name: tail for name in FILES if (tail := _tail(path / name, offsets.get(name, 0)))}


def _tail(path: Path, offset: int) -> Tail | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait for a writer forever
            raise ConfigError(f"{path} is no ordinary file. Name the folder of a run.")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(offset)
            return Tail(data=file.read(MOST_BYTES), size=status.st_size, file=status.st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


Document = dict[str, Any]


def parsed(data: bytes) -> Any:
    """The JSON document in these bytes. Halves of surrogate pairs, as an error that names a file may hold, become question marks: neither a
    page nor a terminal can show them.

    Raises ValueError or RecursionError if there is none.
    """
    document = json.loads(data)
    if any(mark in data for mark in (b"\\ud", b"\\uD", b"\xed")):  # rare, and costs a second pass
        document = json.loads(json.dumps(document, ensure_ascii=False).encode(errors="replace"))
    return document


class Lines:
    """The documents of a ``.jsonl`` file that grows. Damaged lines are left out and counted.

    Args:
        name: the file's name.
        valid: whether a JSON object is one of the file's documents.
    """

    def __init__(self, name: str, valid: Callable[[Document], bool]) -> None:
        self.name, self.offset = name, 0
        self.documents: list[Document] = []
        self._valid = valid
        self._file: int | None = None
        self._begun = b""  # of a line whose end is still to come
        self._number = 1
        self._damaged: list[int] = []
        self._handed_out = 0

    def replaced(self, tail: Tail | None) -> bool:
        """Return whether this is another file than before, or a shorter one."""
        if self._file is None:
            return False
        return tail is None or tail.file != self._file or tail.size < self.offset

    def take(self, tail: Tail | None) -> bool:
        """Parse what is new. Return whether the file holds more."""
        if tail is None:
            return False
        self._file = tail.file
        self.offset += len(tail.data)
        *whole, self._begun = (self._begun + tail.data).split(b"\n")
        for line in whole:
            if not self._parse(line):
                self._damaged.append(self._number)
            self._number += 1
        if self.offset < tail.size and tail.data:
            return True
        # A part of an object is no object: a line that parses is complete, even before its end arrives.
        if self._parse(self._begun):
            self._begun = b""
        return False

    def fresh(self) -> list[Document]:
        """The documents since the last call."""
        documents, self._handed_out = self.documents[self._handed_out :], len(self.documents)
        return documents

    def note(self) -> str:
        """A sentence that counts the lines that are left out; empty if there are none."""
        damaged = [*self._damaged, self._number] if self._begun else self._damaged
        if self._begun and len(damaged) == 1:
            return f"The last line of {self.name} is incomplete, as a crash leaves it. This report omits it."
        if not damaged:
            return ""
        which = ", ".join(str(number) for number in damaged[:5]) + (", …" if len(damaged) > 5 else "")
        many = "s" if len(damaged) != 1 else ""
        return (
            f"{self.name}: {len(damaged):,} damaged line{many} ({which}). This report omits {'them' if many else 'it'}."
        )

    def _parse(self, line: bytes) -> bool:
        """Take a line; return False if it is damaged."""
        if not line.strip():
            return True
        try:
            document = parsed(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(document, dict) or not self._valid(document):
            return False
        self.documents.append(document)
        return True
