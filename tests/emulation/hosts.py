"""Several hosts on one machine, with real Ray on them, for tests and benchmarks.

    with Hosts({"gpu-1": HostSpec(core=0), "cpu-1": HostSpec(core=1)}) as hosts:
        hosts.start_ray(head="gpu-1")
        print(hosts["gpu-1"].run([sys.executable, "train.py"], timeout=60, check=True).stdout)

Each host has its own address, host name, processes, /proc, /etc/hosts, /dev/shm, /tmp/ray, /opt/ml and HOME, and its
core or CPU quota; it shares the rest of the file system with the machine. Hosts reach only each other and the process
that made them (at `hosts.gateway`): there is no route out.

Whatever ends the owner (context exit, an exception, a signal, SIGKILL), the kernel ends the hosts with it. Only after
a violent death do an empty cgroup and a folder under the temporary directory stay, and the next hosts to start remove them.
Where it stops: memory is not limited per host, and a host has the machine's kernel, disk and clock.
"""

import atexit
import contextlib
import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from offload.ray_private.preload.minimal_agent import DASHBOARD_ONLY
from tests.emulation.cpu_accounting import Accounting, CpuSeconds, QuotaUnavailable
from tests.emulation.netns import (
    Host,
    HostProcess,
    HostsError,
    HostSpec,
    Switch,
    hosts_file,
    unavailable,
)
from tests.emulation.sandbox import Sandbox

RAY_PORT = 6379
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_RAY_STOP_DEADLINE_S = 60.0
_JOIN_GRACE_S = 120.0  # time for a driver to import Ray and connect, beyond the deadline of the start itself
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

# A program for the head: it waits until raylets at all given addresses are alive, or the time is up, and prints the live ones. It
# joins as a driver, which also proves that Ray accepts the token.
_WAIT_FOR_NODES = """
import json, sys, time
import ray
expected, deadline_s = set(json.loads(sys.argv[1])), float(sys.argv[2])
ray.init(logging_level="ERROR", log_to_driver=False)
until = time.monotonic() + deadline_s
while True:
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if expected <= alive or time.monotonic() > until:
        break
    time.sleep(0.1)
print(json.dumps(sorted(alive)))
"""


@dataclass(frozen=True, kw_only=True)
class _RayStart:
    """The arguments of `ray start` besides the host's place in the cluster; see :meth:`Hosts.start_ray`."""

    num_cpus: Mapping[str, float] = field(default_factory=dict)
    num_gpus: Mapping[str, float] = field(default_factory=dict)
    object_store_memory: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dashboard: bool = False


