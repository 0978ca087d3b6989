"""Weighted draws and mixed data sets: what a pass visits, the random numbers of repeated draws, and refusals."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.describe.combine import mix, weighted
from offload.pipeline.describe.sources import from_torch, image_folder, parquet, webdataset
from offload.pipeline.images.on_device import Normalize
from offload.pipeline.index.mixed import PART, MixedRows
from offload.pipeline.index.rows import Runs, rows_at
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import Draws
from offload.pipeline.preprocessing.processing import process
from tests.pipeline.index_pass import a_pass, listed, stream_of

some_weights = st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=30).filter(any)


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"], "draw": torch.rand(()).item() + np.random.rand()}


def noisy_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "draw": np.random.rand(len(batch["x"]))}


class Augmenting(torch.utils.data.Dataset[Any]):
    """A data set that augments in its own __getitem__."""

    def __init__(self, samples: int, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        return {"x": self.first + i, "draw": torch.rand(()).item()}


def numbers(n: int, first: int = 0) -> list[dict[str, int]]:
    return [{"x": first + i} for i in range(n)]


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- draws ------------------------------------------------------------------------------------------------------------


@given(weights=some_weights, number=st.integers(1, 200), seed=st.integers(), epoch=st.integers(0, 9))
def test_draws_depend_on_seed_and_epoch_alone_and_never_hit_a_weight_of_zero(
    weights: list[float], number: int, seed: int, epoch: int
) -> None:
    draws = Draws(weights=np.array(weights), number=number)
    groups = np.arange(len(weights)) // 3
    order = draws.order(seed=seed, epoch=epoch)
    assert len(order) == number
    assert np.array_equal(order, draws.order(seed=seed, epoch=epoch))
    assert all(weights[i] > 0 for i in order)
    grouped = draws.order(seed=seed, epoch=epoch, groups=groups)
    assert Counter(grouped.tolist()) == Counter(order.tolist())
    changes = np.count_nonzero(np.diff(groups[grouped]))
    assert changes == len(set(groups[grouped].tolist())) - 1, "each group at once"


def test_shares_of_draws_follow_the_weights() -> None:
    order = Draws(weights=np.array([1.0, 0.0, 3.0]), number=40_000).order(seed=0, epoch=0)
    counts = np.bincount(order, minlength=3)
    assert counts[1] == 0
    assert abs(counts[2] / 40_000 - 0.75) < 0.02  # nine standard deviations
    assert not np.array_equal(order, Draws(weights=np.array([1.0, 0.0, 3.0]), number=40_000).order(seed=0, epoch=1))


@pytest.mark.parametrize(
    ("dataset", "transform", "per_sample"),
    [(numbers(5), noisy, True), (numbers(5), noisy_batch, False), (Augmenting(5), None, False)],
    ids=["per sample", "per batch", "in the data set"],
)
@settings(deadline=None, max_examples=15)
@given(done=st.sets(st.integers(0, 69), max_size=69), epoch=st.integers(0, 3))
def test_a_resumed_pass_makes_exactly_the_rest_and_each_draw_has_its_own_random_numbers(
    dataset: Any, transform: Any, per_sample: bool, done: set[int], epoch: int
) -> None:
    stream = stream_of(weighted(from_torch(dataset, transform, per_sample=per_sample), [0, 1, 1, 0, 8], samples=70))
    whole = a_pass(stream, epoch=epoch)
    assert sorted(whole) == list(range(70))
    assert [whole[i][SAMPLE_ID] for i in range(70)] == stream.order(epoch).tolist()
    assert len({row["draw"] for row in whole.values()}) == 70
    rest = a_pass(stream, epoch=epoch, done=Ranges.of(done).pairs)
    assert rest == {i: row for i, row in whole.items() if i not in done}


@pytest.mark.parametrize(
    "weights", [(1, 2, 3), np.array([1, 2, 3], np.int8), torch.tensor([1.0, 2, 3], requires_grad=True)]
)
def test_weights_of_every_kind(weights: Any) -> None:
    index = listed(weighted(numbers(3), weights))
    assert len(index) == 3
    assert index.draws is not None
    assert index.draws.weights.tolist() == [1, 2, 3]
    assert len(listed(weighted(numbers(3), weights, samples=50))) == 50


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, -2, 3], "weights[1] must be a finite number of 0 or more, found -2"),
        ([1, 2, float("nan")], "weights[2] must be a finite number of 0 or more, found nan"),
        ([1, float("inf"), 3], "weights[1]"),
        ([0, 0, 0], "only zeros"),
        ([], "must be a list of numbers"),
        (["1", "2", "3"], "must be a list of numbers"),
        ([[1], [2, 3]], "must be a list of numbers"),
        (3, "must be a list of numbers"),
        ({"a": 1}, "must be a list of numbers"),
        (None, "must be a list of numbers"),
    ],
)
def test_weights_that_are_refused(weights: Any, says: str) -> None:
    assert says in refusal(weighted, numbers(3), weights)


def test_what_weighted_refuses() -> None:
    text = refusal(lambda: listed(weighted(numbers(3), [1, 2])))
    assert "holds 2 numbers, and from_torch(list) has 3 samples" in text
    assert "samples must be" in refusal(weighted, numbers(3), [1, 1, 1], samples=0)
    assert "Drop shuffle=False" in refusal(weighted, from_torch(numbers(3), shuffle=False), [1, 1, 1])
    assert "already draws" in refusal(weighted, weighted(numbers(3), [1, 1, 1]), [1, 1, 1])
    assert "found " in refusal(weighted, "s3://bucket", [1])


# --- mix --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 25), min_size=1, max_size=4), shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_a_union_visits_every_sample_once_with_its_own_values(sizes: list[int], shuffle: bool, epoch: int) -> None:
    starts = np.cumsum([0, *sizes]).tolist()
    mixed = mix({f"s{i}": numbers(n, 100 * i) for i, n in enumerate(sizes)})
    stream = stream_of(mixed, shuffle=shuffle)
    rows = a_pass(stream, epoch=epoch)
    assert sorted(rows) == list(range(sum(sizes)))
    values = {int(row[SAMPLE_ID]): int(row["x"]) for row in rows.values()}
    assert values == {starts[i] + k: 100 * i + k for i, n in enumerate(sizes) for k in range(n)}
    if not shuffle:
        assert [rows[i][SAMPLE_ID] for i in range(len(rows))] == list(range(sum(sizes)))


@settings(deadline=None, max_examples=15)
@given(done=st.sets(st.integers(0, 59), max_size=59))
def test_each_part_keeps_its_transform_and_a_resume_makes_the_rest(done: set[int]) -> None:
    def negative(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": -np.asarray(batch["x"]), "draw": np.random.rand(len(batch["x"]))}

    mixed = mix(
        {
            "a": from_torch(numbers(20), noisy, per_sample=True),
            "b": from_torch(numbers(20, 20), negative),
            "c": Augmenting(20, 40),
        },
        weights={"a": 1, "b": 1, "c": 1},
        samples=60,
    )
    stream = stream_of(mixed)
    whole = a_pass(stream)
    assert sorted(whole) == list(range(60))
    for row in whole.values():
        number = int(row[SAMPLE_ID])
        assert row["x"] == (-number if 20 <= number < 40 else number)
    assert len({row["draw"] for row in whole.values()}) == 60
    assert a_pass(stream, done=Ranges.of(done).pairs) == {i: row for i, row in whole.items() if i not in done}


def test_the_share_of_each_set() -> None:
    index = listed(mix({"a": numbers(10), "b": numbers(1000), "c": numbers(5)}, weights={"a": 1, "b": 3, "c": 0}))
    assert len(index) == 1015
    assert index.draws is not None
    weights = index.draws.weights
    assert np.isclose(weights[:10].sum() * 3, weights[10:1010].sum())
    assert not weights[1010:].any()


def test_mixes_of_weighted_sets_and_of_mixes() -> None:
    inner = mix({"x": numbers(2), "y": numbers(2, 10)}, weights={"x": 1, "y": 1})
    one = weighted(numbers(3, 20), [0, 0, 5])
    stream = stream_of(mix({"inner": inner, "one": one}, weights={"inner": 1, "one": 1}, samples=200))
    rows = a_pass(stream)
    counts = Counter(int(row["x"]) for row in rows.values())
    assert counts.keys() == {0, 1, 10, 11, 22}
    assert 50 < counts[22] < 150
    union = a_pass(stream_of(mix({"a": mix({"b": numbers(3), "c": numbers(2, 10)}), "d": numbers(1, 20)})))
    assert sorted(int(row["x"]) for row in union.values()) == [0, 1, 2, 10, 11, 20]
    drawn = weighted(mix({"a": numbers(2), "b": numbers(2, 10)}), [0, 1, 1, 0], samples=9)
    assert {int(row["x"]) for row in a_pass(stream_of(drawn)).values()} == {1, 10}


def test_sources_of_different_kinds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(100, 106))}), tmp_path / "x.parquet", row_group_size=2)
    mixed = mix({"list": numbers(3), "table": parquet(tmp_path / "x.parquet")})
    index = listed(mixed)
    assert index.groups is not None
    assert index.groups.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    assert index.reader.describe(index.table, 1) == "item 1 of list"
    assert index.reader.describe(index.table, 4).startswith("row 1 of row group 0 of ")
    assert sorted(index.reader.read(index.table).columns["x"]) == [0, 1, 2, *range(100, 106)]
    assert sorted(int(row["x"]) for row in a_pass(stream_of(mixed)).values()) == [0, 1, 2, *range(100, 106)]


def test_sets_with_and_without_a_transform_may_share_a_collate_fn() -> None:
    """Without a transform, samples reach a collate_fn as the data set returns them; a transform's come as columns."""
    other = from_torch(numbers(9, first=100), lambda sample: {"x": -sample["x"]}, per_sample=True, collate_fn=list)
    mixed = mix({"a": from_torch(numbers(9), collate_fn=list), "b": other})
    stream = stream_of(mixed)
    found: list[int] = []
    for rows in (np.arange(18), np.array([0, 1]), np.array([17])):
        index = rows_at(cast(Any, stream.rows), rows).append_column(SAMPLE_ID, pa.array(rows))
        block = process(cast(Any, stream.recipe), index.append_column(POSITION, pa.array(rows)), epoch=0)
        found += [sample["x"] for (sample,) in whole_samples.decode(wire.decode(block))]
    assert found == [*range(9), *range(-100, -109, -1), 0, 1, -108]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data())
