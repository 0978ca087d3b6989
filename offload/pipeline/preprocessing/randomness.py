"""The random numbers of preprocessing: seeded for every sample or chunk, and whether anybody draws them.

A transform may hold generators itself. Each process would go on with its own copy of the same stream, so these are seeded, too.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from offload.pipeline.order.shuffling import mix

_MOST = 100_000  # objects to look at, about a tenth of a second
_LONG = 1000  # items of a list, tuple or dict that is data, not a composition of transforms
_DATA = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic, types.ModuleType, type, type(None))

Held = tuple[Any, ...]
"""Generators, each once, in an order that is the same in every process."""


def held_by(transform: Any) -> Held:
    """The generators of NumPy, Python and torch that a transform draws from: in its attributes and those of its parts, its closure and
    defaults, and the globals that its code names. Libraries' global generators are not among them."""
    generators: list[Any] = []
    seen: dict[int, Any] = {}
    todo = [transform]
    while todo and len(seen) < _MOST:
        value = todo.pop()
        # Data holds no generators, and is most of what there is to look at.
        if isinstance(value, _DATA) or id(value) in seen:
            continue
        seen[id(value)] = value
        if _is_generator(value):
            generators.append(value)
        else:
            # Depth first, and each object's parts in their order. So every process finds the same generators in the
            # same order.
            todo += reversed(list(_within(value)))
    return tuple(generators)


def seed_held(generators: Held, seed: int) -> None:
    """Seed each with numbers of its own."""
    for number, generator in enumerate(generators):
        # Different seeds, or two generators of one transform would draw equal numbers.
        own = mix(seed, number)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own & 0xFFFFFFFF)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        else:
            generator.manual_seed(own)


def states_of(generators: Held) -> bytes:
    """The states of these generators, which differ once anybody has drawn from one."""
    return pickle.dumps([_state(generator) for generator in generators])


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state().numpy().tobytes()


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        # The global one is seeded anyway, and the system's cannot be.
        return not isinstance(value, random.SystemRandom) and value is not random._inst
    if isinstance(value, np.random.RandomState):
        return value is not np.random.mtrand._rand
    if isinstance(value, np.random.Generator):
        return isinstance(
            value.bit_generator,
            np.random.PCG64 | np.random.PCG64DXSM | np.random.MT19937 | np.random.Philox | np.random.SFC64,
        )
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Generator)
        and value.device.type == "cpu"
        and value is not torch.default_generator
    )


def _within(value: Any) -> Iterator[Any]:
    """What a value holds."""
    if isinstance(value, list | tuple | dict):
        if len(value) <= _LONG:
            yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif not _is_pythons(type(value)):
        yield from getattr(value, "__dict__", {}).values()
        for base in type(value).__mro__:
            if not _is_library(base):
                yield from vars(base).values()


def _of_function(function: Callable[..., Any]) -> Iterator[Any]:
    wrapped: Any = function
    yield from wrapped.__defaults__ or ()
    yield from (wrapped.__kwdefaults__ or {}).values()
    for cell in wrapped.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if not _is_library(wrapped):
        codes = [wrapped.__code__]
        while codes:
            code = codes.pop(0)
            yield from (wrapped.__globals__[name] for name in code.co_names if name in wrapped.__globals__)
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]  # its functions


def _is_library(thing: Any) -> bool:
    """Return whether a function or class belongs to Python or a large library, whose code draws from global generators or its
    attributes."""
    return _is_pythons(thing) or _top(thing) in {"torch", "torchvision", "numpy", "PIL", "cv2", "offload"}


def _is_pythons(thing: Any) -> bool:
    return _top(thing) in sys.stdlib_module_names


def _top(thing: Any) -> str:
    return str(thing.__module__ or "").partition(".")[0]


def seed_generators(seed: int, held: Held = ()) -> None:
    """Seed every generator of augmentation, those of libraries only if they are loaded: importing torch costs seconds. ``held`` are those
    of the transform itself."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setRNGSeed(seed & 0x7FFFFFFF)
    seed_held(held, seed)


def loaded_libraries() -> tuple[bool, bool]:
    """Return whether each library that :func:`seed_generators` seeds is loaded."""
    return "torch" in sys.modules, "cv2" in sys.modules


class Drawn:
    """Whether anybody has drawn random numbers since this object was made, of libraries that were loaded then. It costs 15 to 60 µs.
    ``held``: the transform's generators."""

    def __init__(self, held: Held = ()) -> None:
        self._held, self._torch = held, sys.modules.get("torch")
        self._opencv = "cv2" in sys.modules
        # A normal number of np.random that waits may be drawn without a change of its generator.
        self._whole = bool(np.random.get_state(legacy=False)["has_gauss"])
        self._before = self._states()

    def __bool__(self) -> bool:
        # OpenCV does not tell the state of its generator.
        return self._opencv or self._states() != self._before

    def _states(self) -> tuple[Any, ...]:
        of_torch = None if self._torch is None else self._torch.default_generator.get_state().numpy().tobytes()
        return random.getstate(), _numpy_state(whole=self._whole), of_torch, states_of(self._held)


def _numpy_state(*, whole: bool) -> bytes:
    """The state of np.random's generator. ``whole``: with a normal number that waits."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if whole or type(generator) is not np.random.MT19937:
        return pickle.dumps(np.random.get_state(legacy=False))
    # NumPy's own way to this state takes 30 µs.
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


_MT19937_BYTES = 625 * 4  # 624 words, and the place of the next
