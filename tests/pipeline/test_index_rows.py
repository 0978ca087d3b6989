"""Index rows in runs are those of a table with a row for each sample."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.index.rows import Picked, Runs, rows_at, whole
from offload.pipeline.order.chunks import CHUNK, whole_chunks
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import epoch_permutation


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=9), data=st.data())
def test_runs_are_as_the_whole_table(counts: list[int], data: st.DataObject) -> None:
    runs = Runs(pa.table({"file": [f"f{i}" for i in range(len(counts))]}), np.array(counts))
    expected = [{"file": f"f{i}", "row": row} for i, count in enumerate(counts) for row in range(count)]
    assert len(runs) == len(expected)
    assert whole(runs).to_pylist() == expected
    assert runs.groups.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]
    if expected:
        ids = data.draw(st.lists(st.integers(0, len(expected) - 1)))
        for rows in (runs, whole(runs)):
            assert rows_at(rows, np.array(ids, dtype=np.int64)).to_pylist() == [expected[i] for i in ids]


def test_a_task_does_not_carry_the_names_of_all_shards() -> None:
    names = pa.array([f"shard-{i}" for i in range(1000)])
    table = pa.table({"shard": pa.DictionaryArray.from_arrays(np.arange(1000, dtype=np.int32), names)})
    taken = rows_at(table, np.array([7, 3]))
    assert taken.column("shard").to_pylist() == ["shard-7", "shard-3"]
    assert taken.nbytes < 100


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(0, 3000), min_size=1, max_size=5), seed=st.integers(0, 99), grouped=st.booleans())
def test_long_runs_are_as_the_whole_table_in_any_order(counts: list[int], seed: int, grouped: bool) -> None:
    runs = Runs(pa.table({"file": [f"f{i}" for i in range(len(counts))]}), np.array(counts))
    ids = epoch_permutation(len(runs), seed=seed, epoch=0, groups=runs.groups if grouped else None)
    taken = runs.rows_at(ids)
    expected = runs.groups.each()[ids]
    assert taken.column("file").to_pylist() == [f"f{i}" for i in expected.tolist()]
    assert (taken.column("row").to_numpy() + (np.cumsum(counts) - counts)[expected]).tolist() == ids.tolist()


def test_a_task_carries_the_ids_of_its_rows_and_little_more() -> None:
    runs = Runs(pa.table({"file": ["a/path/as/long/as/those/of/buckets/often/are"] * 8}), np.full(8, 5000))
    ids = epoch_permutation(len(runs), seed=0, epoch=0, groups=runs.groups)[: 20_000 // CHUNK * CHUNK]
    positions = Ranges(((0, len(ids)),))
    picked = Picked(ids=ids, source=runs, positions=positions, wanted=positions)
    assert len(pickle.dumps(picked)) < 1.1 * ids.nbytes + 4096
    assert picked.table().column("row").to_pylist() == (ids % 5000).tolist()


def test_a_task_gets_the_names_of_its_samples_when_it_travels() -> None:
    """The pass keeps every task until its end: their names would be those of all samples."""
    table = pa.table({"path": [f"a-long-name-{number:08d}" for number in range(1000)]})
    positions = Ranges(((0, 3),))
    picked = Picked(ids=np.array([7, 3, 5]), source=table, positions=positions, wanted=positions)
    assert picked.source is table
    travelled = pickle.loads(pickle.dumps(picked))
    assert len(pickle.dumps(picked)) < 4096
    assert len(pickle.dumps(travelled)) < 4096
    for each in (picked, travelled):
        assert each.table().column("path").to_pylist() == [f"a-long-name-{number:08d}" for number in (7, 3, 5)]


@settings(deadline=None)
@given(trained=st.sets(st.integers(0, 99)))
def test_a_task_returns_what_is_wanted_of_its_chunks(trained: set[int]) -> None:
    runs = Runs(pa.table({"file": ["a", "b"]}), np.array([60, 40]))
    order = epoch_permutation(100, seed=0, epoch=0)
    wanted = Ranges.of(trained).missing_from(100).between(0, 100)
    chunks = whole_chunks(wanted, 100)
    picked = Picked(ids=order[chunks.numbers()], source=runs, positions=chunks, wanted=wanted)
    rows = picked.returned()
    assert rows.column(POSITION).to_pylist() == sorted(set(range(100)) - trained)
    assert rows.column(SAMPLE_ID).to_pylist() == order[wanted.numbers()].tolist()
    assert {p // CHUNK for p in picked.table().column(POSITION).to_pylist()} == {p // CHUNK for p in wanted.numbers()}