def test_mixed_rows_are_those_of_one_table(sizes: list[int], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["runs", "table"]), min_size=len(sizes), max_size=len(sizes)))
    tables = [pa.table({"x": [f"{number}-{i}" for i in range(size)]}) for number, size in enumerate(sizes)]
    runs = [Runs(pa.table({"x": [f"{number}"]}), np.array([size])) for number, size in enumerate(sizes)]
    mixed = MixedRows(
        tuple(run if kind == "runs" else table for run, table, kind in zip(runs, tables, kinds, strict=True))
    )
    assert len(mixed) == sum(sizes)
    expected = [
        {"part": number, "x": f"{number}" if kind == "runs" else f"{number}-{i}", "row": i if kind == "runs" else None}
        for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
        for i in range(size)
    ]
    ids = np.array(
        data.draw(st.lists(st.integers(0, max(sum(sizes) - 1, 0)), max_size=9 if sum(sizes) else 0)), np.uint32
    )
    taken = rows_at(mixed, ids)
    assert [
        {"part": row[PART], "x": row[f"{row[PART]}/x"], "row": row.get(f"{row[PART]}/row")} for row in taken.to_pylist()
    ] == [expected[i] for i in ids]
    # A task without samples of a part has its columns, too.
    assert {f"{number}/x" for number in range(len(sizes))} <= set(taken.column_names)


