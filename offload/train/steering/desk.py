"""The place where a run and those who steer it meet: the run shows its state and hears commands, others read the one and leave the other.

Where it stops: it decides nothing, and passes on what it is told.
"""

from __future__ import annotations

import threading

from offload.train.steering.messages import Command, Reply, RunState


class Desk:
    """The desk of one run. Its methods run on several threads. ``state``: the run's first state."""

    def __init__(self, state: RunState) -> None:
        self._state, self._number = state, 0
        self._commands: list[Command] = []
        self._replies: dict[int, Reply] = {}
        self._changed = threading.Condition()

    # -- the run ---------------------------------------------------------------------------------------------------

    def show(self, number: int, state: RunState) -> None:
        """Make this the state that others see, unless one with a higher number has arrived: Ray does not keep the order of calls."""
        with self._changed:
            if number > self._number:
                self._state, self._number = state, number

    def asked(self, seen: int, timeout_s: float) -> tuple[Command, ...]:
        """The commands after the first ``seen``. Waits for one, at most for ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._commands) > seen, timeout_s)
            return tuple(self._commands[seen:])

    def reply(self, number: int, reply: Reply) -> None:
        """Answer the command with this number, from 0."""
        with self._changed:
            self._replies[number] = reply
            self._changed.notify_all()

    # -- others ----------------------------------------------------------------------------------------------------

    def state(self) -> RunState:
        """What the run has shown last."""
        return self._state

    def ask(self, command: Command) -> int:
        """Leave a command; return its number."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()
            return len(self._commands) - 1

    def replied(self, number: int, timeout_s: float) -> Reply | None:
        """The run's answer to a command; None if there is none within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies, timeout_s)
            return self._replies.get(number)
