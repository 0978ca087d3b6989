"""Relative speeds of GPUs from their data sheets: a prior for a plan on a GPU that nobody probed.

Arithmetic or memory bounds a step, so the ratios of the two bound its speed. Software, clocks and power add a factor either way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Dense FP16 tensor TFLOPS and memory bandwidth in GB/s, from NVIDIA's data sheets: T4 (2019), V100 SXM2 (2020), A10G as on
# AWS's page of EC2 G5 with half of the A10's tensor rate, L4 and L40S (2023, sparse figures halved), A100 SXM 40 GB (2020),
# H100 SXM (2023) and H200 SXM (2024).
DATA_SHEETS: Mapping[str, tuple[float, float]] = {
    "T4": (65.0, 320.0),
    "V100": (125.0, 900.0),
    "A10G": (70.0, 600.0),
    "L4": (121.0, 300.0),
    "L40S": (362.0, 864.0),
    "A100": (312.0, 1555.0),
    "H100": (989.0, 3350.0),
    "H200": (989.0, 4800.0),
}
BEYOND = 1.5  # how far the speed may lie outside the two ratios


@dataclass(frozen=True, kw_only=True)
class RelativeSpeed:
    """A GPU's speed relative to another one, with its 95 % range."""

    speed: float
    least: float
    most: float


def relative_speed(device: str, model: str | None) -> RelativeSpeed | None:
    """The speed of a GPU ``model`` relative to the probed ``device``; None if the table does not hold both."""
    base, other = _sheet(device), _sheet(model or "")
    if base is None or other is None:
        return None
    ratios = [there / here for here, there in zip(base, other, strict=True)]
    return RelativeSpeed(speed=math.sqrt(math.prod(ratios)), least=min(ratios) / BEYOND, most=max(ratios) * BEYOND)


def _sheet(name: str) -> tuple[float, float] | None:
    words = re.split(r"[\s-]+", name.upper())
    return next((sheet for model, sheet in DATA_SHEETS.items() if model in words), None)
