"""Index rows in files: they are those of a table, hold no memory for their names, and go when their run does."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.large_index import MadeUp
from offload.errors import ConfigError, RunError
from offload.pipeline.cache.spec import parse_cache
from offload.pipeline.index import listing_cache, stored_rows
from offload.pipeline.index.rows import rows_at, whole
from offload.pipeline.index.source import Index
from offload.pipeline.index.stored_rows import OwnedFolder, RowsWriter, StoredRows
from offload.pipeline.sources import image_folder, tar_index
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.webdataset import list_webdataset
from tests.helpers import ROOT, mount_small_disk
from tests.pipeline.test_shards import write, write_index


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(listing_cache, "folder", lambda: folder)
    return folder


@pytest.fixture
def all_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 0)


def table_of(samples: list[tuple[str, bytes, int]]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([key for key, _, _ in samples], pa.large_string()),
            "path": pa.array([path for _, path, _ in samples], pa.large_binary()),
            "label": pa.array([number for _, _, number in samples], pa.int64()),
            "shard": pa.array([number for _, _, number in samples], pa.int32()),
        }
    )


SHARDS = pa.array(["a.tar", "b.tar", "c.tar"], pa.large_string())
NUMBERS = np.array([2, 0, 1])


def written(batches: list[pa.Table]) -> pa.Table | StoredRows:
    writer = RowsWriter(lambda: OwnedFolder(Path(tempfile.gettempdir())))
    for batch in batches:
        writer.add(batch)
    return writer.finish(dictionaries={"shard": SHARDS}, numbers={"label": NUMBERS})


# --- the law ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5), st.integers(0, 2)), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    in_memory=st.integers(0, 30),
    near=st.integers(1, 30),
    data=st.data(),
)
def test_taking_stored_rows_is_taking_those_of_a_table(
    monkeypatch: pytest.MonkeyPatch,
    samples: list[tuple[str, bytes, int]],
    cuts: list[int],
    in_memory: int,
    near: int,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", in_memory)
    monkeypatch.setattr(stored_rows, "_NEAR", near)
    table = table_of(samples)
    edges = [0, *sorted(min(cut, len(samples)) for cut in cuts), len(samples)]
    # A slice shares its buffers with the whole.
    rows = written([table.slice(start, stop - start) for start, stop in itertools.pairwise(edges)])
    assert isinstance(rows, StoredRows) == (len(samples) > in_memory)
    assert len(rows) == len(samples)
    ids = np.array(data.draw(st.lists(st.integers(0, len(samples) - 1))), dtype=np.uint32)
    expected = [
        {"key": key, "path": path, "label": NUMBERS[number], "shard": SHARDS[number].as_py()}
        for key, path, number in (samples[i] for i in ids)
    ]
    travelled = pickle.loads(pickle.dumps(rows))
    for each in (rows, travelled):
        assert rows_at(each, ids).to_pylist() == expected
        assert whole(each).num_rows == len(samples)
    if isinstance(rows, StoredRows):
        rows.close()
        assert not rows.folder.exists()
        assert rows_at(travelled, ids).to_pylist() == expected  # what is open stays


def test_what_travels_is_no_name(all_on_disk: None) -> None:
    rows = written([table_of([("a-long-name" * 10, b"as-long" * 20, 1)] * 1000)])
    assert len(pickle.dumps(rows)) < 2000


def test_versions_of_remote_files_are_stored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = parse_cache("cache", f"ssd:{tmp_path / 'ssd'}:1GB")
    fs = pafs.PyFileSystem(MadeUp(3, 4))
    small = list_image_folder("data", filesystem=fs, cache=cache)
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 0)
    large = list_image_folder("data", filesystem=fs, cache=cache)
    assert isinstance(large.rows, StoredRows)
    assert large.table.column_names == ["path", "label", "version"]
    assert large.table.equals(small.table)


# --- memory -----------------------------------------------------------------------------------------------------------


def most_held(listing: Callable[[Callable[[str], None]], Index]) -> tuple[Index, int]:
    """The index, and the most bytes that Python and Arrow held while it was listed."""
    most, before = 0, pa.total_allocated_bytes()

    def look(text: str) -> None:
        nonlocal most
        most = max(most, tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before)

    tracemalloc.start()
    try:
        return listing(look), most
    finally:
        tracemalloc.stop()


def test_listing_an_image_folder_holds_a_few_folders_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 1000)
    monkeypatch.setattr(image_folder, "_AT_ONCE", 500)

    def listed(classes: int) -> tuple[Index, int]:
        fs = pafs.PyFileSystem(MadeUp(classes, 100))
        return most_held(lambda tell: list_image_folder("data", filesystem=fs, tell=tell))

    (small, few), (large, many) = listed(60), listed(480)
    assert (len(small), len(large)) == (6_000, 48_000)
    assert many < few + 420 * 1000  # bytes a folder; with a table, its 100 names would be 8,000
    assert large.table.column("label").to_pylist() == [number // 100 for number in range(48_000)]


def test_listing_tar_shards_holds_a_few_shards_at_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 1000)
    # Several threads hold a few shards more or less, as the processor lets them.
    monkeypatch.setattr(tar_index, "requests_at_once", lambda fs: 1)
    paths = [tmp_path / f"{number:03d}.tar" for number in range(96)]
    write(paths[0], samples=150, size=0)
    write_index(paths[0])
    for path in paths[1:]:
        os.link(paths[0], path)
        os.link(paths[0].with_suffix(".idx"), path.with_suffix(".idx"))

    def listed(count: int) -> tuple[Index, int]:
        return most_held(lambda tell: list_webdataset([str(path) for path in paths[:count]], tell=tell))

    (small, few), (large, many) = listed(32), listed(96)
    assert (len(small), len(large)) == (32 * 150, 96 * 150)
    assert isinstance(large.rows, StoredRows)
    assert many < few + 64 * 4000  # bytes a shard; with a table, its 150 samples would be 15,000


# --- the files --------------------------------------------------------------------------------------------------------


def test_small_data_sets_touch_no_disk(cache: Path) -> None:
    fs = pafs.PyFileSystem(MadeUp(20, 10))
    assert isinstance(list_image_folder("data", filesystem=fs).rows, pa.Table)
    assert not cache.exists()


def test_files_are_for_their_user_alone_and_go_with_their_rows(all_on_disk: None, cache: Path) -> None:
    fs = pafs.PyFileSystem(MadeUp(20, 10))
    index = list_image_folder("data", filesystem=fs)
    (folder,) = cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    del index
    assert not list(cache.iterdir())


def test_a_folder_that_nobody_can_write_to_is_none_to_fail_for(
    all_on_disk: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where a folder belongs")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    rows = list_image_folder("data", filesystem=pafs.PyFileSystem(MadeUp(20, 10))).rows
    assert isinstance(rows, StoredRows)
    assert rows.folder.parent == temporary


KILLED = """
import sys, time
from pathlib import Path
from offload.pipeline.index.stored_rows import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
(folder.path / "names").write_text("names")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_the_next_listing_removes_what_a_killed_process_left(cache: Path) -> None:
    cache.mkdir()
    argv = [sys.executable, "-c", KILLED, str(cache)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as run:
        assert run.stdout is not None
        left = Path(run.stdout.readline().strip())
        mine = listing_cache.new_folder()
        assert left.exists()  # its owner lives
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert (left / "names").exists()
    other = listing_cache.new_folder()
    assert not left.exists()
    assert mine.path.exists()
    mine.remove()
    mine.remove()
    other.remove()
    assert not list(cache.iterdir())


@pytest.mark.parametrize("harm", ["removed", "changed"])
def test_files_that_are_gone_or_others_are_named(all_on_disk: None, harm: str) -> None:
    rows = written([table_of([("a", b"b", 0)] * 10)])
    assert isinstance(rows, StoredRows)
    copy = pickle.loads(pickle.dumps(rows))
    if harm == "removed":
        rows.close()
        says = rf"cannot be read on the driver's machine: {rows.folder}: No such file or directory\. .* as this user: set XDG_CACHE_HOME"
    else:
        with (rows.folder / "key.values").open("ab") as file:
            file.write(b"more")
        says = r"has changed: .*key\.values holds 14 bytes instead of 10\. Start the run again"
    with pytest.raises(RunError, match=says):
        copy.open()


def test_a_file_that_gets_shorter_meanwhile_is_named(all_on_disk: None) -> None:
    rows = written([table_of([("a", b"b", 0)] * 10)])
    assert isinstance(rows, StoredRows)
    rows.open()
    os.truncate(rows.folder / "label.values", 72)
    assert rows_at(rows, np.arange(9)).num_rows == 9
    with pytest.raises(RunError, match=r"label\.values ends early: 72 bytes came instead of 80\. Start the run again"):
        rows_at(rows, np.arange(10))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount_small_disk(folder, "size=256k")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


FULL = """
import sys
import offload
from offload.pipeline.index import stored_rows
stored_rows.IN_MEMORY = 100
def build():
    return offload.Trainer(print, datasets={"train": offload.image_folder(sys.argv[1])}, batch_size=4)
"""


def test_a_full_disk_is_one_sentence_with_the_folder_and_the_remedy(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FULL)
    for number in range(3000):
        path = tmp_path / "data" / f"class {number % 40:02d}" / f"{'long' * 40}{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    ran = subprocess.run(
        [sys.executable, "-m", "offload", "run", "script.py", "--", "data"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(small_disk)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ran.returncode == 2
    (said,) = [line for line in ran.stderr.splitlines() if "cannot be written" in line]
    assert "the names of 3,000 samples cannot be written to" in said
    assert str(small_disk / "offload" / "listings" / "offload-index-") in said
    assert said.endswith(
        "No space left on device. Free space there, or set XDG_CACHE_HOME to a folder on a disk with room."
    )
    assert "Traceback" not in ran.stderr
    assert not list((small_disk / "offload" / "listings").iterdir())


def test_a_disk_that_is_full_from_the_beginning(all_on_disk: None) -> None:
    def refuse() -> OwnedFolder:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        ConfigError, match=r"no folder can be made .*: No space left on device\. Free space in .*, or set XDG"
    ):
        RowsWriter(refuse).add(table_of([("a", b"b", 0)]))
