"""State as plain data, which a checkpoint can hold and ``torch.load(weights_only=True)`` reads back.

A ``state_dict`` may hold anything: numpy numbers, a ``deque``, a ``Namespace``. torch saves them all, but refuses to load many of
them. :func:`to_plain` turns data into plain containers, and names the first object that is not data; :func:`from_plain` is its
inverse. Where it stops: it refuses objects of unknown classes, since training would resume with a different state.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import io
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from offload.train.checkpoints.sharded import is_part

TAG = "__offload_type__"
_LEAVES = (type(None), bool, int, float, str)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, bytes)
}


def _octets(value: bytes | bytearray) -> torch.Tensor:
    """Bytes as a tensor: pickled bytes would grow by half, and torch does not load empty ones."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


# type → (a function to plain data, a function back to the type)
_CONVERTED: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    set: (list, set),
    frozenset: (list, frozenset),
    Counter: (dict, Counter),
    argparse.Namespace: (vars, lambda content: argparse.Namespace(**content)),
    types.SimpleNamespace: (vars, lambda content: types.SimpleNamespace(**content)),
    deque: (
        lambda value: {"items": list(value), "maxlen": value.maxlen},
        lambda content: deque(content["items"], content["maxlen"]),
    ),
    bytes: (_octets, lambda content: content.numpy().tobytes()),
    bytearray: (_octets, lambda content: bytearray(content.numpy().tobytes())),
    complex: (lambda value: [value.real, value.imag], lambda content: complex(*content)),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda content: datetime.timedelta(*content),
    ),
    decimal.Decimal: (str, decimal.Decimal),
    uuid.UUID: (str, uuid.UUID),
}
_BY_NAME = {kind.__name__: make for kind, (_, make) in _CONVERTED.items()}


class NotPlainError(ValueError):
    """A checkpoint cannot hold ``what`` at ``where``."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where} is {what}, and a checkpoint can hold only data that loads without running code: numbers, text, "
            "tensors, arrays, and lists or dicts of those."
        )


def to_plain(value: Any, where: str, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """Return a copy of a state as data that torch loads under ``weights_only``.

    Args:
        value: any nesting of containers, numbers, text, tensors and arrays.
        where: its name in messages, such as ``the state of AdamW``.
        tensor: returns the replacement of each tensor, such as a copy on the CPU.

    Raises:
        NotPlainError: if an object is not data; it names the first one, its place, and its type.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    # Exact types: a subclass may hold more than its values.
    if kind in _TENSORS or is_part(value):
        return tensor(value)
    if kind is list or kind is tuple:
        return kind(to_plain(element, f"{where}[{i}]", tensor) for i, element in enumerate(value))
    if kind is dict or kind is OrderedDict:
        return _plain_dict(value, where, tensor)
    if kind is defaultdict:
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise NotPlainError(where, f"a defaultdict whose factory is {factory!r}")
        content = _plain_dict(dict(value), where, tensor)
        return {TAG: "defaultdict", "content": content, "factory": factory and factory.__name__}
    if kind in _CONVERTED:
        return {TAG: kind.__name__, "content": to_plain(_CONVERTED[kind][0](value), where, tensor)}
    if isinstance(value, np.ndarray):
        return _plain_array(value, where)
    # NumPy's numbers become Python's where nothing is lost. Times and others keep their type, as an array of one.
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        item = value.item()
        if type(item) in (*_LEAVES, bytes, complex) and value.dtype.kind not in "mM":
            return to_plain(item, where, tensor)
        return {TAG: "scalar", "content": _plain_array(np.asarray(value), where)}
    for base in (int, float, str):  # for example members of an IntEnum, which equal their value
        if isinstance(value, base):
            return base(value)
    if _loads(value):
        return value
    raise NotPlainError(where, _called(value))


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`. Raises ValueError for anything that :func:`to_plain` did not write."""
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    if type(value) is OrderedDict:
        for key in value:
            value[key] = from_plain(value[key])
        return value
    if type(value) is not dict:
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    try:
        content = from_plain(value["content"])
        if kind == "ndarray":
            return np.frombuffer(content.numpy().tobytes(), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        if kind == "scalar":
            return content[()]
        if kind == "defaultdict":
            return defaultdict(value["factory"] and _FACTORIES[value["factory"]], content)
        return _BY_NAME[kind](content)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"it holds an invalid {kind!r} ({type(error).__name__}: {error})") from None


def _plain_dict(value: Mapping[Any, Any], where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    plain: Any = type(value)()
    for key, item in value.items():
        named = to_plain(key, f"a key of {where}", tensor)
        try:
            hash(named)
        except TypeError:  # data that becomes a dict, such as a date, cannot be a key
            raise NotPlainError(f"a key of {where}", _called(key)) from None
        if named == TAG:
            raise NotPlainError(where, f"a dict with the key {TAG!r}, which offload uses itself")
        plain[named] = to_plain(item, f"{where}[{key!r}]", tensor)
    if (metadata := getattr(value, "_metadata", None)) is not None:  # the versions of a model's modules
        plain._metadata = to_plain(metadata, f"{where}._metadata", tensor)
    return plain


def _plain_array(value: np.ndarray[Any, Any], where: str) -> dict[str, Any]:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise NotPlainError(where, f"an array of {value.dtype}")
    return {TAG: "ndarray", "content": _octets(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}


def _loads(value: Any) -> bool:
    """Return whether torch saves a value, and loads it without the classes that this process has declared safe. The resuming process may
    declare them too late."""
    declared: Any = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # an object's own pickle hooks may raise anything
        return False
    finally:
        torch.serialization.add_safe_globals(declared)
    return True


def _called(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"of type {name}"
