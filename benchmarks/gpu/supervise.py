"""Runs each check in a process of its own, with a deadline: a crash or a hang of one check ends that check alone.

Where it stops: `benchmarks.gpu.child` is what runs there. This module imports neither torch nor Ray.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).resolve().parents[2]
Status = Literal["passed", "failed", "not applicable", "not run"]
SPENT = "the budget is spent"
GRACE_S = 20.0  # for a check that is told to end: Ray's processes end with it
CPU_PATIENCE = 10.0  # deadlines are for a machine with a GPU; the stand-in may share a slow one
OUTPUT_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check: its name, the function ``module:name`` that makes it, and how long it may take.

    Args:
        least_s: the seconds without which it does not begin.
        most_s: its deadline.
    """

    name: str
    function: str
    least_s: float = 10.0
    most_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a check. ``reason``: why it did not pass. ``device``: where its figures were measured, ``"cuda"`` or ``"cpu"``.
    ``output``: the last lines of a failed check's standard error."""

    name: str
    status: Status
    reason: str = ""
    device: str
    seconds: float = 0.0
    said: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    output: Sequence[str] = ()


def run_all(
    checks: Sequence[Check],
    *,
    device: str,
    gpus: int,
    until: float,
    path: Sequence[str] = (),
    told: Callable[[Check], None] = lambda check: None,
) -> list[Outcome]:
    """Run the checks one after the other until ``until``, in seconds of the monotonic clock. Those that no longer fit are not run.

    Args:
        path: folders with packages that this Python lacks.
        told: hears of every check before it begins.
    """
    found = []
    for check in checks:
        left_s = until - time.monotonic()
        if left_s < check.least_s:
            found.append(Outcome(name=check.name, status="not run", reason=SPENT, device=device))
            continue
        told(check)
        patience = CPU_PATIENCE if device == "cpu" else 1.0
        # What hangs is given time to end by itself, which belongs to the budget, too.
        deadline_s = min(check.most_s * patience, max(left_s - GRACE_S, left_s / 2))
        found.append(run_one(check, device=device, gpus=gpus, deadline_s=deadline_s, path=path))
    return found


def run_one(check: Check, *, device: str, gpus: int, deadline_s: float, path: Sequence[str] = ()) -> Outcome:
    """Run a check in a process of its own. After ``deadline_s``, end this process and those that it has started."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offload-gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        answer, errors = folder / "answer.json", folder / "stderr"
        (folder / "work").mkdir()
        command = [sys.executable, "-m", "benchmarks.gpu.child", check.function, str(answer), str(folder / "work")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
            "TQDM_DISABLE": "1",
        }
        environment.pop("RAY_ADDRESS", None)  # each check starts a Ray of its own
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [*command, device, str(gpus)],
                stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                child.wait(deadline_s)
                hung = False
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                _end(child)
        told = _read(answer)
        output = errors.read_text(errors="replace").strip().splitlines()[-OUTPUT_LINES:]
    status, reason = _judged(told, child.returncode, hung, deadline_s, output)
    return Outcome(
        name=check.name,
        status=status,
        reason=reason,
        device=device,
        seconds=round(time.monotonic() - began, 1),
        said=told.get("said", "") if status == "passed" else "",
        figures=told.get("figures", {}),
        output=output if status == "failed" else (),
    )


def _judged(
    told: Mapping[str, Any], code: int, hung: bool, deadline_s: float, output: Sequence[str]
) -> tuple[Status, str]:
    """The status of a check, and the reason unless it passed."""
    if hung:
        return "failed", f"it was not done within {deadline_s:.0f} s"
    if code < 0:
        return "failed", f"its process died from {_signal(-code)}"
    if code == 0 and "status" in told:
        return told["status"], told.get("reason", "")
    said = output[-1] if output else "it said nothing"
    return "failed", f"its process ended with exit code {code}: {said}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(answer: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(answer.read_text())
    except (OSError, ValueError):
        return {}
    return told


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process, if it still runs, and the processes that it started: first all are asked, then killed."""
    if child.poll() is not None:
        return
    started = [psutil.Process(child.pid), *_children(child.pid)]
    child.send_signal(signal.SIGTERM)  # offload then ends its Ray
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil never kills another process that has got the same id
    child.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
