"""The wire format of a block's columns on their way from a preprocessing task to a worker.

A block is an Arrow table of one chunk. Tensors are Arrow's own fixed-shape tensors: a worker on the task's host sees them without a
copy, a worker on another host after one transfer. Arrays of types that Arrow lacks (complex numbers, bfloat16, records) travel as
the bytes of their rows. Text and bytes travel as Arrow's own types, any other Python object pickled, row by row. Three more columns
travel with the user's: `sample_id`, the sample's position in its pass, and the reasons for skipped samples.

Where it stops: bytes in, bytes out; nothing here knows ranks, devices or transforms.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline.program.pickling import dumps_back


def as_arrays(lists: pa.Array) -> list[NDArray[Any]] | None:
    """An array for each list, or for each list of lists of one length. The arrays are writable.

    A missing float is NaN. Return None if any list is missing or holds something else: other values, other missing numbers, or lists that
    differ in length.
    """
    kind = lists.type
    fixed = pa.types.is_fixed_size_list(kind)
    if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or lists.null_count:
        return None
    inner = lists.flatten()
    ends = np.arange(len(lists) + 1) * kind.list_size if fixed else lists.offsets.to_numpy() - lists.offsets[0].as_py()
    places = list(itertools.pairwise(ends.tolist()))
    of = inner.type
    if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_boolean(of):
        if inner.null_count and not pa.types.is_floating(of):
            return None
        numbers = np.array(inner.to_numpy(zero_copy_only=False))  # a copy, since Arrow's own are read-only
        return [numbers[start:stop] for start, stop in places]
    rows = as_arrays(inner)
    if not rows or any(len({row.shape for row in rows[start:stop]}) > 1 for start, stop in places):
        return None
    return [np.stack(rows[start:stop]) if stop > start else rows[0][:0] for start, stop in places]


SAMPLE_ID = "sample_id"
POSITION = "__position__"
ERROR = "__error__"
HIDDEN = (POSITION, ERROR)

Array = NDArray[Any]
Column = Array | list[Any]
Columns = dict[str, Column]


class RaggedError(ValueError):
    """Rows of one column differ in shape: ``shapes`` holds two different shapes, ``rows`` the first row of each."""

    def __init__(self, column: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], rows: tuple[int, int]) -> None:
        super().__init__(f"column {column!r} has rows of shapes {shapes[0]} and {shapes[1]}")
        self.column, self.shapes, self.rows = column, shapes, rows


class UnsendableError(TypeError):
    """A value cannot travel in a block. ``what`` describes it, ``instead`` is the remedy, ``column`` and ``row`` its place once known."""

    def __init__(self, what: str, instead: str, column: str = "", row: int = 0) -> None:
        super().__init__(f"{what} cannot be sent to a worker: {instead}")
        self.what, self.instead, self.column, self.row = what, instead, column, row


# Types of torch that numpy lacks, by their size in bytes. As an array, such a tensor is a record of one field, named after the type.
_TORCH_ONLY = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1}
_NUMBERS = "biufc"
_FIXED = _NUMBERS + "mMV"  # kinds of numpy types whose rows are bytes of one length
_ARROW = "biuf"  # those kinds that Arrow has, up to 8 bytes each
REMEDY_RAGGED = "Samples of a batch must agree: resize or crop them to one size in the transform, or pass a collate_fn."
_PLAIN = "numbers, arrays, tensors, text, bytes, or lists and dicts of these"


def stack(name: str, rows: Sequence[Any]) -> Column:
    """Stack the rows' arrays or numbers in one array. Other rows (text, bytes, objects, types without a common type) stay a list.

    Raises RaggedError if arrays differ in shape, UnsendableError if a row has no array in memory.
    """
    if not len(rows) or any(row is None or isinstance(row, str | bytes | Mapping | set) for row in rows):
        return list(rows)
    if all(isinstance(row, list | tuple) and not row for row in rows):  # such as the objects of images without any
        return list(rows)
    examples = {type(row): row for row in rows if not isinstance(row, list | tuple) or row}
    if any(map(_is_container, examples.values())):
        return list(rows)
    arrays = []
    for i, row in enumerate(rows):
        try:
            arrays.append(as_array(row))
        except UnsendableError as error:
            raise UnsendableError(error.what, error.instead, name, i) from None
        except (ValueError, TypeError):  # nested lists without a shape, such as polygons
            return list(rows)
    if any(array.dtype.kind not in _FIXED or array.dtype.hasobject for array in arrays):
        return list(rows)
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise RaggedError(name, (arrays[0].shape, array.shape), (0, i))
    if (dtype := common_dtype(array.dtype for array in arrays)) is None:
        return list(rows)
    return np.stack(arrays, dtype=dtype.newbyteorder("="))  # torch has no other order of bytes


def _is_container(value: Any) -> bool:
    """Return whether NumPy would take this object, or the first of a list, for a list of its items, such as a graph for its nodes."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    kind = type(value)
    if isinstance(value, Sequence) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        return False
    if any(hasattr(kind, name) for name in ("__array__", "__array_interface__", "__array_struct__")):
        return False
    try:
        memoryview(value)
    except TypeError:
        return True
    return False  # it exposes its memory as an array


