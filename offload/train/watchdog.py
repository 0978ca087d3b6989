"""Whether a worker still moves: a process that hangs holds up all others, for ever, without a word.

Waiting for data is no hang: there is somebody else to tell what is wrong there.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """Of the thread that constructs it. ``deadline_s``: without a sign of life, or waiting, for so long it counts as hung."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._thread = threading.get_ident()
        self._alive_at = time.monotonic()
        self._waiting = False

    def alive(self) -> None:
        """A sign of life."""
        self._alive_at = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, the thread waits for data."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
            self.alive()

    def hung_at(self) -> str | None:
        """Where the thread hangs, None where it does not. For another thread to ask."""
        if self._waiting or time.monotonic() - self._alive_at < self.deadline_s:
            return None
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "a thread that has ended"
        place = traceback.extract_stack(frame)[-1]
        return f"{place.filename}:{place.lineno} in {place.name}"
