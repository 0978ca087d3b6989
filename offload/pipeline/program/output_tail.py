"""Read what this process prints, whoever prints it: Python, a warning, a logger, or a C library.

In Ray's processes, standard output and standard error are log files. They stay that way, so Ray's logs hold everything and no writer
ever waits for a reader. A tail reads such a file from the position at which it began. Where it stops: where Ray rotates its logs,
processes write to a pipe, of which it reads nothing.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from offload.actors.errors import lost_errors
from offload.pipeline.program.printed import Limit, Printed, PrintedLine, Stream

LOOK_S = 0.5
RECEIPT_S = 10.0  # time for the hub to receive what a process has printed
CHUNK = 1 << 20  # bytes
LONGEST = 1 << 16  # characters of a line
RAYS = (":job_id:", ":actor_name:", ":task_name:")
"""The beginnings of lines by which Ray tells its log monitor whose output follows."""


class WholeLines:
    """The whole lines of a stream that arrives in parts. A line that a progress bar rewrites appears only in its newest state."""

    def __init__(self) -> None:
        self._rest = ""
        self._settled = False

    def add(self, text: str) -> list[str]:
        """The lines that are whole now."""
        *lines, rest = (self._rest + text).split("\n")
        self._rest, self._settled = _newest(rest), False
        if len(self._rest) > LONGEST:
            lines.append(self._rest)
            self._rest = ""
        newest = (_newest(line).rstrip("\r") for line in lines)
        return [line for line in newest if not line.startswith(RAYS)]

    def settled(self) -> list[str]:
        """A line without an end that has not grown since the last call, unless it is the state of a progress bar."""
        if self._settled and "\r" not in self._rest:
            return self.rest()
        self._settled = True
        return []

    def rest(self) -> list[str]:
        """A line without an end."""
        rest, self._rest = self._rest.rstrip("\r"), ""
        return [rest] if rest else []


def _newest(line: str) -> str:
    """The part of a line after its last carriage return.

    A return at the very end stays: the next text may replace the line, or be the newline that ends it.
    """
    text = line.rstrip("\r")
    return text[text.rfind("\r") + 1 :] + line[len(text) :][:1]


class OutputTail:
    """The tail of the file to which a descriptor of this process writes, from now on."""

    def __init__(self, descriptor: int, stream: Stream) -> None:
        self._descriptor, self._stream = descriptor, stream
        self._file: int | None = None
        self._at = self._size()
        self._lines = WholeLines()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, settled: bool = False, last: bool = False) -> Iterator[PrintedLine]:
        """Yield the new lines. ``settled``: also :meth:`WholeLines.settled`. ``last``: also a line without an end."""
        size = self._size()
        while self._at < size:
            content = self._part()
            if not content:
                break
            self._at += len(content)
            yield from self._named(self._lines.add(self._decoder.decode(content)))
        if last:
            yield from self._named(self._lines.rest())
        elif settled:
            yield from self._named(self._lines.settled())

    def _named(self, texts: list[str]) -> list[PrintedLine]:
        return [PrintedLine(self._stream, text) for text in texts]

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            status = os.fstat(self._descriptor)
            return status.st_size if stat.S_ISREG(status.st_mode) else 0
        return 0

    def _part(self) -> bytes:
        with contextlib.suppress(OSError):  # such as too many open files: printing must not fail the work
            if self._file is None:
                self._file = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._file, CHUNK, self._at)
        return b""

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Output:
    """Everything that this process prints from now on."""

    def __init__(self) -> None:
        self._tails = (OutputTail(1, "stdout"), OutputTail(2, "stderr"))
        self._reading = threading.Lock()

    def read(self, *, settled: bool = False, last: bool = False) -> list[PrintedLine]:
        """The new lines, standard output first. The arguments are those of :meth:`OutputTail.read`."""
        with self._reading:
            return [line for tail in self._tails for line in tail.read(settled=settled, last=last)]

    def close(self) -> None:
        """Read no more."""
        with self._reading:
            for tail in self._tails:
                tail.close()


class Teller:
    """Tells the hub what a preprocessing process prints, with the key of the recipe at work.

    ``run``: the hub's handle. None: nothing is reported.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._key = run, ""
        self._output, self._limit = Output(), Limit()
        self._telling = threading.Lock()
        self._receipt: Future[None] | None = None
        if run is not None:
            threading.Thread(target=self._look, daemon=True, name="output").start()

    @contextlib.contextmanager
    def working(self, key: str) -> Iterator[None]:
        """A context for work with this recipe. At its end the hub has received the work's output, before anybody has its outcome."""
        self._key = key
        failed = True
        try:
            yield
            failed = False
        finally:
            if self._run is not None:
                with self._telling:
                    self._tell(last=failed)
                    self._wait()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._telling:
                self._tell(settled=True)

    def _tell(self, *, settled: bool = False, last: bool = False) -> None:
        lines = self._output.read(settled=settled, last=last)
        if not lines:
            return
        self._wait()  # Ray does not keep the order of calls
        shown, held = self._limit.admit(lines), self._limit.held_back()
        printed = Printed(lines=tuple(shown), more=held.more, beyond=held.beyond)
        with contextlib.suppress(*lost_errors()):  # the hub is gone
            self._receipt = self._run.printed.remote(self._key, printed).future()

    def _wait(self) -> None:
        """Wait until the hub has received the last report. Unlike ``ray.get``, a future does not release this process's CPU to Ray."""
        receipt, self._receipt = self._receipt, None
        if receipt is not None:
            with contextlib.suppress(TimeoutError, *lost_errors()):
                receipt.result(timeout=RECEIPT_S)
