"""The workloads of the benchmarks: what one sample is and what it costs to make, the same in every row.

Two steps make a sample: `load` (from an id to a raw sample) and `transform`. A row that does not need them separately
calls `make`. Samples are dicts of numpy arrays. Each process uses one torch thread: a process has one core, and rows that
use several cores do so with several processes.
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import simplejpeg
import torch
from torchvision import transforms
from torchvision.transforms import v2

from benchmarks.raw_images import BLUR_KERNEL, BLUR_SIGMA, BLURS, IMAGE_SIZE, LABELS, labelled_files, noise

Sample = Mapping[str, Any]

NAMES = ("blur", "blur-uint8", "jpeg")
JPEG_FILES = 2000

torch.set_num_threads(1)


class Workload(Protocol):
    """Makes the sample of any id ≥ 0. Picklable, so that it can be sent to other processes."""

    name: str

    def load(self, sample_id: int) -> Sample: ...

    def transform(self, sample: Sample) -> Sample: ...

    def make(self, sample_id: int) -> Sample: ...


class _InTwoSteps:
    def load(self, sample_id: int) -> Sample:
        raise NotImplementedError

    def transform(self, sample: Sample) -> Sample:
        raise NotImplementedError

    def make(self, sample_id: int) -> Sample:
        return self.transform(self.load(sample_id))


@functools.cache
def _blurs() -> transforms.Compose:
    """Return the transform of the reference workload, which is deliberately heavy."""
    return transforms.Compose([transforms.ToTensor()] + [transforms.GaussianBlur(BLUR_KERNEL, BLUR_SIGMA)] * BLURS)


HALF_AS_FAST = "OFFLOAD_BENCHMARK_HALF_AS_FAST"
"""Environment variable of a host whose cores should be half as fast: they blur every image twice."""


class Blur(_InTwoSteps):
    """The reference workload: a random float32 image, blurred ten times, shipped as float32 CHW (602,112 bytes)."""

    name = "blur"

    def load(self, sample_id: int) -> Sample:
        return {"image": noise(sample_id), "label": np.int64(sample_id % LABELS)}

    def transform(self, sample: Sample) -> Sample:
        if HALF_AS_FAST in os.environ:
            _blurs()(sample["image"])
        return {"image": _blurs()(sample["image"]).numpy(), "label": sample["label"]}


class BlurUint8(_InTwoSteps):
    """The same blurs on an image of uint8 noise, shipped as uint8 CHW (150,528 bytes)."""

    name = "blur-uint8"

    def load(self, sample_id: int) -> Sample:
        shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
        image = np.random.RandomState(sample_id).randint(0, 256, shape, dtype=np.uint8)
        return {"image": image, "label": np.int64(sample_id % LABELS)}

    def transform(self, sample: Sample) -> Sample:
        # ToTensor gives float32 in 0..1, on which the blurs work as they do in `Blur`.
        if HALF_AS_FAST in os.environ:
            _blurs()(sample["image"])
        image = _blurs()(sample["image"]).mul_(255).round_().to(torch.uint8)
        return {"image": image.numpy(), "label": sample["label"]}


@functools.cache
def _crop_and_flip() -> v2.Compose:
    return v2.Compose([v2.RandomResizedCrop(IMAGE_SIZE, antialias=True), v2.RandomHorizontalFlip()])


@dataclass(frozen=True)
class Jpeg(_InTwoSteps):
    """A decoded JPEG file with a random crop resized to 224 and a random flip, shipped as uint8 HWC (150,528 bytes)."""

    files: tuple[str, ...]
    labels: tuple[int, ...]
    name = "jpeg"

    def load(self, sample_id: int) -> Sample:
        number = sample_id % len(self.files)
        return self.decode(Path(self.files[number]).read_bytes(), self.labels[number])

    def decode(self, file: bytes, label: int) -> Sample:
        """The raw sample of a file's content."""
        return {"image": simplejpeg.decode_jpeg(file, colorspace="RGB"), "label": np.int64(label)}

    def transform(self, sample: Sample) -> Sample:
        # A CHW view of HWC memory is channels-last, on which resizing uint8 is nearly twice as fast.
        image = _crop_and_flip()(torch.from_numpy(sample["image"]).permute(2, 0, 1))
        return {"image": image.permute(1, 2, 0).contiguous().numpy(), "label": sample["label"]}


def get(name: str, data: Path | None = None) -> Workload:
    """Return the workload of this name. `data` is a folder of JPEG files in class folders; only `jpeg` needs it."""
    if name == "blur":
        return Blur()
    if name == "blur-uint8":
        return BlurUint8()
    if name == "jpeg":
        if data is None:
            raise ValueError("the workload jpeg needs a folder of JPEG files")
        files, labels = labelled_files(data)
        return Jpeg(tuple(files), tuple(labels))
    raise ValueError(f"workload must be one of {', '.join(NAMES)}, found {name!r}")


def jpeg_files(folder: Path, images: int = JPEG_FILES) -> Path:
    """Make sure that `folder` holds the JPEG files (about 500×375) and return the folder of those to read."""
    from offload.demo_data import make_demo_data  # only this workload needs scikit-learn, which ships the photographs

    return make_demo_data(folder, images=images).train


def stack(samples: Iterable[Sample]) -> dict[str, np.ndarray[Any, Any]]:
    """Collate samples of equal shapes into one batch of arrays."""
    rows: Sequence[Sample] = list(samples)
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
