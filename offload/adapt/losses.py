"""The count of machine losses without notice, after which a run stops using a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FLAPS = 3  # losses within FORGET_S
FORGET_S = 3600.0


@dataclass(frozen=True)
class Losses:
    """The times, in seconds, at which the run lost each machine (by its address) while using it."""

    lost_at: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def with_lost(self, addresses: Iterable[str], now_s: float) -> Losses:
        """The losses so far, with these machines lost now."""
        lost_at = dict(self.lost_at)
        for address in addresses:
            lost_at[address] = (*_recent(lost_at.get(address, ()), now_s), now_s)
        return Losses(lost_at)

    def flapping(self, now_s: float) -> frozenset[str]:
        """Addresses of machines that the run lost too often recently."""
        return frozenset(address for address, at in self.lost_at.items() if len(_recent(at, now_s)) >= FLAPS)


def _recent(at: Iterable[float], now_s: float) -> tuple[float, ...]:
    return tuple(each for each in at if now_s - each < FORGET_S)
