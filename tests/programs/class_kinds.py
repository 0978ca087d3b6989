"""Classes of a module that can be imported, whose names are not the paths by which they are found."""

from __future__ import annotations

import enum
from collections import namedtuple
from typing import NamedTuple

import torch

NOTHING = object()


def _named(name: str) -> type:
    return namedtuple(name, ["a", "b"])  # a tuple of this function's module, as of a library that makes classes


Renamed = _named("Other")
Renamed.__module__ = "no.such.module"
_Hidden = _named("Public")  # as a package does with classes of its private modules


class Data:
    """A data set's class, with the classes of its samples in its body."""

    Item = namedtuple("Item", ["a", "b"])
    Typed = NamedTuple("Typed", [("a", int), ("b", torch.Tensor)])  # noqa: UP014

    class Inner:
        """A class in a class in a class."""

        Item = namedtuple("Item", ["a", "b"])

        class Level(enum.Enum):
            LOW = 1
            HIGH = 2

    class Syntax(NamedTuple):
        a: int
        b: torch.Tensor
