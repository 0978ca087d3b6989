"""A core that reads from storage with a slow first byte: S3 behind a delay of each request, against local files.

    python benchmarks/storage_latency.py -o result.json

One core decodes, blurs and packs JPEG files, as a preprocessing process does, from local files, from S3 with one request at a time, and
from S3 with requests ahead. The S3 server is moto, on another core; a proxy holds every request back for --delay-ms. The rows run in turn
for --repeats rounds, and the result holds medians.
"""

import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side, workloads
from benchmarks.slow_s3 import slow_s3
from offload.pipeline.recipe import Recipe, process
from offload.pipeline.sources import read_ahead
from offload.pipeline.sources.base import Index
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.split import split_transform
from offload.pipeline.wire import POSITION, SAMPLE_ID

BLURS = 2
REQUESTS = read_ahead.REQUESTS
LOCAL, ONE, AHEAD = "local files", "S3, one request at a time", "S3, requests ahead"


@click.command()
@click.option("--delay-ms", default=40.0, show_default=True, type=click.FloatRange(min=0), help="Of each request.")
@click.option("--images", default=400, show_default=True, type=click.IntRange(min=64))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(delay_ms: float, images: int, repeats: int, output: Path | None) -> None:
    """Compare local files with S3 behind a delay."""
    folder = workloads.jpeg_files(Path(tempfile.gettempdir()) / "offload-benchmark-jpeg")
    paths = sorted(folder.rglob("*.jpg"))[:images]
    cores, machine = side_by_side.cores(), side_by_side.machine()
    files = {str(path.relative_to(folder)): path for path in paths}
    with slow_s3(files, delay_ms / 1000, cores[1]) as bucket:
        os.sched_setaffinity(0, {cores[0]})
        remote = list_image_folder(f"s3://{bucket}/")
        beside = list_image_folder(folder)
        rows: dict[str, list[float]] = {LOCAL: [], ONE: [], AHEAD: []}
        for _ in range(repeats):
            rows[LOCAL].append(_rate(beside, images, requests=1))
            rows[ONE].append(_rate(remote, min(images, 64), requests=1))
            rows[AHEAD].append(_rate(remote, images, requests=REQUESTS))
    base = rows[LOCAL]
    result = {
        "samples_per_s": {name: statistics.median(rates) for name, rates in rows.items()},
        "over_local": {
            name: statistics.median(rate / local for rate, local in zip(rates, base, strict=True))
            for name, rates in rows.items()
        },
        "repeats": rows,
        "delay_ms": delay_ms,
        "images": images,
        "command": shlex.join(["python", "benchmarks/storage_latency.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": side_by_side.versions(),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def _rate(index: Index, samples: int, *, requests: int) -> float:
    """Samples/s of one core, in tasks of 64."""
    read_ahead.REQUESTS = requests
    transform = v2.Compose([v2.RandomResizedCrop(224, antialias=True), *[v2.GaussianBlur(11)] * BLURS, v2.ToTensor()])
    cpu = split_transform(transform).cpu
    recipe = Recipe(transform=cpu, kind="image", seed=0, reader=index.reader).ready()
    recipe.reader._ahead = None  # type: ignore[union-attr]  # a pool of threads of the wanted size
    ids = np.arange(samples) % len(index)
    rows = index.table.take(pa.array(ids)).append_column(SAMPLE_ID, pa.array(ids))
    rows = rows.append_column(POSITION, pa.array(np.arange(samples)))
    process(recipe, rows.slice(0, 16), epoch=0)
    began = time.perf_counter()
    for start in range(0, samples, 64):
        process(recipe, rows.slice(start, 64), epoch=0)
    return samples / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
