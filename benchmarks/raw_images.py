"""The raw samples of the image workloads, without torch: for rows of libraries that transform them with functions of their own."""

from pathlib import Path
from typing import Any

import numpy as np

IMAGE_SIZE = 224
BLURS, BLUR_KERNEL, BLUR_SIGMA = 10, 11, (0.1, 2.0)
LABELS = 1000  # of synthetic images


def noise(sample_id: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the image of an id. A seed for each sample makes the same images in every row."""
    return np.random.RandomState(sample_id).randn(IMAGE_SIZE, IMAGE_SIZE, 3).astype(np.float32)


def labelled_files(folder: Path) -> tuple[list[str], list[int]]:
    """Return the JPEG files in class folders, and the number of each one's class.

    Raises: ValueError if there are none.
    """
    files = sorted(folder.rglob("*.jpg"))
    if not files:
        raise ValueError(f"no *.jpg under {folder}")
    classes = {name: number for number, name in enumerate(sorted({file.parent.name for file in files}))}
    return [str(file) for file in files], [classes[file.parent.name] for file in files]
