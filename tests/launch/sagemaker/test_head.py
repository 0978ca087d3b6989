"""What the head of a job tells its hosts of the script: how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from offload.launch.sagemaker.head import _how_it_died


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (
            f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})",
            "the process of mine.py was killed by SIGKILL; the kernel does that when memory runs out.",
        ),
        (f"import os; os.kill(os.getpid(), {signal.SIGTERM:d})", "the process of mine.py was killed by SIGTERM."),
        ("raise SystemExit(3)", "mine.py ended with exit code 3 and gave no reason: see the log."),
    ],
    ids=["SIGKILL", "SIGTERM", "3"],
)
def test_how_a_script_ended_is_told(ends: str, told: str) -> None:
    assert _how_it_died("mine.py", subprocess.run([sys.executable, "-c", ends]).returncode) == told
