"""Ray on one host of a job: the options of ``ray start``, and its end.

The command gives addresses, ports, counts and the token explicitly, because the hosts of a job share neither files nor a home
directory. Where it stops: :mod:`offload.launch.sagemaker.container.head` decides when a host starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import RunError
from offload.machine import memory_limit, usable_cores
from offload.preload import NONE_AHEAD

if TYPE_CHECKING:
    import psutil  # functions import it themselves at run time: it may not be installed yet

HEAD_PORT = 6379
NODE_MANAGER_PORT, OBJECT_MANAGER_PORT, RUNTIME_ENV_PORT = 6380, 6381, 6382
AGENT_GRPC_PORT, AGENT_HTTP_PORT, METRICS_PORT = 6383, 6384, 6385
WORKER_PORTS = (10_002, 19_999)
START_S = 120.0
END_S = 5.0
SHARE_OF_SHM, SHARE_OF_MEMORY = 0.8, 0.4
LITTLE_SHM_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A host's resources in the cluster, and the options of its Ray node.

    Args:
        address: the host's address on the job's network.
        head: the address of the head's host.
        group, instance_type: the name and type of its instance group. They become node labels, and a resource ``group_<name>`` of 1.
        cores, gpus: the cores and GPUs that it may use.
        store_bytes: the shared memory for the object store.
        interface: the network interface between the job's hosts.
        token_file: the file with the token for Ray's authentication.
        folder: the folder with the user's code, from which worker processes import.
    """

    address: str
    head: str
    group: str
    instance_type: str
    cores: int
    gpus: int
    store_bytes: int
    interface: str
    token_file: Path
    folder: Path

    def command(self) -> list[str]:
        """``ray start`` with all its options."""
        where = (
            ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
            if self.address == self.head
            else [f"--address={self.head}:{HEAD_PORT}"]
        )
        return [
            sys.executable, "-m", "ray.scripts.scripts", "start", *where,
            f"--node-ip-address={self.address}",
            f"--node-manager-port={NODE_MANAGER_PORT}",
            f"--object-manager-port={OBJECT_MANAGER_PORT}",
            f"--runtime-env-agent-port={RUNTIME_ENV_PORT}",
            f"--dashboard-agent-grpc-port={AGENT_GRPC_PORT}",
            f"--dashboard-agent-listen-port={AGENT_HTTP_PORT}",
            f"--metrics-export-port={METRICS_PORT}",
            f"--min-worker-port={WORKER_PORTS[0]}",
            f"--max-worker-port={WORKER_PORTS[1]}",
            f"--num-cpus={self.cores}",
            f"--num-gpus={self.gpus}",
            f"--object-store-memory={self.store_bytes}",
            f"--labels=instance-group={self.group},instance-type={self.instance_type}",
            f"--resources={json.dumps({f'group_{self.group}': 1})}",
            "--disable-usage-stats",
            # The run forwards users' output itself; forwarding all logs would always take 0.6 % of a core.
            "--include-log-monitor=false",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The environment of Ray's processes and their children. The token stays in its file: environments end up in logs."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            **{f"RAY_{name}": str(int(value)) for name, value in NONE_AHEAD.items()},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])),
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
        }


def store_bytes(shm_bytes: int, memory_bytes: int) -> int:
    """The size of the object store: most of ``/dev/shm``, beyond which Ray would use the disk, but small enough to leave memory for the
    processes."""
    return int(min(SHARE_OF_SHM * shm_bytes, SHARE_OF_MEMORY * memory_bytes))


def free_shm_bytes() -> int:
    """The free bytes of this host's ``/dev/shm``."""
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def memory_bytes() -> int:
    """The memory of this host, or of this container, in bytes."""
    import psutil

    return memory_limit(psutil.virtual_memory().total)


def cores() -> int:
    """The cores that this host's processes may use. The training toolkit counts all of the machine's cores."""
    return usable_cores()


def gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that this host's processes may use, as counted by the training toolkit, or else by NVIDIA's tool."""
    count = environment.get("SM_NUM_GPUS", "")
    if count.isdigit():
        return int(count)
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])


class RayNode:
    """Ray's processes on this host, and their children."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        # This mark identifies the processes later: Ray's own `ray stop` ends those of every cluster that it can see.
        self._mark = uuid.uuid4().hex

    def environment(self) -> dict[str, str]:
        """The environment for processes that should end with the node."""
        return {**self._spec.environment(), _MARK: self._mark}

    def start(self) -> None:
        """Start Ray's processes. Raises RunError, with the message of ``ray start``, if that fails."""
        environment = {**os.environ, **self.environment()}
        environment.pop("RAY_ADDRESS", None)  # `ray start` would take it for the address of an existing cluster
        try:
            done = subprocess.run(
                self._spec.command(), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=START_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(f"ray start did not end within {START_S:g} s.") from None
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr, flush=True)
            said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            raise RunError(f"ray start ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")

    def stop(self) -> None:
        """End Ray's processes. Another thread may call it while they start."""
        import psutil

        marked = [process for process in psutil.process_iter() if _environment(process).get(_MARK) == self._mark]
        # A process that renames itself, as Ray's agents do, overwrites the environment in /proc.
        processes = {*marked, *(child for process in marked for child in _children(process))}
        for process in processes:
            _quietly(process.terminate)
        _, alive = psutil.wait_procs(processes, timeout=END_S)
        for process in alive:
            _quietly(process.kill)


_MARK = "OFFLOAD_RAY_NODE"


def _environment(process: psutil.Process) -> Mapping[str, str]:
    import psutil

    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _children(process: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _quietly(act: object) -> None:
    import psutil

    try:
        act()  # type: ignore[operator]
    except psutil.Error:
        pass
