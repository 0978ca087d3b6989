"""Runs a program of the matrix in the environment of a row, and ends whatever it leaves behind.

Every process that a program starts carries a mark in its environment, so that nothing else on the machine is ever ended.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.matrix.environments import ROOT, Environment

TIMEOUT_S = 240.0
END_S = 20.0
MARK = "OFFLOAD_MATRIX"
SHOWN = 1500  # characters of a failed program's output
SENTENCE_ENDS = "pip install 'ray[data]>="
_KEPT = ("LANG", "LC_ALL", "TZ")
"""What a program gets of this process's environment."""
_running: set[str] = set()
"""The marks of the programs that run now."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended. ``why``: the end of its output, if it failed; ``found``: what it printed, if it passed."""

    passed: bool
    seconds: float
    why: str = ""
    found: Mapping[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        more = {"why": shortened(self.why)} if self.why else {}
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            **more,
            **({"found": self.found} if self.found else {}),
        }


def shortened(why: str) -> str:
    """How a program ended and the last line of its output, without the folders of this machine."""
    ended, _, said = why.partition(": ")
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    return re.sub(r"(/[\w.+-]+)+/", "", f"{ended}: {last}" if last else ended)[:300]


def run(environment: Environment, program: str, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run a program in an environment."""
    done = _run(environment, ["-m", f"benchmarks.matrix.programs.{program}"], timeout_s)
    last = next(reversed(done.stdout.splitlines()), "")
    if done.code == 0 and last.startswith("{"):
        return Outcome(passed=True, seconds=done.seconds, found=json.loads(last))
    said = (done.stdout + done.stderr).strip()[-SHOWN:]
    ended = f"no end within {timeout_s:.0f} s" if done.code is None else f"exit code {done.code}"
    return Outcome(passed=False, seconds=done.seconds, why=f"{ended}: {said}")


def refusal(environment: Environment) -> Outcome:
    """Check that the import and the command are refused, each with the same one sentence."""
    imported = _run(environment, ["-c", "import offload"], TIMEOUT_S)
    command = _run(environment, ["-m", "offload", "plan"], TIMEOUT_S)
    seconds = imported.seconds + command.seconds
    last = next(reversed(imported.stderr.splitlines()), "")
    sentence = last.removeprefix("offload.errors.VersionError: ")
    right = imported.code == 1 and sentence != last and command.code == 2 and command.stderr == f"offload: {sentence}\n"
    if right:
        return Outcome(passed=True, seconds=seconds, found={"import": sentence, "installer": environment.refused_by})
    said = f"import: {imported.code}: {imported.stderr[-SHOWN:]} command: {command.code}: {command.stderr[-SHOWN:]}"
    return Outcome(passed=False, seconds=seconds, why=said)


@dataclass(frozen=True, kw_only=True)
class _Done:
    code: int | None
    """None: it did not end in time."""
    stdout: str
    stderr: str
    seconds: float


def _run(environment: Environment, arguments: list[str], timeout_s: float) -> _Done:
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="mx-", dir="/tmp"))  # short: Ray makes sockets in it
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {
        MARK: mark,
        "PATH": f"{environment.python.parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),  # where Ray would keep a token, and a job its runs
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(environment.python.parent.parent / "matplotlib"),  # its cache of fonts takes long to make
    }
    began = time.monotonic()
    _running.add(mark)
    try:
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = subprocess.Popen(
                [environment.python, *arguments], cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_marked(mark)
                process.wait()
        seconds = time.monotonic() - began
        texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")]
        return _Done(code=code, stdout=texts[0], stderr=texts[1], seconds=seconds)
    finally:
        _running.discard(mark)
        shutil.rmtree(folder, ignore_errors=True)


def end_all() -> None:
    """End every program that runs now."""
    for mark in list(_running):
        end_marked(mark)


def end_marked(mark: str) -> None:
    """End the processes that carry a mark: with SIGTERM, and those that are left after that with SIGKILL."""
    until = time.monotonic() + END_S
    number = signal.SIGTERM
    while (left := marked(mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(0.5)
        number = signal.SIGKILL


def marked(mark: str) -> list[int]:
    """The live processes that carry a mark."""
    wanted, pids = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids
