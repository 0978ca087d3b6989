"""Makes the tar shards that webdataset's tests read, since its source archive has none, and the names by which the tests find them.

The tests count on 47 samples with the members png, cls, wnid and xml, and on the size of the first image.
"""

import gzip
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = "testdata"
SAMPLES = 47
FIRST_SIZE = (600, 793)
ELSEWHERE_SHARDS, ELSEWHERE_SAMPLES = 4, 30

# The tests' own names.
local_data = f"{FOLDER}/imagenet-000000.tar"
compressed = f"{FOLDER}/compressed.tar"
remote_loc = f"{FOLDER}/"
remote_shards = f"openimages-train-{{000000..{ELSEWHERE_SHARDS - 1:06}}}.tar"
remote_shard = "openimages-train-000000.tar"
remote_pattern = "openimages-train-{}.tar"
remote_sample = f"{FOLDER}/sample.tar"

CONFTEST = f"""
from benchmarks.suites import tar_reading
from {__name__} import *

tar_reading.install()
"""


def count_samples_tuple(source: Iterable[Any], *checks: Callable[[Any], bool], n: int = 10_000) -> int:
    """Return the number of samples, ``n`` at most. Each must be a tuple, a dict or a list, and pass the checks."""
    number = 0
    for sample in itertools.islice(source, n):
        assert isinstance(sample, tuple | dict | list), sample
        assert all(check(sample) for check in checks), sample
        number += 1
    return number


def write(folder: Path) -> None:
    """Write all shards below a folder."""
    from webdataset import tenbin

    at = folder / FOLDER
    at.mkdir()
    image = _image("PNG", (64, 48))
    imagenet = {
        f"{i:05}": {
            "png": _image("PNG", FIRST_SIZE) if i == 0 else image,
            "cls": str(i % 10).encode(),
            "wnid": f"n{i:08}".encode(),
            "xml": b"<annotation/>",
        }
        for i in range(SAMPLES)
    }
    _write(folder / local_data, imagenet)
    _write(folder / compressed, {f"{i:04}": {"txt.gz": gzip.compress(b"hello\n")} for i in range(1, 4)})
    _write(folder / remote_sample, {"10": {"png": image, "cls": b"0"}})
    photograph = _image("JPEG", (300, 260))
    elsewhere = {f"{i:04}": {"jpg": photograph, "json": json.dumps([i]).encode()} for i in range(ELSEWHERE_SAMPLES)}
    for number in range(ELSEWHERE_SHARDS):
        _write(at / remote_pattern.format(f"{number:06}"), elsewhere)
    arrays = bytes(tenbin.encode_buffer([np.zeros((28, 28)), np.ones((28, 28))]))
    _write(at / "tendata.tar", {f"{i:04}": {"ten": arrays} for i in range(100)})


def _image(kind: str, size: tuple[int, int]) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", size, (200, 90, 30)).save(written, kind)
    return written.getvalue()


def _write(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for extension, content in members.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
