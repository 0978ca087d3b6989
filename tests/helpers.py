"""Data that several tests use."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_jpegs(folder: Path, count: int, *, classes: int = 3, size: tuple[int, int] = (24, 32)) -> None:
    """Real JPEG files of noise, ``folder/<class>/<number>.jpg``."""
    import simplejpeg

    rng = np.random.default_rng(0)
    for i in range(count):
        target = folder / f"class_{i % classes}"
        target.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        (target / f"{i:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))
