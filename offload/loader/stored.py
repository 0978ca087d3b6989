"""What the methods of a data set store in it, noticed where a copy of the data set works.

With ``num_workers=0``, torch calls these methods in the program, which finds there what they stored. Here, each process has a copy of its
own. A look takes microseconds. Where it stops: it sees that an attribute is new, has another value or another length. It does not look into
the values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

from torch.utils.data import Dataset

MOST = 16  # data sets within a data set
_GROWING = frozenset({list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter})


class _Attributes(NamedTuple):
    """The attributes of a data set, and the lengths of those that may grow. It keeps the values, so that no other takes their address."""

    values: dict[str, Any]
    lengths: dict[str, int]


class StoredWatch:
    """Finds the first attribute that changes in a data set, or in one that it holds, as a ``Subset`` does."""

    def __init__(self) -> None:
        self._datasets: list[Any] | None = None
        self._found = False

    def look(self, dataset: Any) -> list[_Attributes]:
        """What the data sets hold now; nothing once a change was found."""
        if self._found:
            return []
        if self._datasets is None:
            self._datasets = _inside(dataset)
        return [_held(each) for each in self._datasets]

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
    found: list[Any] = []
    todo = [dataset]
    while todo and len(found) < MOST:
        each = todo.pop(0)
        if not isinstance(getattr(each, "__dict__", None), dict) or any(each is other for other in found):
            continue
        found.append(each)
        for value in vars(each).values():
            several = value if type(value) in (list, tuple) else (value,)
            if isinstance(next(iter(several), None), Dataset):  # not all of a list: it may be long
                todo += several[:MOST]
    return found
