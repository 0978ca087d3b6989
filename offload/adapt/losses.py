"""Machines that come and go without notice: how often one may before it is done without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

FLAPS = 3  # losses within FORGET_S
FORGET_S = 3600.0


@dataclass
class Losses:
    """When each machine, by its address, was lost while it was in use."""

    _at: dict[str, list[float]] = field(default_factory=dict)

    def lost(self, addresses: Iterable[str], now_s: float) -> None:
        """These were lost, unannounced."""
        for address in addresses:
            self._at[address] = [*self._recent(address, now_s), now_s]

    def flapping(self, now_s: float) -> frozenset[str]:
        """Addresses of machines that were lost too often lately."""
        return frozenset(address for address in self._at if len(self._recent(address, now_s)) >= FLAPS)

    def _recent(self, address: str, now_s: float) -> list[float]:
        return [at for at in self._at.get(address, []) if now_s - at < FORGET_S]
