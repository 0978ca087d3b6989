"""The interval between checkpoint commits, from the cost of a commit and the rate of node failures."""

from __future__ import annotations

import math

DAY_S = 86400.0
MOST_SHARE = 0.01  # of training time that commits may take
LEAST_S = 15.0


def commit_interval_s(cost_s: float, failures_per_s: float) -> float:
    """Seconds between two commits, each of which stops training for ``cost_s``.

    The interval that loses the least time to commits and to work lost in failures is ``sqrt(2·cost / rate)`` (Young,
    1974). It is longer if commits would otherwise take more than a hundredth of the time.
    """
    return max(math.sqrt(2 * cost_s / failures_per_s), cost_s / MOST_SHARE, LEAST_S)


def failures_per_s(failures: int, elapsed_s: float, nodes: int) -> float:
    """The rate of failures of a run. The prior is one failure per node-day; each observed hour and failure updates it (the mean
    of a gamma distribution)."""
    return (1 + failures) / (DAY_S / max(nodes, 1) + elapsed_s)
