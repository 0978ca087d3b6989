"""Give the program back what importing or starting Ray changes in its process: variables of the environment, the state of
:mod:`random`, and Python's handler of crashes.

Where it stops: it knows the changes of Ray and of what offload imports, and leaves other variables alone: another thread of the
program may set them meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

RAYS = ("RAY_", "PYTHONBREAKPOINT")
"""The variables that Ray sets, and those that a run sets for it, by the beginnings of their names."""


@contextmanager
def restored() -> Iterator[None]:
    """A context for an import or for a start of Ray. Afterwards, this process is as before."""
    variables, numbers, handled = _variables(), random.getstate(), faulthandler.is_enabled()
    try:
        yield
    finally:
        for name in _variables().keys() - variables.keys():
            os.environ.pop(name, None)
        os.environ.update(variables)
        random.setstate(numbers)
        if faulthandler.is_enabled() and not handled:
            faulthandler.disable()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(RAYS)}
