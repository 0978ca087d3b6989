"""How many cores preprocessing is worth, where the cluster can grow and shrink."""

from __future__ import annotations

import math

HEADROOM = 0.1  # of the input over the accelerators
STEADY = 0.25  # of a demand that may be surplus before it is lowered: nodes take minutes to come


def wanted_cores(
    device_samples_per_s: float, core_samples_per_s: float, *, bounds: tuple[int, int], before: int | None
) -> int:
    """The cores that preprocess a little faster than the accelerators train.

    Args:
        device_samples_per_s: what the workers would train if they never waited.
        core_samples_per_s: what one core delivers.
        bounds: least and most.
        before: what was wanted so far; a surplus that is small stays.
    """
    least, most = bounds
    needed = math.ceil(device_samples_per_s * (1 + HEADROOM) / core_samples_per_s)
    if before is not None and needed <= before <= math.ceil(needed * (1 + STEADY)):
        needed = before
    return min(max(needed, least), most)
