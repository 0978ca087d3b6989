"""Forks close the files that only their parent may hold, keep what must not end, and end where the user's code does."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.process import forks
from offload.process.interrupts import Interrupts, handled, install
from offload.report.run_dir import locked


def forked(work: Callable[[], int]) -> int:
    """The exit code of a fork, which is what the work returns."""
    pid = os.fork()
    if pid == 0:
        code = 100
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_that_outlives_a_run_does_not_hold_its_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    with locked(tmp_path):
        if (pid := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)  # until the parent has looked
            os._exit(0)
    try:
        with locked(tmp_path):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        os.close(read)


def test_a_fork_leaves_the_lock_and_its_file_to_the_parent(tmp_path: Path) -> None:
    with locked(tmp_path):
        (file,) = tmp_path.iterdir()

        def work() -> int:
            with pytest.raises(OSError, match=r"closed|descriptor"), locked(tmp_path / "other") as _:
                raise OSError("closed")
            return 0

        (tmp_path / "other").mkdir()
        assert forked(work) == 0
        with file.open("rb+") as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_connection_ends_with_the_process_that_has_it() -> None:
    ours, its = socket.socketpair()
    forks.closes(ours)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        its.close()
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    ours.close()
    readable, _, _ = select.select([its], [], [], 800)
    assert readable
    assert its.recv(1) == b""
    os.close(write)
    os.waitpid(pid, 0)
    os.close(read)
    its.close()


class Told:
    """An object that another one hears the end of."""


def test_what_is_kept_never_ends_in_a_fork() -> None:
    told, ended = forks.keeps(Told()), list[str]()
    weakref.finalize(told, ended.append, "ended").atexit = False

    def work() -> int:
        nonlocal told
        told = Told()
        return len(ended)

    assert forked(work) == 0
    told = Told()
    assert ended == ["ended"]


@pytest.mark.parametrize(
    ("end", "code"), [(lambda: None, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("said"), 1), (lambda: 1 // 0, 1)]
)
def test_a_fork_ends_where_the_users_function_does(end: Callable[[], object], code: int) -> None:
    read, write = os.pipe()

    def work() -> int:
        with forks.ending_here():
            if os.fork():
                os.write(write, str(os.waitstatus_to_exitcode(os.wait()[1])).encode())
            else:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                end()
        os.write(write, b" parent")
        return 0

    assert forked(work) == 0
    assert os.read(read, 100).decode() == f"{code} parent"
    os.close(read)
    os.close(write)


def test_a_signal_to_a_fork_is_none_to_its_parent() -> None:
    with handled() as interrupts:
        install(interrupts)

        def work() -> int:
            ours = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_ours(number)]
            return len(ours)

        assert is_ours(signal.SIGTERM)
        assert forked(work) == 0


def is_ours(number: int) -> bool:
    return isinstance(getattr(signal.getsignal(number), "__self__", None), Interrupts)


def test_a_signal_that_reaches_a_fork_at_its_birth_ends_it() -> None:
    """As multiprocessing's pools do, which may end before all of their processes have begun."""
    read, write = os.pipe()
    with handled():
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                os.close(write)
                os.read(read, 1)  # until the parent's end
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    os.close(read)
    os.close(write)
