"""The lines that the user's code prints in other processes, on their way to the program, and the limit of floods.

A decoder may warn about every file, or a data set print a line for every sample, in a hundred processes. The limit shows the beginning of
such a flood and counts the rest. Where it stops: :mod:`offload.pipeline.program.output_tail` reads the lines, and the program shows them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Stream = Literal["stdout", "stderr"]

SAME = 3  # lines of one text that are shown
BURST = 1000  # lines that are shown at once
PER_S = 10.0  # lines that are shown each second after a burst
TELL_S = 60.0  # between two counts of what was held back. After each, the same text is shown again
MOST_COUNTS = 20  # texts that have a count of their own
KNOWN = 1000  # texts that a limit remembers
SHOWN_OF_LINE = 120  # characters of a line that a count repeats


class PrintedLine(NamedTuple):
    """A printed line, without its end."""

    stream: Stream
    text: str


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Lines to show, in order, and counts of those held back: ``more`` of the same text, and ``beyond`` the limit by stream."""

    lines: tuple[PrintedLine, ...] = ()
    more: dict[PrintedLine, int] = field(default_factory=dict)
    beyond: dict[Stream, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lines or self.more or self.beyond)


class Limit:
    """A token bucket of BURST lines that refills at PER_S. It shows SAME lines of one text, and counts what it holds back.

    ``now_s``: a clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._room, self._at = float(BURST), now_s()
        self._seen: OrderedDict[PrintedLine, int] = OrderedDict()
        self._more: Counter[PrintedLine] = Counter()
        self._beyond: Counter[Stream] = Counter()
        self._counted_at = now_s()

    def admit(self, lines: Iterable[PrintedLine]) -> list[PrintedLine]:
        """The lines that may be shown now."""
        now_s = self._now_s()
        self._room = min(self._room + (now_s - self._at) * PER_S, BURST)
        self._at = now_s
        shown = []
        for line in lines:
            seen = self._seen[line] = self._seen.pop(line, 0) + 1
            if len(self._seen) > KNOWN:
                self._seen.popitem(last=False)
            if seen > SAME and line.text.strip():
                self._more[line] += 1
            elif self._room < 1.0:
                self._beyond[line.stream] += 1
            else:
                self._room -= 1.0
                shown.append(line)
        return shown

    def pass_on(self, printed: Printed) -> list[PrintedLine]:
        """The lines of another limit that may be shown now. What it held back counts here."""
        self._more.update(printed.more)
        self._beyond.update(printed.beyond)
        return self.admit(printed.lines)

    def held_back(self) -> Printed:
        """The counts of what was held back. They start again from zero, and so do the lines of one text."""
        held = Printed(more=dict(self._more), beyond=dict(self._beyond))
        for counter in (self._seen, self._more, self._beyond):
            counter.clear()
        return held

    def counts(self, *, last: bool = False) -> list[PrintedLine]:
        """Sentences about what was held back: once a minute, and at the end."""
        if not last and self._now_s() - self._counted_at < TELL_S:
            return []
        self._counted_at = self._now_s()
        held = self.held_back()
        most = Counter(held.more).most_common(MOST_COUNTS)
        beyond = Counter(held.beyond)
        for line, count in held.more.items() - dict(most).items():
            beyond[line.stream] += count
        return [*(_more(line, count) for line, count in most), *map(_beyond, beyond.items())]

    @property
    def holds_back(self) -> bool:
        """Whether it has held anything back since the last counts."""
        return bool(self._more or self._beyond)


def _more(line: PrintedLine, count: int) -> PrintedLine:
    if count == 1:
        return line
    text = line.text if len(line.text) <= SHOWN_OF_LINE else f"{line.text[:SHOWN_OF_LINE]}…"
    return PrintedLine(line.stream, f"… and {count:,} more lines like this: {text}")


def _beyond(held: tuple[Stream, int]) -> PrintedLine:
    stream, count = held
    return PrintedLine(
        stream, f"… and {count:,} more line{'s' if count > 1 else ''} from preprocessing, which Ray's logs hold"
    )


class Outlet:
    """The output of preprocessing processes for one program, limited, until the program collects it. Safe for several threads."""

    def __init__(self, limit: Limit | None = None) -> None:
        self._limit = limit or Limit()
        self._waiting: list[PrintedLine] = []
        self._lock = threading.Lock()

    def put(self, printed: Printed) -> None:
        """Add what a process has printed."""
        with self._lock:
            self._waiting += [*self._limit.pass_on(printed), *self._limit.counts()]

    @property
    def holds_back(self) -> bool:
        """Whether there are counts to tell at the end."""
        return self._limit.holds_back

    def pop_lines(self, *, last: bool = False) -> list[PrintedLine]:
        """The lines to show now. ``last``: with the counts of what was held back."""
        with self._lock:
            lines, self._waiting = self._waiting, []
            return [*lines, *(self._limit.counts(last=True) if last else ())]