def test_bad_samples_are_skipped_only_in_the_sets_that_say_so(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name / "k").mkdir(parents=True)
        for i in range(3):
            PIL.Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / name / "k" / f"{i}.png")
    (tmp_path / "bad" / "k" / "1.png").write_bytes(b"broken")
    mixed = mix({"good": image_folder(tmp_path / "good"), "bad": image_folder(tmp_path / "bad", on_error="skip")})
    rows = a_pass(stream_of(mixed))
    assert len(rows) == 6
    reasons = {int(row[SAMPLE_ID]): row[wire.ERROR] for row in rows.values() if row[wire.ERROR]}
    assert list(reasons) == [4]
    assert reasons[4].startswith(f"{tmp_path / 'bad' / 'k' / '1.png'}: ")
    strict = mix({"good": image_folder(tmp_path / "good", on_error="skip"), "bad": image_folder(tmp_path / "bad")})
    with pytest.raises(RunError, match=r"sample 4 \(.*1\.png\) is unusable"):
        a_pass(stream_of(strict))


def test_sets_whose_samples_have_different_columns() -> None:
    with pytest.raises(RunError, match=r"'a' gives x, and 'b' gives x, y.*Return the same columns"):
        a_pass(stream_of(mix({"a": numbers(20), "b": [{"x": 1, "y": 2}] * 20})))


