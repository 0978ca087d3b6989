"""The number of preprocessing cores that are worth their price, on a cluster that can grow and shrink."""

from __future__ import annotations

import math

HEADROOM = 0.1  # by which the input is faster than the accelerators
STEADY = 0.25  # surplus that is kept: nodes take minutes to come


def wanted_cores(
    device_samples_per_s: float, core_samples_per_s: float, *, bounds: tuple[int, int], before: int | None
) -> int:
    """The cores that preprocess a little faster than the accelerators train.

    Args:
        device_samples_per_s: the workers' rate if they never waited for data.
        core_samples_per_s: the rate of one core.
        bounds: the least and the most cores.
        before: the number wanted so far; a small surplus stays.
    """
    least, most = bounds
    needed = math.ceil(device_samples_per_s * (1 + HEADROOM) / core_samples_per_s)
    if before is not None and needed <= before <= math.ceil(needed * (1 + STEADY)):
        needed = before
    return min(max(needed, least), most)
