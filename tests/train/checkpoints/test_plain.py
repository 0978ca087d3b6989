"""Whatever a checkpoint takes can be loaded again, equal and of the same type; all else is refused by name."""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offload.train.checkpoints.plain import NotPlainError, from_plain, to_plain


def loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(to_plain(value, "the state"), buffer)
    buffer.seek(0)
    return from_plain(torch.load(buffer, weights_only=True))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), pathlib.Path("a/b")])
)
KEYS = st.integers() | st.text(max_size=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3]))
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.lists(KEYS, max_size=3).map(Counter)
        | fields.map(lambda items: argparse.Namespace(**items))
        | fields.map(lambda items: types.SimpleNamespace(**items))
    )


@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_what_is_data_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = loaded(value)
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory


@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=4) | hnp.byte_string_dtypes(max_len=4),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
@example(np.array("NaT", "datetime64[Y]"))
def test_arrays_come_back_bit_by_bit_and_numbers_as_numbers(array: np.ndarray[Any, Any]) -> None:
    back = loaded({"array": array})["array"]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for number in array.reshape(-1)[:1]:
        np.testing.assert_array_equal(loaded([number])[0], number)


class Level(enum.IntEnum):
    LOW = 1


def test_what_equals_a_number_is_one() -> None:
    assert type(loaded(np.float64(0.1))) is float
    assert type(loaded(Level.LOW)) is int
    assert loaded({np.int64(3): np.bool_(True)}) == {3: True}


def test_a_model_keeps_the_versions_of_its_modules() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert loaded(state)._metadata == state._metadata


def test_tensors_are_replaced_by_what_is_asked_for() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    kept = to_plain({"weight": [weight]}, "the state", lambda each: each.detach().clone())
    with torch.no_grad():
        weight += 1
    assert kept["weight"][0].tolist() == [1, 1, 1]


Point = namedtuple("Point", "x y")


class Own:
    """A class of the user's."""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Own(), r"tests.train.checkpoints.test_plain.Own"),
        (lambda: 1, r"of type function"),
        (Point(1, 2), r"tests.train.checkpoints.test_plain.Point"),
        (defaultdict(lambda: 1), r"a defaultdict whose factory is <function"),
        (np.array([Own()]), r"an array of object"),
        (torch.Generator(), r"torch._C.Generator"),
        (type("Dict", (dict,), {})(), r"tests.train.checkpoints.test_plain.Dict"),
    ],
)
def test_what_is_no_data_is_refused_by_its_place_and_type(value: Any, says: str) -> None:
    with pytest.raises(
        NotPlainError, match=rf"^the state\['groups'\]\[1\] is .*{says}.* a checkpoint can hold only data"
    ):
        to_plain({"groups": [1, value]}, "the state")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (datetime.date(2026, 1, 2), "datetime.date"),
        (frozenset({1}), "frozenset"),
        (b"name", "bytes"),
        ((1, b"name"), "tuple"),
    ],
)
def test_a_key_that_would_become_a_dict_is_refused_by_its_type(key: Any, says: str) -> None:
    with pytest.raises(NotPlainError, match=rf"^a key of the state\['seen'\] is of type {says}, and a checkpoint"):
        to_plain({"seen": {key: 1}}, "the state")
    assert loaded({"seen": {(1, "name"): 1}}) == {"seen": {(1, "name"): 1}}


def test_a_class_that_this_process_declared_safe_is_refused_all_the_same() -> None:
    # The process that resumes reads the checkpoint before the user's function runs.
    with torch.serialization.safe_globals([Own]), pytest.raises(NotPlainError):
        to_plain(Own(), "the state")


def test_the_key_that_marks_converted_types_is_taken() -> None:
    with pytest.raises(NotPlainError, match="__offload_type__"):
        to_plain({"__offload_type__": "deque"}, "the state")
