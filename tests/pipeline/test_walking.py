"""A walk finds every file that counts, in the order of the paths, whatever the names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.pipeline.sources import walking
from offload.pipeline.sources.walking import walk_local, walk_remote

NAMES = st.sampled_from(["a", "a-1", "a.b", "a0", "b", "B", "é", "a b", ".hidden"])
TREES = st.lists(st.lists(NAMES, min_size=1, max_size=4).map(tuple), max_size=12)


def made(root: Path, tree: list[tuple[str, ...]]) -> list[str]:
    """Files at these paths, as far as none is a folder too; those that count, sorted."""
    for parts in tree:
        path = root.joinpath(*parts)
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return sorted(path for path in files if not any(part.startswith(".") for part in path.split("/")))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, several=st.integers(1, 4))
def test_files_come_in_the_order_of_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: list[tuple[str, ...]], several: int
) -> None:
    monkeypatch.setattr(walking, "SEVERAL", several)
    root = Path(tempfile.mkdtemp(dir=tmp_path)) / "root"
    root.mkdir()
    expected = made(root, tree)
    local: list[str] = []
    visited: list[str] = []
    walk_local(str(root), lambda paths, infos: local.extend(paths), visited.append)
    assert local == [str(root / path) for path in expected]
    assert set(visited) >= {os.path.dirname(path) for path in local}
    remote: list[str] = []
    fs = pafs.SubTreeFileSystem(str(root.parent), pafs.LocalFileSystem())
    walk_remote(fs, "root", lambda paths, infos: remote.extend(paths))
    assert remote == [f"root/{path}" for path in expected]


def test_links_to_folders_count_and_those_to_parents_do_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "back").symlink_to(root)
    (root / "nowhere").symlink_to(tmp_path / "missing")
    found: list[str] = []
    walk_local(str(root), lambda paths, infos: found.extend(paths), lambda folder: None)
    assert found == [f"{root}/linked/1", f"{root}/nowhere"]


def test_folders_that_link_to_each_other_show_each_file_once_on_each_way(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        (tmp_path / name / "link").symlink_to(f"../{other}")
    found: list[str] = []
    walk_local(str(tmp_path), lambda paths, infos: found.extend(paths), lambda folder: None)
    assert [os.path.relpath(path, tmp_path) for path in found] == ["a/a", "a/link/b", "b/b", "b/link/a"]


def test_a_deep_folder(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(400):
        folder = folder / "a"
    folder.mkdir(parents=True)
    (folder / "1").touch()
    found: list[str] = []
    walk_local(str(tmp_path), lambda paths, infos: found.extend(paths), lambda folder: None)
    assert found == [f"{folder}/1"]