class Hosts(Mapping[str, Host]):
    """Emulated hosts by name. A context manager: they exist inside the `with` block.

    Args:
        specs: the resources of each host, by host name (a DNS label: lower case, digits, hyphens).
        accounting: "cgroup" or "proc" to insist on one way of counting CPU time; None uses the better one that works.
    """

    def __init__(self, specs: Mapping[str, HostSpec], *, accounting: str | None = None) -> None:
        for name in specs:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"a host name must consist of a-z, 0-9 and inner hyphens, found {name!r}")
        self._specs = dict(specs)
        self._method = accounting
        self._hosts: dict[str, Host] = {}
        self._sandbox: Sandbox | None = None
        self._switch: Switch | None = None
        self._cleanup = contextlib.ExitStack()
        self._ray_hosts: list[str] = []
        self.ray_address: str | None = None
        """`host:port` of the Ray cluster while one is up."""

    def __enter__(self) -> "Hosts":
        reason = unavailable()
        if reason is not None:
            raise HostsError(reason)
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        sandbox = Sandbox()
        self._sandbox = sandbox
        self._cleanup.callback(sandbox.close)
        switch = Switch(sandbox)
        self._switch = switch
        self._cleanup.callback(switch.close)
        addresses = {name: switch.next_address() for name in self._specs}
        (sandbox.folder / "hosts").write_text(hosts_file({**addresses, "gateway": switch.gateway}))
        for name, spec in self._specs.items():
            try:
                accounting = Accounting(sandbox.name, name, quota_cpus=spec.cpus, method=self._method)
            except QuotaUnavailable as error:
                raise HostsError(f"host {name}: {error}") from None
            self._cleanup.callback(accounting.close)
            host = Host(name, spec, addresses[name], sandbox, accounting)
            self._hosts[name] = host
            self._cleanup.callback(host.kill)
            switch.connect(host)

    def close(self) -> None:
        """Kill every host and remove the network. Called on leaving the `with` block; harmless when repeated."""
        atexit.unregister(self.close)
        self._ray_hosts = []
        self.ray_address = None
        self._cleanup.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def gateway(self) -> str:
        """The address at which hosts reach servers of the owning process (also the host name `gateway`)."""
        assert self._switch is not None, "hosts exist inside the with block only"
        return self._switch.gateway

    @property
    def folder(self) -> Path:
        """A folder that every host sees under the same path, removed with the hosts."""
        assert self._sandbox is not None, "hosts exist inside the with block only"
        return self._sandbox.folder

    def cpu_seconds(self) -> CpuSeconds:
        """The CPU time of all hosts so far, with Ray's daemons apart."""
        return sum((host.cpu_seconds() for host in self.values()), CpuSeconds(work_s=0.0, daemons_s=0.0))

    def start_ray(
        self,
        head: str,
        *,
        workers: Sequence[str] | None = None,
        num_cpus: Mapping[str, float] | None = None,
        num_gpus: Mapping[str, float] | None = None,
        object_store_memory: int | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Mapping[str, Sequence[str]] | None = None,
        dashboard: bool = False,
        deadline_s: float = 90.0,
    ) -> str:
        """Start a real Ray cluster on the hosts and wait until every node is alive.

        Token authentication is on, with a token for this cluster alone. Every process started on these hosts from
        then on finds the cluster and the token in its environment, so that `ray.init()` just works.

        Args:
            head: the host of the head node.
            workers: the other hosts to join; None: all of them.
            num_cpus: CPUs to announce, by host; by default the host's cores or quota.
            num_gpus: GPUs to announce, by host; by default none. They need not exist.
            object_store_memory: bytes of each host's object store; by default 80 % of its /dev/shm.
            env: environment of the raylets and hence of the workers they start.
            extra_args: more arguments of `ray start`, by host.
            dashboard: start Ray's dashboard on the head, with its agents on all hosts. Ray's state API needs it; without it Ray Train
                logs warnings. Otherwise the hosts are as if ``ray[default]`` were not installed.
            deadline_s: the time limit for the whole start.

        Returns: the cluster's address, `host:port`.

        Raises: HostsError with the hosts that are missing at the deadline, or with the output of `ray start`.
        """
        if self.ray_address is not None:
            raise HostsError(f"Ray is already up at {self.ray_address}; call stop_ray() first")
        members = [head, *(workers if workers is not None else (n for n in self if n != head))]
        until = time.monotonic() + deadline_s
        address = f"{self[head].address}:{RAY_PORT}"
        cluster_env = {
            "RAY_ADDRESS": address,
            # Set in every process: with files in HOME instead, hosts with different files would refuse each other.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._ray_hosts = members
        for name in members:
            self[name].env.update(cluster_env)
        self.ray_address = address

        options = _RayStart(
            num_cpus=num_cpus or {}, num_gpus=num_gpus or {}, object_store_memory=object_store_memory, env=env or {},
            extra_args=extra_args or {}, dashboard=dashboard,
        )  # fmt: skip

        def start(name: str) -> HostProcess:
            where = ["--head", f"--port={RAY_PORT}", f"--include-dashboard={str(dashboard).lower()}"]
            return self._ray_start(name, where if name == head else [f"--address={address}"], options)

        try:
            starts = {head: start(head)}
            # `ray start --address` waits forever for a missing head: probe the port ourselves.
            self._wait_for_port(head, starts[head], until)
            starts |= {name: start(name) for name in members[1:]}
            self._finish_ray_start(starts, until)
            self._wait_for_nodes(head, until)
        except BaseException:
            self._forget_ray()
            raise
        return address

    def join_ray(self, name: str, *, env: Mapping[str, str] | None = None, deadline_s: float = 90.0) -> None:
        """Start Ray on one more host, and wait until `ray start` has joined it to the running cluster.

        Raises: HostsError with the output of `ray start`.
        """
        if self.ray_address is None:
            raise HostsError("no Ray cluster is up to be joined; call start_ray() first")
        member = self[self._ray_hosts[0]]
        self[name].env.update({key: value for key, value in member.env.items() if key.startswith("RAY_")})
        self._ray_hosts.append(name)
        start = self._ray_start(name, [f"--address={self.ray_address}"], _RayStart(env=env or {}))
        self._finish_ray_start({name: start}, time.monotonic() + deadline_s)

    def _ray_start(self, name: str, where: Sequence[str], start: "_RayStart") -> HostProcess:
        host = self[name]
        if not start.dashboard:
            host.hide(DASHBOARD_ONLY)
        memory = start.object_store_memory or int(0.8 * host.spec.shm_bytes)
        return host.popen(
            [
                *_RAY,
                "start",
                *where,
                f"--node-ip-address={host.address}",
                f"--node-name={name}",
                f"--num-cpus={start.num_cpus.get(name, host.spec.num_cpus)}",
                f"--num-gpus={start.num_gpus.get(name, 0)}",
                f"--object-store-memory={memory}",
                "--disable-usage-stats",
                # Do not forward logs to drivers: that always takes 0.6 % of a core.
                "--include-log-monitor=false",
                *start.extra_args.get(name, ()),
            ],
            # `ray start` must not mistake the address of the future cluster for that of an existing one.
            env={**start.env, "RAY_ADDRESS": ""},
            stdout=self._ray_log(name),
            stderr=subprocess.STDOUT,
        )

    def stop_ray(self) -> None:
        """Stop Ray on every host where it was started; the hosts live on."""
        try:
            stops = {
                name: self[name].popen(
                    [*_RAY, "stop", "--force"],
                    stdout=self._ray_log(name),
                    stderr=subprocess.STDOUT,
                )
                for name in reversed(self._ray_hosts)
                if self[name].alive
            }
            until = time.monotonic() + _RAY_STOP_DEADLINE_S
            for process in stops.values():
                process.wait(max(until - time.monotonic(), 0.1))
        finally:
            self._forget_ray()

    def _forget_ray(self) -> None:
        for name in self._ray_hosts:
            host = self[name]
            host.env = {key: value for key, value in host.env.items() if not key.startswith("RAY_")}
        self._ray_hosts = []
        self.ray_address = None

    def _ray_log(self, name: str) -> TextIO:
        # A file, not a pipe: the daemons inherit it, and would keep a pipe open after `ray start` has ended.
        log = (self[name].folder / "ray.log").open("a")
        self._cleanup.callback(log.close)
        return log

    def _finish_ray_start(self, starts: Mapping[str, HostProcess], until: float) -> None:
        late = []
        for name, process in starts.items():
            try:
                status = process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(name)
                continue
            if status != 0:
                log = (self[name].folder / "ray.log").read_text()
                raise HostsError(f"ray start on host {name} ended with {status}:\n{log[-4000:]}")
        if late:
            raise HostsError(f"ray start did not finish in time on: {', '.join(late)}")

    def _wait_for_port(self, head: str, start: HostProcess, until: float) -> None:
        while True:
            try:
                socket.create_connection((self[head].address, RAY_PORT), timeout=1.0).close()
                return
            except OSError as error:
                if start.poll() not in (None, 0):
                    self._finish_ray_start({head: start}, until)
                if time.monotonic() > until:
                    raise HostsError(f"no Ray head answers at {self.ray_address} on host {head}: {error}") from None
                time.sleep(0.05)

    def _wait_for_nodes(self, head: str, until: float) -> None:
        names = {self[name].address: name for name in self._ray_hosts}
        wait_s = max(until - time.monotonic(), 1.0)
        try:
            answer = self[head].run(
                [sys.executable, "-c", _WAIT_FOR_NODES, json.dumps(list(names)), str(wait_s)],
                timeout=wait_s + _JOIN_GRACE_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise HostsError(f"the Ray head on host {head} accepts no driver") from None
        missing = [names[address] for address in names.keys() - json.loads(answer.stdout)]
        if missing:
            raise HostsError(f"not alive in the Ray cluster in time: {', '.join(sorted(missing))}")
