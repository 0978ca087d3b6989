"""Listings of tar shards: by index files, from the cache, and with few requests. Whatever the way, the samples are the same."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import tariterators

from offload.errors import ConfigError
from offload.pipeline.index import listing_cache, stored_rows
from offload.pipeline.index.rows import whole
from offload.pipeline.index.source import silent
from offload.pipeline.index.stored_rows import StoredRows
from offload.pipeline.sources import tar_index

SAMPLES = 40


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(listing_cache, "folder", lambda: folder)
    return folder


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "data-000.tar"
    write(path)
    return path


def write(path: Path, samples: int = SAMPLES, size: int = 300) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for extension in ("jpg", "cls"):
                member = tarfile.TarInfo(f"part/{number:04d}.{extension}")
                member.size = size + number
                tar.addfile(member, io.BytesIO(bytes(member.size)))


def write_index(shard: Path, change: Callable[[str], str] = lambda text: text) -> None:
    """As ``wds2idx`` does."""
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
    lines = []
    for first, second in zip(members[::2], members[1::2], strict=True):
        fields = [(m.name.partition(".")[2], m.offset_data, m.size, m.name) for m in (first, second)]
        lines.append(" ".join(str(value) for each in fields for value in each))
    text = "\n".join([f"v1.2 {len(lines)}", *lines, ""])
    shard.with_suffix(".idx").write_text(change(text))


def listed(*paths: Path, fs: Any = None) -> pa.Table:
    rows, *_ = tar_index.list_shards(fs or pafs.LocalFileSystem(), [str(path) for path in paths], silent)
    return whole(rows).drop_columns(["shard"])


def unscanned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: Any) -> None:
        raise AssertionError("the shard was read")

    monkeypatch.setattr(tar_index, "_scanned", refuse)


def test_an_index_file_spares_reading_the_shard(shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = listed(shard)
    for path in cache.iterdir():
        path.unlink()
    write_index(shard)
    unscanned(monkeypatch)
    assert listed(shard).equals(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("v1.2", "v1.1"),
        lambda text: "",
        lambda text: text.partition("\n")[0] + "\n",
        lambda text: text.replace("jpg 512 300", "jpg 1024 300"),
        lambda text: text.replace("jpg 512 300", "jpg 0 300"),
        lambda text: text.replace("jpg 512 300", "jpg 512 301"),
        lambda text: text.replace(" 339 ", " 99999999 "),
        lambda text: text.replace("0003", "0002"),
        lambda text: text.replace("0003.cls", "0004.cls"),
        lambda text: text.replace("part/0005", "part/0 05"),
        lambda text: text.replace(" 300 ", " many "),
        lambda text: "\x00\x01" + text,
    ],
    ids=[
        "version",
        "empty",
        "no samples",
        "place",
        "before",
        "size",
        "end",
        "twice",
        "mixed",
        "spaces",
        "words",
        "bytes",
    ],
)
def test_an_index_file_that_does_not_fit_is_not_used(shard: Path, change: Callable[[str], str]) -> None:
    expected = listed(shard)
    write_index(shard, change)
    os.utime(shard)  # so that the earlier listing does not count
    assert listed(shard).equals(expected)


def test_an_index_file_of_the_shard_that_was_there_before(shard: Path) -> None:
    write(shard, size=300)
    write_index(shard)
    write(shard, size=900)
    assert '"jpg": [512, 900]' in listed(shard)["members"][0].as_py()


PARTS = st.sampled_from(
    [
        "a",
        "b",
        "A",
        "__m__",
        "__m",
        "m__",
        "_",
        "__.x__",
        "a.b",
        ".a",
        "a.jpg",
        "a.JPG",
        "b.cls",
        "a.tar.gz",
        "a.",
        "..",
        ".",
        "",
        "é.x",
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join) | st.sampled_from(
    ["a.jpg", "a.JPG", "a.cls", "b.jpg", "b.cls", "x/a.jpg"]
)
MEMBERS = st.lists(
    st.tuples(NAMES, st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])),
    max_size=8,
)


@given(members=MEMBERS, kind=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@settings(max_examples=200, deadline=None)
def test_a_shard_holds_the_samples_that_webdataset_finds(members: list[tuple[str, bytes]], kind: int) -> None:
    """Two differences are documented: the files of a sample need not follow one another, and hidden files belong to no sample."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=kind) as tar:
        for number, (name, type_) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = type_, "a.jpg"
            member.size = number if type_ == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(bytes([number] * number)))
    content.seek(0)
    expected: dict[str, dict[str, bytes]] = {}
    twice = False
    for file in tariterators.tar_file_iterator(content):
        # One file at a time: webdataset would begin another sample where the key changes.
        for sample in tariterators.group_by_keys([{**file, "__url__": ""}]):
            (extension,) = set(sample) - {"__key__", "__url__"}
            if not file["fname"].rpartition("/")[2].startswith("."):
                found = expected.setdefault(sample["__key__"], {})
                twice = twice or extension in found
                found[extension] = sample[extension]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.tar")
        path.write_bytes(content.getvalue())
        if twice:
            with pytest.raises(ConfigError, match=r"x\.tar' holds the member '.*' twice .* Write the shard anew"):
                listed(path)
            return
        rows = listed(path).to_pylist()
    data = content.getvalue()
    read = {
        row["key"]: {name: data[at : at + size] for name, (at, size) in json.loads(row["members"]).items()}
        for row in rows
    }
    assert read == expected
    assert list(read) == list(expected)


