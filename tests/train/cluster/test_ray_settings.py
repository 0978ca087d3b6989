"""After a run or a loader that has started its own Ray, the program is as before, and uses Ray as it likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 800.0


@pytest.mark.parametrize("part", ["RUNS", pytest.param("LOADERS", marks=pytest.mark.soak)])
def test_a_program_uses_ray_before_between_and_after(part: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "programs" / "ray_before_and_after.py"), part],
        cwd=tmp_path, env=without_ray(PYTHONPATH=str(ROOT), HOME=str(tmp_path)),
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout[-1000:] + done.stderr[-3000:]
