"""CPUs of Ray that this process holds and does not use, which a run of the same process may have."""

from __future__ import annotations

from collections.abc import Callable

_holders: list[Callable[[], None]] = []


def on_need(give_back: Callable[[], None]) -> None:
    """Call ``give_back`` whenever a run looks for room. It gives up CPUs that are not in use, and does nothing otherwise."""
    _holders.append(give_back)


def give_back_idle() -> None:
    """Let everything in this process give up the CPUs that it does not use."""
    for give_back in _holders:
        give_back()
