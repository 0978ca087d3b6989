"""What the head of a job tells its hosts of the script: how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from offload.launch.sagemaker.container.head import _how_it_died, _how_it_stopped


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


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (
            {"status": "interrupted", "checkpoint": "/run/checkpoints/checkpoint_1"},
            "the job was stopped; a checkpoint was committed.",
        ),
        ({"status": "interrupted", "checkpoint": None}, "the job was stopped before it reported a checkpoint."),
        (
            {"schema": "offload.error/1", "error": "the disk is full."},
            "the job was stopped before it reported a checkpoint.",
        ),
        ({}, "the job was stopped before it reported a checkpoint."),
    ],
    ids=["committed", "no checkpoint", "failed", "while the script is loaded"],
)
def test_a_stopped_job_claims_no_checkpoint_that_it_did_not_commit(document: dict[str, Any], told: str) -> None:
    assert _how_it_stopped(document) == told
