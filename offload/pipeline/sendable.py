"""The part of a data set that cannot travel to the preprocessing processes, in words.

It runs only after pickling has failed, and pickles the parts one by one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ray import cloudpickle

from offload.pipeline.recipe import Recipe

DEEPEST = 6  # attributes of attributes to look into
MOST_ITEMS = 1000  # items of a list to look into


class _Nowhere(io.RawIOBase):
    """A file that forgets."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def travels(value: object) -> bool:
    """Whether ``value`` can be pickled."""
    try:
        cloudpickle.dump(value, _Nowhere())  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return True


def obstacle(recipe: Recipe, error: BaseException) -> str:
    """What of a recipe, which raised ``error``, cannot be pickled, and the remedy. Two sentences."""
    for part in (recipe, *recipe.parts):
        dataset = getattr(part.reader, "dataset", None) if not hasattr(part.reader, "factory") else None
        if dataset is not None and not travels(dataset):
            owner = type(dataset).__name__
            found = _culprit(dataset)
            what = (
                f"the {owner} cannot be pickled ({error})"
                if found is None
                else f"its attribute {owner}.{found} cannot be pickled"
            )
            return f"{what}. Let each process construct it: offload.from_torch(lambda: {owner}(...))."
        if part.transform is not None and not travels(part.transform):
            name = getattr(part.transform, "__qualname__", type(part.transform).__name__)
            return (
                f"the transform {name} cannot be pickled ({error}). Pass it as a class, which each process constructs itself, or open "
                "files and connections in it at its first call."
            )
    return f"{type(error).__name__}: {error}. Open files, connections and locks in the process that uses them."


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
        yield from ((f"[{key!r}]", each) for key, each in list(value.items())[:MOST_ITEMS])
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", each) for i, each in zip(range(MOST_ITEMS), value, strict=False))
    if not isinstance(value, type):
        yield from dict(getattr(value, "__dict__", {})).items()
