"""An emulated SageMaker training job: the containers as the service sets them up, with the training toolkit's own command.

    job = TrainingJob(hosts, request, {"cpu": ["algo-1", "algo-3"], "gpu": ["algo-2"]}, environment)
    job.start()
    assert job.wait(120) == {"algo-1": 0, "algo-2": 0, "algo-3": 0}

The request is the document of a CreateTrainingJob call. Each host gets its files below ``/opt/ml`` and runs the request's entrypoint, or
``train`` if it has none. ``train`` fetches the bundle from S3 and starts the entry. Where it stops: it pulls no image (all hosts have
this Python), downloads no inputs, and copies checkpoints in before the start and out on request, not while the job runs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.ray_private.preload.minimal_agent import DASHBOARD_ONLY
from tests.emulation.hosts import Hosts
from tests.emulation.netns import HostProcess

TRAIN = Path(sys.executable).with_name("train")


class TrainingJob:
    """One emulated job.

    Args:
        hosts: the hosts, with the service's names: ``algo-1``, ``algo-2``, …
        request: the document of a CreateTrainingJob call.
        groups: the hosts of each of its instance groups.
        environment: the environment of the containers, besides the request's own: access to S3, and credentials.
        checkpoints: the checkpoints of an earlier run of the job, from which to resume.
    """

    def __init__(
        self,
        hosts: Hosts,
        request: Mapping[str, Any],
        groups: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        *,
        checkpoints: Path | None = None,
    ) -> None:
        self._hosts, self._request, self._groups = hosts, request, groups
        self._environment = {
            "TRAINING_JOB_NAME": request["TrainingJobName"],
            "OFFLOAD_WITHOUT_GPUS": "1",
            "PATH": f"{TRAIN.parent}:{os.environ['PATH']}",
            **request.get("Environment", {}),
            **environment,
        }
        self._running: dict[str, HostProcess] = {}
        self.ended_at: dict[str, float] = {}
        """The time at which each host's command ended, by the monotonic clock."""
        self.started_at = 0.0
        """The time at which the last host was started, in seconds since the epoch."""
        for name in self.names:
            hosts[name].hide(DASHBOARD_ONLY)  # offload's requirements for images bring Ray without ray[default]
            self._set_up(name, checkpoints)

    @property
    def names(self) -> list[str]:
        """The job's hosts, in the order in which the service lists them."""
        return sorted(name for group in self._groups.values() for name in group)

    def folder(self, name: str) -> Path:
        """The folder that the host sees as ``/opt/ml``."""
        return self._hosts[name].folder / "opt_ml"

    def start(self, *names: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the containers of these hosts; without names, of all hosts that do not run yet."""
        for name in names or [name for name in self.names if name not in self._running]:
            with self._log_path(name).open("a") as log:
                self._running[name] = self._hosts[name].popen(
                    self._command,
                    env={**self._environment, **(environment or {})},
                    cwd="/opt/ml",
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        self.started_at = time.time()

    def stop(self) -> None:
        """Ask the containers to end, as the service does before it kills them: SIGTERM to process 1 of each.

        The kernel delivers to a process 1 only the signals that it handles.
        """
        for process in self._running.values():
            pid = process.inner_pid()
            if pid is not None and _handles(pid, signal.SIGTERM):
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the containers at once."""
        for name, process in self._running.items():
            if process.poll() is None:
                for pid in self._hosts[name].pids():
                    if pid != self._hosts[name].init_pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> dict[str, int]:
        """Return the exit code of every started host. Raises TimeoutError, with their names, if some still run."""
        until = time.monotonic() + timeout_s
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    self.ended_at.setdefault(name, time.monotonic())
            if len(self.ended_at) == len(self._running):
                return {name: process.wait() for name, process in self._running.items()}
            if time.monotonic() > until:
                raise TimeoutError(f"still running: {sorted(self._running.keys() - self.ended_at.keys())}")
            time.sleep(0.05)

    def log(self, name: str) -> str:
        """The output of the host's container so far."""
        with contextlib.suppress(FileNotFoundError):
            return self._log_path(name).read_text(errors="replace")
        return ""

    def failure(self, name: str) -> str | None:
        """The reason that the service would show for a failure; None without a failure."""
        try:
            return (self.folder(name) / "output" / "failure").read_text()
        except FileNotFoundError:
            return None

    @property
    def _command(self) -> list[str]:
        algorithm = self._request["AlgorithmSpecification"]
        return [*algorithm.get("ContainerEntrypoint", [str(TRAIN)]), *algorithm.get("ContainerArguments", [])]

    def _log_path(self, name: str) -> Path:
        return self._hosts[name].folder / "train.log"

    def _set_up(self, name: str, checkpoints: Path | None) -> None:
        folder = self.folder(name)
        for old in folder.iterdir():  # files of an earlier job on this host
            shutil.rmtree(old)
        self._log_path(name).unlink(missing_ok=True)
        config = folder / "input" / "config"
        for path in (config, folder / "model", folder / "output" / "data", folder / "code"):
            path.mkdir(parents=True, exist_ok=True)
        if "CheckpointConfig" in self._request:
            (folder / "checkpoints").mkdir(exist_ok=True)
            if checkpoints is not None:
                shutil.copytree(checkpoints, folder / "checkpoints", dirs_exist_ok=True)
        for file, document in self._documents(name):
            (config / file).write_text(json.dumps(document))

    def _documents(self, name: str) -> Iterator[tuple[str, Any]]:
        types = {g["InstanceGroupName"]: g["InstanceType"] for g in self._request["ResourceConfig"]["InstanceGroups"]}
        mine = next(group for group, names in self._groups.items() if name in names)
        yield "hyperparameters.json", self._request["HyperParameters"]
        yield (
            "inputdataconfig.json",
            {channel["ChannelName"]: {} for channel in self._request.get("InputDataConfig", [])},
        )
        yield (
            "resourceconfig.json",
            {
                "current_host": name,
                "current_group_name": mine,
                "current_instance_type": types[mine],
                "hosts": self.names,
                "instance_groups": [
                    {"instance_group_name": group, "instance_type": types[group], "hosts": list(names)}
                    for group, names in self._groups.items()
                ],
                "network_interface_name": "eth0",
            },
        )


def _handles(pid: int, sig: signal.Signals) -> bool:
    """Whether a process handles a signal itself."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (sig - 1) & 1)
