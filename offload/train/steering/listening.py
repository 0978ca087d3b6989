"""Threads of a run that wait for answers of Ray's actors, and that end before the connection does.

Such a thread must not be at work when another one ends the connection. Ray's core is gone a moment before its Python side knows: whoever
calls it then, or only drops a reference, ends the whole process. So these threads wait in Python, where :meth:`Listening.end` reaches
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

END_S = 5.0  # a thread that asks a control process which does not answer must not keep the run from its end


class ListeningEndedError(Exception):
    """The run is over: its threads end."""


class Listening:
    """The listening threads of one run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._over = False
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` in a thread, until it returns or raises ListeningEndedError. Does nothing after :meth:`end`."""
        with self._changed:
            if self._over:
                return
            thread = threading.Thread(target=self._run, args=(work,), daemon=True, name=name)
            self._threads.append(thread)
            thread.start()

    def answer(self, call: Callable[[], Any]) -> Any:
        """Wait for the answer to a call, which returns a reference. Raises what the reference stands for, and ListeningEndedError after
        :meth:`end`."""
        with self._changed:
            self._check()
            answered: Future[Any] = call().future()
        answered.add_done_callback(self._wake)
        self.wait_for(answered.done)
        return answered.result()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until the condition holds. Return whether it does. Whoever makes it hold calls :meth:`notify`.

        Raises ListeningEndedError after :meth:`end`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or condition(), timeout_s)
            self._check()
            return condition()

    def notify(self) -> None:
        """Let waiting threads look at their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Let all threads end, and wait for that once: none of them calls Ray from now on."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(END_S)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ListeningEndedError:
            pass

    def _check(self) -> None:
        if self._over:
            raise ListeningEndedError

    def _wake(self, _: Future[Any]) -> None:
        self.notify()
