"""Files that are read before their turn: each arrives whole, errors at their file, and requests overlap within limits."""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import offload
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.cache import accounts
from offload.pipeline.index.source import Index
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.sources import read_ahead
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.parquet import list_parquet
from offload.pipeline.sources.read_ahead import REQUESTS, ReadAhead
from offload.pipeline.sources.webdataset import list_webdataset


@given(st.integers(0, 80), st.data())
def test_every_file_arrives_whatever_is_left_out_or_read_again(n: int, data: st.DataObject) -> None:
    files = {f"f{i}": b"x" * i for i in range(n)}
    lock, now, most = threading.Lock(), 0, 0

    def read(path: str) -> bytes:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        content = files[path]
        with lock:
            now -= 1
        return content

    ahead = ReadAhead(read)
    for _ in range(2):  # two tasks
        ahead.begin(list(files))
        for path in files:
            for _ in range(data.draw(st.sampled_from([0, 1, 1, 1, 2]))):
                assert ahead.get(path) == files[path]
    assert most <= REQUESTS + 1  # and the file that is read again


def test_requests_overlap() -> None:
    together = threading.Barrier(4)  # nobody passes before four read

    def read(path: str) -> bytes:
        together.wait(timeout=800)
        return path.encode()

    ahead = ReadAhead(read)
    paths = [f"f{i}" for i in range(8)]
    ahead.begin(paths)
    assert [ahead.get(path) for path in paths] == [path.encode() for path in paths]


def test_an_error_is_raised_at_its_file() -> None:
    def read(path: str) -> bytes:
        if path == "bad":
            raise OSError("no such file")
        return b""

    ahead = ReadAhead(read)
    ahead.begin(["a", "bad", "b"])
    assert ahead.get("a") == b""
    with pytest.raises(OSError, match="no such file"):
        ahead.get("bad")
    assert ahead.get("b") == b""


def test_a_task_tells_how_long_it_waited_for_its_first_file() -> None:
    late_s = 0.05

    def read(path: str) -> bytes:
        time.sleep(late_s)  # storage that answers late
        if path == "bad":
            raise OSError("no such file")
        return b""

    accounts.collect()
    ahead = ReadAhead(read)

    def waited(first: str) -> bool:
        ahead.begin([first, *"bcdefgh"])
        with contextlib.suppress(OSError):
            ahead.get(first)
        waited_s = accounts.collect().first_wait_s
        for path in "bcdefgh":
            ahead.get(path)
        assert accounts.collect().first_wait_s == 0
        return waited_s > late_s / 2

    for first in ("a", "bad"):
        # On a busy machine, this thread may come to ask for the file only once it is there.
        assert any(waited(first) for _ in range(100))


def test_few_large_files_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "BUFFERED_BYTES", 100)
    begun: list[str] = []

    def read(path: str) -> bytes:
        begun.append(path)
        return b"x" * 30

    ahead = ReadAhead(read)
    paths = [f"f{i}" for i in range(200)]
    ahead.begin(paths)
    for number, path in enumerate(paths[:-REQUESTS], start=1):
        ahead.get(path)
        if number > REQUESTS:
            assert len(begun) <= number + 3


def task(index: Index) -> Any:
    """The decoded block of a task over all samples."""
    ids = np.arange(len(index))
    rows = index.table.append_column(SAMPLE_ID, pa.array(ids)).append_column(POSITION, pa.array(ids))
    recipe = Recipe(transform=None, kind="none", seed=0, reader=index.reader, on_error="skip").ready()
    return wire.decode(process(recipe, rows, epoch=0))


def blocks_of(make_index: Callable[[Any], Index]) -> list[Any]:
    """The decoded blocks of one task, from local files and from the same ones behind other file systems."""
    blocks = []
    others = (pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), fsspec.filesystem("file"))
    for filesystem in (None, *others):
        index = make_index(filesystem)
        blocks.append(task(index))
        assert (getattr(index.reader, "_ahead", None) is not None) == (filesystem is not None)
    return blocks


