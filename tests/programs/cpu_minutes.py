"""Say the CPU minutes of a command and of everything that it starts, daemons included.

``python -m tests.programs.cpu_minutes COMMAND...`` runs the command, and adds a line to standard error when it has ended.
Exit code and signals are the command's. A daemon that outlives the command counts up to then.

The kernel's ``task-clock`` event counts exactly, as in ``perf stat``. ``wait4`` cannot: Ray's raylets ignore SIGCHLD, so
the kernel drops the times of their workers, which are most of a run. Where the event is not permitted, processes below
this one are looked at several times a second; what they do after the last look is missing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

# From linux/perf_event.h: struct perf_event_attr of 128 bytes begins with type, size and config; flags follow at byte 40.
SOFTWARE, TASK_CLOCK = 1, 1
INHERIT, EXCLUDE_KERNEL = 1 << 1, 1 << 5  # the latter is what lets unprivileged processes count; this clock ignores it
ATTR_BYTES, FLAGS_AT = 128, 40
CLOSE_ON_EXEC = 8
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY_S = 0.2


class Meter(Protocol):
    """Counts the CPU time of this process and of all that it starts from now on."""

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, those of processes that have ended included."""

    def close(self) -> None:
        """Count no more."""


class TaskClock:
    """The kernel's count: exact.

    Raises:
        OSError: This process may not count.
    """

    def __init__(self) -> None:
        """Begin."""
        attr = bytearray(ATTR_BYTES)
        struct.pack_into("IIQ", attr, 0, SOFTWARE, ATTR_BYTES, TASK_CLOCK)
        struct.pack_into("Q", attr, FLAGS_AT, INHERIT | EXCLUDE_KERNEL)
        number = PERF_EVENT_OPEN.get(platform.machine())
        if number is None:
            raise OSError(f"no system call is known for {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.syscall(
            number, (ctypes.c_char * ATTR_BYTES).from_buffer(attr), 0, -1, -1, CLOSE_ON_EXEC
        )
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open")

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, those of processes that have ended included."""
        (nanoseconds,) = struct.unpack("Q", os.read(self._descriptor, 8))
        return float(nanoseconds) / 1e9

    def close(self) -> None:
        """Count no more."""
        os.close(self._descriptor)


class Looks:
    """The processes below this one, looked at again and again from a thread: a lower bound."""

    def __init__(self) -> None:
        """Become the parent of orphans, so that daemons stay below this process; then look."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._seen_s: dict[tuple[int, float], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_often, daemon=True)
        self._thread.start()

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, those of processes that have ended included."""
        with self._lock:
            self._look()
            return sum(self._seen_s.values())

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _look_often(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                times = process.cpu_times()
                self._seen_s[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue


def meter() -> Meter:
    """Return what counts here, exactly if that is permitted."""
    try:
        return TaskClock()
    except OSError:
        return Looks()


def main(command: Sequence[str], say: Callable[[str], object]) -> int:
    """Run the command and say its CPU minutes. Returns its exit code; minus a signal's number if that ended it."""
    counting = meter()
    started = time.monotonic()
    process = subprocess.Popen(command)
    # Ctrl-C reaches the command as well, which alone decides what to do.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    cpu_min, wall_min = counting.cpu_s() / 60, (time.monotonic() - started) / 60
    at_least = "at least " if isinstance(counting, Looks) else ""
    say(f"{at_least}{cpu_min:.2f} CPU minutes, {wall_min:.2f} minutes by the clock")
    counting.close()
    return code


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(f"usage: {Path(sys.argv[0]).name} COMMAND...")
    ended = main(sys.argv[1:], lambda text: print(text, file=sys.stderr, flush=True))
    if ended < 0:  # end as the command did
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
