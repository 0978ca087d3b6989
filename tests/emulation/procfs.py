"""Processes in /proc: identity, CPU time, command line. It only reads, and knows nothing of hosts."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process at one moment. Pids are those of the /proc that this process sees."""

    pid: int
    parent: int
    started: int
    """Clock ticks since boot; with `pid` it identifies a process even after pids were reused."""
    own_s: float
    """User and system CPU time of all its threads."""
    reaped_s: float
    """The CPU time of its reaped children, and of theirs."""
    command: str


def read(pid: int) -> Process | None:
    """The process with this pid, a zombie included, or None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # The name in parentheses may itself contain spaces and parentheses: fields count from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        own_s=own / _TICKS_PER_S,
        reaped_s=reaped / _TICKS_PER_S,
        command=command.replace(b"\0", b" ").decode(errors="replace").strip(),
    )


def every() -> Iterator[Process]:
    """Yield all processes visible here, except those that end meanwhile."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read(int(entry))) is not None:
            yield process


def pid_namespace(pid: int) -> str | None:
    """The identity of a process's PID namespace; None if the process is gone or not readable."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def in_pid_namespace(namespace: str) -> list[Process]:
    """The live processes of one PID namespace."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    members = [read(pid) for pid in pids if pid_namespace(pid) == namespace]
    return [process for process in members if process is not None]
