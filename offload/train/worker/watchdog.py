"""Finds out whether a worker hangs: it would stop all others for ever, without a word. Waiting for data is no hang."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """Watches the thread that constructs it. ``deadline_s``: the thread counts as hung after so long without a sign of life."""

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
        """Where the thread hangs, or None if it does not. For another thread to ask."""
        if self._waiting or time.monotonic() - self._alive_at < self.deadline_s:
            return None
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "a thread that has ended"
        place = traceback.extract_stack(frame)[-1]
        return f"{place.filename}:{place.lineno} in {place.name}"
