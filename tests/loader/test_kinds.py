"""Scripts of many kinds train with offload.DataLoader exactly as with torch's, and change in at most three lines."""

from __future__ import annotations

import difflib
import gc
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ray import cloudpickle

from offload.loader import session as sessions
from tests.helpers import ROOT

KINDS = ROOT / "examples" / "kinds"
NAMES = sorted(path.stem for path in (KINDS / "torch_loader").glob("*.py"))
PAGE = ROOT / "docs" / "kinds.md"
MOST_LINES = 3


@pytest.fixture(scope="module", autouse=True)
def _free_cores_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    sessions.end_unused()


def load(path: Path) -> ModuleType:
    """The script as a module. Processes of Ray cannot import it, as they cannot a script that a user starts."""
    spec = importlib.util.spec_from_file_location(f"kinds_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_lines(name: str) -> int:
    before, after = (
        (KINDS / folder / f"{name}.py").read_text().splitlines() for folder in ("torch_loader", "offload_loader")
    )
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in difflib.ndiff(before, after))


def test_every_kind_is_written_with_both_loaders() -> None:
    assert sorted(path.stem for path in (KINDS / "offload_loader").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change_and_the_page_says_how_many(name: str) -> None:
    lines = changed_lines(name)
    assert 1 <= lines <= MOST_LINES
    row = re.search(rf"\| \[{name}\]\(.*\) \|.*\| (\d+) \|", PAGE.read_text(encoding="utf-8"))
    assert row is not None
    assert int(row[1]) == lines


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (load(KINDS / folder / f"{name}.py") for folder in ("torch_loader", "offload_loader"))
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    cloudpickle.register_pickle_by_value(ours)
    try:
        assert ours.main() == pytest.approx(theirs.main(), rel=1e-6)
    finally:
        cloudpickle.unregister_pickle_by_value(ours)
