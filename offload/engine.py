"""The engine that runs preprocessing and training: Ray where there is a cluster, else processes of this machine."""

from __future__ import annotations

import os
import sys

ADDRESS = "RAY_ADDRESS"


def uses_ray(address: str | None) -> bool:
    """Return whether Ray is the engine: an ``address`` is given, ``$RAY_ADDRESS`` is set, or the program has started Ray."""
    return bool(address or os.environ.get(ADDRESS)) or program_uses_ray()


def program_uses_ray() -> bool:
    """Return whether this process is connected to Ray. Does not import it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())
