"""Local batches: every sample in one of them, none divided, and none of a single row where that can be avoided."""

from __future__ import annotations

from itertools import count
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import collate
from offload.errors import RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns
from offload.train.worker.data.cutting import Cut, Cutter, TokenBudget
from offload.train.worker.data.delivery import Delivery

CPU = Delivery(torch.device("cpu"))


def columns(start: int, stop: int) -> Columns:
    ids = np.arange(start, stop)
    return {"x": ids.astype(np.float32), SAMPLE_ID: ids, POSITION: ids}


def whole(start: int, samples: list[list[Any]]) -> Columns:
    """A piece of rows that hold these samples, through the wire."""
    ids = np.arange(start, start + len(samples))
    block = pa.table({SAMPLE_ID: pa.array(ids), POSITION: pa.array(ids), **whole_samples.encode(samples)})
    return wire.decode(block)


def cut_all(cutter: Cutter, pieces: list[tuple[Columns, int]], size: int) -> list[Cut]:
    cuts = []
    for piece, rows in pieces:
        cutter.add(piece, rows)
        while (cut := cutter.cut(size, over=False, near_end=True)) is not None:
            cuts.append(cut)
    while (cut := cutter.cut(size, over=True, near_end=True)) is not None:
        cuts.append(cut)
    return cuts


@given(st.lists(st.integers(1, 20), max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_rows_come_once_in_order_and_no_batch_is_needlessly_small(lengths: list[int], size: int, least: int) -> None:
    pieces, start = [], 0
    for length in lengths:
        pieces.append((columns(start, start + length), length))
        start += length
    cuts = cut_all(Cutter(least=least), pieces, size)
    positions = [int(p) for cut in cuts for p in cut.positions.numbers()]
    assert positions == list(range(start))
    assert all(cut.rows <= size for cut in cuts)
    assert len(cuts) == -(-start // size), "as many as full batches would be"
    if size >= 2 * least and start >= least:
        assert all(cut.rows >= least for cut in cuts)
    assert [cut.partial for cut in cuts[:-1]] == [False] * (len(cuts) - 1)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=5), st.integers(1, 7))
def test_the_samples_of_an_input_stay_together(blocks: list[list[int]], size: int) -> None:
    number, start, pieces, wanted = count(), 0, [], []
    for block in blocks:
        rows = [[next(number) for _ in range(made)] for made in block]
        wanted += [sample for row in rows for sample in row]
        pieces.append((whole(start, rows), len(rows)))
        start += len(block)
    cuts = cut_all(Cutter(), pieces, size)
    assert [sample for cut in cuts for sample in cut.samples] == wanted
    trained = [int(p) for cut in cuts for p in cut.positions.numbers()]
    assert len(trained) == len(set(trained)), "each input is trained in one batch"
    made = [len(row) for block in blocks for row in [[0] * m for m in block]]
    assert all(made[p] == 0 for p in set(range(start)) - set(trained)), "what is left out gave no sample"
    assert all(cut.rows <= size or sum(made[p] > 0 for p in cut.positions.numbers().tolist()) == 1 for cut in cuts)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(30, 60))
def test_a_budget_of_tokens_limits_a_batch(lengths: list[int], most: int) -> None:
    rows = [[torch.zeros(n)] for n in lengths]
    cuts = cut_all(Cutter(budget=TokenBudget(tokens=len, most=most)), [(whole(0, rows), len(rows))], 1000)
    assert [len(sample) for cut in cuts for sample in cut.samples] == lengths
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        assert cut.weight == sum(map(len, cut.samples)) <= most
        if following is not None:
            assert cut.weight + len(following.samples[0]) > most, "as many as fit"


def test_skipped_samples_are_told_with_the_batch_after_them() -> None:
    piece = {**columns(0, 4), ERROR: [None, "broken", None, None]}
    (cut,) = cut_all(Cutter(), [(piece, 4)], 10)
    assert [(each.sample_id, each.reason) for each in cut.skipped] == [(1, "broken")]
    assert cut.positions.numbers().tolist() == [0, 2, 3]


NESTED: dict[str, Any] = {
    "views": [(torch.full((2, 3), float(i)), torch.full((2, 3), i + 0.5)) for i in range(3)],
    "target": [
        {"boxes": torch.full((4,), float(i)), "id": i, "name": f"n{i}", "deep": {"y": [np.ones(2), np.zeros(1)]}}
        for i in range(3)
    ],
    "empty": [torch.zeros(0, 4) for _ in range(3)],
    "half": [torch.full((2,), i, dtype=torch.bfloat16) for i in range(3)],
    "wave": [torch.full((2,), 1j * i, dtype=torch.complex64) for i in range(3)],
    "number": [0.5, 1.5, 2.5],
    "text": ["a", "b", "c"],
}