def common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any] | None:
    """The type that holds the values of all these types; None if there is none."""
    kinds = list(dict.fromkeys(dtypes))
    if len(kinds) == 1:
        return kinds[0]
    if not all(dtype.kind in _NUMBERS for dtype in kinds):
        same = len({dtype.kind for dtype in kinds}) == 1 and kinds[0].kind in "mMUS"
        return np.result_type(*kinds) if same else None
    result = np.result_type(*kinds)
    # NumPy promotes int64 and uint64 to float64, which cannot hold all values of either.
    return None if result.kind == "f" and all(dtype.kind in "biu" for dtype in kinds) else result


def stack_lists(name: str, rows: list[Any]) -> Column:
    """Stack rows that are lists or arrays of numbers, as :func:`stack` does.

    Rows of different lengths become a list of arrays, which a transform may pad. Other rows stay unchanged.
    """
    if not rows or not all(isinstance(row, list | np.ndarray) for row in rows):
        return rows
    try:
        return stack(name, rows)
    except RaggedError:
        return [as_array(row) for row in rows]


def join(parts: Sequence[Column]) -> Column:
    """Concatenate the parts of one column; arrays must agree in shape."""
    if len(parts) == 1:
        return parts[0]
    parts = typed(parts)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and (dtype := common_dtype(array.dtype for array in arrays)) is not None:
        return np.concatenate(arrays, dtype=dtype)
    return listed(parts)


def listed(parts: Sequence[Column]) -> list[Any]:
    """The rows of all parts. Bools become Python's, as they are in a column where one is missing."""
    plain = (p.tolist() if isinstance(p, np.ndarray) and p.dtype == bool and p.ndim == 1 else p for p in parts)
    return [row for part in plain for row in part]


def typed(parts: Sequence[Column]) -> Sequence[Column]:
    """The parts of a column, with None in those that hold only NaN, unless the other parts hold numbers.

    Ray fills a column with NaN in a block where it has no value, since nothing tells its type there.
    """
    unknown = [_is_nothing(part) for part in parts]
    known = [part for part, nothing in zip(parts, unknown, strict=True) if len(part) and not nothing]
    if not any(unknown) or all(map(_is_of_numbers, known)):
        return parts
    return [[None] * len(part) if nothing else part for part, nothing in zip(parts, unknown, strict=True)]


def _is_nothing(part: Column) -> bool:
    if not isinstance(part, np.ndarray) or part.dtype != np.float32 or part.ndim != 1 or not len(part):
        return False
    return bool(np.isnan(part[0]) and np.isnan(part).all())


def _is_of_numbers(part: Column) -> bool:
    if isinstance(part, np.ndarray):
        return part.ndim == 1 and part.dtype.kind in "iuf"
    return all(row is None or (isinstance(row, int | float | np.number) and not isinstance(row, bool)) for row in part)


def parts_of_columns(pieces: Sequence[Columns], rows: Sequence[int]) -> dict[str, list[Column]]:
    """The parts of each column, one from each piece. ``rows``: the number of rows of each piece.

    A column that a piece lacks is None there, as Arrow and Ray fill it: a member of some tar shards, or a column of some Parquet files.
    """
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {
        name: [piece[name] if name in piece else [None] * count for piece, count in zip(pieces, rows, strict=True)]
        for name in names
    }


def take(columns: Columns, rows: Sequence[int] | np.ndarray[Any, Any]) -> Columns:
    """The rows with these numbers, of every column."""
    return {n: _selected(c, rows) if isinstance(c, np.ndarray) else [c[i] for i in rows] for n, c in columns.items()}


