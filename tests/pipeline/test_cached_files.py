"""What sources read through a node's cache equals what storage holds, and storage is asked for it once."""

from __future__ import annotations

import io
import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ray import cloudpickle

import offload
from offload.errors import ConfigError
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.cache import accounts
from offload.pipeline.cache.spec import CacheSpec, parse_cache
from offload.pipeline.index.source import Index
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe
from offload.pipeline.sources.cached_files import FILE, CachedFile, CachedFiles
from offload.pipeline.sources.file_versions import storage_name
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.parquet import list_parquet
from offload.pipeline.sources.webdataset import list_webdataset

YEAR_S = 365 * 24 * 3600


def spec_of(folder: Path | str, size: str = "10MB") -> CacheSpec:
    spec = parse_cache("cache", f"ssd:{folder}:{size}")
    assert spec is not None
    return spec


def place(folder: Path, kind: str) -> tuple[str, Any]:
    """The path of ``data`` in a folder, and its file system: mounted, remote (versions come from the listing), or fsspec's."""
    if kind == "mounted":
        return str(folder / "data"), None
    if kind == "fsspec":
        return str(folder / "data"), fsspec.filesystem("file")
    return "data", pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())


def settle(folder: Path, years: int = 20) -> None:
    """Set the files' time of modification far back: a file that has just changed may change again."""
    for path in folder.rglob("*"):
        os.utime(path, (years * YEAR_S, years * YEAR_S))


@given(
    st.binary(max_size=20_000),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(-1, 20_000)), max_size=12),
    st.sampled_from(["1kB", "30kB", "1MB"]),
)
@settings(deadline=None, max_examples=40)
def test_bytes_read_through_the_cache_equal_the_files(content: bytes, reads: list[tuple[int, int]], size: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        settle(Path(folder))
        files = CachedFiles(pafs.LocalFileSystem(), folder, spec_of(folder, size))
        for _ in range(2):
            assert files.read(str(path), FILE, None, path.read_bytes) == content
            with CachedFile(files, str(path), len(content), None, lambda: pa.OSFile(str(path))) as cached:
                for start, length in reads:
                    cached.seek(start)
                    assert cached.read(length) == content[start:][: length if length >= 0 else None]


def write_images(folder: Path) -> None:
    for i in range(40):
        (folder / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / f"c{i % 2}" / f"{i:02}.png")


def write_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for key in range(8):
                for extension, content in (("txt", f"{key} of {shard}"), ("cls", str(key))):
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))


def write_tables(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        rows = range(40 * number, 40 * number + 40)
        table = pa.table({"x": list(rows), "text": [f"t{i}" for i in rows], "unused": [0.5] * 40})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=8)


def images(path: Path, **options: Any) -> Index:
    return list_image_folder(path, **options)


def shards(path: Path, **options: Any) -> Index:
    return list_webdataset(path, **options)


def tables(path: Path, **options: Any) -> Index:
    return list_parquet(path, columns=["text", "x"], **options)


KINDS = [(write_images, images), (write_shards, shards), (write_tables, tables)]


def task(index: Index, epoch: int = 0) -> tuple[dict[str, Any], accounts.Account]:
    """The decoded block of a task over all samples in another process, and what it read."""
    ids = np.arange(len(index))
    rows = index.table.append_column(SAMPLE_ID, pa.array(ids)).append_column(POSITION, pa.array(ids))
    reader = cloudpickle.loads(cloudpickle.dumps(index.reader))  # type: ignore[no-untyped-call]
    recipe = Recipe(transform=None, kind="none", seed=0, reader=reader).ready()
    accounts.collect()
    block = dict(wire.decode(process(recipe, rows, epoch=epoch)))
    return block, accounts.collect()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("write", "index_of"), KINDS)
@pytest.mark.parametrize("kind", ["mounted", "remote", "fsspec"])
def test_a_source_reads_storage_once(
    tmp_path: Path, write: Callable[[Path], None], index_of: Callable[..., Index], kind: str
) -> None:
    write(tmp_path / "data")
    settle(tmp_path / "data")
    direct, read = task(index_of(tmp_path / "data"))
    assert read == accounts.Account()
    path, filesystem = place(tmp_path, kind)
    index = index_of(path, filesystem=filesystem, cache=spec_of(tmp_path))
    first, read = task(index)
    assert equal(first, direct)
    assert read.storage_bytes > 0
    second, again = task(index_of(path, filesystem=filesystem, cache=spec_of(tmp_path)), epoch=1)
    assert equal(second, direct)
    assert again.storage_bytes == 0
    assert again.cache_bytes > 0
    if kind != "mounted":  # not even the listing is needed again: nothing asks the storage
        shutil.rmtree(tmp_path / "data")
        assert equal(task(index, epoch=2)[0], direct)