def test_a_task_reads_remote_images_ahead(tmp_path: Path) -> None:
    for i in range(40):
        folder = tmp_path / f"c{i % 2}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / f"{i:02}.png")
    (tmp_path / "c0" / "38.png").write_bytes(b"no image")
    local, *others = blocks_of(lambda filesystem: list_image_folder(tmp_path, filesystem=filesystem))
    for other in others:
        assert np.array_equal(local["image"], other["image"])
        assert [error is None for error in other[wire.ERROR]].count(False) == 1


def test_a_task_over_mixed_sets_reads_both_ahead(tmp_path: Path) -> None:
    for i in range(40):
        folder = tmp_path / "ab"[i % 2] / "class"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / f"{i:02}.png")
    remote = pafs.SubTreeFileSystem("/", pafs.LocalFileSystem())
    mixed = offload.mix({name: offload.image_folder(tmp_path / name, filesystem=remote) for name in "ab"})
    assert mixed.list is not None
    index = mixed.list()
    order = np.random.default_rng(0).permutation(len(index))
    rows = index.table.take(pa.array(order)).append_column(SAMPLE_ID, pa.array(order))
    rows = rows.append_column(POSITION, pa.array(np.arange(len(order))))
    recipe = mixed.recipe(index, seed=0).ready()
    images = wire.decode(process(recipe, rows, epoch=0))["image"]
    assert images[:, 0, 0, 0].tolist() == [2 * (i % 20) + i // 20 for i in order.tolist()]
    assert all(part.reader._ahead is not None for part in recipe.parts)  # type: ignore[union-attr]


def test_a_task_reads_remote_shards_ahead(tmp_path: Path) -> None:
    for shard in range(20):  # more than stay open
        with tarfile.open(tmp_path / f"{shard:02}.tar", "w") as tar:
            for key in "abc":
                for extension, content in (("txt", f"{key}{shard}"), ("json", f"[{shard}]"), ("cls", str(shard))):
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))
                    if (key, extension) == ("b", "txt"):  # its other members lie far away
                        gap = tarfile.TarInfo("gap")
                        gap.size = 200_000
                        tar.addfile(gap, io.BytesIO(bytes(gap.size)))
    local, *others = blocks_of(lambda filesystem: list_webdataset(tmp_path, filesystem=filesystem))
    assert local["txt"] == [f"{key}{shard}" for shard in range(20) for key in "abc"]
    assert local["label"].tolist() == [shard for shard in range(20) for _ in "abc"]
    for other in others:
        assert other["txt"] == local["txt"]
        assert other["label"].tolist() == local["label"].tolist()


def test_a_task_reads_remote_row_groups_ahead_and_each_footer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        table = pa.table({"x": np.arange(40) + 40 * number, "text": [f"t{40 * number + i}" for i in range(40)]})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=8)
    read: list[tuple[str, bool]] = []
    real = pq.ParquetFile

    def recorded(*args: Any, metadata: Any = None, **options: Any) -> Any:
        read.append((threading.current_thread().name, metadata is not None))
        return real(*args, metadata=metadata, **options)

    elsewhere = pafs.SubTreeFileSystem(str(tmp_path.parent), pafs.LocalFileSystem())
    listed = [list_parquet(tmp_path), list_parquet(tmp_path.name, filesystem=elsewhere)]
    monkeypatch.setattr(pq, "ParquetFile", recorded)
    local, remote = (task(index) for index in listed)
    assert local["x"].tolist() == list(range(120))
    assert remote["x"].tolist() == local["x"].tolist()
    assert remote["text"] == local["text"]
    ahead = [known for thread, known in read if thread.startswith("read-ahead")]
    assert ahead.count(True) == 15, "each row group once"
    assert ahead.count(False) == 3, "each footer once"
