"""Index rows in runs are those of a table with a row for each sample."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.pipeline.index_rows import Runs, rows_at


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=9), data=st.data())
def test_runs_are_as_the_whole_table(counts: list[int], data: st.DataObject) -> None:
    runs = Runs(pa.table({"file": [f"f{i}" for i in range(len(counts))]}), np.array(counts))
    whole = [{"file": f"f{i}", "row": row} for i, count in enumerate(counts) for row in range(count)]
    assert len(runs) == len(whole)
    assert runs.whole().to_pylist() == whole
    assert runs.groups.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]
    if whole:
        ids = data.draw(st.lists(st.integers(0, len(whole) - 1)))
        for rows in (runs, runs.whole()):
            assert rows_at(rows, np.array(ids, dtype=np.int64)).to_pylist() == [whole[i] for i in ids]


def test_a_task_does_not_carry_the_names_of_all_shards() -> None:
    names = pa.array([f"shard-{i}" for i in range(1000)])
    table = pa.table({"shard": pa.DictionaryArray.from_arrays(np.arange(1000, dtype=np.int32), names)})
    taken = rows_at(table, np.array([7, 3]))
    assert taken.column("shard").to_pylist() == ["shard-7", "shard-3"]
    assert taken.nbytes < 100
