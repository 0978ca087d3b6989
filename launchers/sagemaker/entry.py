"""What every container of a job runs: find together, start Ray, train on the head, end together.

The head leads (:mod:`launchers.sagemaker.head`), all others follow it (:mod:`launchers.sagemaker.follower`); whatever happens, each
exits with the head's outcome and leaves the reason where the service looks for it. It begins with the standard library alone, since
nothing is installed yet. Where it stops: training is ``offload run``, as anywhere else.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from launchers.sagemaker.follower import Part
from launchers.sagemaker.head import Head
from launchers.sagemaker.place import Outcome, read_place, reason_of
from launchers.sagemaker.process_one import ENTRY_PID
from offload.errors import OffloadError

BASE = "/opt/ml"
SHOWN_OF_A_FAILURE = 1024  # characters, by the service's console


def main() -> None:
    """The command of a container."""
    sys.exit(run(Path(os.environ.get("SAGEMAKER_BASE_DIR", BASE))))


def run(base: Path) -> int:
    """Take part in the job whose files are below ``base``. Returns the exit code."""
    try:
        _tell_pid()
        place = read_place(base, os.environ)
        hosts = place.hosts
        print(
            f"offload: this is {hosts.current} of group {hosts.group.name} ({hosts.group.instance_type}); the head is {hosts.head}",
            flush=True,
        )
        outcome = Head(place).lead() if hosts.is_head else Part(place).play()
    except Exception as error:
        if not isinstance(error, OffloadError):
            traceback.print_exc()
        outcome = Outcome(exit=1, reason=reason_of(error))
    if outcome.reason:
        print(f"offload: {outcome.reason}", file=sys.stderr, flush=True)
        _leave(outcome.reason, base / "output" / "failure")
    return outcome.exit


def _tell_pid() -> None:
    """Tell the container's process 1, where it is the launcher's, whom to pass SIGTERM on to."""
    if path := os.environ.get(ENTRY_PID):
        Path(f"{path}.part").write_text(str(os.getpid()))
        os.replace(f"{path}.part", path)


def _leave(reason: str, path: Path) -> None:
    """Write the failure file; the service shows its beginning. One that is there already says more."""
    text = reason if len(reason) <= SHOWN_OF_A_FAILURE else f"{reason[: SHOWN_OF_A_FAILURE - 6]} [...]"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"offload: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
