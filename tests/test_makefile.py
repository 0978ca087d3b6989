"""What the Makefile's targets install, from what make would run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT


def planned(target: str, environment: Path) -> str:
    """The commands of a target, with the environment in another folder. None of them runs."""
    done = subprocess.run(
        ["make", "--dry-run", target, f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_demo_installs_what_it_needs_alone(tmp_path: Path) -> None:
    text = planned("demo", tmp_path / "new")
    assert "pip install --constraint requirements.txt -e '.[demo]'" in text
    assert "-r requirements.txt" not in text


@pytest.mark.parametrize("target", ["install", "test", "check"])
def test_the_rest_comes_with_what_needs_it_after_a_demo_too(target: str, tmp_path: Path) -> None:
    (tmp_path / ".demo-installed").touch()
    assert "pip install --compile-bytecode -r requirements.txt" in planned(target, tmp_path)


def test_a_demo_after_everything_was_installed_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for made in ("bin/uv", ".demo-installed", ".installed"):
        (tmp_path / made).touch()
    assert "install" not in planned("demo", tmp_path)