@pytest.mark.parametrize("name", NESTED)
def test_without_a_collate_fn_structures_become_what_torch_makes_of_them(name: str) -> None:
    samples = [{name: value} for value in NESTED[name]]
    wanted = torch.utils.data.default_collate(samples)
    (cut,) = cut_all(Cutter(), [(whole(0, [[sample] for sample in samples]), 3)], 3)
    got, _ = CPU.deliver(cut)
    assert got.pop(SAMPLE_ID).tolist() == [0, 1, 2]
    assert same(got, wanted)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return bool(a.keys() == b.keys()) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_images_without_objects_have_an_empty_list_of_them_whatever_their_block_holds() -> None:
    pieces = []
    for start, rows in ((0, [[], []]), (2, [[{"box": [1, 2]}], []])):
        ids = np.arange(start, start + 2)
        block = wire.encode({"objects": wire.stack("objects", rows), SAMPLE_ID: ids, POSITION: ids})
        pieces.append((wire.decode(block), 2))
    for size, wanted in ((2, [[], []]), (4, [[], [], [{"box": [1, 2]}], []])):
        cut = cut_all(Cutter(), [(dict(piece), rows) for piece, rows in pieces], size)[0]
        assert CPU.deliver(cut)[0]["objects"] == wanted


def test_numbers_of_another_byte_order_become_tensors_within_structures_too() -> None:
    # FITS files and many volumes hold such arrays.
    samples = [[{"views": [(np.arange(n) + i).astype(kind) for n, kind in ((3, ">f4"), (2, ">i2"))]}] for i in range(2)]
    (cut,) = cut_all(Cutter(), [(whole(0, samples), 2)], 2)
    got, _ = CPU.deliver(cut)
    wanted = [torch.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]), torch.tensor([[0, 1], [1, 2]], dtype=torch.int16)]
    assert same(got["views"], wanted)


def test_samples_that_differ_in_shape_are_named() -> None:
    samples = [[{"boxes": torch.zeros(n, 4), "deep": {"boxes": torch.zeros(n, 4)}}] for n in (2, 2, 3)]
    (cut,) = cut_all(Cutter(), [(whole(5, samples), 3)], 3)
    with pytest.raises(
        RunError,
        match=r"column 'boxes' has rows of different shapes: \(2, 4\) for sample 5, \(3, 4\) for sample 7.*collate_fn",
    ):
        CPU.deliver(cut)


def test_a_function_of_tokens_that_raises_is_named_with_its_line() -> None:
    def lengths(sample: Any) -> int:
        return len(sample["words"])

    cutter = Cutter(budget=TokenBudget(tokens=lengths, most=9))
    with pytest.raises(
        RunError,
        match=r"lengths\(sample\) of the collate_fn raised KeyError: 'words' \(lengths, .*\) on sample 5\. Correct it",
    ):
        cutter.add(whole(5, [[{"x": 1}]]), 1)
    pack = Cutter(budget=TokenBudget(tokens=collate.pack(length="text").tokens, most=9))
    with pytest.raises(RunError, match=r"^pack counts the tokens of a sample by its column 'text', which holds 'a b'"):
        pack.add(whole(5, [[{"text": "a b"}]]), 1)


def test_a_collate_fn_that_raises_is_named_with_its_line() -> None:
    def mine(samples: list[Any]) -> Any:
        raise ValueError("no such token")

    (cut,) = cut_all(Cutter(), [(whole(0, [[1], [2]]), 2)], 2)
    with pytest.raises(
        RunError, match=r"the collate_fn .*mine raised ValueError: no such token \(mine, .*\) on 2 samples, 0 to 1"
    ):
        Delivery(torch.device("cpu"), collate_fn=mine).deliver(cut)


@pytest.mark.parametrize(
    "collate_fn", [None, lambda samples: {"sample_id": [sample["sample_id"] for sample in samples]}]
)
def test_content_of_the_name_of_the_ids_is_refused_unless_it_is_the_ids(collate_fn: Any) -> None:
    def delivered(names: list[Any]) -> Any:
        samples = [[{"sample_id": name, "boxes": [np.ones(2)]}] for name in names]
        (cut,) = cut_all(Cutter(), [(whole(0, samples), 2)], 2)
        return Delivery(torch.device("cpu"), collate_fn=collate_fn).deliver(cut)[0]

    with pytest.raises(RunError, match=r"the name of a column of a batch is 'sample_id', which offload adds itself"):
        delivered(["a.jpg", "b.jpg"])
    if collate_fn is None:
        assert delivered([0, 1])["sample_id"].tolist() == [0, 1]


