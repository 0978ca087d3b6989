"""The demo's data set of handwritten digits on photographs, as real JPEG files in class folders.

scikit-learn ships two photographs (427×640) and 1,797 scans of handwritten digits (8×8). Every image made here is a random crop of
one photograph with one digit drawn large onto it; its label is the digit. So the files cost as much to read and decode as
photographs, and a small convolutional network really learns them.

The scans are split before drawing: no handwriting in ``val/`` appears in ``train/``. The two photographs appear in both. Where it
stops: this is a demonstration that learns in minutes, not a benchmark of accuracy.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from offload.errors import ConfigError, argument
from offload.machine import usable_cores
from offload.model.checks import check_count

WIDTH, HEIGHT = 500, 375
QUALITY = 90
VAL_SHARE = 0.2
MIN_IMAGES = 20  # one of each digit in each split
IMAGE_BYTES = 85_000  # mean size on disk

_MARKER = ".demo-data.json"
_FORMAT = 1  # raise it when the images change, to replace older data sets

# The size of a digit with its margin, in shares of the image's height; the share of the photograph's width behind it; its opacity.
# With these, a ResNet-10 at 80 pixels reaches 95 % in three epochs; smaller or fainter digits need more images than the demo has
# time for.
_DIGIT_HEIGHT = (0.8, 1.0)
_ZOOM = (0.45, 0.85)
_OPACITY = (0.8, 1.0)

_Array = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class DemoData:
    """The location and the content of the data set; ``train`` and ``val`` have one folder per class."""

    train: Path
    val: Path
    train_images: int
    val_images: int
    classes: int
    total_bytes: int


@dataclass(frozen=True)
class _Material:
    photographs: list[Image.Image]
    scans: dict[str, list[list[_Array]]]  # split → class → 8×8 scans, 0 (paper) to 255 (ink)


def make_demo_data(
    out: Path, images: int = 3000, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> DemoData:
    """Make ``images`` JPEGs under ``out``: ``train/<class>/<id>.jpg`` and ``val/<class>/<id>.jpg``, four to one.

    The same arguments give the same images. An existing data set stays unchanged; one made with other arguments is replaced. ``out``
    appears whole or not at all, so an interrupted call leaves no partial data set. ``progress`` is called with (images made, images
    in all).

    Raises ConfigError for too few images, if the folder holds something else or cannot be written, or if scikit-learn is missing.
    """
    images = check_count(argument("images"), images, least=MIN_IMAGES, most=sys.maxsize**2, sane="such as 3000")
    key = {"format": _FORMAT, "images": images, "seed": seed}
    existing = _read_marker(out)
    if existing is not None and existing.get("made_with") == key:
        return _from_marker(out, existing)
    try:
        occupied = existing is None and out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ConfigError(f"{out} cannot be read: {error.strerror or error}; name another folder") from None
    if occupied:
        raise ConfigError(f"{out} exists and is not a demo data set; name another folder, or remove this one")

    _check_room(out, images)
    material = _load_material(seed)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        data = _write(partial, out, material, images, seed, progress)
        marker = {"made_with": key, **{k: v for k, v in asdict(data).items() if not isinstance(v, Path)}}
        (partial / _MARKER).write_text(json.dumps(marker) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(
            f"cannot write the demo data set to {out}: {error.strerror or error}; "
            "name a folder on a writable disk with about 250 MB free"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return data


def _check_room(out: Path, images: int) -> None:
    """Raise ConfigError if the disk has no room for that many images."""
    try:
        there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
    except OSError:  # writing there will raise a better error
        return
    sane = f"the {free / 1e9:,.1f} GB that are free at {there} hold no more"
    check_count(argument("images"), images, most=max(free // IMAGE_BYTES, MIN_IMAGES), sane=sane)


def _read_marker(out: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((out / _MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _from_marker(out: Path, marker: dict[str, Any]) -> DemoData:
    return DemoData(
        train=out / "train",
        val=out / "val",
        train_images=marker["train_images"],
        val_images=marker["val_images"],
        classes=marker["classes"],
        total_bytes=marker["total_bytes"],
    )


def _load_material(seed: int) -> _Material:
    try:
        from sklearn.datasets import load_digits, load_sample_images
    except ImportError as error:
        raise ConfigError(
            "the demo data set uses images that scikit-learn ships, and scikit-learn is not installed; "
            "run: pip install 'offload[demo]'"
        ) from error
    digits = load_digits()
    scans: dict[str, list[list[_Array]]] = {"train": [], "val": []}
    rng = np.random.default_rng(seed)
    for label in range(10):
        of_class = (digits.images[digits.target == label] * (255 / 16)).astype(np.uint8)
        of_class = of_class[rng.permutation(len(of_class))]
        held_out = int(len(of_class) * VAL_SHARE)
        scans["val"].append(list(of_class[:held_out]))
        scans["train"].append(list(of_class[held_out:]))
    return _Material([Image.fromarray(photograph) for photograph in load_sample_images().images], scans)


def _write(
    root: Path,
    final: Path,
    material: _Material,
    images: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> DemoData:
    """Write the files under ``root``; the result gives their final paths, under ``final``."""
    counts = {"val": max(10, round(images * VAL_SHARE))}
    counts["train"] = images - counts["val"]
    written = total_bytes = 0
    for number, split in enumerate(("train", "val")):
        for label in range(10):
            (root / split / str(label)).mkdir(parents=True)
        draw = functools.partial(
            _write_image, root / split, material.photographs, material.scans[split], (seed, number)
        )
        # Pillow draws and encodes without Python's lock. A loop that ends early cancels what has not begun.
        with ThreadPoolExecutor(usable_cores()) as threads:
            for size in threads.map(draw, range(counts[split])):
                written += 1
                total_bytes += size
                if progress is not None:
                    progress(written, images)
    return DemoData(
        train=final / "train",
        val=final / "val",
        train_images=counts["train"],
        val_images=counts["val"],
        classes=10,
        total_bytes=total_bytes,
    )


def _write_image(
    folder: Path, photographs: list[Image.Image], scans: list[list[_Array]], seed: tuple[int, int], index: int
) -> int:
    """Write the image of that number, and return its bytes. Its random numbers are its own, whoever draws it, and when."""
    label = index % 10
    of_label = scans[label]
    rng = np.random.default_rng((*seed, index))
    jpeg = _encode(_draw(rng, photographs, of_label[(index // 10) % len(of_label)]))
    return (folder / str(label) / f"{index:06d}.jpg").write_bytes(jpeg)


def _draw(rng: np.random.Generator, photographs: list[Image.Image], scan: _Array) -> Image.Image:
    """Draw one image: a crop of a photograph, with the scan drawn over it at a random place, size, colour and opacity."""
    image = _crop(rng, photographs[rng.integers(len(photographs))])
    side = round(HEIGHT * rng.uniform(*_DIGIT_HEIGHT))
    opacity = rng.uniform(*_OPACITY)
    left, top = int(rng.integers(WIDTH - side + 1)), int(rng.integers(HEIGHT - side + 1))
    dark_below = np.asarray(image.crop((left, top, left + side, top + side)).convert("L")).mean() < 128
    light, dark = rng.integers(190, 256, size=3), rng.integers(0, 66, size=3)
    ink, halo = (light, dark) if dark_below else (dark, light)
    enlarged = Image.fromarray(np.pad(scan, 1)).resize((side, side), Image.Resampling.BICUBIC)
    # The halo keeps a digit legible on a busy photograph.
    for colour, offset in ((halo, 90), (ink, 255)):
        # A steep edge at one level of grey: without it, 8×8 scans enlarged fifty times are blurred.
        levels = [round(opacity * min(max(3 * value - offset, 0), 255)) for value in range(256)]
        image.paste((int(colour[0]), int(colour[1]), int(colour[2])), (left, top), enlarged.point(levels))
    return image


def _crop(rng: np.random.Generator, photograph: Image.Image) -> Image.Image:
    zoom = rng.uniform(*_ZOOM)
    width, height = zoom * photograph.width, zoom * photograph.width * HEIGHT / WIDTH
    left, top = rng.uniform(0, photograph.width - width), rng.uniform(0, photograph.height - height)
    box = (left, top, left + width, top + height)
    image = photograph.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