@pytest.mark.parametrize(("write", "index_of"), KINDS)
@pytest.mark.parametrize("kind", ["mounted", "remote"])
def test_a_changed_file_is_never_served_as_it_was(
    tmp_path: Path, write: Callable[[Path], None], index_of: Callable[..., Index], kind: str
) -> None:
    """The names and sizes of the files stay the same; their contents change places."""
    write(tmp_path / "data")
    settle(tmp_path / "data")
    path, filesystem = place(tmp_path, kind)
    task(index_of(path, filesystem=filesystem, cache=spec_of(tmp_path)))
    paths = sorted(path for path in (tmp_path / "data").rglob("*.*"))
    contents = [path.read_bytes() for path in paths]
    for file, content in zip(paths, reversed(contents), strict=True):
        file.write_bytes(content)
    settle(tmp_path / "data", years=21)
    changed, read = task(index_of(path, filesystem=filesystem, cache=spec_of(tmp_path)))
    assert equal(changed, task(index_of(tmp_path / "data"))[0])
    assert read.storage_bytes > 0


@pytest.mark.parametrize("kind", ["mounted", "remote"])
def test_a_file_that_has_just_changed_may_change_again_within_its_time_stamp(tmp_path: Path, kind: str) -> None:
    """Storage tells times to a second, or coarser: a later run could not see the second change."""
    write_images(tmp_path / "data")
    path, filesystem = place(tmp_path, kind)
    task(list_image_folder(path, filesystem=filesystem, cache=spec_of(tmp_path)))
    again = task(list_image_folder(path, filesystem=filesystem, cache=spec_of(tmp_path)))[1]
    assert again.cache_bytes == 0


def test_a_run_reads_remote_files_as_it_listed_them_also_those_that_have_just_changed(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    path, filesystem = place(tmp_path, "remote")
    index = list_image_folder(path, filesystem=filesystem, cache=spec_of(tmp_path))
    first = task(index)[0]
    shutil.rmtree(tmp_path / "data")
    assert equal(task(index, epoch=1)[0], first)


def test_storage_that_tells_no_times_is_refused() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/untimed/c/a.png": b"x", "/untimed/a.tar": b"x", "/untimed/a.parquet": b"x"})
    for index_of in (
        lambda **options: list_image_folder("memory://untimed", **options),
        lambda **options: list_webdataset(["memory://untimed/a.tar"], **options),
        lambda **options: list_parquet("memory://untimed/a.parquet", **options),
    ):
        with pytest.raises(ConfigError) as refused:
            index_of(cache=spec_of("/tmp"))
        assert "cache= needs storage that tells when a file has changed" in str(refused.value)
        assert "Drop cache=" in str(refused.value)


def test_equal_paths_on_two_servers_are_two_files() -> None:
    names = [
        storage_name(pafs.S3FileSystem(region="us-east-1", endpoint_override=server, secret_key="shh", access_key="me"))
        for server in ("http://127.0.0.1:1", "http://127.0.0.1:2", None)
    ]
    names += [storage_name(fsspec_s3(server)) for server in ("http://127.0.0.1:1", "http://127.0.0.1:2")]
    names += [storage_name(pafs.SubTreeFileSystem(path, pafs.LocalFileSystem())) for path in ("/a", "/b")]
    names.append(storage_name(pafs.LocalFileSystem()))
    assert len(set(names)) == len(names)
    assert "shh" not in " ".join(names)


def fsspec_s3(server: str) -> pafs.FileSystem:
    filesystem = fsspec.filesystem("s3", endpoint_url=server, key="me", secret="shh", skip_instance_cache=True)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


def test_a_source_goes_on_without_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    settle(tmp_path / "data")
    index = list_image_folder(tmp_path / "data", cache=spec_of(tmp_path / "absent" / "cache"))
    block, read = task(index)
    assert equal(block, task(list_image_folder(tmp_path / "data"))[0])
    assert read.problem is not None
    assert "No such file or directory" in read.problem


def test_parts_of_a_mix_have_their_own_caches(tmp_path: Path) -> None:
    for name in "ab":
        write_images(tmp_path / name)
        settle(tmp_path / name)
    caches = {name: f"ssd:{tmp_path / f'cache-{name}'}:1MB" for name in "ab"}
    remote = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    mixed = offload.mix({name: offload.image_folder(name, filesystem=remote, cache=caches[name]) for name in "ab"})
    assert [spec.text for spec in mixed.caches] == list(caches.values())
    assert mixed.list is not None
    index = mixed.list()
    order = random.Random(0).sample(range(len(index)), len(index))
    rows = index.table.take(pa.array(order)).append_column(SAMPLE_ID, pa.array(order))
    rows = rows.append_column(POSITION, pa.array(np.arange(len(order))))
    recipe = mixed.recipe(index, seed=0).ready()
    first = wire.decode(process(recipe, rows, epoch=0))["image"]
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    assert np.array_equal(wire.decode(process(recipe, rows, epoch=1))["image"], first)


def test_without_a_cache_the_index_of_images_holds_no_versions(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    path, filesystem = place(tmp_path, "remote")
    assert list_image_folder(path, filesystem=filesystem).table.column_names == ["path", "label"]
