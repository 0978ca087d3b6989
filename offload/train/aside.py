"""One call at a time on a thread of its own, for who must not wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Aside:
    """The thread. ``with`` it; a call that is not done by then is left to itself."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._raised: BaseException | None = None

    def __enter__(self) -> Aside:
        threading.Thread(target=self._run, daemon=True, name="aside").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._calls.put(None)

    @property
    def busy(self) -> bool:
        """Whether a call is being made."""
        return not self._idle.is_set()

    def start(self, call: Callable[[], None]) -> None:
        """Make a call. The one before must be done."""
        self._idle.clear()
        self._calls.put(call)

    def wait(self, timeout_s: float) -> None:
        """Wait until the call is done, but no longer than this."""
        self._idle.wait(timeout_s)

    def result(self) -> None:
        """Raise what the last call raised, once."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._raised = error
            self._idle.set()
