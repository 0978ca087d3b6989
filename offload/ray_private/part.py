"""A part: something private to Ray that offload uses, what it needs of Ray, and what its absence costs.

Where it stops: it looks, and calls nothing of Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

ABSENT = "OFFLOAD_TEST_ABSENT_PARTS"
"""For this project's own tests: names of parts, separated by commas, or ``all``. They count as absent, here and in Ray's processes."""
CHANGED = (ImportError, AttributeError, TypeError, LookupError)
"""What Python raises where a part is there but has changed."""
_NEED = re.compile(r"(?P<module>[\w.]+)(:(?P<path>[\w.]+))?(\((?P<parameters>[\w, ]*)\))?")

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that is private to Ray.

    Args:
        name: its name for users.
        purpose: what offload does with it.
        without: the public way that offload takes where a Ray lacks it.
        cost: what its absence costs.
        needs: what a Ray must have, each as ``module``, ``module:name`` or ``module:name(parameter, parameter)``.
    """

    name: str
    purpose: str
    without: str
    cost: str
    needs: tuple[str, ...]

    def available(self) -> bool:
        """Return whether this Ray has all of it. Never raises."""
        return self.lacking() is None

    def lacking(self) -> str | None:
        """The first of :attr:`needs` that this Ray lacks; None if it has all. Never raises. It imports Ray's modules."""
        if self.left_out():
            return "this part, as a test wants it"
        return next((need for need in self.needs if not _is_there(need)), None)

    def left_out(self) -> bool:
        """Return whether a test of this project leaves it out. Imports nothing."""
        return bool({self.name, "all"} & set(os.environ.get(ABSENT, "").split(",")))

    def use(self, private: Callable[[], Value], *, otherwise: Callable[[], Value]) -> Value:
        """What ``private`` returns; what ``otherwise`` returns if this Ray lacks the part or has changed it."""
        if self.available():
            with contextlib.suppress(*CHANGED):
                return private()
        return otherwise()


@dataclass(frozen=True, kw_only=True)
class FoundPart:
    """A part as this Ray has it. ``lacking``: the first thing that it lacks; None if the part is active."""

    name: str
    purpose: str
    lacking: str | None
    without: str
    cost: str

    @property
    def active(self) -> bool:
        """Whether offload uses it."""
        return self.lacking is None


def _is_there(need: str) -> bool:
    match = _NEED.fullmatch(need)
    assert match is not None, need
    try:
        found: Any = importlib.import_module(match["module"])
        for name in (match["path"] or "").split("."):
            if name and not hasattr(found, name) and _sets(found, name):
                return True
            found = getattr(found, name) if name else found
    except Exception:  # a module of Ray may fail in any way
        return False
    return match["parameters"] is None or _takes(found, re.findall(r"\w+", match["parameters"]))


def _sets(kind: Any, name: str) -> bool:
    """Return whether the objects of a class have this attribute: a field, or one that their construction sets."""
    return name in getattr(kind, "__annotations__", {}) or name in kind.__init__.__code__.co_names


def _takes(function: Any, wanted: list[str]) -> bool:
    """Return whether a function has these parameters. One that does not tell, as some in C, passes. One that takes any keyword must name
    them in its code."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    named = () if code is None else code.co_consts
    return all(name in parameters or name in named for name in wanted)
