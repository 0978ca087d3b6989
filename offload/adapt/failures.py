"""What failures cost: the interval between checkpoint commits, and the machines that a run stops using. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FLAPS = 3  # losses within FORGET_S after which a machine is excluded
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
    return tuple(loss_s for loss_s in at if now_s - loss_s < FORGET_S)


DAY_S = 86400.0
MOST_COMMIT_SHARE = 0.01  # the largest share of training time that commits may take
LEAST_INTERVAL_S = 15.0


def commit_interval_s(cost_s: float, failures_per_s: float) -> float:
    """Seconds between two commits, each of which stops training for ``cost_s``.

    The interval that loses the least time to commits and to work lost in failures is ``sqrt(2·cost / rate)`` (Young,
    1974). It is longer if commits would otherwise take more than a hundredth of the time.
    """
    return max(math.sqrt(2 * cost_s / failures_per_s), cost_s / MOST_COMMIT_SHARE, LEAST_INTERVAL_S)


def failures_per_s(failures: int, elapsed_s: float, nodes: int) -> float:
    """The rate of failures of a run. The prior is one failure per node-day; each observed hour and failure updates it (the mean
    of a gamma distribution)."""
    return (1 + failures) / (DAY_S / max(nodes, 1) + elapsed_s)