def _selected(column: Array, rows: Sequence[int] | np.ndarray[Any, Any]) -> Array:
    # For short rows, take() is several times as fast as column[rows]. But it first copies a column that is not contiguous.
    return column.take(rows, axis=0) if column.flags.c_contiguous and len(rows) else column[rows]


def as_array(value: Any) -> Array:
    """A PIL image, tensor, array, number or nested list as an array, in its own layout.

    Raises UnsendableError if its values do not lie in memory like those of an array.
    """
    if type(value) is np.ndarray:
        return value
    if is_tensor(value):
        return _of_tensor(value)
    if type(value).__name__ == "MaskedArray":
        raise UnsendableError("a masked array", "fill it (.filled(0)) and return its mask as a column of its own")
    return np.asarray(value)


def is_tensor(value: Any) -> bool:
    """Return whether the value is a tensor of torch, of any subclass. Imports nothing."""
    # While another thread still imports torch, its module lacks some names.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def is_pillow(value: Any) -> bool:
    """Return whether the value is an image of Pillow's. Imports nothing."""
    kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return kind is not None and isinstance(value, kind)


def _of_tensor(tensor: Any) -> Array:
    layout, dtype = str(tensor.layout).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        raise UnsendableError("a nested tensor", "return a list of tensors, or pad them to one shape")
    if layout != "strided":
        raise UnsendableError(f"a sparse tensor ({layout})", "return .to_dense()")
    if tensor.is_quantized:
        raise UnsendableError(f"a quantized tensor ({dtype})", "return .dequantize() or .int_repr()")
    try:
        here = tensor.detach().cpu()
        if dtype in _TORCH_ONLY:
            torch, size = sys.modules["torch"], _TORCH_ONLY[dtype]
            plain = here.contiguous().view(torch.int16 if size == 2 else torch.uint8).numpy()
            return np.asarray(plain.view(np.dtype([(dtype, plain.dtype)])))
        return np.asarray(here.resolve_conj().resolve_neg().numpy())
    except (RuntimeError, TypeError, NotImplementedError) as error:  # for example on the device "meta"
        why = str(error).strip().split("\n")[0]
        raise UnsendableError(
            f"a {dtype} tensor on {tensor.device} ({why})", "return a dense tensor on the CPU"
        ) from None


def torch_only(dtype: np.dtype[Any]) -> str | None:
    """The torch type that arrays of this type represent, such as ``bfloat16``."""
    return (
        dtype.names[0] if dtype.names is not None and len(dtype.names) == 1 and dtype.names[0] in _TORCH_ONLY else None
    )


def encode(columns: Mapping[str, Column]) -> pa.Table:
    """The block of these columns, zero-copy for contiguous arrays.

    Raises UnsendableError for objects that cannot be pickled.
    """
    return pa.table({name: _encode(name, column) for name, column in columns.items()})


def _encode(name: str, column: Column) -> pa.Array:
    if not isinstance(column, np.ndarray) or column.dtype.hasobject:
        return _encode_rows(name, list(column))
    if column.dtype.kind == "U" and column.ndim == 1:
        return _encode_rows(name, column.tolist())
    if column.dtype.kind == "S" and column.ndim == 1:
        return pa.array(column)
    if column.dtype.kind not in _FIXED + "SU":
        return _encode_rows(name, list(column))
    column = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))
    of_arrow = column.dtype.kind in _ARROW and column.dtype.itemsize <= 8
    if column.ndim <= 1 and of_arrow:
        return pa.array(column)
    width = int(np.prod(column.shape[1:]))
    if of_arrow and width:
        kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(column.dtype), column.shape[1:])
        return pa.ExtensionArray.from_storage(
            kind, pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), width)
        )
    rows = RowsType(column.dtype, column.shape[1:])
    content = pa.py_buffer(column.reshape(-1).view(np.uint8))
    return pa.ExtensionArray.from_storage(rows, pa.Array.from_buffers(rows.storage_type, len(column), [None, content]))


def _encode_rows(name: str, rows: list[Any]) -> pa.Array:
    for kind, of in ((str, pa.string()), (bytes, pa.binary())):
        if all(row is None or isinstance(row, kind) for row in rows):
            with contextlib.suppress(pa.ArrowException, UnicodeError):  # invalid text, such as half of a surrogate pair
                return pa.array(rows, of)
    pickled = []
    for i, row in enumerate(rows):
        try:
            pickled.append(dumps_back(row))
        except Exception as error:  # a user's class may raise anything
            value = f"an object of type {type(row).__name__} ({first_line(error)})"
            raise UnsendableError(value, f"return {_PLAIN}", name, i) from None
    return pa.ExtensionArray.from_storage(ObjectType(), pa.array(pickled, pa.large_binary()))


