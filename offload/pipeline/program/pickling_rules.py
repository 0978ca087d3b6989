"""Rules by which objects of single classes travel: memory maps, caches, properties, types, weak dictionaries, scripted modules.

A rule reduces an object as ``__reduce__`` does. Where it stops: :mod:`offload.pipeline.program.pickling_names` holds the rules for names in
modules.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import sys
import typing
import weakref
from typing import Any

import numpy as np

from offload.errors import RunError
from offload.pipeline.program.pickling_names import Rule, attribute, is_by_value

LARGE_BYTES = 64 << 20  # smaller maps travel with their content: nodes that do not see the file can use them

_MapArguments = tuple[str, Any, int, tuple[int, ...], str]
"""The arguments of :func:`_mapped`."""


def reduce_map(array: Any) -> Any:
    """Reduce a memory map as ``__reduce__`` does. NotImplemented: its content must travel."""
    place = _place(array)
    return NotImplemented if place is None else (_mapped, place)


def _place(array: Any) -> _MapArguments | None:
    """Where the array lies in its file. None if its content must travel, as that of a writable map, which may differ from the file."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if array.nbytes < LARGE_BYTES or array.mode != "r" or not contiguous or not os.path.isfile(array.filename or ""):
        return None
    # A view knows where the whole map begins in the file, but not where it begins itself.
    begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.ctypes.data - np.frombuffer(array._mmap, np.uint8).ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    return str(array.filename), array.dtype, begins + inside, array.shape, order


def _mapped(filename: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    try:
        return np.memmap(filename, dtype, "r", offset, shape, order)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{filename!r}, which the data set maps into memory, cannot be mapped on a preprocessing node: {error}. Every node must see "
            "the file under this path. If they cannot, hold its content instead of the map: numpy.array(map)."
        ) from None


def _unless_found(reduce: Rule) -> Rule:
    """Make a rule for objects that pickle sends by name: ``reduce`` them if only the script holds that name."""

    def rule(obj: Any) -> Any:
        module, path = getattr(obj, "__module__", None), getattr(obj, "__qualname__", obj.__name__)
        if module is not None and not is_by_value(module):
            with contextlib.suppress(AttributeError):
                if attribute(module, path) is obj:
                    return NotImplemented
        return reduce(obj)

    return rule


def _cached(cache: Any) -> Any:
    parameters = cache.cache_parameters()
    state = (cache.__wrapped__, vars(cache))
    return _empty_cache, (parameters["maxsize"], parameters["typed"]), state, None, None, _fill_cache


def _empty_cache(maxsize: int | None, typed: bool) -> Any:
    """A cache around a function that comes later: a recursive function refers to its cache."""

    @functools.lru_cache(maxsize, typed)
    def cache(*args: Any, **kwargs: Any) -> Any:
        return cache.__wrapped__(*args, **kwargs)

    return cache


def _fill_cache(cache: Any, state: tuple[Any, dict[str, Any]]) -> None:
    function, attributes = state
    functools.update_wrapper(cache, function)
    cache.__dict__.update(attributes)


def _cached_property(prop: Any) -> Any:
    return functools.cached_property, (prop.func,), {"attrname": prop.attrname}


def _new_type(kind: Any) -> Any:
    return typing.NewType, (kind.__name__, kind.__supertype__), dict(vars(kind))


def _param_spec(spec: Any) -> Any:
    return typing.ParamSpec, (spec.__name__,)


def _weak(mapping: Any) -> Any:
    return type(mapping), (), None, None, iter(list(mapping.items()))


RULES: dict[type, Rule] = {
    functools._lru_cache_wrapper: _unless_found(_cached),
    functools.cached_property: _cached_property,  # it holds a lock, in Python 3.11
    typing.NewType: _unless_found(_new_type),
    typing.ParamSpec: _unless_found(_param_spec),
    weakref.WeakKeyDictionary: _weak,  # functools.singledispatch uses one
    weakref.WeakValueDictionary: _weak,
}


def is_scripted(kind: type) -> bool:
    """Return whether instances of this class are scripted by torch. Imports nothing."""
    jit = sys.modules.get("torch.jit")
    return jit is not None and issubclass(kind, (jit.ScriptModule, jit.ScriptFunction))


def reduce_scripted(obj: Any) -> Any:
    """Reduce a scripted module or function to the file that torch would save."""
    written = io.BytesIO()
    sys.modules["torch.jit"].save(obj, written)
    return _loaded, (written.getvalue(),)


def _loaded(content: bytes) -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises to export programs instead
        return torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]
