"""Values on their way between processes of this machine."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from offload.actors.values import SMALL_BYTES, Answer, Packed
from offload.process.memory import ALIGNMENT, Memory
from offload.process.messages import pair, receive, send

SIZES = st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=4)


def same(packed: Packed) -> Packed:
    """The value after it has travelled, with its files."""
    ours, its = pair()
    with ours, its:
        send(ours, packed)
        arrived: Packed = receive(its)
    return arrived


@given(SIZES)
def test_arrays_arrive_as_they_were_and_aligned(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    arrived = same(Packed.of({"arrays": arrays, "text": "ü"})).value()
    assert arrived["text"] == "ü"
    for array, there in zip(arrays, arrived["arrays"], strict=True):
        np.testing.assert_array_equal(there, array)
        assert not there.size or there.ctypes.data % min(ALIGNMENT, 16) == 0


def test_large_values_share_their_memory_and_small_ones_do_not() -> None:
    large, small = Packed.of(np.zeros(SMALL_BYTES + 1, np.uint8)), Packed.of(np.zeros(8, np.uint8))
    copy = same(large)
    copy.value()[:] = 7
    assert large.value()[-1] == 7
    small.value()
    assert not isinstance(small.content, Memory)


def test_a_table_is_read_where_it_lies() -> None:
    table = pa.table({"x": np.arange(100_000)})
    arrived = same(Packed.of(table)).value()
    assert arrived.equals(table)
    first, second = (arrived["x"].chunk(0).buffers()[1].address for _ in range(2))
    assert first == second


def test_a_value_refers_to_other_values_without_a_copy() -> None:
    inner = Answer.of(np.zeros(SMALL_BYTES + 1, np.uint8))
    outer = same(Packed.of({"twice": [inner, inner], "rest": 1}))
    assert len(outer.memories) == 1
    one, other = outer.value()["twice"]
    one.result()[:] = 3
    assert inner.result()[0] == other.result()[0] == 3
    assert inner.hex() == one.hex() != Answer.of(0).hex()


def test_outside_of_a_message_a_value_travels_whole() -> None:
    array = np.arange(SMALL_BYTES + 1) % 251
    again: Answer = pickle.loads(pickle.dumps(Answer.of(array)))
    np.testing.assert_array_equal(again.result(), array)


def test_nested_packing_does_not_mix_up_references() -> None:
    class Late:
        def __reduce__(self) -> Any:
            Packed.of([Answer.of(1)])  # somebody else's value, packed meanwhile
            return int, (5,)

    assert same(Packed.of([Answer.of(2), Late(), Answer.of(3)])).value()[0].result() == 2
