"""Training scripts as they are, with functions and classes of the script and what it holds at module level."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 800.0


def test_what_a_scripts_functions_use_and_return_is_as_in_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.script_globals", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["metrics"]
