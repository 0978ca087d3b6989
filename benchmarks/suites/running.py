"""Runs test modules in processes of their own, and goes on behind a test that ends or blocks its process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from benchmarks.endings import MARK, of_run
from benchmarks.suites.verdicts import Outcome

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.5
START_S = 300.0  # for Ray's start and the imports
END_S = 60.0  # for Ray's end, after the last test
_PYTEST_FAILED = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)


class SuiteFailed(Exception):
    """No test could run; the text ends with what pytest said."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the record of one process tells.

    Args:
        collected: the tests that it set out to run; None if it did not get so far.
        running: the test that began and did not end.
    """

    collected: tuple[str, ...] | None = None
    outcomes: tuple[Outcome, ...] = ()
    running: str | None = None


def progress(lines: Iterable[str]) -> Progress:
    """Read a record of :mod:`benchmarks.suites.recorder`."""
    collected: tuple[str, ...] | None = None
    outcomes: list[Outcome] = []
    running: str | None = None
    for line in map(json.loads, lines):
        if "collected" in line:
            collected = tuple(line["collected"])
        elif "begins" in line:
            running = line["begins"]
        else:
            outcomes.append(Outcome(test=line.pop("ends"), **line))
            running = None
    return Progress(collected=collected, outcomes=tuple(outcomes), running=running)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the tests of a suite run.

    Args:
        test_timeout_s: a test fails after that many seconds, and its process is killed after twice as many.
        only: patterns of the tests to run; empty: all.
        packages: a folder with further packages.
    """

    cores: int
    test_timeout_s: float
    only: tuple[str, ...] = ()
    packages: Path | None = None
    tell: Callable[[Outcome], None] = field(default=lambda outcome: None)


def run(folder: Path, files: Sequence[str], settings: Settings) -> list[Outcome]:
    """Run the test files of a folder, and return the outcome of each test.

    Raises: SuiteFailed if a process runs no test, or if pytest itself fails.
    """
    outcomes: dict[str, Outcome] = {}
    while True:
        record, left_out = folder / f"record-{uuid.uuid4().hex}.jsonl", folder / "left-out.txt"
        left_out.write_text("".join(f"{test}\n" for test in outcomes), encoding="utf-8")
        said, code = _process(folder, files, record, left_out, settings)
        found = progress(record.read_text(encoding="utf-8").splitlines() if record.exists() else ())
        ended = [replace(each, why=each.why.replace(f"{folder}/", "")) for each in found.outcomes]
        if found.running is not None:
            why = "its process stood still" if code is None else f"its process ended with exit code {code}"
            ended.append(Outcome(test=found.running, outcome="hung" if code is None else "crashed", why=why))
            settings.tell(ended[-1])
        outcomes |= {outcome.test: outcome for outcome in ended}
        if code in _PYTEST_FAILED or not ended:
            raise SuiteFailed(said[-2000:])
        if found.collected is not None and set(found.collected) <= set(outcomes):
            return list(outcomes.values())


def _process(
    folder: Path, files: Sequence[str], record: Path, left_out: Path, settings: Settings
) -> tuple[str, int | None]:
    """Run one process until it ends, and return what it said, and its exit code; None if it had to be killed."""
    mark = uuid.uuid4().hex
    paths = [str(folder), str(ROOT), str(settings.packages or ""), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_TMPDIR": "/tmp",  # a socket's path must be short
    }
    environment.pop("RAY_ADDRESS", None)
    options = {
        "-c": os.devnull, "--rootdir": folder, "--tb": "short", "--timeout": settings.test_timeout_s, "--timeout-method": "signal",
        "--record": record, "--leave-out": left_out, "--cores": settings.cores,
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.suites.recorder"]
    for name, value in [*options.items(), *(("--only", pattern) for pattern in settings.only)]:
        command += [name, str(value)]
    output = folder / "said.txt"
    with output.open("w", encoding="utf-8") as said, subprocess.Popen(
        [*command, *files], cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
    ) as process:  # fmt: skip
        try:
            hung = _watch(process, record, settings)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for left in of_run(mark):
                left.kill()
    return output.read_text(encoding="utf-8", errors="replace"), None if hung else process.returncode


def _watch(process: subprocess.Popen[bytes], record: Path, settings: Settings) -> bool:
    """Wait for the end of a process, and tell outcomes as they come. Return True if no test begins or ends for too long."""
    told, seen, since = 0, -1, time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True) if record.exists() else []
        found = progress(line for line in lines if line.endswith("\n"))
        for outcome in found.outcomes[told:]:
            settings.tell(outcome)
        told = len(found.outcomes)
        if len(lines) != seen:
            seen, since = len(lines), time.monotonic()
        patience_s = 2 * settings.test_timeout_s if found.running is not None else START_S
        if found.collected is not None and told == len(found.collected):
            patience_s = END_S
        if time.monotonic() - since > patience_s:
            return True
    return False
