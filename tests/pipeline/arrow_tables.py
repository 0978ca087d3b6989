"""Random tables of Arrow, of all types that Ray's blocks may hold, and their values without types."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import strategies as st

SAFE = 2**53  # larger integers are rounded where some are missing
_KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-SAFE, SAFE),
    pa.uint64(): st.integers(0, SAFE),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=4),
    pa.timestamp("us"): st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1)),
}
_OTHER_KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.float16(): st.floats(width=16, allow_nan=False).map(np.float16),  # older versions of pyarrow take no others
    pa.large_string(): st.text(max_size=4),
    pa.binary(): st.binary(max_size=4),
    pa.large_binary(): st.binary(max_size=4),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.dates(datetime.date(1700, 1, 1), datetime.date(2200, 1, 1)),
    pa.date64(): st.dates(datetime.date(1700, 1, 1), datetime.date(2200, 1, 1)),
    pa.timestamp("ms", "UTC"): st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1)).map(
        lambda moment: moment.replace(microsecond=0, tzinfo=datetime.UTC)
    ),
    pa.time64("us"): st.times(),
    pa.duration("us"): st.timedeltas(datetime.timedelta(days=-9), datetime.timedelta(days=9)),
    pa.decimal128(9, 2): st.decimals(-999, 999, places=2),
}


def _nested(kind: pa.DataType, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[pa.DataType, Any]]:
    """Columns of a type, and of lists, structs and categories of it: each type with what makes its values."""
    return st.sampled_from(
        [
            (kind, values),
            (pa.list_(kind), st.lists(values, max_size=3)),
            (pa.large_list(kind), st.lists(values, max_size=3)),
            (pa.list_(kind, 2), st.lists(values, min_size=2, max_size=2)),
            (pa.list_(pa.list_(kind)), st.lists(st.lists(values, max_size=2), max_size=2)),
            (
                pa.struct([("a", kind), ("b", pa.string())]),
                st.fixed_dictionaries({"a": values, "b": st.text(max_size=2)}),
            ),
            (pa.list_(pa.struct([("a", kind)])), st.lists(st.fixed_dictionaries({"a": values}), max_size=2)),
        ]
    )


def _has_a_size(kind: pa.DataType, value: Any) -> bool:
    """Return whether pyarrow tells the bytes of such a column, for which Ray asks."""
    try:
        return bool(pa.table({"x": pa.array([value], kind)}).nbytes)
    except pa.ArrowTypeError:
        return False


_VIEWS: dict[pa.DataType, st.SearchStrategy[Any]] = (
    {pa.string_view(): st.text(max_size=4)} if _has_a_size(pa.string_view(), "text") else {}
)  # Ray cannot store parts of them


@st.composite
def arrow_columns(draw: st.DrawFn, *, of_pandas: bool = False, stored: bool = False, columns: int = 3) -> pa.Table:
    """A table of at most so many columns of any type, with and without missing values. ``of_pandas``: of types that pandas has, too;
    ``stored``: of those that Ray can store."""
    rows = draw(st.integers(1, 8))
    kinds = {**_KINDS, **({} if of_pandas else _OTHER_KINDS), **({} if of_pandas or stored else _VIEWS)}
    made: dict[str, pa.Array] = {}
    for number in range(draw(st.integers(1, columns))):
        kind, values = draw(st.sampled_from(list(kinds.items())))
        if not of_pandas:
            kind, values = draw(_nested(kind, values))
        if draw(st.booleans()):
            values = st.none() | values
        column = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
        primitive = pa.types.is_integer(kind) or pa.types.is_string(kind)
        made[f"c{number}"] = column.dictionary_encode() if primitive and draw(st.booleans()) else column
    return pa.table(made)


def is_missing(value: Any) -> bool:
    return value is None or bool(pd.api.types.is_scalar(value) and pd.isna(value))


def plain(value: Any) -> Any:
    """The value without the types of NumPy, pandas and Arrow."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if is_missing(value):
        return None
    if isinstance(value, datetime.datetime | datetime.date | np.datetime64):
        moment = pd.Timestamp(value)
        return (moment.tz_convert(None) if moment.tz else moment).as_unit("us").value
    if isinstance(value, datetime.timedelta | np.timedelta64):
        return pd.Timedelta(value).as_unit("us").value
    value = value.item() if isinstance(value, np.generic) else value
    return (
        float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    )  # as where some are missing