@pytest.mark.parametrize("names", [("0.jpg", "0.JPG"), ("__meta__/0.jpg", "__meta__/0.cls")])
def test_an_index_file_follows_the_same_rules(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.jpg", "a.cls", *names):
            tar.addfile(tarfile.TarInfo(name))
    write_index(path)
    if names[0] == "0.jpg":
        with pytest.raises(ConfigError, match=r"x\.tar' holds the member '0\.JPG' twice"):
            listed(path)
    else:
        assert listed(path)["key"].to_pylist() == ["a"]


def test_a_second_listing_reads_no_shard(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = listed(shard)
    unscanned(monkeypatch)
    assert listed(shard).equals(first)


def test_a_listing_of_an_earlier_version_without_columns_is_made_anew(shard: Path, cache: Path) -> None:
    local, names = pafs.LocalFileSystem(), [str(shard)]
    expected = tar_index.list_shards(local, names, silent)
    (kept,) = cache.iterdir()
    with pa.OSFile(str(kept)) as file:
        table = pa.ipc.open_file(file).read_all().replace_schema_metadata(None)
    with pa.ipc.new_file(str(kept), table.schema) as writer:
        writer.write_table(table)
    again = tar_index.list_shards(local, names, silent)
    assert again.columns == expected.columns == ("image", "label")
    assert whole(again.rows).equals(whole(expected.rows))


@pytest.mark.parametrize("at_once", [True, False])
def test_dots_in_the_names_of_samples_are_named_with_the_remedy(tmp_path: Path, at_once: bool) -> None:
    names = [f"photo.{number:04d}.jpg" for number in range(tar_index.MOST_COLUMNS + 1)]
    parts = [names] if at_once else [names[:600], names[600:]]
    for number, part in enumerate(parts):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for name in part:
                tar.addfile(tarfile.TarInfo(f"{name[6:10]}/{name}"))
    paths = [str(tmp_path / f"{number}.tar") for number in range(len(parts))]
    with pytest.raises(ConfigError, match=r"more than 1,000 endings, such as '1000\.jpg'\. .*write dots in the names"):
        tar_index.list_shards(pafs.LocalFileSystem(), paths, silent)


def test_a_shard_that_was_written_anew_is_read_again(shard: Path) -> None:
    assert listed(shard).num_rows == SAMPLES
    size, modified = shard.stat().st_size, shard.stat().st_mtime_ns
    write(shard, size=200)
    assert shard.stat().st_size == size  # padded as before
    os.utime(shard, ns=(modified + 1, modified + 1))
    assert '"jpg": [512, 200]' in listed(shard)["members"][0].as_py()


def test_a_cache_that_cannot_be_used_costs_time_alone(shard: Path, cache: Path) -> None:
    expected = listed(shard)
    (kept,) = cache.iterdir()
    kept.write_bytes(b"no arrow")
    assert listed(shard).equals(expected)
    kept.unlink()
    cache.rmdir()
    cache.write_text("a file where a folder belongs")
    assert listed(shard).equals(expected)


def test_listings_that_nobody_used_for_long_are_removed(tmp_path: Path, shard: Path, cache: Path) -> None:
    other = tmp_path / "data-001.tar"
    write(other, samples=2)
    listed(other)
    (unused,) = cache.iterdir()
    old = time.time() - listing_cache.KEPT_S - 60
    os.utime(unused, (old, old))
    listed(shard)
    assert unused not in set(cache.iterdir())
    assert len(list(cache.iterdir())) == 1


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    """As ``tar --sparse --format=posix`` writes one: a map of the pieces comes before them."""
    stored = b"1\n4096\n3\n".ljust(512, b"\0") + b"end"
    member = tarfile.TarInfo("GNUSparseFile.0/a.bin")
    sparse = {"major": "1", "minor": "0", "name": "a.bin", "realsize": "4099"}
    member.pax_headers = {f"GNU.sparse.{name}": value for name, value in sparse.items()}
    member.size = len(stored)
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(stored))
    with pytest.raises(ConfigError, match=r"the member 'a\.bin' of '.*x\.tar' is sparse: .* without tar --sparse"):
        listed(tmp_path / "x.tar")


def test_shards_keep_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(12)]
    for number, path in enumerate(paths):
        write(path, samples=1 + number)
    rows, counts, _ = tar_index.list_shards(pafs.LocalFileSystem(), [str(path) for path in paths], silent)
    assert counts.tolist() == [*range(1, 13)]
    assert whole(rows).column("shard").to_pylist() == [str(paths[n]) for n in range(12) for _ in range(n + 1)]


