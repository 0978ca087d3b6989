"""A host of a job, as far as known before anything is installed on it.

It needs only the standard library. Where it stops: the job's settings (:mod:`offload.launch.sagemaker.settings`) and the host's
equipment (:mod:`offload.launch.sagemaker.container.prepared`) are read later, once the hosts have met, so that all of them hear of
a problem.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import offload
from offload.errors import ConfigError, OffloadError
from offload.launch.sagemaker.container.hosts import JobHosts, read_hosts
from offload.launch.sagemaker.settings import TOKEN

INTERRUPTED = 130
STOPPED_EARLY = "the job was stopped before training began."


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a job, or of this host's part in it. ``reason``: the reason for a failure."""

    exit: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """A host of a job.

    Args:
        base: the service's folder, ``/opt/ml``.
        folder: the unpacked bundle.
        hosts: the hosts of the job.
        job: the name of the job.
        token_file: the file with the job's token.
        address, head_address: the addresses of this host and of the head, on the job's network.
    """

    base: Path
    folder: Path
    hosts: JobHosts
    job: str
    token: str
    token_file: Path
    address: str
    head_address: str

    @property
    def run_dir(self) -> Path:
        """The run's directory. It outlives the container if the job keeps checkpoints."""
        kept = self.base / "checkpoints"
        return (kept if kept.is_dir() else self.base / "output" / "data") / "run"


def read_place(base: Path, environment: Mapping[str, str]) -> HostPlace:
    """Read the host whose files are below ``base``. Raises ConfigError if files or addresses are missing."""
    hosts = read_hosts(base, environment)
    folder = Path(str(offload.__file__)).resolve().parents[1]
    token_file = folder / TOKEN
    try:
        token_file.chmod(0o600)  # whatever the unpacking program set
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise ConfigError(f"{token_file} is missing: the bundle is not the launcher's.") from None
    return HostPlace(
        base=base, folder=folder, hosts=hosts, job=environment.get("TRAINING_JOB_NAME", ""), token=token,
        token_file=token_file, address=_address(hosts.current), head_address=_address(hosts.head),
    )  # fmt: skip


def reason_of(error: BaseException) -> str:
    """The text of a failure file for an error."""
    if isinstance(error, OffloadError):
        return str(error)
    return f"the launcher itself failed: {type(error).__name__}: {error}"


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"the host {host} has no address here: {error.strerror or error}.") from None
