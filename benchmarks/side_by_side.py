"""Runs one row of a benchmark on emulated hosts, each pinned to a core, and measures it from outside.

The rows are modules of `benchmarks.rows`; `benchmarks.rows.protocol` defines how they measure.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rows import protocol
from tests.emulation import CpuSeconds, Host, HostProcess, Hosts, HostsError, HostSpec

ROOT = Path(__file__).resolve().parent.parent
GPU_HOST, CPU_HOST = "gpu-1", "cpu-1"
TRAIN_RESOURCE = '{"train_host": 1}'  # as rows/ray_script.py asks for it
SHM_BYTES = 3 << 30
LIBRARIES = ("offload", "ray", "torch", "torchvision", "timm", "simplejpeg", "numpy")

# What offload's and Ray's processes do, and how their command lines begin.
ROLES = {
    "preprocessing": r"ray::Preprocessor",
    "senders": r"ray::BlockSender",
    "worker": r"ray::TrainingWorker",
    "hub": r"ray::(Hub|run hub)",
    "raylets": r"\S*/raylet$",
}

# One thread per process, since a host has one core. Ray sets the first of these for its tasks in any case.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "TQDM_DISABLE": "1",
}


class RowFailed(Exception):
    """A row ended without a result; the text is the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    module: str
    hosts: tuple[str, ...]
    ray: bool = False
    on_each: bool = False
    """Whether the row runs on every host separately, at the same time, and the results add up. Otherwise it runs on the first host, and
    the others help."""
    raylet_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the raylets, for settings of the cluster."""
    python: str = sys.executable
    """The interpreter that runs the row, for rows whose library has an environment of its own."""
    helper: str | None = None
    """A module that every host of the row runs beside it, as `python -m benchmarks.rows.<helper> --head <the first host>`."""


ROWS = (
    Row(name="plain", module="plain", hosts=(GPU_HOST, CPU_HOST), on_each=True),
    Row(name="dataloader-1-host", module="dataloader", hosts=(GPU_HOST,)),
    Row(name="ray-1-host", module="ray_script", hosts=(GPU_HOST,), ray=True),
    Row(name="ray-2-hosts", module="ray_script", hosts=(GPU_HOST, CPU_HOST), ray=True),
    Row(name="offload-1-host", module="offload_row", hosts=(GPU_HOST,), ray=True),
    Row(name="offload-2-hosts", module="offload_row", hosts=(GPU_HOST, CPU_HOST), ray=True),
    Row(name="dataset-1-host", module="dataset_row", hosts=(GPU_HOST,), ray=True),
    Row(name="dataset-2-hosts", module="dataset_row", hosts=(GPU_HOST, CPU_HOST), ray=True),
    Row(name="loader-1-host", module="loader_row", hosts=(GPU_HOST,), ray=True),
    Row(name="loader-2-hosts", module="loader_row", hosts=(GPU_HOST, CPU_HOST), ray=True),
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one row."""

    samples_per_s: float
    first_batch_s: float
    cpu_ms_per_sample: float
    daemon_cpu_ms_per_sample: float
    stall: float
    busy_cores: float
    """CPU seconds per second of the steady state, daemons included."""
    samples_per_s_by_host: Mapping[str, float]
    """For rows that run on each host separately."""
    busy_cores_by_host: Mapping[str, float]
    preprocessing_cores_by_host: Mapping[str, float]
    """The part of it that offload's preprocessing processes had."""
    start_to_first_batch_s: float
    """From the start of the row's process, imports included. Ray, where the row needs it, was started before."""
    wire_bytes_per_sample: float
    """What the hosts' network devices sent in the steady state."""
    peak_memory_bytes: float
    """The largest sum of the proportional set sizes (PSS) of all the hosts' processes; 0 if nothing looked."""
    batch: Mapping[str, str]
    """Type and shape of each column of the first batch."""
    label_sum: int
    extra: Mapping[str, float]
    cpu_us_per_sample_by_role: Mapping[str, float] = field(default_factory=dict)
    """The CPU time of offload's and Ray's processes in the steady state, by what they do (:data:`ROLES`). The rest has the role "rest"."""


