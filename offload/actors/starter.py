"""The starter: a process that forks the processes of a run, and tells how each one ends.

It has one thread, so that its forks are safe. It begins in one of two ways. A fork of the program has all that the program has set up, and
starts what works for the program. A fresh Python has imported what training needs, and nothing has used CUDA or threads there.

It leads a session of its own, so that Ctrl-C in a terminal reaches the program alone. It ends with the program, however that ends, and
the kernel then ends its forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from offload.actors.errors import ProcessLostError
from offload.process import forks
from offload.process.messages import pair, receive, send

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORDER_BYTES = 4 << 10  # more than any order has
STATUS_S = 10.0  # time for the starter to tell how a process has ended
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Started:
    """A process that the starter has forked. ``pid``: its process id; ``status``: its exit status, negative for a signal."""

    def __init__(self, starter: Starter, number: int, link: socket.socket) -> None:
        self.pid: Future[int] = Future()
        self.status: Future[int] = Future()
        self.link = link
        self._starter, self._number = starter, number

    def kill(self) -> None:
        """End it at once."""
        self._starter.order(("kill", self._number))


class Starter:
    """The program's end of a starter. ``link``: the connection to it; ``pid``: its process."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link, self._pid = forks.closes(link), pid
        self._numbers = itertools.count()
        self._started: dict[int, Started] = {}
        self._lock = threading.Lock()
        self._ended = self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="starter").start()

    @classmethod
    def forked(cls, main: Callable[[socket.socket], None]) -> Starter:
        """A fork of this process, whose forks call ``main``."""
        ours, its = pair()
        with warnings.catch_warnings():  # of threads: the starter takes no lock of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            try:
                ours.close()
                _serve(its, main)
            finally:
                os._exit(1)
        its.close()
        return cls(ours, pid)

    @classmethod
    def fresh(cls, main: str, modules: Sequence[str]) -> Starter:
        """A new Python that imports these modules, and whose forks call ``main``, a function as ``module:name``. Returns at once."""
        ours, its = pair()
        arguments = f"{its.fileno()}, {main!r}, {list(modules)!r}"
        code = f"import sys; sys.path[:] = {sys.path!r}; from offload.actors.starter import begin; begin({arguments})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        its.close()
        process.returncode = 0  # this object waits for the process
        return cls(ours, process.pid)

    def start(self) -> Started:
        """Fork a process. Returns at once. A starter that has ended starts none: the process counts as lost."""
        ours, its = pair()
        with its:
            started = Started(self, next(self._numbers), ours)
            with self._lock:
                if not self._ended:
                    self._started[started._number] = started
            if self._ended or not self.order(("start", started._number), its.fileno()):
                _lose(started)
        return started

    def order(self, message: tuple[Any, ...], *descriptors: int) -> bool:
        """Send an order. Return whether the starter is there."""
        with self._lock:
            try:
                socket.send_fds(self._link, [pickle.dumps(message)], descriptors)
            except OSError:
                return False
            return True

    def close(self) -> None:
        """End the starter, and all of its processes. It may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the program may wait for its children itself
            os.kill(self._pid, signal.SIGKILL)  # it may be importing
            os.waitpid(self._pid, 0)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError), self._link:
            while True:
                number, what, value = receive(self._link)
                if what == "began":
                    self._started[number].pid.set_result(value)
                else:
                    self._started.pop(number).status.set_result(value)
        with self._lock:
            self._ended = True
        for started in self._started.values():
            _lose(started)


def _lose(started: Started) -> None:
    for future in (started.pid, started.status):
        if not future.done():
            future.set_exception(ProcessLostError("the process that starts the others has ended"))


# -- in the starter ------------------------------------------------------------------------------------------------------


def begin(descriptor: int, main: str, modules: Sequence[str]) -> NoReturn:
    """The main function of a fresh starter."""
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    for name in modules:
        importlib.import_module(name)
    module, _, function = main.partition(":")
    _serve(link, getattr(importlib.import_module(module), function))


def _serve(link: socket.socket, main: Callable[[socket.socket], None]) -> NoReturn:
    """Fork on request, until the program is gone."""
    with contextlib.suppress(PermissionError):  # a fresh starter leads one already
        os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    starter = os.getpid()
    numbers: dict[int, int] = {}  # by process id
    with contextlib.suppress(EOFError, OSError):
        while True:
            ready, _, _ = select.select([link, wake], [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                for pid, status in _ended(numbers):
                    send(link, (numbers.pop(pid), "ended", status))
            if link in ready:
                content, descriptors, _, _ = socket.recv_fds(link, ORDER_BYTES, 1)
                what, number = pickle.loads(content)  # EOFError without any
                if what == "start":
                    its = socket.socket(fileno=descriptors[0])
                    its.set_inheritable(False)
                    if not (pid := os.fork()):
                        _become(its, main, [link, wake, woken], starter)
                    its.close()
                    numbers[pid] = number
                    send(link, (number, "began", pid))
                for pid in [pid for pid, known in numbers.items() if what == "kill" and known == number]:
                    os.kill(pid, signal.SIGKILL)
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _ended(numbers: dict[int, int]) -> list[tuple[int, int]]:
    """The forks that have ended, and their exit statuses."""
    ended = []
    for pid in list(numbers):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _become(
    its: socket.socket, main: Callable[[socket.socket], None], others: Sequence[socket.socket], starter: int
) -> NoReturn:
    """The life of a forked process."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:  # it has ended meanwhile
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in others:
            other.close()
        _print_to_file()
        main(its)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _print_to_file() -> None:
    """Turn standard output and standard error to files without a name, from which this process itself reads what the user's code prints."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), descriptor)
    # The program may have replaced these, as a notebook does. Nothing waits in a buffer: half a line counts as printed.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", 0, closefd=False), "utf-8", "backslashreplace", write_through=True)
        for number in (1, 2)
    )


def how_ended(started: Started) -> int | None:
    """The exit status of a process that is ending; None if nobody can tell."""
    with contextlib.suppress(TimeoutError, ProcessLostError):
        return started.status.result(STATUS_S)
    return None
