"""CPU time and CPU quota of an emulated host.

There are two methods; the machine's permissions decide between them:

* `cgroup`: every process of the host lives in one cgroup (version 2, or version 1 with `cpuacct`). The kernel keeps its counter to
  the microsecond, including dead processes. Nothing is missed.
* `proc`: if no cgroup can be made, the sum over the host's live processes in /proc of their own time and that of their reaped
  children, plus the time of the host's top-level processes that have ended. It has a resolution of one clock tick (10 ms) per
  process and misses children whose parent ignores SIGCHLD.

In both, the share of Ray's daemons is the own time of each process recognised by its command line, as last seen; all the rest is
work. If a daemon ends between two looks, its last few milliseconds count as work.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.emulation import procfs

CGROUP_PREFIX = "offload-hosts-"
QUOTA_PERIOD_US = 100_000  # the kernel's own default

# raylet and gcs_server are binaries; the agents, the log monitor and the autoscaler's monitor are Python scripts of
# Ray, some of which rename themselves. Client-mode and dashboard processes count, too. Workers ("ray::…") do not.
_DAEMON = re.compile(
    r"^\S*/(raylet|gcs_server)\s"
    r"|^ray::(DashboardAgent|RuntimeEnvAgent|DashboardHead)"
    r"|^ray-dashboard"
    r"|/ray/dashboard/(agent|dashboard)\.py"
    r"|/ray/_private/(log_monitor|runtime_env/agent/main)\.py"
    r"|/ray/autoscaler/_private/monitor\.py"
    r"|ray\.util\.client\.server"
)


class QuotaUnavailable(Exception):
    """The machine does not permit the requested CPU quota."""


@dataclass(frozen=True, kw_only=True)
class CpuSeconds:
    """The user and system CPU time of one host since it started. Subtract two of them to measure an interval."""

    work_s: float
    """Everything that is not one of Ray's daemons: drivers, workers, preprocessing tasks, plain programs."""
    daemons_s: float
    """raylet, gcs_server and Ray's agents and monitors."""

    @property
    def total_s(self) -> float:
        return self.work_s + self.daemons_s

    def __sub__(self, earlier: "CpuSeconds") -> "CpuSeconds":
        return CpuSeconds(work_s=self.work_s - earlier.work_s, daemons_s=self.daemons_s - earlier.daemons_s)

    def __add__(self, other: "CpuSeconds") -> "CpuSeconds":
        return CpuSeconds(work_s=self.work_s + other.work_s, daemons_s=self.daemons_s + other.daemons_s)


@dataclass(frozen=True, kw_only=True)
class _Hierarchy:
    path: Path
    version: int
    controllers: frozenset[str]


def _hierarchies() -> list[_Hierarchy]:
    folders = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            path = Path(left.split(" ")[4])
            if kind == "cgroup2":
                try:
                    controllers = (path / "cgroup.controllers").read_text().split()
                except OSError:
                    controllers = []
            else:
                controllers = options.split(",")
            folders.append(
                _Hierarchy(
                    path=path,
                    version=2 if kind == "cgroup2" else 1,
                    controllers=frozenset(controllers),
                )
            )
    return folders


