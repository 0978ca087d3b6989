"""What one set of emulated hosts occupies on this machine: a folder, a name and a subnet. Remains of dead owners are removed.

A sandbox is named `<pid>-<n>` after its owner. The owner holds a POSIX lock on a file in the folder as long as it lives: a folder
whose lock is free belongs to a dead owner, whatever process has its pid today.
"""

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from tests.emulation import cpu_accounting, procfs

# /24 networks to try in turn. 10.213 is private, and rarely a default of routers, VPNs or Docker.
_SUBNETS = [ipaddress.IPv4Network(f"10.213.{third}.0/24") for third in range(256)]


def sandboxes_folder() -> Path:
    return Path(tempfile.gettempdir()) / "offload-hosts"


class Sandbox:
    """The folder, name and subnet of one set of hosts. Its construction removes those of dead owners; `close` removes its own."""

    def __init__(self) -> None:
        with _machine_lock():
            remove_dead_sandboxes()
            names = {folder.name for folder in sandboxes_folder().iterdir() if folder.is_dir()}
            self.name = next(name for n in range(1000) if (name := f"{os.getpid()}-{n}") not in names)
            self.folder = sandboxes_folder() / self.name
            self.folder.mkdir()
            self._lock = _claim(self.folder)
            self.subnet = _free_subnet()
            (self.folder / "subnet").write_text(str(self.subnet))
        self._processes: list[tuple[int, int]] = []

    @property
    def interface(self) -> str:
        """The name of the owner's end of the network. The kernel allows 15 characters."""
        return f"ofl{self.name}"

    def record(self, pid: int) -> None:
        """Record a process whose death ends a part of the sandbox, for a later clean-up."""
        process = procfs.read(pid)
        if process is not None:
            self._processes.append((process.pid, process.started))
            (self.folder / "processes.json").write_text(json.dumps(self._processes))

    def close(self) -> None:
        """Remove the folder. The processes must be dead by now: their mounts lie in it."""
        _remove_folder(self.folder)
        if self._lock is not None:
            self._lock.close()


def remove_dead_sandboxes() -> list[str]:
    """Kill and remove the remains of sandboxes whose owner is dead; return their names."""
    removed = []
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(sandboxes_folder().iterdir()):
            # A POSIX lock never conflicts with its own process: our own are known by their name.
            if not folder.is_dir() or folder.name.startswith(f"{os.getpid()}-"):
                continue
            lock = _claim(folder)
            if lock is None:
                continue
            with lock:
                _remove_sandbox(folder)
            removed.append(folder.name)
    return removed


def _remove_sandbox(folder: Path) -> None:
    recorded = folder / "processes.json"
    if recorded.exists():
        with contextlib.suppress(json.JSONDecodeError):  # its writer died before the end
            for pid, started in json.loads(recorded.read_text()):
                process = procfs.read(pid)
                if process is not None and process.started == started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    cpu_accounting.remove_cgroups(cpu_accounting.cgroups_of(folder.name))
    subprocess.run(["ip", "link", "delete", f"ofl{folder.name}"], capture_output=True)
    _remove_folder(folder)


def _remove_folder(folder: Path, deadline_s: float = 5.0) -> None:
    until = time.monotonic() + deadline_s
    while folder.exists():
        # A process may still write while it dies; the last attempt raises the error.
        last = time.monotonic() > until
        shutil.rmtree(folder, ignore_errors=not last)
        if folder.exists():
            time.sleep(0.02)


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    """A lock that lets one process at a time look for a name and a subnet, or clean up."""
    sandboxes_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(sandboxes_folder() / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _claim(folder: Path) -> TextIO | None:
    """The folder's lock if nobody holds it. Forks do not inherit it, so a forgotten child does not keep it."""
    file = (folder / "lock").open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _free_subnet() -> ipaddress.IPv4Network:
    """A subnet that no route of this machine touches and no other sandbox uses."""
    routes = subprocess.run(
        ["ip", "-4", "-json", "route", "show", "table", "all"],
        check=True,
        capture_output=True,
        text=True,
    )
    used = list(_networks(route.get("dst", "") for route in json.loads(routes.stdout or "[]")))
    used += _networks(file.read_text() for file in sandboxes_folder().glob("*/subnet"))
    return next(subnet for subnet in _SUBNETS if not any(subnet.overlaps(net) for net in used))


def _networks(texts: Iterable[str]) -> Iterator[ipaddress.IPv4Network]:
    for text in texts:
        with contextlib.suppress(ValueError):  # "default" is not a network, and overlaps all
            yield ipaddress.IPv4Network(text)
