"""Ray's automatic start, which Ray calls before each of its functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from offload.ray_private.part import Part

PART = Part(
    name="calls of Ray",
    purpose="notice that the program's own code uses the Ray that a DataLoader has started, and that the connection has ended",
    without="a DataLoader takes it that the program uses its Ray, too",
    cost="the Ray of a DataLoader stays until the program ends",
    needs=("ray._private.auto_init_hook:auto_init_ray()", "ray._private.auto_init_hook:wrap_auto_init(fn)"),
)


def call_before_ray(wrapper: Callable[[Callable[[], None]], None]) -> bool:
    """Let Ray call ``wrapper`` with its own automatic start, before each of its functions. Return whether it will. Later calls change
    nothing."""

    def private() -> bool:
        from ray._private import auto_init_hook

        hook: Any = auto_init_hook
        if not isinstance(hook.auto_init_ray, functools.partial):
            hook.auto_init_ray = functools.partial(wrapper, hook.auto_init_ray)
        return True

    return PART.use(private, otherwise=lambda: False)
