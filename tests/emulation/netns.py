"""One emulated host: its own namespaces on a network that it shares with the others. It knows nothing of Ray.

Everything depends on process 1 of the host (see `host_init`): its death is the host's death, and it dies with its owner. The bridge that
joins the hosts lives in a network namespace of its own, the *switch*. So no firewall rule of the machine (such as Docker's) applies
between hosts, and no bridge can be left behind.
"""

import contextlib
import functools
import importlib.util
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.emulation import host_init, procfs
from tests.emulation.cpu_accounting import Accounting, CpuSeconds
from tests.emulation.sandbox import Sandbox

_TOOLS = ("ip", "unshare", "nsenter", "setpriv", "taskset", "mount")
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork")
_START_DEADLINE_S = 60.0
_KILL_DEADLINE_S = 60.0

# A script that joins the host's cgroups (arguments before "--"), then becomes the command after it.
_JOIN = 'until [ "$1" = -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


class HostsError(Exception):
    """Emulated hosts could not be made, or an operation on them failed or timed out."""


@functools.cache
def unavailable() -> str | None:
    """The reason why hosts cannot be emulated on this machine, in words; None if they can."""
    if sys.platform != "linux":
        return f"emulated hosts need Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulated hosts need root, and the user id is {os.geteuid()}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {', '.join(missing)}: install the packages iproute2 and util-linux"
    trial = (
        "ip link add name bridge type bridge && ip link add name one type veth peer name other && "
        "mount -t proc proc /proc"
    )
    result = subprocess.run([*_UNSHARE, "sh", "-c", trial], capture_output=True, text=True)
    if result.returncode != 0:
        return f"this machine does not permit namespaces or network devices: {result.stderr.strip()}"
    return None


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """The resources of an emulated host."""

    core: int | tuple[int, ...] | None = None
    """The core or cores of the machine to which the host's processes are pinned; None: all of them."""
    cpus: float | None = None
    """The CPU quota in cores, for more hosts than cores; None: no limit. It needs a writable cgroup."""
    shm_bytes: int = 2 << 30
    """The size of the host's own /dev/shm, in bytes. It takes memory only as it fills."""
    mbit_per_s: float | None = None
    """What the host's link carries in each direction, in megabits per second, headers included; None: no limit. It needs `tc`."""

    def __post_init__(self) -> None:
        known = os.sched_getaffinity(0)
        strangers = [core for core in self.cores if core not in known]
        if strangers:
            raise ValueError(f"core must be one of {sorted(known)}, found {strangers}; pass core=None for no pinning")
        if self.cpus is not None and self.cpus < 0.01:
            raise ValueError(f"cpus must be ≥ 0.01, found {self.cpus}; pass cpus=None for no quota")
        if self.shm_bytes < 1 << 20:
            raise ValueError(f"shm_bytes must be ≥ 1 MiB, found {self.shm_bytes}")
        if self.mbit_per_s is not None and self.mbit_per_s < 1:
            raise ValueError(f"mbit_per_s must be ≥ 1, found {self.mbit_per_s}; pass mbit_per_s=None for no limit")

    @property
    def cores(self) -> tuple[int, ...]:
        if self.core is None:
            return ()
        return (self.core,) if isinstance(self.core, int) else tuple(self.core)

    @property
    def num_cpus(self) -> int:
        """The cores that this host should announce to Ray: its pinned cores, at most its quota, at least one."""
        count = len(self.cores) or len(os.sched_getaffinity(0))
        return count if self.cpus is None else max(1, min(count, int(self.cpus)))


class HostProcess(subprocess.Popen[str]):
    """A process inside a host. Signals reach the process itself, not the helper that entered the host.

    Its `pid` is the helper's; the helper ends when the process ends, with the same status."""

    def __init__(self, host: "Host", argv: Sequence[str], **options: Any) -> None:
        self._host = host
        super().__init__(argv, **options)

    def inner_pid(self) -> int | None:
        """The pid of the process itself as seen from outside the host, None once it has ended."""
        until = time.monotonic() + 60.0  # the helper may not have forked yet
        while self.poll() is None:
            for process in procfs.every():
                if process.parent == self.pid:
                    return process.pid
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return None

    def send_signal(self, sig: int) -> None:
        inner = self.inner_pid()
        if inner is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, sig)
        if sig == signal.SIGCONT or inner is None:
            super().send_signal(sig)  # the helper stops with its child

    def poll(self) -> int | None:
        if self.returncode is None:
            self._note_cpu_time(os.WNOHANG)
        return super().poll()

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.001
        while self.returncode is None and until is not None:
            if self._note_cpu_time(os.WNOHANG):
                break
            if time.monotonic() > until:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if self.returncode is None and until is None:
            self._note_cpu_time(0)
        return super().wait()

    def _note_cpu_time(self, flags: int) -> bool:
        """Read the process's CPU time while that is possible: after its end, before it is reaped."""
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flags) is None:
                return False
        except ChildProcessError:
            return True
        process = procfs.read(self.pid)
        if process is not None:
            self._host.accounting.top_level_process_ended(process.own_s + process.reaped_s)
        return True


