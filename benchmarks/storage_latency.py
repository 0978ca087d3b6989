"""A core that reads from storage with a slow first byte: S3 behind a delay of each request, against local files.

    python benchmarks/storage_latency.py -o result.json

One core decodes, blurs and packs JPEG files, as a preprocessing process does, from local files, from S3 with one request at a time, and
from S3 with requests ahead. The S3 server is moto, on another core; a proxy holds every request back for --delay-ms. The rows run in turn
for --repeats rounds, and the result holds medians.
"""

import asyncio
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import click
import numpy as np
import pyarrow as pa
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side, workloads
from offload.pipeline.recipe import Recipe, process
from offload.pipeline.sources import read_ahead
from offload.pipeline.sources.base import Index
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.split import split_transform
from offload.pipeline.wire import POSITION, SAMPLE_ID

BUCKET = "benchmark"
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
    with _server(paths, folder, delay_ms / 1000, cores[1]):
        os.sched_setaffinity(0, {cores[0]})
        remote = list_image_folder(f"s3://{BUCKET}/")
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


@contextlib.contextmanager
def _server(paths: list[Path], folder: Path, delay_s: float, core: int) -> Iterator[None]:
    """An S3 server with these files, on a core of its own, behind a delay."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=_serve, args=(core, delay_s, ports), daemon=True)
    server.start()
    direct, delayed = ports.get(timeout=120)
    known = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
             "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    os.environ.update(known, AWS_ENDPOINT_URL=f"http://127.0.0.1:{delayed}")
    client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{direct}", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for path in paths:
        client.put_object(Bucket=BUCKET, Key=str(path.relative_to(folder)), Body=path.read_bytes())
    try:
        yield
    finally:
        server.terminate()
        server.join()


def _serve(core: int, delay_s: float, ports: Any) -> None:
    from moto.server import ThreadedMotoServer

    os.sched_setaffinity(0, {core})
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    asyncio.run(_proxy(port, delay_s, functools.partial(_tell, ports, port)))


def _tell(ports: Any, direct: int, delayed: int) -> None:
    ports.put((direct, delayed))


async def _proxy(port: int, delay_s: float, ready: Any) -> None:
    """Forward connections to a port; hold back what clients send."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(forward(reader, behind_writer, delay_s), forward(behind_reader, writer, 0.0))

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready(proxy.sockets[0].getsockname()[1])
    await proxy.serve_forever()


if __name__ == "__main__":
    main()
