"""The part of a data set or of a function that cannot travel to other processes, in words.

It runs only after pickling has failed, and pickles the parts one by one.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload.pipeline.program.pickling import travels
from offload.pipeline.program.pickling_names import is_by_value

if TYPE_CHECKING:
    from offload.pipeline.preprocessing.recipe import Recipe

DEEPEST = 6  # attributes of attributes to look into
MOST_ITEMS = 1000  # items of a list to look into


def obstacle(recipe: Recipe, error: BaseException) -> str:
    """What of a recipe, which raised ``error``, cannot be pickled, and the remedy. Two sentences."""
    for part in (recipe, *recipe.parts):
        if (reason := used((part.reader, part.transform, part.setup), error)) is not None:
            return reason
        dataset = None if part.reader is None else part.reader.pickled_dataset
        if dataset is not None and not travels(dataset):
            owner = type(dataset).__name__
            attribute = _culprit(dataset)
            what = (
                f"the {owner} cannot be pickled ({error})"
                if attribute is None
                else f"its attribute {owner}.{attribute} cannot be pickled"
            )
            return f"{what}. Let each process construct it: offload.from_torch(lambda: {owner}(...))."
        if part.transform is not None and not travels(part.transform):
            name = getattr(part.transform, "__qualname__", type(part.transform).__name__)
            return (
                f"the transform {name} cannot be pickled ({error}). Pass it as a class, which each process constructs itself, or open "
                "files and connections in it at its first call."
            )
    return f"{type(error).__name__}: {error}. Open files, connections and locks in the process that uses them."


def used(value: object, error: BaseException) -> str | None:
    """What a function of the script among these values uses, so that pickling them raised ``error``, and the remedy. Two sentences; None if
    there is no such function."""
    use = _used(value, set())
    if use is None:
        return None
    return f"{use}, which cannot be pickled ({error}). Make it within the function, at the first call: each process then has its own."


def _used(value: object, seen: set[int]) -> str | None:
    if id(value) in seen or travels(value):
        return None
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        for what, part in _uses(value):
            if not travels(part):
                name = value.__qualname__.rpartition("<locals>.")[2]
                return _used(part, seen) or f"{name}() uses {what} (a {type(part).__name__})"
    return next(filter(None, (_used(part, seen) for part in _code_of(value))), None)


def _uses(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function uses besides its arguments."""
    for name in dict.fromkeys(_names_of_globals(function.__code__)):
        if name in function.__globals__:
            yield f"the global {name}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name} of the function around it", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default argument", default


def _names_of_globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of_globals(constant)


def _code_of(value: object) -> Iterator[object]:
    """The parts of a value in which there may be functions of the script."""
    if isinstance(value, types.FunctionType):
        return
    if isinstance(value, type):
        if is_by_value(value.__module__) or "<locals>" in value.__qualname__:
            yield from vars(value).values()
            yield from value.__bases__
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        yield value.__func__
        yield getattr(value, "__self__", None)
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield type(value)
        yield from (part for _, part in _parts(value))
        yield getattr(value, "__wrapped__", None)


def _culprit(value: object, depth: int = 0) -> str | None:
    """The path and type of the attribute of ``value`` that cannot be pickled: ``file, a TextIOWrapper``."""
    for name, part in _parts(value):
        if not travels(part):
            inner = _culprit(part, depth + 1) if depth < DEEPEST else None
            if inner is None:
                return f"{name} (a {type(part).__name__})"
            return f"{name}{'' if inner.startswith('[') else '.'}{inner}"
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:MOST_ITEMS])
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in zip(range(MOST_ITEMS), value, strict=False))
    if not isinstance(value, type):
        yield from dict(getattr(value, "__dict__", {})).items()
