"""Detect a worker that hangs, which would silently stop all others forever. Waiting for data is not a hang."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[3]))


class Watchdog:
    """A watchdog of the thread that constructs it. ``deadline_s``: the time without a sign of life after which the thread counts as
    hung."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._thread = threading.get_ident()
        self._alive_at = time.monotonic()
        self._waiting = False
        self._call, self._since = "", 0.0

    def alive(self) -> None:
        """Give a sign of life."""
        self._alive_at = time.monotonic()

    @contextmanager
    def waiting(self, call: str = "") -> Iterator[None]:
        """A context in which the thread waits for data, or, in a ``call`` of the user's loop, for the other workers."""
        self._waiting = True
        self._since, self._call = time.monotonic(), call
        try:
            yield
        finally:
            self._waiting = False
            self._call = ""
            self.alive()

    def call_waiting(self, seconds: float) -> str:
        """The call of the user's loop that has waited for the other workers for at least that long; empty if there is none. Call it from
        another thread."""
        call = self._call
        return call if call and time.monotonic() - self._since >= seconds else ""

    def hung_at(self) -> str | None:
        """The place where the thread hangs, or None if it does not. Call it from another thread."""
        if self._waiting or time.monotonic() - self._alive_at < self.deadline_s:
            return None
        running = sys._current_frames().get(self._thread)
        if running is None:
            return "a thread that has ended"
        stack = traceback.extract_stack(running)
        # In a call into torch, the user's line says more than torch's.
        place = next((frame for frame in reversed(stack) if not frame.filename.startswith(_LIBRARIES)), stack[-1])
        return f"{place.filename}:{place.lineno} in {place.name}"
