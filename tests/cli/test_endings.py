"""How runs end: told to at any phase of their start, or when a process of Ray's dies. What is left is found by the environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.endings import SCRIPT
from offload.process.interrupts import INTERRUPTED
from offload.report.run_dir import EVENTS, METRICS, SUMMARY, read_lines
from tests.helpers import MARK, eventually, marked, without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 800.0


@pytest.fixture(autouse=True)
def _no_nohup() -> Iterator[None]:
    """The tests themselves may run under nohup, which what they start would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, str]]:
    """A run on a Ray of its own in a process group of its own, what it says, and what marks its processes."""
    script, said, mark = tmp_path / "training.py", tmp_path / "said", uuid.uuid4().hex
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "offload",
        "run",
        str(script),
        "--run-dir",
        str(tmp_path / "run"),
        "--address",
        "local",
    ]
    with said.open("w") as file, subprocess.Popen(
        command, stdout=file, stderr=file, env=without_ray(**{MARK: mark}), start_new_session=True,
    ) as run:  # fmt: skip
        try:
            yield run, said, mark
        finally:
            run.kill()
            for process in marked(mark):
                process.kill()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("phase", "signals"),
    [
        pytest.param("starting Ray", [signal.SIGTERM], id="while Ray starts, SIGTERM"),
        pytest.param(
            "starting 1 worker(s)", [signal.SIGHUP, signal.SIGINT], id="while workers start, SIGHUP and Ctrl-C"
        ),
    ],
)
def test_a_start_that_is_interrupted_ends_in_one_way(tmp_path: Path, phase: str, signals: list[signal.Signals]) -> None:
    with running(tmp_path) as (run, said, mark):
        eventually(lambda: phase in said.read_text() or run.poll() is not None, DEADLINE_S)
        for number in signals:
            with contextlib.suppress(ProcessLookupError):  # it has ended before the second
                os.killpg(run.pid, number)  # as a terminal does: to the command and to what it started
            eventually(lambda: "stopping" in said.read_text() or run.poll() is not None, DEADLINE_S)
        assert run.wait(DEADLINE_S) == INTERRUPTED, said.read_text()
        eventually(lambda: not marked(mark))
    assert "Traceback" not in said.read_text()
    assert "ended at once" in said.read_text() or "interrupted" in said.read_text()


@pytest.mark.soak
def test_nothing_is_left_of_a_driver_that_was_killed_while_processes_start(tmp_path: Path) -> None:
    """Those that are just starting would look for Ray for half a minute."""
    with running(tmp_path) as (run, _, mark):

        def starting() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return any("default_worker.py" in word for each in marked(mark) for word in each.cmdline())
            return False

        eventually(lambda: starting() or run.poll() is not None, DEADLINE_S)
        assert run.poll() is None
        run.kill()
        eventually(lambda: not marked(mark))


def test_a_run_whose_ray_ends_says_so_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Ray itself looks for it for a minute, and then ends the process in the middle of whatever it does."""
    with running(tmp_path) as (run, said, mark):
        eventually(lambda: bool(read_lines(tmp_path / "run" / METRICS)) or run.poll() is not None, DEADLINE_S)
        (control,) = [process for process in marked(mark) if process.name() == "gcs_server"]
        control.kill()
        assert run.wait(DEADLINE_S) == 1, said.read_text()
        eventually(lambda: not marked(mark))
    lines = said.read_text().splitlines()
    assert "Traceback" not in said.read_text()
    assert lines[-1].startswith("offload: Ray's control process (gcs_server) on ")
    assert lines[-1].endswith("was ended by signal 9 (SIGKILL). The same command resumes from the last checkpoint.")
    assert not [line for line in lines if "GCS" in line or "(raylet)" in line]
    assert "gcs_server" in (tmp_path / "run" / "error.txt").read_text()
    assert '"failed"' in (tmp_path / "run" / SUMMARY).read_text()
    assert read_lines(tmp_path / "run" / EVENTS)[-1]["event"] == "run_finished"
