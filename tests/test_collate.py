"""Ready-made collate functions, here and under torch's own DataLoader."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import collate
from offload.errors import ConfigError, RunError

TEXTS = [{"ids": torch.arange(n), "labels": torch.arange(n), "n": n, "name": f"t{n}"} for n in (3, 5, 2)]


def test_pad_fills_up_to_the_longest_and_says_what_is_real() -> None:
    batch = collate.pad({"labels": -100})(TEXTS)
    assert batch["ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch["labels"][2].tolist() == [0, 1, -100, -100, -100]
    assert batch["mask"].sum(1).tolist() == [3, 5, 2]
    assert batch["n"].tolist() == [3, 5, 2]
    assert batch["name"] == ["t3", "t5", "t2"]


def test_pad_takes_tuples_several_dimensions_and_multiples() -> None:
    images = [(torch.ones(1, 2, 3), 0), (torch.ones(1, 4, 2), 1)]
    batch, labels, mask = collate.pad(multiple_of=8)(images)
    assert batch.shape == (2, 8, 4, 3)
    assert float(batch.sum()) == 6 + 8
    assert labels.tolist() == [0, 1]
    assert mask.shape == (2, 8)


@pytest.mark.parametrize("first", [[], [1, 2]])
def test_lists_of_numbers_become_tensors_of_one_type(first: list[int]) -> None:
    """Whole numbers among others, and a first list that is empty."""
    whole, halves = [{"ids": first}, {"ids": [3]}], [{"at": first}, {"at": [0.5]}]
    assert collate.pad()(whole)["ids"].dtype == collate.pack()(whole)["ids"].dtype == torch.int64
    assert collate.pad()(halves)["at"][1, 0] == collate.pack()(halves)["at"][-1] == 0.5
    assert collate.nest()(halves)["at"].dtype == torch.float32


def test_a_batch_without_padding_has_a_mask_too() -> None:
    batch = collate.pad(mask="real")(TEXTS[:1])
    assert batch["real"].tolist() == [[True] * 3]
    ids, label, mask = collate.pad()([(torch.zeros(2), 0), (torch.ones(2), 1)])
    assert (ids.shape, label.tolist(), mask.tolist()) == ((2, 2), [0, 1], [[True] * 2] * 2)
    pictures = [{"image": torch.zeros(3, 4, 4), "ids": torch.arange(5)}]
    assert collate.pad(length="ids")(pictures)["mask"].shape == (1, 5)
    assert "mask" not in collate.pad()(pictures)  # it could be the images' or the texts'
    assert "mask" not in collate.pad()([{"n": 1}, {"n": 2}])


def test_lengths_are_rounded_up_in_batches_without_padding_too() -> None:
    for texts in (TEXTS, TEXTS[:1], [TEXTS[1]] * 2):
        batch = collate.pad({"labels": -100}, length="ids", multiple_of=8)(texts)
        assert batch["ids"].shape == batch["labels"].shape == batch["mask"].shape == (len(texts), 8)
        assert batch["mask"].sum(1).tolist() == batch["n"].tolist()


@pytest.mark.parametrize("boxes", [(2, 2), (2, 3)])
@pytest.mark.parametrize("ids", [(5, 5), (5, 4)])
def test_the_mask_is_that_of_the_named_column_in_every_batch(boxes: tuple[int, int], ids: tuple[int, int]) -> None:
    samples = [{"boxes": torch.zeros(n, 4), "ids": torch.arange(m)} for n, m in zip(boxes, ids, strict=True)]
    assert collate.pad(length="ids")(samples)["mask"].sum(1).tolist() == list(ids)


def test_a_column_of_the_samples_is_not_replaced() -> None:
    # As a tokenizer with padding="max_length" gives them: the mask of equally long texts knows what is real.
    texts = [{"ids": torch.tensor([5, 6, 0]), "real": torch.tensor([1, 1, 0])}] * 2
    assert collate.pad(mask="real")(texts)["real"].tolist() == [[1, 1, 0]] * 2
    batch = collate.pad(mask="real", length="ids", multiple_of=4)(texts)
    assert batch["ids"].shape == batch["real"].shape == (2, 4)
    assert batch["real"].tolist() == [[1, 1, 0, 0]] * 2
    pictures = [{"image": torch.zeros(3, n, 4), "mask": torch.full((n, 4), 7)} for n in (2, 3)]
    assert collate.pad()(pictures)["mask"][1].tolist() == [[7] * 4] * 3
    assert collate.pad(mask="seen")(pictures)["seen"].tolist() == [[True] * 3] * 2
    assert collate.pad()([{"ids": torch.arange(n), "mask": n} for n in (1, 2)])["mask"].tolist() == [1, 2]
    placed = [{"ids": torch.arange(3), "position_ids": torch.tensor([4, 5, 6])}]
    assert collate.pack()(placed)["position_ids"].tolist() == [4, 5, 6]


def test_samples_of_a_single_value_are_one_column() -> None:
    ids, mask = collate.pad()([torch.ones(2), torch.ones(3), torch.ones(1)])
    assert ids.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert mask.sum(1).tolist() == [2, 3, 1]
    ids, positions, offsets = collate.pack()([torch.ones(2), torch.ones(1)])
    assert (ids.tolist(), positions.tolist(), offsets.tolist()) == ([1, 1, 1], [0, 1, 0], [0, 2, 3])


@pytest.mark.parametrize("make", [collate.pad, collate.nest])
def test_lists_of_numbers_of_one_length_are_stacked_too(make: Any) -> None:
    batch = make()([{"ids": [1, 2, 3], "box": (0.5, 1)}, {"ids": [4, 5, 6], "box": (2, 3)}])
    assert batch["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["box"].tolist() == [[0.5, 1], [2, 3]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_pack_loses_nothing_and_tells_where_samples_begin(lengths: list[int]) -> None:
    samples = [{"ids": torch.full((n,), i)} for i, n in enumerate(lengths)]
    batch = collate.pack()(samples)
    starts = batch["cu_seqlens"].tolist()
    assert len(batch["ids"]) == sum(lengths) == starts[-1]
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        assert batch["ids"][part].tolist() == [i] * n
        assert batch["position_ids"][part].tolist() == list(range(n))


def test_nest_and_lists_keep_each_sample() -> None:
    nested = collate.nest()(TEXTS)["ids"]
    assert [each.tolist() for each in nested.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]
    images, targets = collate.lists()([(torch.ones(n), {"boxes": torch.zeros(n, 4)}) for n in (1, 2)])
    assert [len(image) for image in images] == [1, 2]
    assert [len(target["boxes"]) for target in targets] == [1, 2]


@pytest.mark.parametrize("make", [collate.pad, collate.pack, collate.nest])
@pytest.mark.parametrize(
    "values", [[["a"], ["b", "c"]], [["a"], ["b"]], [datetime(2026, 1, 1), None], [{1}, {2, 3}], [None, 1.5]]
)
def test_what_torch_does_not_collate_stays_a_list(make: Any, values: list[Any]) -> None:
    samples = [{"ids": [1] * (2 + i), "more": value} for i, value in enumerate(values)]
    assert make()(samples)["more"] == values


def test_they_work_with_torchs_own_loader() -> None:
    (batch,) = torch.utils.data.DataLoader(TEXTS, batch_size=3, collate_fn=collate.pad())  # type: ignore[arg-type]
    assert batch["ids"].shape == (3, 5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: collate.pad(max_tokens=0), "pad: max_tokens must be at least 1"),
        (lambda: collate.pad([1]), "pad: values must be a dict of padding values by column"),  # type: ignore[arg-type]
        (lambda: collate.pad(multiple_of=0), "pad: multiple_of must be"),
    ],
)
def test_bad_arguments_are_named(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        make()


ROWS = [{"id": 7, "text": "a b", "score": torch.tensor(0.5), "ids": list(range(n)), "box": [1.0] * 4} for n in (2, 3)]
"""As Hugging Face's data sets give them: ids, text and labels come before the tokens."""


