"""Laws of tasks and parts: each sample in one task, each result once in the output, whatever interrupts the prediction."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.inference.blocks import Tasks
from offload.inference.model_worker import Answer
from offload.inference.parts import Parts
from offload.inference.results import as_array
from offload.pipeline.order.chunks import CHUNK
from offload.train.worker.data.cutting import Skipped


@given(samples=st.integers(1, 5000), batch_size=st.integers(1, 1200))
def test_tasks_hold_each_sample_once_and_batches_and_chunks_whole(samples: int, batch_size: int) -> None:
    """No task has many more samples than a batch, or than a few hundred."""
    tasks = Tasks(rows=pa.table({"path": [str(i) for i in range(samples)]}), batch_size=batch_size)
    every = [tasks.task(number).rows for number in range(len(tasks))]
    returned = [task.returned().column("sample_id").to_pylist() for task in every]
    assert list(itertools.chain(*returned)) == list(range(samples))
    assert list(map(len, returned)) == [tasks.samples(number) for number in range(len(tasks))]
    assert all(len(ids) % batch_size == 0 for ids in returned[:-1])
    for task in every:
        first, last = int(task.ids[0]), int(task.ids[-1])
        assert task.ids.tolist() == list(range(first, last + 1))
        assert first % CHUNK == 0
        assert (last + 1) % CHUNK == 0 or last + 1 == samples
        assert task.num_rows < max(512, batch_size) + 2 * CHUNK


def answer(number: int, rows: int) -> Answer:
    """The results of a task of ten samples, of which the first ``rows`` have any."""
    ids = range(10 * number, 10 * number + rows)
    skipped = tuple(Skipped(sample_id=i, reason="no image") for i in range(10 * number + rows, 10 * number + 10))
    batch = pa.record_batch({"sample_id": list(ids), "output": [float(i) for i in ids]}) if rows else None
    return Answer(number=number, samples=10, batch=batch, skipped=skipped)


@given(st.data())
def test_parts_hold_each_result_once_in_order(data: st.DataObject) -> None:
    """However the tasks come, and whenever the prediction is killed: after a flush, or before one."""
    counts = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.parquet")
        for sessions in range(20):
            with Parts(output, {"batch_size": 10}, overwrite=False).opened() as parts:
                todo = data.draw(st.permutations(sorted(set(range(len(counts))) - parts.done)))
                killed = sessions < 10 and data.draw(st.booleans())
                for number in todo[: data.draw(st.integers(0, len(todo)))] if killed else todo:
                    parts.add(answer(number, counts[number]))
                    if data.draw(st.booleans()):
                        parts.flush()
                if killed:
                    parts._waiting.clear()  # as a kill would
                    continue
                parts.finish()
                break
        expected = [10 * number + i for number, count in enumerate(counts) for i in range(count)]
        assert pq.read_table(output).column("sample_id").to_pylist() == expected
        assert parts.rows == len(expected)
        assert sorted(s.sample_id for s in parts.skipped) == sorted(set(range(10 * len(counts))) - set(expected))
        assert [path.name for path in Path(folder).iterdir()] == ["out.parquet"]


def test_one_process_predicts_an_output(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.parquet", {}, overwrite=False)
    with (
        parts.opened(),
        pytest.raises(ConfigError, match="is being predicted already, by process"),
        Parts(tmp_path / "out.parquet", {}, overwrite=False).opened(),
    ):
        pass


def test_a_part_that_a_crash_cut_off_is_made_again(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with Parts(output, {}, overwrite=False).opened() as parts:
        parts.add(answer(0, 10))
    (part,) = (tmp_path / "out.parquet.parts").glob("part-*.arrow")
    part.write_bytes(part.read_bytes()[:-40])
    with Parts(output, {}, overwrite=False).opened() as parts:
        assert (parts.done, parts.rows) == (set(), 0)


def test_a_full_disk_at_the_beginning_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(
            ConfigError, match=r"out\.parquet\.parts cannot be written: No space left on device\. Correct that"
        ),
        Parts(tmp_path / "out.parquet", {}, overwrite=False).opened(),
    ):
        pass


def test_results_of_another_kind_are_refused(tmp_path: Path) -> None:
    with Parts(tmp_path / "out.parquet", {}, overwrite=False).opened() as parts:
        parts.add(answer(0, 10))
        other = pa.record_batch({"sample_id": [10], "output": ["text"]})
        with pytest.raises(RunError, match="output: double and output: string"):
            parts.add(Answer(number=1, samples=1, batch=other))
    with pytest.raises(RunError, match="the column 'output' cannot be stored"):
        as_array("output", [object()])


@given(st.data())
def test_missing_values_do_not_change_the_kind_of_a_column(data: st.DataObject) -> None:
    """A batch without any value of a column does not know its type. Whichever batch comes first, and wherever parts end."""
    texts: list[list[str | None]] = [[None], ["a"], [None, "b"], [None]]
    numbers: list[list[int | None]] = [[None], [1], [2, None], [3]]
    boxes: list[list[list[int] | None]] = [[None], [[]], [[1, 2], None], [[3]]]
    batches = [
        pa.record_batch(
            {
                "sample_id": list(range(10 * number, 10 * number + len(texts[number]))),
                "text": texts[number],
                # As a tensor, where no number is missing.
                "number": pa.array(numbers[number], pa.int32() if number == 3 else None),
                "boxes": boxes[number],
            }
        )
        for number in range(4)
    ]
    todo = data.draw(st.permutations(range(4)))
    cut = data.draw(st.integers(0, 4))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.parquet")
        for numbers_of_session in (todo[:cut], todo[cut:]):
            with Parts(output, {}, overwrite=False).opened() as parts:
                for number in numbers_of_session:
                    parts.add(Answer(number=number, samples=2, batch=batches[number]))
                    if data.draw(st.booleans()):
                        parts.flush()
        with Parts(output, {}, overwrite=False).opened() as parts:
            parts.finish()
        table = pq.read_table(output)
    assert table.column("text").to_pylist() == list(itertools.chain(*texts))
    assert table.column("number").to_pylist() == list(itertools.chain(*numbers))
    assert table.column("boxes").to_pylist() == list(itertools.chain(*boxes))
    assert [table.schema.field(name).type for name in ("text", "number")] == [pa.string(), pa.int64()]
