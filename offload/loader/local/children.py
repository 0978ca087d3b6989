"""The preprocessing processes of an iteration: their start, their messages, their ends.

The kernel tells of a process's messages and of its end; nothing is polled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from offload.errors import ConfigError, RunError
from offload.loader.batch_recipe import IterableRecipe, MapRecipe
from offload.loader.local.child import work
from offload.loader.local.tasks import MakeBatches, ReadOn, Ready
from offload.pipeline.preprocessing.environment import Ordinal
from offload.process import forks
from offload.process.exits import how_it_ended
from offload.process.messages import pair, receive, send

STUCK_S = 10.0  # time for the user's code of an ended iteration to end


class Child:
    """A preprocessing process. ``tasks``: those under way, the oldest first. ``number``: its number among the processes."""

    def __init__(self, number: int, process: BaseProcess, connection: socket.socket) -> None:
        self.number, self.process, self.connection = number, process, connection
        self.tasks: deque[MakeBatches | ReadOn] = deque()
        self.ready = False

    def give(self, task: MakeBatches | ReadOn) -> None:
        """Give it a task."""
        self.tasks.append(task)
        self.tell(task)

    def tell(self, message: object) -> None:
        """Send it a message, unless it has ended: :meth:`Children.hear` tells of that."""
        with contextlib.suppress(OSError):
            send(self.connection, message)

    @property
    def end_in_words(self) -> str:
        """How the process ended."""
        self.process.join()
        return how_it_ended(self.process.exitcode or 0)


class Children:
    """The processes of one recipe.

    Args:
        recipe: their work.
        context: Python's context of processes, which says how they start.
        packed: the recipe pickled; None if the processes inherit it.
    """

    def __init__(self, recipe: MapRecipe | IterableRecipe, context: Any, packed: bytes | None) -> None:
        self.all: list[Child] = []
        self._recipe, self._context, self._packed = recipe, context, packed
        self._selector = forks.closes(selectors.DefaultSelector())
        # It lives as long as this object: whoever wakes may come after the end.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._pid, self.all, self._selector)
        self._finalizer.atexit = False  # multiprocessing ends processes at the exit of the program

    def start(self, number: int, of: int) -> Child:
        """Start process ``number`` of ``of``.

        Raises ConfigError in a process that may not start others, RunError if the machine refuses another.
        """
        me = multiprocessing.current_process()
        if me.daemon:
            raise ConfigError(
                f"a DataLoader cannot start preprocessing processes in {me.name}, which is a daemonic process itself, such as a worker of "
                "another DataLoader or of a multiprocessing.Pool. Make the loader in the program, or start this process with daemon=False."
            )
        mine, its = pair()
        forks.closes(mine)
        work_of = self._recipe if self._packed is None else self._packed
        process = self._context.Process(
            target=work, args=(its, work_of, Ordinal(number, of)), daemon=True, name=f"offload-{number}"
        )
        # The process inherits the mask, and lifts it once it ignores the signal: Ctrl-C may come before it has begun.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except OSError as error:
            mine.close()
            raise RunError(f"this machine starts no further process for preprocessing: {error}.") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            its.close()
        child = Child(number, process, mine)
        self.all.append(child)
        self._selector.register(mine, selectors.EVENT_READ, child)
        self._selector.register(process.sentinel, selectors.EVENT_READ, child)
        return child

    def hear(self, timeout_s: float) -> list[tuple[Child, Any]]:
        """What processes say, after at most this time: (process, message), and (process, None) for one that has ended.

        Returns at once after :meth:`wake`.
        """
        heard: list[tuple[Child, Any]] = []
        ready = self._selector.select(timeout_s)
        for child in dict.fromkeys(key.data for key, _ in ready):
            if child is None:
                os.eventfd_read(self._wake)
                continue
            ended = not self._read(child, heard) or any(
                key.data is child and key.fileobj is not child.connection for key, _ in ready
            )
            if ended:
                self._read(child, heard)  # it may have spoken just before its end
                self._forget(child)
                heard.append((child, None))
        return heard

    def wake(self) -> None:
        """Let :meth:`hear` return. Any thread may call this."""
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """End the processes, without waiting for them. The garbage collector may call this."""
        self._finalizer()

    @staticmethod
    def _read(child: Child, heard: list[tuple[Child, Any]]) -> bool:
        """Read what a process has said. Return whether it can say more."""
        try:
            while True:
                message = receive(child.connection, wait=False)
                child.ready = child.ready or isinstance(message, Ready)
                heard.append((child, message))
        except BlockingIOError:
            return True
        except EOFError:
            return False

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.connection)
        self._selector.unregister(child.process.sentinel)
        self.all.remove(child)
        child.connection.close()


def _end(pid: int, children: list[Child], selector: selectors.BaseSelector) -> None:
    """Close the connections, at which processes end, and see to it that they do."""
    if os.getpid() != pid:
        return
    selector.close()
    for child in children:
        child.connection.close()
    if children:
        with contextlib.suppress(RuntimeError):  # Python is ending: multiprocessing ends the processes
            threading.Thread(target=_reap, args=([child.process for child in children],), daemon=True).start()


def _reap(processes: Sequence[BaseProcess]) -> None:
    left = list(processes)
    while left and (gone := wait([process.sentinel for process in left], STUCK_S)):
        left = [process for process in left if process.sentinel not in gone]
    for process in left:
        process.kill()
    for process in processes:
        process.join()