def test_a_second_start_maps_a_large_listing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 10)
    paths = [tmp_path / f"{number}.tar" for number in range(3)]
    for path in paths:
        write(path)
    local, names = pafs.LocalFileSystem(), [str(path) for path in paths]
    first, counts, columns = tar_index.list_shards(local, names, silent)
    for kept in cache.glob("*.arrow"):  # those of single shards
        kept.unlink()
    with monkeypatch.context() as patch:
        unscanned(patch)
        again, counts_again, columns_again = tar_index.list_shards(local, names, silent)
    assert isinstance(first, StoredRows)
    assert isinstance(again, StoredRows)
    assert again.folder == first.folder
    assert whole(again).equals(whole(first))
    assert counts_again.tolist() == counts.tolist() == [SAMPLES] * 3
    assert columns_again == columns == ("image", "label")
    first.close()
    assert first.folder.exists()  # for later runs
    write(paths[1], samples=2)
    changed, counts, _ = tar_index.list_shards(local, names, silent)
    assert counts.tolist() == [SAMPLES, 2, SAMPLES]
    assert len(changed) == 2 * SAMPLES + 2
    assert isinstance(changed, StoredRows)
    assert [path for path in cache.iterdir() if path.is_dir()] == [changed.folder]


@pytest.mark.parametrize("harm", ["about.json", "key.values", "key.bounds", "shard.values"])
def test_a_damaged_large_listing_is_not_used(
    tmp_path: Path, shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 10)
    expected = listed(shard).to_pylist()
    (kept,) = (path for path in cache.iterdir() if path.is_dir())
    (kept / harm).write_bytes((kept / harm).read_bytes()[:-8])
    assert listed(shard).to_pylist() == expected


def test_a_large_listing_that_nobody_used_for_long_is_removed(
    tmp_path: Path, shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 10)
    listed(shard)
    old = time.time() - listing_cache.KEPT_S - 60
    for path in cache.iterdir():
        os.utime(path, (old, old))
    other = tmp_path / "data-001.tar"
    write(other, samples=2)
    listed(other)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_broken_shard_among_many_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(6)]
    for path in paths:
        write(path, samples=2)
    paths[4].write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match=r"cannot read '.*/4\.tar' as a tar shard"):
        listed(*paths)


class Counting:
    """A remote file that counts its requests."""

    def __init__(self, content: bytes) -> None:
        self.content, self.requests = content, 0

    def size(self) -> int:
        return len(self.content)

    def read_at(self, count: int, offset: int) -> bytes:
        self.requests += 1
        return self.content[offset : offset + count]


def test_headers_of_small_members_share_a_request(shard: Path) -> None:
    stream = Counting(shard.read_bytes())
    with tarfile.open(fileobj=io.BufferedReader(tar_index._Requests(stream), tar_index.REQUEST_BYTES)) as tar:
        assert len(tar.getmembers()) == 2 * SAMPLES
    assert stream.requests <= 2 + stream.size() // tar_index.REQUEST_BYTES


def test_remote_shards_are_those_of_the_disk(shard: Path, tmp_path: Path) -> None:
    remote = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    assert listed(Path(shard.name), fs=remote).equals(listed(shard))