@pytest.mark.parametrize("make", [collate.pad, collate.pack, collate.nest, collate.lists])
def test_tokens_are_those_of_the_first_array_of_numbers(make: Any) -> None:
    function = make(max_tokens=5)
    assert [function.tokens(row) for row in ROWS] == [2, 3]
    assert function.tokens(tuple(ROWS[0].values())) == 2
    assert function.tokens([7, np.int64(8), np.array(1.5), b"a", np.arange(6)]) == 6
    assert make(length="box").tokens(ROWS[0]) == 4
    function(ROWS)


def test_pack_takes_rows_that_begin_with_text() -> None:
    batch = collate.pack()([{name: row[name] for name in ("text", "id", "ids")} for row in ROWS])
    assert (batch["text"], batch["id"].tolist()) == (["a b"] * 2, [7, 7])
    assert (batch["ids"].tolist(), batch["cu_seqlens"].tolist()) == ([0, 1, 0, 1, 2], [0, 2, 5])


@pytest.mark.parametrize("make", [collate.pad, collate.pack, collate.nest, collate.lists])
def test_what_has_no_length_of_tokens_is_named_with_a_column_that_has(make: Any) -> None:
    name = make.__name__

    def said(sample: Any, **options: Any) -> str:
        with pytest.raises(RunError) as caught:
            make(max_tokens=9, **options).tokens(sample)
        return str(caught.value)

    assert said(ROWS[0], length="text") == (
        f"{name} counts the tokens of a sample by its column 'text', which holds 'a b': that has no length of tokens. Name the column "
        f"of tokens: {name}(length='ids', ...)."
    )
    # Missing in some samples only, it must not make the batch count different columns.
    assert "column 'caption', which holds nothing: that has no length" in said({"caption": None, "ids": [1]})
    assert (
        f"value 0, which holds ['a', 'b']: that has no length of tokens. Name the column of tokens: {name}(length=1"
        in said((["a", "b"], [1, 2]))
    )
    assert f"{name}(length='input_ids', ...)" in said({"meta": {"a": 1}})
    assert said({"text": "a b", "label": 3}).startswith(
        f"{name} counts the tokens of a sample by its first array of numbers, and a sample has none: {{'text': 'a b', 'label': 3}}. Return"
    )
    assert "has none: 'a b'" in said("a b")


def test_what_cannot_be_padded_or_counted_is_named() -> None:
    with pytest.raises(RunError, match=r"cannot pad column 'x': its values have 1 and 2 dimensions"):
        collate.pad()([{"x": torch.zeros(2)}, {"x": torch.zeros(2, 2)}])
    with pytest.raises(RunError, match="counts the tokens of column 'y', and a sample has no such value"):
        collate.pack(length="y").tokens({"x": torch.zeros(2)})
