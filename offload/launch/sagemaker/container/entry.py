"""The entry point of every container of a job: the hosts meet, start Ray, train on the head, and end together.

The head leads (:mod:`offload.launch.sagemaker.container.head`), and all other hosts follow
(:mod:`offload.launch.sagemaker.container.follower`). Every host always exits with the head's outcome, and writes the reason where
the service looks for it. At the start, the entry imports only the standard library, since nothing is installed yet. Where it stops:
``offload run`` trains, as anywhere else.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from offload.errors import OffloadError
from offload.launch.sagemaker.container.follower import FollowerHost
from offload.launch.sagemaker.container.head import Head
from offload.launch.sagemaker.container.place import Outcome, read_place, reason_of
from offload.launch.sagemaker.container.process_one import ENTRY_PID

BASE = "/opt/ml"
SHOWN_OF_A_FAILURE = 1024  # characters that the service's console shows


def main() -> None:
    """The command of a container."""
    sys.exit(run(Path(os.environ.get("SAGEMAKER_BASE_DIR", BASE))))


def run(base: Path) -> int:
    """Take part in the job whose files are below ``base``. Return the exit code."""
    try:
        _tell_pid()
        place = read_place(base, os.environ)
        hosts = place.hosts
        print(
            f"offload: this is {hosts.current} of group {hosts.group.name} ({hosts.group.instance_type}); the head is {hosts.head}",
            flush=True,
        )
        outcome = Head(place).lead() if hosts.is_head else FollowerHost(place).follow()
    except Exception as error:
        if not isinstance(error, OffloadError):
            traceback.print_exc()
        outcome = Outcome(exit=1, reason=reason_of(error))
    if outcome.reason:
        print(f"offload: {outcome.reason}", file=sys.stderr, flush=True)
        _leave(outcome.reason, base / "output" / "failure")
    return outcome.exit


def _tell_pid() -> None:
    """Tell the launcher's process 1, if it runs in this container, which process should get SIGTERM."""
    if path := os.environ.get(ENTRY_PID):
        Path(f"{path}.part").write_text(str(os.getpid()))
        os.replace(f"{path}.part", path)


def _leave(reason: str, path: Path) -> None:
    """Write the failure file, whose beginning the service shows, unless one exists already, which says more."""
    text = reason if len(reason) <= SHOWN_OF_A_FAILURE else f"{reason[: SHOWN_OF_A_FAILURE - 6]} [...]"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a script's error may hold any text
    except OSError as error:
        print(f"offload: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
