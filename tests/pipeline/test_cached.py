"""Samples that are made once: what later passes make again, what they get, and what cannot be cached."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchvision.transforms import v2

from offload.errors import ConfigError, RunError
from offload.pipeline.cache import accounts
from offload.pipeline.describe.cached import cached, check_names
from offload.pipeline.describe.combine import mix, weighted
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.describe.sources import from_torch, image_folder, parquet, webdataset
from offload.pipeline.preprocessing.watchdog import SampleTimeoutError
from tests.helpers import write_jpegs
from tests.pipeline.index_pass import a_pass, stream_of

N = 40


class Slow(torch.utils.data.Dataset[Any]):
    """A data set that notes each sample that it makes."""

    def __init__(self, log: Path, samples: int = N) -> None:
        self.log, self.samples = log, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, Any]:
        with self.log.open("a") as file:
            file.write(f"{i}\n")
        return {"x": np.full((3, 2), i, np.float32), "id": i, "text": f"é{i}", "noise": np.random.rand()}


def made(log: Path) -> Counter[int]:
    """How often each sample was made since the last look."""
    found = Counter(map(int, log.read_text().split())) if log.exists() else Counter[int]()
    log.unlink(missing_ok=True)
    return found


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    sample["x"] += 1  # samples are the transform's own
    return {**sample, "draw": torch.rand(()).item()}


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.arange(int(sample["id"]) % 5, dtype=np.int32), "id": sample["id"]}


def padded(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.pad(sample["tokens"], (0, 5 - len(sample["tokens"]))), "id": sample["id"]}


def kept(tmp_path: Path, inner: Any, transform: Any = None, *, size: str = "50MB", **given: Any) -> Pipeline:
    return cached(inner, transform, cache=f"ssd:{tmp_path / 'cache'}:{size}", name=given.pop("name", "a"), **given)


def same(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> bool:
    return one.keys() == other.keys() and all(
        row.keys() == other[i].keys() and all(np.array_equal(row[name], other[i][name]) for name in row)
        for i, row in one.items()
    )


def without(rows: dict[int, dict[str, Any]], *names: str) -> dict[int, dict[str, Any]]:
    return {i: {name: value for name, value in row.items() if name not in names} for i, row in rows.items()}


def refusal(*given: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        cached(*given, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sample_is_made_once_whatever_passes_and_processes_follow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pipeline = kept(tmp_path, Slow(log), noisy, per_sample=True)
    first = a_pass(stream_of(pipeline), epoch=0)
    assert made(log) == Counter(range(N))
    second = a_pass(stream_of(pipeline), epoch=1)
    assert not made(log)
    assert same(a_pass(stream_of(kept(tmp_path, Slow(log), noisy, per_sample=True)), epoch=1), second)
    assert not made(log)

    by_id = {row["id"]: row for row in second.values()}
    for row in first.values():
        assert row["noise"] == by_id[row["id"]]["noise"], "made once"
        assert row["draw"] != by_id[row["id"]]["draw"], "transformed anew"
        assert np.array_equal(by_id[row["id"]]["x"], np.full((3, 2), row["id"] + 1, np.float32))
        assert row["text"] == f"é{row['id']}"


def test_another_name_another_data_set_and_a_full_cache_make_the_sample_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    a_pass(stream_of(kept(tmp_path, Slow(log))))
    made(log)
    a_pass(stream_of(kept(tmp_path, Slow(log), name="b")))
    assert made(log) == Counter(range(N))
    a_pass(stream_of(kept(tmp_path, mix({"a": Slow(log), "b": Slow(log)}))))
    assert made(log) == Counter(dict.fromkeys(range(N), 2))

    full = tmp_path / "full"
    full.mkdir()
    for epoch in range(2):  # four contents of a block each fit
        assert len(a_pass(stream_of(kept(full, Slow(log), size="16KiB")), epoch=epoch)) == N
    assert sorted(made(log).values()) == [1] * 4 + [2] * (N - 4)


def test_a_damaged_content_is_made_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = a_pass(stream_of(kept(tmp_path, Slow(log))))
    made(log)
    contents = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 200]
    assert len(contents) == N
    contents[0].write_bytes(contents[0].read_bytes()[:-1])
    after = a_pass(stream_of(kept(tmp_path, Slow(log))))
    assert same(without(after, "noise"), without(before, "noise"))
    assert sum(made(log).values()) == 1


def boxes(sample: dict[str, Any]) -> dict[str, Any]:
    return {"boxes": {"xyxy": [np.arange(4.0), np.zeros((int(sample["id"]) % 3, 4))]}, "id": sample["id"]}


@pytest.mark.parametrize("kind", ["columns", "whole", "nested"])
def test_samples_of_any_structure_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    inner = from_torch(Slow(log), boxes if kind == "nested" else None, per_sample=True)
    collate = {"collate_fn": list} if kind == "whole" else {}
    passes = [a_pass(stream_of(kept(tmp_path, inner, **collate)), epoch=0) for _ in range(2)]
    assert made(log) == Counter(range(N))
    if kind == "columns":
        assert same(*passes)
    else:  # whole samples travel as bytes of their own
        assert [sorted(row) for row in passes[0].values()] == [sorted(row) for row in passes[1].values()]
        assert all(
            bytes(a["__samples__"]) == bytes(b["__samples__"]) for a, b in zip(*map(dict.values, passes), strict=True)
        )


def test_images_are_cached_as_their_transform_leaves_them(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "images", 12)
    folder = tmp_path / "images"
    resized = image_folder(folder, v2.Resize((32, 32), antialias=True))
    random = v2.Compose([v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    stored = stream_of(kept(tmp_path, resized))
    accounts.collect()
    first = a_pass(stored)
    assert accounts.collect().cache_bytes == 0
    assert same(first, a_pass(stream_of(resized)))
    assert same(a_pass(stored), first)
    account = accounts.collect()
    assert account.cache_bytes > 12 * 32 * 32 * 3
    assert account.storage_bytes == 0
    cropped = a_pass(stream_of(kept(tmp_path, resized, random)))
    assert {row["image"].shape for row in cropped.values()} == {(16, 16, 3)}  # HWC on the wire


def test_samples_of_different_shapes_are_cached(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "images", 12, size=(40, 60))
    resized = image_folder(tmp_path / "images", v2.Resize(32, antialias=True))  # keeps the aspect ratio
    crop = v2.RandomResizedCrop(16, antialias=True)
    for inner in (resized, image_folder(tmp_path / "images")):
        stored = kept(tmp_path, inner, crop, name=inner.notes[0] if inner.notes else "decoded")
        for epoch in range(2):
            assert {row["image"].shape for row in a_pass(stream_of(stored), epoch=epoch).values()} == {(16, 16, 3)}

    tokens = from_torch(Slow(tmp_path / "log"), ragged, per_sample=True)
    stored = kept(tmp_path, tokens, padded, per_sample=True)
    for epoch in range(2):
        assert {row["tokens"].shape for row in a_pass(stream_of(stored), epoch=epoch).values()} == {(5,)}
    assert made(tmp_path / "log") == Counter(range(N))


def as_given(batch: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(batch["label"], np.ndarray)
    assert batch["label"].dtype == np.int64
    return {"x": batch["label"] * 2 + 1}


def names(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": {0: "a", 1: "b", 2: "c"}[sample["label"]], "id": sample["label"]}


def test_a_transform_gets_what_it_would_get_without_a_cache(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "images", 12)
    for name, transform, given in [("batch", as_given, {}), ("sample", names, {"per_sample": True})]:
        plain = a_pass(stream_of(image_folder(tmp_path / "images", transform, **given)))
        stored = stream_of(kept(tmp_path, image_folder(tmp_path / "images"), transform, name=name, **given))
        for _ in range(2):
            assert same(a_pass(stored), plain)
    pq.write_table(
        pa.table({"x": pa.array([[i, 1] for i in range(N)], pa.list_(pa.int64(), 2))}), tmp_path / "rows.parquet"
    )
    stored = stream_of(kept(tmp_path, parquet(tmp_path / "rows.parquet"), twice))
    assert {row["y"].shape for row in a_pass(stored).values()} == {(2,)}


class Gone:
    """A class that changes between two runs."""


class Objects(Slow):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**super().__getitem__(i), "object": Gone()}


def test_what_cannot_be_loaded_any_more_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    stored = kept(tmp_path, Objects(log, 3), collate_fn=list)
    a_pass(stream_of(stored))
    made(log)

    def refuse(*_: Any) -> Any:
        raise AttributeError("no such class")

    monkeypatch.setattr("offload.pipeline.blocks.packing.unpack", refuse)
    with pytest.raises(RunError):  # it cannot be loaded even when it is new
        a_pass(stream_of(stored))
    assert made(log) == Counter(range(3))


def test_two_data_sets_of_a_run_need_two_names(tmp_path: Path) -> None:
    train, other = kept(tmp_path, Slow(tmp_path / "a")), kept(tmp_path, Slow(tmp_path / "b"))
    check_names({"train": train, "again": train, "val": kept(tmp_path, Slow(tmp_path / "b"), name="b")})
    with pytest.raises(
        ConfigError, match=r"'train' and 'val' are cached under the same name 'a'.*Give each its own name"
    ):
        check_names({"train": train, "val": other})
    with pytest.raises(ConfigError, match="two data sets in 'train' are cached"):
        check_names({"train": mix({"a": train, "b": other})})


def late(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 3:
        raise SampleTimeoutError
    return sample


def test_a_late_sample_is_skipped_by_name(tmp_path: Path) -> None:
    inner = from_torch(Slow(tmp_path / "log"), late, per_sample=True, on_error="skip")
    rows = a_pass(stream_of(kept(tmp_path, inner, sample_timeout_s=60)))
    wrong = {row["sample_id"]: row["__error__"] for row in rows.values() if row["__error__"] is not None}
    assert wrong == {3: "item 3 of Slow: took longer than sample_timeout_s=60"}


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    return {"y": batch["x"] * 2}


def test_rows_of_tables_and_draws_by_weight(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(N)}), tmp_path / "rows.parquet", row_group_size=7)
    stored = kept(tmp_path, parquet(tmp_path / "rows.parquet", twice))
    for epoch in range(2):
        assert Counter(row["y"] for row in a_pass(stream_of(stored), epoch=epoch).values()) == Counter(
            range(0, 2 * N, 2)
        )
    drawn = weighted(stored, np.arange(N) == 3, samples=5)
    assert [row["y"] for row in a_pass(stream_of(drawn)).values()] == [6] * 5


class Bad(Slow):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 3:
            raise ValueError("no such colour")
        return super().__getitem__(i)


def test_a_sample_that_cannot_be_made_is_named_or_skipped_and_never_cached(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RunError, match=r"sample 3 \(item 3 of Bad\).*no such colour"):
        a_pass(stream_of(kept(tmp_path, from_torch(Bad(log)))))
    skipping = kept(tmp_path, from_torch(Bad(log), on_error="skip"), name="b")
    for epoch in range(2):
        rows = a_pass(stream_of(skipping), epoch=epoch)
        assert len(rows) == N
        reasons = [row["__error__"] for row in rows.values() if row["__error__"] is not None]
        assert len(reasons) == 1
        assert reasons[0].startswith("item 3 of Bad: ValueError: no such colour")


def test_a_resumed_pass_gets_what_the_whole_one_would(tmp_path: Path) -> None:
    pipeline = kept(tmp_path, Slow(tmp_path / "log"), noisy, per_sample=True)
    whole = a_pass(stream_of(pipeline), epoch=2)
    done = ((0, 5), (11, 13))
    rest = a_pass(stream_of(pipeline), epoch=2, done=done)
    assert rest.keys() == whole.keys() - {*range(5), 11, 12}
    assert same(rest, {i: whole[i] for i in rest})


def several(sample: dict[str, Any]) -> Any:
    yield sample


def test_what_cannot_be_cached_is_named_with_a_remedy(tmp_path: Path) -> None:
    data = Slow(tmp_path / "log")
    good = {"cache": f"ssd:{tmp_path}:1MB", "name": "a"}
    normalised = v2.Compose(
        [v2.Resize(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    )
    for inner, transform, said in [
        (weighted(data, np.ones(N)), None, "weighted(cached(...), weights)"),
        (from_torch(data, several), None, "Pass the generator to cached as its transform"),
        (from_torch(data, collate_fn=list), None, "has a collate_fn, which gets the samples after cached"),
        (from_torch(data, sample_timeout_s=1), None, "has a sample_timeout_s. Pass it to cached"),
        (image_folder(tmp_path, normalised), noisy, "run on the device (Normalize("),
        (mix({"a": from_torch(data, several)}), None, "Pass the generator to cached as its transform"),
        (mix({"a": from_torch(data, sample_timeout_s=1)}), None, "has a sample_timeout_s. Pass it to cached"),
        ("train", None, "cached takes the result of offload.image_folder"),
    ]:
        assert said in refusal(inner, transform, **good)
    images = image_folder(tmp_path, v2.Compose([v2.Resize(32)]))
    assert "after cached's collate_fn" in refusal(images, collate_fn=list, **good)
    assert "cached: cache must be text such as" in refusal(data, **{**good, "cache": None})
    assert "must end with the size of the cache" in refusal(data, **{**good, "cache": "ssd:/mnt"})
    assert "cached: name must be" in refusal(data, **{**good, "name": ""})
    assert "cached: name must be" in refusal(data, **{**good, "name": 3})
    assert cached(webdataset(tmp_path), **good).caches