class Accounting:
    """The CPU time of one host, and its quota if it has one. Call `close` when the host's processes are gone."""

    def __init__(self, run: str, host: str, *, quota_cpus: float | None = None, method: str | None = None) -> None:
        """Args: run and host name the cgroup. quota_cpus: the CPUs that the host may use, possibly a fraction.
        method: "cgroup" or "proc" to insist on one; None uses the better one that works.

        Raises: QuotaUnavailable."""
        self._folders: list[Path] = []
        self._daemons: dict[tuple[int, int], float] = {}
        self._ended_s = 0.0
        self._counter: Path | None = None
        self._name = f"{CGROUP_PREFIX}{run}/{host}"
        if method != "proc":
            self._counter = self._make_counter()
        self.method = "cgroup" if self._counter is not None else "proc"
        if method == "cgroup" and self._counter is None:
            raise OSError("no cgroup can be made on this machine")
        if quota_cpus is not None:
            self._set_quota(quota_cpus)

    @property
    def join_files(self) -> tuple[str, ...]:
        """Files into which a process writes its pid (or 0) to belong to the host."""
        return tuple(str(folder / "cgroup.procs") for folder in self._folders)

    def join(self, pid: int) -> None:
        for file in self.join_files:
            Path(file).write_text(str(pid))

    def cpu_seconds(self, pid_namespace: str) -> CpuSeconds:
        """The CPU time since the host was made; `pid_namespace` identifies the host's processes."""
        processes = procfs.in_pid_namespace(pid_namespace)
        total_s = self._ended_s + sum(process.own_s + process.reaped_s for process in processes)
        if self._counter is not None:
            total_s = _counter_s(self._counter)
        for process in processes:
            if _DAEMON.search(process.command):
                self._daemons[process.pid, process.started] = process.own_s
        daemons_s = sum(self._daemons.values())
        # The daemons' ticks may run ahead of the counter by rounding: never report negative work.
        return CpuSeconds(work_s=max(total_s - daemons_s, 0.0), daemons_s=daemons_s)

    def top_level_process_ended(self, cpu_s: float) -> None:
        """Add the time of a process that entered from outside, which no process of the host has reaped."""
        self._ended_s += cpu_s

    def close(self) -> None:
        remove_cgroups(self._folders)

    def _make_counter(self) -> Path | None:
        hierarchies = _hierarchies()
        # Version 2 keeps the counter without any controller, so it also works beside version 1 hierarchies.
        for hierarchy in sorted(hierarchies, key=lambda h: -h.version):
            if hierarchy.version == 2 or "cpuacct" in hierarchy.controllers:
                folder = hierarchy.path / self._name
                counter = folder / ("cpu.stat" if hierarchy.version == 2 else "cpuacct.usage")
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    _counter_s(counter)
                except (OSError, KeyError):
                    continue
                self._folders.append(folder)
                return counter
        return None

    def _set_quota(self, cpus: float) -> None:
        quota_us = round(cpus * QUOTA_PERIOD_US)
        reasons = []
        for hierarchy in _hierarchies():
            if "cpu" not in hierarchy.controllers:
                continue
            folder = hierarchy.path / self._name
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if hierarchy.version == 2:
                    for parent in (hierarchy.path, folder.parent):
                        (parent / "cgroup.subtree_control").write_text("+cpu")
                    (folder / "cpu.max").write_text(f"{quota_us} {QUOTA_PERIOD_US}")
                else:
                    (folder / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
                continue
            if folder not in self._folders:
                self._folders.append(folder)
            return
        self.close()
        raise QuotaUnavailable(
            f"a CPU quota of {cpus} needs a writable cgroup with the cpu controller, and there is none "
            f"({'; '.join(reasons) or 'no such hierarchy is mounted'}); pin the host with core= instead"
        )


def _counter_s(counter: Path) -> float:
    text = counter.read_text()
    if counter.name == "cpu.stat":
        return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
    return int(text) / 1e9


def cgroups_of(run: str) -> list[Path]:
    """The cgroups that a run made, in every hierarchy."""
    return [folder for hierarchy in _hierarchies() for folder in (hierarchy.path / f"{CGROUP_PREFIX}{run}").glob("*/")]


def remove_cgroups(folders: list[Path], deadline_s: float = 5.0) -> None:
    """Remove cgroups whose processes are dead or dying, and each parent folder that has become empty."""
    until = time.monotonic() + deadline_s
    for folder in folders:
        while folder.exists():
            try:
                os.rmdir(folder)
            except OSError:
                # The folder is busy until the last killed process is gone.
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
        try:
            os.rmdir(folder.parent)
        except OSError:
            pass  # other hosts of the run are still there