def test_a_batch_that_is_a_sample_itself_is_repeated_by_fillers() -> None:
    one = Delivery(torch.device("cpu"), collate_fn=lambda samples: samples[0])
    (cut,) = cut_all(Cutter(), [(whole(0, [[{"x": torch.ones(3)}]]), 1)], 1)
    assert one.deliver(cut)[0]["sample_id"].tolist() == [0]
    assert one.deliver(cut.first(2).again())[0]["x"].tolist() == [1.0, 1.0, 1.0]


class Graphs:
    """A batch that is an object, and moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graphs:
        return Graphs(self.x.to(device))


@pytest.mark.parametrize("bare", [False, True])
def test_a_batch_of_objects_moves_to_the_device(monkeypatch: pytest.MonkeyPatch, bare: bool) -> None:
    def collate(samples: list[Any]) -> Any:
        graphs = Graphs(torch.tensor([sample["x"] for sample in samples]))
        return graphs if bare else {"graphs": graphs}

    current, recorded = MagicMock(), list[Any]()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, to: recorded.append((tensor.device.type, to)))
    delivery = Delivery(torch.device("cpu"), collate_fn=collate)
    placement = delivery._placement
    placement._device, placement._stream = torch.device("meta"), MagicMock()  # as on a machine with a GPU
    (cut,) = cut_all(Cutter(), [(whole(0, [[{"x": 1.0}], [{"x": 2.0}]]), 2)], 2)
    batch, event = delivery.deliver(cut)
    graphs = batch if bare else batch["graphs"]
    assert (graphs.x.device.type, graphs.x.shape) == ("meta", (2,))
    delivery.arrived(batch, event)
    current.wait_event.assert_called_once_with(event)
    assert recorded == [("meta", current)] * (1 if bare else 2), "with the column sample_id"


def unlike(start: int, stop: int, nested: bool) -> Columns:
    """A piece of a block that has columns of its own: numbers, rows and text, or samples of such parts."""
    n = stop - start
    own = {f"own {start}": np.arange(start, stop), f"rows {start}": np.ones((n, 2)), f"text {start}": ["a"] * n}
    if not nested:
        return {**columns(start, stop), **own}
    made = [
        {"x": float(i), "box": {"at": np.ones(2)}, **{k: v[i - start] for k, v in own.items()}}
        for i in range(start, stop)
    ]
    return whole(start, [[sample] for sample in made])


@pytest.mark.parametrize("nested", [False, True])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), size=st.integers(1, 9))
def test_what_a_block_lacks_is_none(nested: bool, lengths: list[int], size: int) -> None:
    """Tar shards with optional members, Parquet files, and unions of Datasets give blocks of different columns."""
    ends = np.cumsum(lengths).tolist()
    pieces = [(unlike(end - n, end, nested), n) for end, n in zip(ends, lengths, strict=True)]
    block = {i: int(end - n) for end, n in zip(ends, lengths, strict=True) for i in range(end - n, end)}
    seen = list[int]()
    for cut in cut_all(Cutter(), pieces, size):
        batch, _ = CPU.deliver(cut)
        ids = batch["sample_id"].tolist()
        seen += ids
        assert batch["x"].tolist() == ids
        for start in {block[i] for i in ids}:
            assert list(batch[f"own {start}"]) == [i if block[i] == start else None for i in ids]
            assert list(batch[f"text {start}"]) == ["a" if block[i] == start else None for i in ids]
            assert [row is not None for row in batch[f"rows {start}"]] == [block[i] == start for i in ids]
        filler, _ = CPU.deliver(cut.first(4).again())
        assert len(filler["x"]) == 4
        assert filler.keys() <= batch.keys() | {"sample_id"}
    assert seen == list(range(ends[-1]))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fillers_have_enough_rows_whatever_the_first_batch_had(rows: int) -> None:
    for piece in (columns(0, rows), whole(0, [[{"x": torch.tensor(float(i))}] for i in range(rows)])):
        (cut,) = cut_all(Cutter(), [(piece, rows)], 3)
        filler, _ = CPU.deliver(cut.first(2).again())
        assert filler["x"].tolist() == ([0.0, 0.0] if rows == 1 else [0.0, 1.0])
