"""Choose the next local batch size that a probe measures. Pure.

Sizes double from a small one, so that no step is much larger, in time or memory, than one that succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARM_STEPS = 2
STEPS = 5
FEW_WARM_STEPS, FEW_STEPS = 1, 3  # steps without a GPU, where each takes long and needs no warm-up
MEMORY_SHARE = 0.9  # usable share of the device's memory


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The steps of one local batch size: seconds of the typical step, and the device's peak memory (0: unknown). ``depth``: the number
    of the model's repeated blocks (0: all). ``synced_s``: seconds with exchange of gradients between workers (0: unmeasured).
    ``variation``: the coefficient of variation from step to step (0: unmeasured). ``host_s``: CPU seconds of the worker's process in
    such a step, to queue it on a GPU or to compute it on a CPU (0: unmeasured)."""

    size: int
    step_s: float
    peak_bytes: float = 0.0
    depth: int = 0
    synced_s: float = 0.0
    variation: float = 0.0
    host_s: float = 0.0


def next_size(
    measured: Sequence[MeasuredStep],
    *,
    wanted: int,
    left_s: float,
    memory_bytes: float | None,
    steps: int = WARM_STEPS + STEPS,
) -> int | None:
    """The next local batch size to measure; None if enough is known.

    Args:
        measured: the sizes measured so far.
        wanted: the script's local batch size. On a CPU the probe measures nothing larger.
        left_s: the seconds left.
        memory_bytes: the device's memory; None on a CPU, whose memory the probe does not fill.
        steps: the number of steps for each size.
    """
    if not measured:
        return 1 if memory_bytes is None else max(1, wanted // 8)
    last = measured[-1]
    size = last.size * 2
    if memory_bytes is None and size > wanted:
        # The wanted size itself, if doubling has passed it.
        size = wanted if wanted > last.size else 0
    if size < 1 or (memory_bytes is not None and predicted_peak(measured, size) > MEMORY_SHARE * memory_bytes):
        return None
    # A step of twice the size takes at most twice as long.
    affordable = steps * last.step_s * size / last.size <= left_s
    return size if affordable or len(measured) < 2 else None


def at_whole_depth(measured: Sequence[MeasuredStep], blocks: int) -> list[MeasuredStep]:
    """Step times of the whole model with ``blocks`` blocks, from steps with one block and with two."""
    whole = [step for step in measured if step.depth == 0]
    one, two = ({step.size: step for step in measured if step.depth == depth} for depth in (1, 2))
    for size in sorted(one.keys() & two.keys()):
        block_s = max(two[size].step_s - one[size].step_s, 0.0)
        # Blocks are alike, so each takes as long as the second one.
        step_s = one[size].step_s + (blocks - 1) * block_s
        whole.append(MeasuredStep(size=size, step_s=step_s, variation=two[size].variation))
    return whole


def predicted_peak(measured: Sequence[MeasuredStep], size: float) -> float:
    """The predicted peak memory of a step of ``size``, in bytes: a line through the two largest sizes measured."""
    if len(measured) < 2:
        return measured[-1].peak_bytes * size / measured[-1].size
    a, b = measured[-2:]
    slope = max(b.peak_bytes - a.peak_bytes, 0.0) / (b.size - a.size)
    return b.peak_bytes + slope * (size - b.size)


def largest_that_fits(measured: Sequence[MeasuredStep], memory_bytes: float | None) -> int | None:
    """The largest local batch whose peak stays within the device's memory; None if unknown."""
    if memory_bytes is None or not measured or not measured[-1].peak_bytes:
        return None
    usable, last = MEMORY_SHARE * memory_bytes, measured[-1]
    if len(measured) < 2:
        return max(last.size, int(last.size * usable / last.peak_bytes))
    slope = (last.peak_bytes - measured[-2].peak_bytes) / (last.size - measured[-2].size)
    return None if slope <= 0 else max(last.size, int(last.size + (usable - last.peak_bytes) / slope))
