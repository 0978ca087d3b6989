"""The resources that this machine, or this container, lets its processes use.

Where it stops: it uses only the standard library, so that callers can ask before any heavy import.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """The cores that this process may use: its affinity, further limited by a cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cgroup's CPU quota in cores (v2, then v1); None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cores if cores > 0 else None


def process_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int:
    """The private memory of this process, in bytes: without files and shared memory, and with its share of pages in common with the
    process that forked it. 0 if the kernel does not tell. In a process with torch, this takes some 20 ms."""
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:")), 0)


def core_wait_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """The seconds that this thread was ready to run and waited for a core, since it began. NaN if the kernel does not tell."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return math.nan


def memory_limit(total_bytes: int, root: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory that processes here can have, in bytes: the machine's, or less if the cgroup limits it."""
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        try:
            return min(total_bytes, int(file.read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return total_bytes
