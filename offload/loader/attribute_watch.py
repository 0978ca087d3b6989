"""Notice attributes that a data set's methods store in it: where a process works on a copy, the program would not find them.

With ``num_workers=0``, torch calls these methods in the program itself, which finds what they stored. Here, each process has its own copy.
A look takes microseconds. Where it stops: it sees that an attribute is new, or has another value or length. It does not look into values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

from torch.utils.data import Dataset

MOST = 16  # data sets within a data set
_GROWING = frozenset({list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter})


class _Attributes(NamedTuple):
    """The attributes of a data set, and the lengths of those that may grow.

    It keeps the values alive, so that no new object gets the address, and so the identity, of an old one.
    """

    values: dict[str, Any]
    lengths: dict[str, int]


class StoredWatch:
    """Finds the first attribute that changes in a data set, or in one that it holds, as a ``Subset`` does."""

    def __init__(self) -> None:
        self._datasets: list[Any] | None = None
        self._found = False

    def look(self, dataset: Any) -> list[_Attributes]:
        """The attributes of the data sets now. Empty once a change was found."""
        if self._found:
            return []
        if self._datasets is None:
            self._datasets = _inside(dataset)
        return [_held(part) for part in self._datasets]

    def since(self, before: list[_Attributes]) -> str:
        """The name of an attribute that has changed since, such as ``Images.cache``; empty if there is none."""
        for held, dataset in zip(before, self._datasets or (), strict=False):
            if (name := _changed(held, _held(dataset))) is not None:
                self._found = True
                return f"{type(dataset).__name__}.{name}"
        return ""


def _held(dataset: Any) -> _Attributes:
    values = dict(vars(dataset))
    return _Attributes(values, {name: len(value) for name, value in values.items() if type(value) in _GROWING})


def _changed(before: _Attributes, now: _Attributes) -> str | None:
    nothing = object()
    for name, value in now.values.items():
        if value is not before.values.get(name, nothing) or now.lengths.get(name) != before.lengths.get(name):
            return name
    return None


def _inside(dataset: Any) -> list[Any]:
    """The data set, and those that its attributes hold, one by one or in a list."""
    datasets: list[Any] = []
    todo = [dataset]
    while todo and len(datasets) < MOST:
        current = todo.pop(0)
        if not isinstance(getattr(current, "__dict__", None), dict) or any(current is other for other in datasets):
            continue
        datasets.append(current)
        for value in vars(current).values():
            several = value if type(value) in (list, tuple) else (value,)
            if isinstance(next(iter(several), None), Dataset):  # not all of a list: it may be long
                todo += several[:MOST]
    return datasets
