"""Importing and starting Ray leaves the program's settings as they are."""

from __future__ import annotations

import faulthandler
import os
import random
import subprocess
import sys

import pytest

from offload.process.program_state import restored
from tests.helpers import ROOT


def test_variables_of_ray_and_random_numbers_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_KEPT", "the user's")
    monkeypatch.setenv("RAY_REMOVED", "the user's")
    monkeypatch.delenv("RAY_ADDED", raising=False)
    monkeypatch.setenv("OF_ANOTHER_THREAD", "before")
    numbers, handled = random.getstate(), faulthandler.is_enabled()

    @restored()
    def start() -> None:
        os.environ |= {"RAY_KEPT": "ours", "RAY_ADDED": "ours", "OF_ANOTHER_THREAD": "after"}
        del os.environ["RAY_REMOVED"]
        random.random()
        raise ValueError("Ray does not start")

    with pytest.raises(ValueError, match="Ray does not start"):
        start()
    assert (os.environ["RAY_KEPT"], os.environ["RAY_REMOVED"]) == 2 * ("the user's",)
    assert "RAY_ADDED" not in os.environ
    assert os.environ["OF_ANOTHER_THREAD"] == "after"
    assert random.getstate() == numbers
    assert faulthandler.is_enabled() == handled


IMPORTS = """
import os, random
before = dict(os.environ), random.getstate()
import offload
offload.Trainer, offload.DataLoader, offload.notebook
print((dict(os.environ), random.getstate()) == before)
"""


def test_importing_changes_neither_variables_nor_random_numbers() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=800, env=env
    )
    assert done.stdout.strip() == "True", done.stderr