class Host:
    """A living host. `Hosts` makes it, and documents its private parts."""

    def __init__(self, name: str, spec: HostSpec, address: str, sandbox: Sandbox, accounting: Accounting) -> None:
        self.name = name
        self.spec = spec
        self.address = address
        self.folder = sandbox.folder / name
        """The folder on disk behind the host's private paths: home, opt_ml, tmp_ray."""
        self.accounting = accounting
        self.env: dict[str, str] = {}
        """The environment of every process started here, on top of the owner's own."""
        self._processes: list[HostProcess] = []
        self._init = self._start_init()
        try:
            self._pid = self._read_pid()
            sandbox.record(self._pid)
            namespace = procfs.pid_namespace(self._pid)
            if namespace is None:
                raise HostsError(f"host {name} died as it started")
            self._namespace = namespace
            accounting.join(self._pid)
        except BaseException:
            self._close_streams()  # this ends it
            raise

    def _start_init(self) -> subprocess.Popen[str]:
        for private in ("home", "opt_ml", "tmp_ray"):
            (self.folder / private).mkdir(parents=True)
        # Mount points must exist; they stay, since other hosts may be using them.
        for point in ("/opt/ml", "/tmp/ray"):
            Path(point).mkdir(parents=True, exist_ok=True)
        config = {
            "name": self.name,
            "mounts": [
                ["--bind", str(self.folder.parent / "hosts"), "/etc/hosts"],
                ["--bind", str(self.folder / "opt_ml"), "/opt/ml"],
                ["--bind", str(self.folder / "tmp_ray"), "/tmp/ray"],
                ["-t", "tmpfs", "-o", f"size={self.spec.shm_bytes},mode=1777", "shm", "/dev/shm"],
                ["-t", "proc", "proc", "/proc"],
            ],
        }
        return subprocess.Popen(
            [*_UNSHARE, sys.executable, "-I", "-S", str(host_init.__file__), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the owner, which ends the hosts in order
        )

    def _read_pid(self) -> int:
        assert self._init.stdout is not None
        assert self._init.stderr is not None
        line = self._init.stdout.readline()
        if not line:
            self._init.wait(_START_DEADLINE_S)
            raise HostsError(f"host {self.name} did not start: {self._init.stderr.read().strip()}")
        return int(line)

    @property
    def init_pid(self) -> int:
        """The pid of the host's process 1, as seen from outside."""
        return self._pid

    @property
    def alive(self) -> bool:
        return self._init.poll() is None

    def _check_alive(self) -> None:
        if not self.alive:
            raise HostsError(f"host {self.name} is dead")

    def pids(self) -> list[int]:
        """The pids of all the host's processes, as seen from outside."""
        return [process.pid for process in procfs.in_pid_namespace(self._namespace)]

    def cpu_seconds(self) -> CpuSeconds:
        """The CPU time of everything in this host so far, with Ray's daemons apart. See `cpu_accounting` for the method."""
        return self.accounting.cpu_seconds(self._namespace)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> HostProcess:
        """Start a process in the host, with text streams. `env` is added to the host's environment."""
        self._check_alive()
        command = [
            *("sh", "-c", _JOIN, "sh", *self.accounting.join_files, "--"),
            *(self._pinning()),
            *("nsenter", "--target", str(self._pid), "--net", "--uts", "--ipc", "--mount", "--pid"),
            # If the helper is killed, its process in the host must not stay.
            *("--", "setpriv", "--pdeathsig", "KILL"),
            *("env", f"--chdir={os.fspath(cwd) if cwd is not None else os.getcwd()}", *argv),
        ]
        process = HostProcess(
            self,
            command,
            env={**self._base_environment(), **self.env, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._processes = [known for known in self._processes if known.poll() is None]
        self._processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host to its end and return its output.

        Raises: subprocess.TimeoutExpired, after killing the command; HostsError with its output if it fails
        and `check` is set."""
        process = self.popen(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait(_KILL_DEADLINE_S)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
            raise
        if check and process.returncode != 0:
            raise HostsError(
                f"on host {self.name}, {' '.join(argv)} ended with {process.returncode}:\n{stdout}{stderr}"
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def hide(self, package: str) -> None:
        """Make imports of a package fail on this host from now on, as if it were not installed there."""
        self._check_alive()
        spec = importlib.util.find_spec(package)
        for number, place in enumerate((spec and spec.submodule_search_locations) or ()):
            stand_in = self.folder / "hidden" / f"{package}-{number}"
            stand_in.mkdir(parents=True, exist_ok=True)
            (stand_in / "__init__.py").write_text(
                f"raise ModuleNotFoundError({f'{package} is hidden on this host'!r})\n"
            )
            enter = ("nsenter", "--target", str(self._pid), "--mount")
            done = subprocess.run([*enter, "mount", "--bind", str(stand_in), place], capture_output=True, text=True)
            if done.returncode != 0:
                raise HostsError(f"{package} could not be hidden on host {self.name}: {done.stderr.strip()}")

    def kill(self) -> None:
        """End the host at once, as a power failure would: every process in it gets SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self._pid, signal.SIGKILL)
        # `unshare` ends after process 1, once the kernel has removed all other processes.
        self._init.wait(_KILL_DEADLINE_S)
        self._close_streams()
        for process in self._processes:
            process.wait(_KILL_DEADLINE_S)

    def _close_streams(self) -> None:
        for stream in (self._init.stdin, self._init.stdout, self._init.stderr):
            if stream is not None:
                stream.close()

    def _pinning(self) -> tuple[str, ...]:
        cores = self.spec.cores
        return ("taskset", "--cpu-list", ",".join(map(str, cores))) if cores else ()

    def _base_environment(self) -> dict[str, str]:
        # The owner's Ray settings (an address, a token, a temporary folder) are not the host's, which has its own /tmp/ray.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, "RAY_TMPDIR": "/tmp", "HOME": str(self.folder / "home"), "HOSTNAME": self.name}


class Switch:
    """The network between hosts: a bridge in a namespace of its own, and the owner's own end of it."""

    def __init__(self, sandbox: Sandbox) -> None:
        addresses = sandbox.subnet.hosts()
        self.gateway = str(next(addresses))
        """The owner's address: hosts reach its servers there, and it reaches them."""
        self._addresses = addresses
        self._interface = sandbox.interface
        self._prefix = sandbox.subnet.prefixlen
        # `cat` ends when its input does: when we close it or die.
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the namespace exists from here on
        sandbox.record(self._process.pid)
        self._ports = 0
        self._inside("link add name bridge type bridge", "link set bridge up", "link set lo up")
        _ip(
            f"link add name {sandbox.interface} type veth peer name {self._port()} netns {self._process.pid}",
            f"addr add {self.gateway}/{self._prefix} dev {sandbox.interface}",
            f"link set {sandbox.interface} up",
        )
        self._plug()

    def next_address(self) -> str:
        return str(next(self._addresses))

    def connect(self, host: Host) -> None:
        """Give a host its network device and its address."""
        port = self._port()
        self._inside(f"link add name {port} type veth peer name eth0 netns {host.init_pid}")
        self._plug()
        _ip(
            "link set lo up",
            f"addr add {host.address}/{self._prefix} dev eth0",
            "link set eth0 up",
            namespace_of=host.init_pid,
        )
        if host.spec.mbit_per_s is not None:
            _limit("eth0", host.spec.mbit_per_s, namespace_of=host.init_pid)
            _limit(port, host.spec.mbit_per_s, namespace_of=self._process.pid)

    def close(self) -> None:
        """Remove the network. The kernel would remove its devices with the namespace, but only after a while."""
        subprocess.run(["ip", "link", "delete", self._interface], capture_output=True)
        self._process.kill()
        self._process.wait(_KILL_DEADLINE_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _port(self) -> str:
        return f"port{self._ports}"

    def _plug(self) -> None:
        self._inside(f"link set {self._port()} master bridge", f"link set {self._port()} up")
        self._ports += 1

    def _inside(self, *commands: str) -> None:
        _ip(*commands, namespace_of=self._process.pid)


def _ip(*commands: str, namespace_of: int | None = None) -> None:
    enter = [] if namespace_of is None else ["nsenter", "--target", str(namespace_of), "--net"]
    result = subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if result.returncode != 0:
        raise HostsError(f"ip {'; '.join(commands)}: {result.stderr.strip()}")


def _limit(device: str, mbit_per_s: float, *, namespace_of: int) -> None:
    """Limit what leaves a device."""
    burst = max(
        int(mbit_per_s * 1e6 / 8 / 100), 1 << 18
    )  # a hundredth of a second, and no less than a few large packets
    limit = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", f"{burst}", "latency", "50ms"]
    command = ["nsenter", "--target", str(namespace_of), "--net", "tc", "qdisc", "add", "dev", device, "root", *limit]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise HostsError(f"tc cannot limit {device} to {mbit_per_s:g} Mbit/s: {result.stderr.strip()}")


def hosts_file(addresses: Mapping[str, str]) -> str:
    """The contents of an /etc/hosts with the names of all hosts."""
    for address in addresses.values():
        ipaddress.IPv4Address(address)
    names = "".join(f"{address}\t{name}\n" for name, address in addresses.items())
    return f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}"