def test_what_mix_refuses(tmp_path: Path) -> None:
    a, b = from_torch(numbers(3)), from_torch(numbers(2))
    for names, says in ((["x"], "animal"), (["y"], "animal")):
        (tmp_path / names[0] / names[0]).mkdir(parents=True)
        PIL.Image.new("RGB", (4, 4)).save(tmp_path / names[0] / names[0] / f"{says}.png")
    assert "pipelines is empty" in refusal(mix, {})
    assert "must be a dict" in refusal(mix, [a, b])
    assert "weights names 'c', and the data sets are a, b" in refusal(mix, {"a": a, "b": b}, weights={"a": 1, "c": 1})
    assert "weights lacks 'b'" in refusal(mix, {"a": a, "b": b}, weights={"a": 1})
    assert "weights['a']" in refusal(mix, {"a": a}, weights={"a": -1})
    assert "only zeros" in refusal(mix, {"a": a}, weights={"a": 0})
    assert "weights['a']" in refusal(mix, {"a": a}, weights={"a": float("nan")})
    assert "samples=5 counts draws" in refusal(mix, {"a": a}, samples=5)
    assert "samples must be" in refusal(mix, {"a": a}, weights={"a": 1}, samples=0)
    assert "found 5" in refusal(mix, {"a": 5})
    assert "without weights visits every sample once" in refusal(mix, {"a": weighted(numbers(1), [1])})
    assert "shuffle=False" in refusal(mix, {"a": a, "b": from_torch(numbers(1), shuffle=False)})
    finished = from_torch(numbers(1), on_device=Normalize(0.5))
    assert "nothing and Normalize(" in refusal(mix, {"a": a, "b": finished})
    mix({"a": finished, "b": from_torch(numbers(1), on_device=Normalize(0.5))})  # equal, if not the same object
    folders = mix({"a": image_folder(tmp_path / "x"), "b": image_folder(tmp_path / "y")})
    assert "'a' has the classes x, and 'b' has y" in refusal(listed, folders)


def twice(sample: dict[str, Any]) -> Any:
    yield from (sample, sample)


def test_what_joins_and_draws_of_generators_yields_any_number_too() -> None:
    one, two = (from_torch([{"x": 1}, {"x": 2}], twice) for _ in range(2))
    for each in (one, weighted(one, [1, 2]), mix({"a": one, "b": two}), mix({"a": one, "b": two}, {"a": 1, "b": 1})):
        assert each.yields
    assert not mix({"a": [{"x": 1}], "b": from_torch([{"x": 2}])}).yields


@pytest.mark.parametrize("weights", [None, {"a": 1, "b": 3}])
def test_mixed_tar_shards_may_lack_a_member_in_some_samples(tmp_path: Path, weights: Any) -> None:
    for name in "ab":
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for number in range(40):
                for member, content in (("cls", b"1"), ("txt", b"caption")):
                    if member == "cls" or number % 8 == 0:
                        info = tarfile.TarInfo(f"{name}{number}.{member}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    rows = a_pass(stream_of(mix({name: webdataset(tmp_path / f"{name}.tar") for name in "ab"}, weights=weights)))
    assert {row["label"] for row in rows.values()} == {1}
    assert {row.get("txt") for row in rows.values()} == {None, "caption"}
