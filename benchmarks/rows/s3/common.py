"""What the rows of other libraries share that read from S3: their arguments, a sample, and the answer.

`--write` makes the data set in the library's own format, in a folder of the bucket. Without it, the row reads one pass from S3, or from the
same folder on this disk with `--local`, and answers with its rate from the first batch to the last.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from torchvision.transforms import v2

from benchmarks.rows.protocol import ANSWER

BATCH = 32
SHARD = 64
"""Samples of a shard or chunk: a pass reads several, so that a library can read ahead."""
BUCKET = "benchmark"


@dataclass(frozen=True)
class Place:
    """The data set's folder. ``bucket``: the folder of the bucket that has its files; ``scratch``: an empty folder for caches."""

    bucket: Path
    scratch: Path
    local: bool
    samples: int

    def url(self, name: str) -> str:
        """The folder in which a library's format lies."""
        return str(self.bucket / name) if self.local else f"s3://{BUCKET}/{name}"

    def shards(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the files' contents, shard by shard."""
        files = sorted((self.bucket / "train").rglob("*.jpg"))[: self.samples]
        for start in range(0, len(files), SHARD):
            yield [{"image": file.read_bytes(), "number": 0} for file in files[start : start + SHARD]]


_transform = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.GaussianBlur(11), v2.GaussianBlur(11)])


def sample(image: bytes) -> torch.Tensor:
    """The preprocessed image of a JPEG file."""
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(image, colorspace="RGB")).permute(2, 0, 1)
    return _transform(pixels)  # type: ignore[no-any-return]


def run(write: Callable[[Place], None], batches: Callable[[Place], Iterable[Any]]) -> None:
    """Write the data set, or read a pass and answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bucket", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    place = Place(given.bucket, given.scratch, given.local, given.samples)
    torch.set_num_threads(1)
    if given.write:
        write(place)
        return
    received, began, first = 0, 0.0, 0
    for batch in batches(place):
        received += len(batch)
        if not first:
            began, first = time.perf_counter(), received
    if received != given.samples:
        raise SystemExit(f"{received} samples arrived of {given.samples}")
    print(f"{ANSWER}{(received - first) / (time.perf_counter() - began)}")
