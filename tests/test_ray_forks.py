"""Forks of a process that is connected to Ray end in order, and disturb neither the process nor its Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 800.0


def told(program: str, folder: Path) -> Any:
    """What a program says in its last line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "programs" / program)],
        cwd=folder, env=without_ray(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_loader_goes_on_while_its_process_forks(tmp_path: Path) -> None:
    seen = told("forks_of_a_loader.py", tmp_path)
    said = seen.pop("refusals")
    assert seen == {"failed": [], "exact": True, "again": 300, "ended": []}
    assert len(said) == 4
    for each in said:
        assert "Ray does not survive a fork. Start processes with" in each, said


def test_a_run_goes_on_while_its_functions_fork(tmp_path: Path) -> None:
    """A fork that leaves the training function, or a callback, ends there. One that outlives a run holds none of its files."""
    seen = told("forks_of_a_run.py", tmp_path)
    squares = sum(index * index for index in range(40))
    parts = seen.pop("parts")  # a busy machine may leave the callback no time for the last one
    assert parts
    assert all(part == [[1, 2], 7] for part in parts)
    assert seen == {
        "metrics": 2 * [{"squares": float(squares), "ended": 7.0}],
        "alive": True,
        "after": squares,
    }
