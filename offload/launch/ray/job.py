"""A Ray job, and the request that submits it: pure.

Where it stops: nothing is read, uploaded or submitted.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from offload.errors import ConfigError, argument
from offload.launch.arguments import login_in, secrets_in
from offload.train.config import WorkerOverrides

ENTRY = "offload.launch.ray.entry"
RUNS = "~/offload-runs"
"""The folder of runs on the cluster's head. Ray removes a job's working directory after the job."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_S = 300
"""The time for a stopped job to commit a checkpoint before Ray kills it, in seconds."""
STOP_WAIT_OF_RAY_S = 3
"""Ray's default for this time, which is too short for any checkpoint."""
RUN_DIR, NAME = "offload_run_dir", "offload_name"
"""The job's metadata."""
ENVIRONMENT = argument("env", python="environment")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A Ray job.

    Args:
        name: the name of the run; the job's id begins with it.
        user: the user who launches; on a shared cluster, two users may have runs of the same name.
        script: the script, relative to the working directory.
        args: arguments for the script.
        run_dir: the run directory on the cluster's head, where ``~`` means the home directory there; None: a folder
            of this user and name below ``RUNS``.
        storage_path: the folder of checkpoints; None: the script's setting, or the run directory.
        overwrite: whether to replace the run that the directory holds.
        workers: settings that replace those of the script's Trainer.
        requirements: lines for pip on the nodes.
        environment: environment variables for the job's processes on all nodes. No secrets: everyone with access to the dashboard
            can read them.

    Raises:
        ConfigError: for values that cannot work on the cluster.
    """

    name: str
    user: str
    script: str
    args: tuple[str, ...] = ()
    run_dir: str | None = None
    storage_path: str | None = None
    overwrite: bool = False
    workers: WorkerOverrides = field(default_factory=WorkerOverrides)
    requirements: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{argument('name')} must consist of letters, digits, - _ and dots, 100 at most, found {self.name!r}."
            )
        if not self.run_dir_there.startswith(("/", "~/")):
            raise ConfigError(
                f"{argument('run_dir')} {self.run_dir} is relative, and Ray removes a job's working directory after its end: pass "
                f"an absolute path on the cluster's head, or one below ~/."
            )
        if (
            self.storage_path is not None
            and "://" not in self.storage_path
            and not self.storage_path.startswith(("/", "~/"))
        ):
            raise ConfigError(
                f"{argument('storage_path')} {self.storage_path} is relative, and Ray removes a job's working directory after its end: "
                "pass an absolute path that all nodes see, or a URI such as s3://bucket/runs/a."
            )
        self._check_secrets()
        wait = self.environment.get(STOP_WAIT, str(STOP_WAIT_S))
        if not (wait.isascii() and wait.isdigit()):
            raise ConfigError(f"{ENVIRONMENT} {STOP_WAIT} must be a whole number of seconds, found {wait!r}.")

    def _check_secrets(self) -> None:
        remedy = (
            "and everyone with access to the cluster's dashboard could read it: set it where the nodes are started, or let the "
            "script fetch it from a secret store."
        )
        if secrets := secrets_in(self.environment, self.args):
            raise ConfigError(f"{secrets[0]} looks like a secret, {remedy}")
        where = login_in(
            [
                *((f"{ENVIRONMENT} {name}", value) for name, value in self.environment.items()),
                *(
                    (f"{argument('requirements')}, package {number},", line)
                    for number, line in enumerate(self.requirements, start=1)
                ),
                (argument("storage_path"), self.storage_path or ""),
                *((f"argument {number} of the script", text) for number, text in enumerate(self.args, start=1)),
            ]
        )
        if where is not None:
            raise ConfigError(f"{where} has an address with a password or a token in it, {remedy}")

    @property
    def run_dir_there(self) -> str:
        """The run directory on the cluster's head."""
        return str(PurePosixPath(self.run_dir or f"{RUNS}/{self.user}/{self.name}"))

    @property
    def entrypoint(self) -> str:
        """The shell command that Ray runs on the head. It becomes the run itself, so that a signal reaches the run once."""
        command = ["python3", "-m", ENTRY, platform.python_version(), "run", self.script, *self._options()]
        return f"exec {shlex.join([*command, '--', *self.args] if self.args else command)}"

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that the cluster keeps with the job."""
        return {NAME: self.name, RUN_DIR: self.run_dir_there}

    def runtime_env(self, working_dir: str) -> dict[str, Any]:
        """Ray's runtime environment. ``working_dir``: the archive's path here, or its URI."""
        environment = {
            "working_dir": working_dir,
            "env_vars": {STOP_WAIT: str(STOP_WAIT_S), **self.environment},
        }
        return {**environment, "pip": list(self.requirements)} if self.requirements else environment

    def request(self, job_id: str, working_dir: str) -> dict[str, Any]:
        """The arguments of Ray's ``submit_job``."""
        return {
            "submission_id": job_id,
            "entrypoint": self.entrypoint,
            "runtime_env": self.runtime_env(working_dir),
            "metadata": self.metadata,
        }

    def _options(self) -> Iterator[str]:
        yield from ("--address", "auto", "--run-dir", self.run_dir_there)
        for option, value in (
            ("--storage-path", self.storage_path),
            ("--max-workers", self.workers.max_workers),
            ("--cpus-per-worker", self.workers.cpus_per_worker),
            ("--gpus-per-worker", self.workers.gpus_per_worker),
        ):
            if value is not None:
                yield from (option, f"{value:g}" if isinstance(value, float) else str(value))
        if self.overwrite:
            yield "--overwrite"


def job_id(name: str, now: datetime) -> str:
    """A unique id such as ``train-2026-11-22-13-20-05-123`` for the run ``train``: a cluster does not accept an id twice."""
    return f"{name}-{now:%Y-%m-%d-%H-%M-%S}-{now.microsecond // 1000:03d}"


def run_name(stem: str, otherwise: str = "run") -> str:
    """A valid name made from a script's or a user's name; ``otherwise`` if no letter of it is valid."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or otherwise
