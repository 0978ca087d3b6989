"""What a user says about a cache: sizes and paths are read exactly, and bad input is refused in a sentence."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.errors import ConfigError
from offload.pipeline.cache.spec import FOLDER, CacheSpec, in_units, obstacle_here, parse_cache

UNITS = {"B": 1, "kB": 1000, "KiB": 1024, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "gb": 10**9, "GiB": 2**30}
UNITS |= {"TB": 10**12, "TiB": 2**40, "PB": 10**15}


def spec(path: Path, size: str) -> CacheSpec:
    found = parse_cache("cache", f"ssd:{path}:{size}")
    assert found is not None
    return found


@given(st.integers(1, 999), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_a_number_and_a_unit(number: int, unit: str, space: str) -> None:
    found = parse_cache("cache", f"ssd:/mnt/a:b/c:{number}{space}{unit}")
    assert found is not None
    assert found.limit_bytes == number * UNITS[unit]
    assert found.path == Path("/mnt/a:b/c")


@given(st.integers(1, 10**17))
def test_a_size_in_a_message_can_be_passed_and_is_no_larger(size: int) -> None:
    limit = spec(Path("/c"), in_units(size)).limit_bytes
    assert 0.9 * size <= limit <= size


def test_no_cache_by_default() -> None:
    assert parse_cache("cache", None) is None
    assert parse_cache("cache", "ssd:/c:1.5TB") == CacheSpec(
        path=Path("/c"), limit_bytes=1_500_000_000_000, text="ssd:/c:1.5TB"
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "must be text"),
        (200, "must be text"),
        (Path("/c"), "must be text"),
        ("/c:200GB", 'must begin with the kind of cache, "ssd:"'),
        ("ram:/c:200GB", 'must begin with the kind of cache, "ssd:"'),
        ("ssd", 'must begin with the kind of cache, "ssd:"'),
        ("ssd:", 'must begin with the kind of cache, "ssd:"'),
        ("ssd:/c", "must end with the size"),
        ("ssd:/c:d/e", "must end with the size"),
        ("ssd:c:200GB", "must name an absolute path, the same on every node"),
        ("ssd:~/c:200GB", "must name an absolute path"),
        ("ssd::200GB", "must name an absolute path"),
        ("ssd:/c\0d:200GB", "must name an absolute path"),
        ("ssd:/c:", "a number and one of kB, MB, GB"),
        ("ssd:/c:200", "a number and one of kB, MB, GB"),
        ("ssd:/c:GB", "a number and one of kB, MB, GB"),
        ("ssd:/c:-1GB", "a number and one of kB, MB, GB"),
        ("ssd:/c:200GBs", "a number and one of kB, MB, GB"),
        ("ssd:/c:0GB", "must have a size above 0"),
        ("ssd:/c:0.1B", "must have a size above 0"),
        ("ssd:/c:5000000PB", "must have a size above 0"),
    ],
)
@pytest.mark.parametrize("source", ["image_folder", "parquet", "webdataset"])
def test_a_bad_cache_is_refused_where_it_is_named(source: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        getattr(offload, source)("s3://bucket/train", cache=value)
    text = str(refused.value)
    assert text.startswith(f"{source}: cache must ")
    assert says in text
    assert '"ssd:/mnt/nvme/cache:200GB"' in text
    assert refused.value.exit_code == 2


def test_a_folder_is_made_for_this_user_alone_and_only_below_an_existing_one(tmp_path: Path) -> None:
    assert obstacle_here(spec(tmp_path / "cache", "1MB")) is None
    assert os.stat(tmp_path / "cache" / FOLDER).st_mode & 0o777 == 0o700
    obstacle = obstacle_here(spec(tmp_path / "unmounted" / "cache", "1MB"))
    assert obstacle is not None
    assert obstacle.startswith(f"{tmp_path / 'unmounted'} does not exist. Make it, mount its disk,")
    assert not (tmp_path / "unmounted").exists()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    obstacle = obstacle_here(spec(tmp_path / "file", "1MB"))
    assert obstacle is not None
    assert "cannot be written (Not a directory). Name a folder that this user can write to" in obstacle


def test_too_little_free_space(tmp_path: Path) -> None:
    obstacle = obstacle_here(spec(tmp_path, "900PB"))
    assert obstacle is not None
    assert f"the disk of {tmp_path} has " in obstacle
    assert "free for it. Free space, or name a size that every node has" in obstacle


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_the_folder_of_another_user_is_not_used() -> None:
    shared = Path(tempfile.mkdtemp())  # pytest's folders are closed to others
    try:
        shared.chmod(0o777)
        (shared / FOLDER).mkdir(mode=0o777)
        (shared / FOLDER).chmod(0o777)
        os.seteuid(65534)
        try:
            obstacle = obstacle_here(spec(shared, "1MB"))
        finally:
            os.seteuid(0)
        assert obstacle is not None
        assert "it belongs to another user" in obstacle
    finally:
        shutil.rmtree(shared)