def decode(block: pa.Table, *, foreign: bool = False) -> Columns:
    """The columns of a block: views of its memory, read-only, for numbers and tensors; lists for anything else.

    ``foreign``: the block comes from outside, for example from a user's file. Nothing in it is unpickled, since that could run
    code.
    """
    return {name: _decode(name, block.column(name), foreign) for name in block.column_names}


def _decode(name: str, column: pa.ChunkedArray, foreign: bool) -> Column:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if foreign and isinstance(array.type, ObjectType):
        array = array.storage
    if isinstance(array, pa.FixedShapeTensorArray):
        if array.null_count:
            there = iter(_decode(name, pa.chunked_array([array.drop_null()]), foreign))
            return [next(there) if valid else None for valid in array.is_valid().to_pylist()]
        if pa.types.is_boolean(array.type.value_type):  # Arrow packs them into bits and makes no tensors of them
            return np.reshape(array.storage.flatten().to_numpy(zero_copy_only=False), (-1, *array.type.shape))
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(array.type, RowsType):
        storage, width = array.storage, array.type.storage_type.byte_width
        content = np.frombuffer(storage.buffers()[1] or b"", np.uint8)
        content = content[storage.offset * width : (storage.offset + len(storage)) * width]
        return content.view(array.type.dtype).reshape(len(storage), *array.type.shape)
    if isinstance(array.type, ContentsType):
        _, ends, content = array.storage.buffers()
        at = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
        whole = np.frombuffer(content or b"", np.uint8)
        return [whole[start:stop] for start, stop in itertools.pairwise(at.tolist())]
    if isinstance(array.type, ObjectType):
        try:
            return [pickle.loads(row) for row in array.storage.to_pylist()]
        except Exception as error:
            raise RunError(
                f"column {name!r} holds objects that cannot be loaded in a worker: {first_line(error)}. Return {_PLAIN}."
            ) from None
    if not array.null_count and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return _numbers(array)
    if is_whole(array) and not pa.types.is_time(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    lists = as_arrays(array)
    return list(array.to_pylist()) if lists is None else lists


def _numbers(array: pa.Array) -> NDArray[Any]:
    """The same memory as an array. Arrow's own conversion imports pandas, for which the first batch of every worker would wait."""
    content = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return content[array.offset : array.offset + len(array)]


def is_whole(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether NumPy has a value for each row of a column of numbers or times.

    A missing float is NaN, whichever rows a chunk holds, since pandas writes NaN as missing. NumPy has no missing integer or bool.
    """
    return bool(pa.types.is_primitive(column.type)) and (
        column.null_count == 0 or bool(pa.types.is_floating(column.type))
    )


def first_line(error: BaseException) -> str:
    """``ValueError: text``: the error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


class ContentsType(pa.ExtensionType):  # type: ignore[misc]
    """Rows of bytes, read as views of the block's memory."""

    def __init__(self) -> None:
        super().__init__(pa.large_binary(), "offload.contents")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> ContentsType:
        return cls()


class RowsType(pa.ExtensionType):  # type: ignore[misc]
    """Arrays of a numpy type that Arrow lacks, as the bytes of each row."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        super().__init__(pa.binary(dtype.itemsize * int(np.prod(shape))), "offload.rows")

    def __arrow_ext_serialize__(self) -> bytes:
        return repr((np.lib.format.dtype_to_descr(self.dtype), self.shape)).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> RowsType:
        # A user's Parquet file may name this type, too: none of its content may run.
        descr, shape = ast.literal_eval(serialized.decode())
        return cls(np.lib.format.descr_to_dtype(descr), tuple(shape))


class ObjectType(pa.ExtensionType):  # type: ignore[misc]
    """Python objects, pickled."""

    def __init__(self) -> None:
        super().__init__(pa.large_binary(), "offload.object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> ObjectType:
        return cls()


for _kind in (RowsType(np.dtype(np.uint8), (1,)), ObjectType(), ContentsType()):
    with contextlib.suppress(pa.ArrowKeyError):  # registered already: this module was loaded again
        pa.register_extension_type(_kind)
