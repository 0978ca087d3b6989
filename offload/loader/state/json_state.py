"""State as plain data for JSON: numbers, text, lists, and dicts whose keys are text.

Checkpoints and loggers write a loader's state as JSON, while samplers tell theirs with tensors, arrays and tuples. :func:`encoded` writes
these as text, and :func:`decoded` is its inverse. Where it stops: it takes only values that a checkpoint can hold, see
:mod:`offload.train.checkpoints.plain`.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
import zlib
from collections import OrderedDict
from typing import Any

import torch

from offload.train.checkpoints.plain import from_plain, to_plain

TAG = "__offload_json__"


def encoded(value: Any, where: str) -> Any:
    """A copy of ``value`` as plain data for JSON. ``where``: its name in messages. Raises NotPlainError for an object that is not data."""
    return _encoded(to_plain(value, where, lambda tensor: tensor.detach().cpu()))


def decoded(value: Any) -> Any:
    """The inverse of :func:`encoded`. Raises ValueError for anything that :func:`encoded` did not write."""
    try:
        return from_plain(_decoded(value))
    except (KeyError, TypeError, AttributeError, RuntimeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"it holds damaged data ({type(error).__name__}: {error})") from None


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind is float and not math.isfinite(value):  # some writers of JSON refuse these
        return {TAG: "float", "content": repr(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is tuple:
        return {TAG: "tuple", "content": [_encoded(item) for item in value]}
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: _encoded(item) for key, item in value.items()}
    if kind in (dict, OrderedDict):
        return {TAG: kind.__name__, "content": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    if (
        kind is torch.Tensor and value.dtype == torch.uint8 and value.ndim == 1
    ):  # a generator's state, or an array's bytes
        return {TAG: "octets", "content": _text(value.numpy().tobytes())}
    buffer = io.BytesIO()
    # A view would bring all of its memory.
    torch.save(value.clone() if isinstance(value, torch.Tensor) else value, buffer)
    return {TAG: "saved", "content": _text(buffer.getvalue())}


def _decoded(value: Any) -> Any:
    if type(value) is list:
        return [_decoded(item) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: _decoded(item) for key, item in value.items()}
    kind, content = value[TAG], value["content"]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_decoded(item) for item in content)
    if kind == "octets":
        return (
            torch.frombuffer(bytearray(_bytes(content)), dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
        )
    if kind == "saved":
        return torch.load(io.BytesIO(_bytes(content)), weights_only=True)
    mapping: type[dict[Any, Any]] = {"dict": dict, "OrderedDict": OrderedDict}[kind]
    return mapping((_decoded(key), _decoded(item)) for key, item in content)


def _text(content: bytes) -> str:
    """Bytes as text: half of the state of torch's generator is zeros. Empty for no bytes."""
    return base64.b64encode(zlib.compress(content, 1)).decode("ascii") if content else ""


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))