def cores() -> tuple[int, int]:
    """Return the two cores that stand for the two instances. Raises RuntimeError if there is only one."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise RuntimeError("two hosts on two cores need two cores, and this process may use one")
    return available[0], available[1]


def run(
    row: Row,
    task: protocol.Task,
    *,
    timeout_s: float,
    specs: Mapping[str, HostSpec] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
    samples: Mapping[str, int] | None = None,
    memory_every_s: float | None = None,
) -> Measurement:
    """Run a row on fresh hosts, with a fresh Ray cluster if it needs one. Whatever happens, nothing of the hosts is left.

    Args:
        specs: the hosts, by name; None: two, each pinned to a core.
        env: additional environment variables of each host's processes, by name.
        samples: how many samples each host makes, by name, for rows that run on each host separately.
        memory_every_s: how often to look at the memory of the hosts' processes; None: never.

    Raises:
        RowFailed: if the row ends without a result.
    """
    pinned = dict(zip((GPU_HOST, CPU_HOST), cores(), strict=True))
    given = specs or {name: HostSpec(core=pinned[name], shm_bytes=SHM_BYTES) for name in row.hosts}
    with Hosts(given) as hosts:
        for name, more in (env or {}).items():
            hosts[name].env.update(more)
        if row.ray:
            hosts.start_ray(
                head=row.hosts[0],
                env={**ENVIRONMENT, **row.raylet_env},
                extra_args={row.hosts[0]: [f"--resources={TRAIN_RESOURCE}"]},
            )
        if row.on_each:
            groups = [(hosts[name], [hosts[name]]) for name in row.hosts]
        else:
            groups = [(hosts[row.hosts[0]], [hosts[name] for name in row.hosts])]
        counts = samples or {}
        runs = [
            _Running(
                row,
                replace(task, samples=counts.get(at.name, task.samples), hosts=len(members)),
                at,
                members,
                hosts.folder,
            )
            for at, members in groups
        ]
        with contextlib.ExitStack() as stack:
            for running in runs:
                stack.callback(running.close)
            if row.helper is not None:
                for host in hosts.values():
                    stack.callback(_start_helper(row, row.helper, host).kill)
            _watch(runs, timeout_s, memory_every_s)
            return _add_up([running.measurement() for running in runs])


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """An event of a row: when it happened, and each host's CPU time until then, of all processes and by role; and the bytes that each
    host's network device had sent."""

    at: float
    used: Mapping[str, CpuSeconds]
    by_role_s: Mapping[str, Mapping[str, float]]
    sent_bytes: Mapping[str, int]


def _sent_bytes(host: Host) -> int:
    """Return the bytes that the host's network device has sent. Loopback does not count: it is no wire."""
    for line in Path(f"/proc/{host.init_pid}/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            return int(counters.split()[8])
    raise HostsError(f"host {host.name} has no eth0")


def _memory_bytes(hosts: Sequence[Host]) -> int:
    """Return the sum of the proportional set sizes of the hosts' processes: a page that several of them map counts once."""
    total = 0
    for host in hosts:
        for pid in host.pids():
            with contextlib.suppress(OSError):  # processes come and go
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def _start_helper(row: Row, module: str, host: Host) -> HostProcess:
    command = [row.python, "-m", f"benchmarks.rows.{module}", f"--head={row.hosts[0]}"]
    with (host.folder / "helper.log").open("w") as log:
        return host.popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log)


def _by_role_s(host: Host) -> dict[str, float]:
    """Return the CPU time of the host's processes of each role. They live as long as the row's steady state."""
    spent = dict.fromkeys(ROLES, 0.0)
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):  # other processes come and go
            process = psutil.Process(pid)
            command, times = " ".join(process.cmdline()[:1]), process.cpu_times()
            for role, name in ROLES.items():
                spent[role] += (times.user + times.system) if re.match(name, command) else 0.0
    return spent


