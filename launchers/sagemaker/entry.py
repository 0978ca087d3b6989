"""What every container of a job runs: find together, start Ray, train on the head, end together.

The head leads (:mod:`launchers.sagemaker.head`), all others follow it; whatever happens, each exits with the head's outcome
and leaves the reason where the service looks for it. Where it stops: training is ``offload run``, as anywhere else.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import launchers
import offload
from launchers.sagemaker.bundle import TOKEN
from launchers.sagemaker.head import MEETING_PORT, SAME_EVERYWHERE, Head, Outcome, Place
from launchers.sagemaker.hosts import JobHosts, read_hosts
from launchers.sagemaker.ray_node import RayNode
from launchers.sagemaker.rendezvous import Follower
from launchers.sagemaker.settings import read_settings
from offload.errors import ConfigError, OffloadError

BASE = "/opt/ml"
SHOWN_OF_A_FAILURE = 1024  # characters, by the service's console


def main() -> None:
    """The command of a container."""
    sys.exit(run(Path(os.environ.get("SAGEMAKER_BASE_DIR", BASE))))


def run(base: Path) -> int:
    """Take part in the job whose files are below ``base``. Returns the exit code."""
    try:
        hosts = read_hosts(base, os.environ)
        print(
            f"offload: this is {hosts.current} of group {hosts.group.name} ({hosts.group.instance_type}); the head is {hosts.head}",
            flush=True,
        )
        place = _place(base, hosts)
        outcome = Head(place).lead() if hosts.is_head else _follow(place)
    except OffloadError as error:
        outcome = Outcome(exit=1, reason=str(error))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(exit=1, reason=f"the launcher itself failed: {type(error).__name__}: {error}")
    if outcome.reason:
        print(f"offload: {outcome.reason}", file=sys.stderr, flush=True)
        _leave(outcome.reason, base / "output" / "failure")
    return outcome.exit


def _place(base: Path, hosts: JobHosts) -> Place:
    folder = Path(str(launchers.__file__)).resolve().parents[1]
    settings, hyperparameters = read_settings(base)
    token_file = folder / TOKEN
    try:
        token_file.chmod(0o600)  # whatever unpacked it
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise ConfigError(f"{token_file} is missing: the bundle is not the launcher's.") from None
    return Place(
        base=base, folder=folder, hosts=hosts, settings=settings, hyperparameters=hyperparameters,
        job=os.environ.get("TRAINING_JOB_NAME", ""), token=token,
        token_file=token_file, versions=installed(), address=_address(hosts.current), head_address=_address(hosts.head),
    )  # fmt: skip


def installed() -> dict[str, str]:
    """What must be the same on all hosts of a job, at the versions of this one."""
    return {
        "Python": platform.python_version(),
        "offload": offload.__version__,
        **{name: version for name, package in SAME_EVERYWHERE.items() if (version := _version(package))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _follow(place: Place) -> Outcome:
    """A host that preprocesses, or holds workers: it does what the head says and ends as the head does."""
    # The service signals all containers at once. The head commits a checkpoint, and needs this host until then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    head = (place.head_address, MEETING_PORT)
    follower = Follower(head, place.token, place.hosts.current, place.versions, place.settings.hosts_deadline_s)
    node: RayNode | None = None
    try:
        node = RayNode(place.node)
        for message in follower.messages():
            if "start" in message:
                # On a thread: `ray start` waits for a head that is gone, and what the head tells must be heard meanwhile.
                threading.Thread(target=_start, args=(node, follower), daemon=True).start()
            if "outcome" in message:
                return _as_told(message["outcome"], place.hosts.head)
    except ConfigError as error:
        follower.say(failed=str(error))
        raise
    finally:
        if node is not None:
            node.stop()
    raise AssertionError("messages end with an outcome or raise")


def _start(node: RayNode, follower: Follower) -> None:
    try:
        node.start()
    except OffloadError as error:
        follower.say(failed=str(error))
    else:
        follower.say(ready=True)


def _as_told(outcome: dict[str, Any], head: str) -> Outcome:
    reason = outcome.get("reason")
    return Outcome(exit=int(outcome["exit"]), reason=f"{head}: {reason}" if reason else None)


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"the host {host} has no address here: {error.strerror or error}.") from None


def _leave(reason: str, path: Path) -> None:
    """Write the failure file; the service shows its beginning. One that is there already says more."""
    text = reason if len(reason) <= SHOWN_OF_A_FAILURE else f"{reason[: SHOWN_OF_A_FAILURE - 6]} [...]"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"offload: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
