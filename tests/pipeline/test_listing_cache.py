"""A second listing of a folder is read from the cache, unless anything below the folder has changed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.pipeline.index import listing_cache, stored_rows
from offload.pipeline.sources import image_folder, storage_paths
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.storage_paths import list_files


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(listing_cache, "folder", lambda: folder)
    monkeypatch.setattr(storage_paths, "WORTH_CACHING", 3)
    monkeypatch.setattr(image_folder, "WORTH_CACHING", 3)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return made(tmp_path / "data")


def made(root: Path) -> Path:
    for name in ("a/1.jpg", "a/2.jpg", "b/deep/3.jpg", "c-d/4.jpg", "c/5.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    (root / "empty").mkdir()
    settle(root)
    return root


def settle(root: Path) -> None:
    """As if nothing had changed for an hour."""
    old = time.time() - 3600
    for folder, _, _ in os.walk(root):
        os.utime(folder, (old, old))


def listed(root: Path) -> list[str]:
    return list_files(root)[2]


def truth(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*") if path.is_file())


def unwalked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: Any, **options: Any) -> None:
        raise AssertionError("the folder was walked")

    monkeypatch.setattr(storage_paths, "walk_local", refuse)


def test_a_second_listing_walks_through_no_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = listed(data), list[str]()
    assert first == truth(data)
    unwalked(monkeypatch)
    assert list_files(data, tell=said.append)[2] == first
    assert said == ["5 files"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "b/deep", "c", "empty", "new", "new/one"]),
            st.sampled_from(["1.jpg", "2.jpg", "3.jpg", "9.jpg"]),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_whatever_changes_is_found(tmp_path: Path, changes: list[tuple[str, str, bool]]) -> None:
    root = made(Path(tempfile.mkdtemp(dir=tmp_path)) / "data")
    assert listed(root) == truth(root)
    for folder, name, adds in changes:
        path = root / folder / name
        if adds:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"y")
        else:
            path.unlink(missing_ok=True)
    for _ in range(2):
        assert listed(root) == truth(root)


def test_a_folder_that_has_just_changed_is_walked_through_again(data: Path, cache: Path) -> None:
    """Another file within the same tick of the clock would leave no trace."""
    (data / "a" / "new.jpg").write_bytes(b"x")
    assert len(listed(data)) == 6
    assert not cache.exists()


def test_few_files_are_not_worth_a_cache(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_paths, "WORTH_CACHING", 6)
    listed(data)
    assert not cache.exists()


def test_names_that_are_no_text(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.fsencode(data / "a") + b"/\xff.jpg", "wb"):
        pass
    settle(data)
    first = listed(data)
    unwalked(monkeypatch)
    assert listed(data) == first
    assert any("\udcff" in path for path in first)


def test_a_damaged_or_foreign_listing_is_not_used(data: Path, cache: Path) -> None:
    expected = listed(data)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-40])
    assert listed(data) == expected


@pytest.mark.parametrize("in_memory", [2, 100], ids=["large", "small"])
def test_a_second_listing_of_images_walks_through_no_folder(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", in_memory)
    (data / "b" / "notes.txt").touch()
    with open(os.fsencode(data / "a") + b"/\xff.jpg", "wb"):
        pass
    settle(data)
    first = list_image_folder(data)
    assert first.classes == ("a", "b", "c", "c-d")
    # In the order of paths, "c-d/" comes before "c/".
    assert first.table.column("label").to_pylist() == [0, 0, 0, 1, 3, 2]
    with monkeypatch.context() as patch:
        unwalked(patch)
        again = list_image_folder(data)
    assert again.table.equals(first.table)
    assert again.classes == first.classes
    assert isinstance(again.rows, stored_rows.StoredRows) == (in_memory == 2)
    (data / "a" / "new.jpg").touch()
    settle(data)
    os.utime(data / "a")
    assert len(list_image_folder(data)) == len(first) + 1
    if in_memory == 2:
        os.utime(data / "a", (1e9, 1e9))
        changed = list_image_folder(data).rows
        assert isinstance(changed, stored_rows.StoredRows)
        assert [path for path in cache.iterdir() if path.is_dir()] == [changed.folder]


def test_a_folder_of_images_that_grows_or_shrinks_has_one_listing(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large listings are kept in another way than small ones: the one of another size must not hide the present one."""
    for number, in_memory in enumerate([2, 100, 2, 100]):
        monkeypatch.setattr(stored_rows, "IN_MEMORY", in_memory)
        (data / "a" / f"new{number}.jpg").touch()
        settle(data)
        os.utime(data / "a", (number, number))
        first = list_image_folder(data).table
        assert first.num_rows == 6 + number
        with monkeypatch.context() as patch:
            unwalked(patch)
            assert list_image_folder(data).table.equals(first)
        (kept,) = cache.iterdir()
        assert kept.is_dir() == (in_memory == 2)


@pytest.mark.parametrize("in_memory", [2, 100], ids=["large", "small"])
@pytest.mark.parametrize("lister", [list_files, list_image_folder])
def test_a_listing_that_is_out_of_date_counts_as_unused(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int, lister: Any
) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", in_memory)
    lister(data)
    (kept,) = cache.iterdir()
    os.utime(kept, (1e9, 1e9))
    for worth in ("storage_paths", "image_folder"):  # nothing replaces it
        monkeypatch.setattr(f"offload.pipeline.sources.{worth}.WORTH_CACHING", 100)
    lister(data)
    assert kept.stat().st_mtime > 1e9
    os.utime(kept, (1e9, 1e9))
    (data / "a" / "new.jpg").touch()
    lister(data)
    assert kept.stat().st_mtime == 1e9