class _Running:
    """One started row: its process, and its hosts' CPU time at the beginning and end of its steady state."""

    def __init__(self, row: Row, task: protocol.Task, at: Host, members: Sequence[Host], folder: Path) -> None:
        self._members = members
        self._at = at
        self._name = row.name
        self._marks: dict[str, _Mark] = {}
        self._peak_memory_bytes = 0
        self._stdout = folder / f"{at.name}.stdout"
        self._stderr = folder / f"{at.name}.stderr"
        events = folder / f"{at.name}.events"
        os.mkfifo(events)
        # Open the pipe for writing too, so that neither side ever waits for the other to open it.
        self.events = os.open(events, os.O_RDWR | os.O_NONBLOCK)
        self._started = time.monotonic()
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process: HostProcess = at.popen(
                [row.python, "-m", f"benchmarks.rows.{row.module}", *replace(task, events=str(events)).argv()],
                env=ENVIRONMENT,
                cwd=ROOT,
                stdout=stdout,
                stderr=stderr,
            )

    def mark(self) -> None:
        for event in os.read(self.events, 4096).decode().split():
            self._marks[event] = _Mark(
                at=time.monotonic(),
                used={host.name: host.cpu_seconds() for host in self._members},
                by_role_s={host.name: _by_role_s(host) for host in self._members},
                sent_bytes={host.name: _sent_bytes(host) for host in self._members},
            )

    def look_at_memory(self) -> None:
        self._peak_memory_bytes = max(self._peak_memory_bytes, _memory_bytes(self._members))

    def measurement(self) -> Measurement:
        if self.process.returncode != 0:
            said = self._stderr.read_text().strip() or self._stdout.read_text().strip()
            raise RowFailed(f"{self._name} ended with {self.process.returncode}: {said[-3000:]}")
        result = protocol.read_answer(self._stdout.read_text())
        begin, end = self._marks[protocol.STEADY_BEGINS], self._marks[protocol.STEADY_ENDS]
        seconds = end.at - begin.at
        used = {name: end.used[name] - begin.used[name] for name in end.used}
        roles_s = {
            role: {name: end.by_role_s[name][role] - begin.by_role_s[name][role] for name in end.by_role_s}
            for role in ROLES
        }
        by_role = {role: sum(spent.values()) for role, spent in roles_s.items()}
        by_role["rest"] = sum(host.total_s for host in used.values()) - sum(by_role.values())
        # CPU seconds per second, divided by samples per second.
        per_sample_ms = 1e3 / seconds / result.samples_per_s
        return Measurement(
            samples_per_s=result.samples_per_s,
            first_batch_s=result.first_batch_s,
            cpu_ms_per_sample=sum(host.work_s for host in used.values()) * per_sample_ms,
            daemon_cpu_ms_per_sample=sum(host.daemons_s for host in used.values()) * per_sample_ms,
            stall=result.stall,
            busy_cores=sum(host.total_s for host in used.values()) / seconds,
            samples_per_s_by_host={self._at.name: result.samples_per_s},
            busy_cores_by_host={name: host.total_s / seconds for name, host in used.items()},
            preprocessing_cores_by_host={name: spent / seconds for name, spent in roles_s["preprocessing"].items()},
            start_to_first_batch_s=result.first_batch_at_s - self._started,
            wire_bytes_per_sample=sum(end.sent_bytes[name] - begin.sent_bytes[name] for name in end.sent_bytes)
            / (seconds * result.samples_per_s),
            peak_memory_bytes=self._peak_memory_bytes,
            batch=result.batch,
            label_sum=result.label_sum,
            extra={"steady_s": result.steady_s, **result.extra},
            cpu_us_per_sample_by_role={role: spent * 1e3 * per_sample_ms for role, spent in by_role.items()},
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.events)


def _watch(runs: Sequence[_Running], timeout_s: float, memory_every_s: float | None) -> None:
    until = time.monotonic() + timeout_s
    next_look = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for running in runs:
            selector.register(running.events, selectors.EVENT_READ, running)
        while any([running.process.poll() is None for running in runs]):  # noqa: C419 - poll every one
            if time.monotonic() > until:
                raise RowFailed(f"no result after {timeout_s:.0f} s")
            for key, _ in selector.select(timeout=0.2):
                key.data.mark()
            if memory_every_s is not None and time.monotonic() > next_look:
                for running in runs:
                    running.look_at_memory()
                next_look = time.monotonic() + memory_every_s


def _add_up(parts: Sequence[Measurement]) -> Measurement:
    """Combine rows that ran on each host separately: rates add up, costs are means over all samples."""
    rate = sum(part.samples_per_s for part in parts)

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) * part.samples_per_s for part in parts) / rate)

    return Measurement(
        samples_per_s=rate,
        first_batch_s=max(part.first_batch_s for part in parts),
        cpu_ms_per_sample=mean("cpu_ms_per_sample"),
        daemon_cpu_ms_per_sample=mean("daemon_cpu_ms_per_sample"),
        stall=mean("stall"),
        busy_cores=sum(part.busy_cores for part in parts),
        samples_per_s_by_host={name: r for part in parts for name, r in part.samples_per_s_by_host.items()},
        busy_cores_by_host={name: c for part in parts for name, c in part.busy_cores_by_host.items()},
        preprocessing_cores_by_host={name: c for part in parts for name, c in part.preprocessing_cores_by_host.items()},
        start_to_first_batch_s=max(part.start_to_first_batch_s for part in parts),
        wire_bytes_per_sample=mean("wire_bytes_per_sample"),
        peak_memory_bytes=sum(part.peak_memory_bytes for part in parts),
        batch=parts[0].batch,
        label_sum=sum(part.label_sum for part in parts),
        extra=parts[0].extra,
        cpu_us_per_sample_by_role=parts[0].cpu_us_per_sample_by_role if len(parts) == 1 else {},
    )


def as_dict(measurement: Measurement) -> dict[str, Any]:
    return asdict(measurement)


def machine() -> dict[str, Any]:
    """The machine of a result that hosts on two cores made."""
    return hardware() | {"cores_used": list(cores())}


def hardware() -> dict[str, Any]:
    """The machine of any result."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu_model": cpu[0].split(":", 1)[1].strip() if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that a result depends on."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue  # the benchmark runs from a checkout that is not installed
    return versions
