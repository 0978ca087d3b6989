"""A core that reads from storage with a slow first byte: S3 behind a delay of each request, against local files.

    python benchmarks/storage_latency.py -o result.json

One core decodes, crops and blurs JPEG files in tasks of one to three seconds, as a preprocessing process does: from local files, and in
several ways from S3. Beside it, other libraries do the same on that core, each in an environment of its own. Every row has a partner that
reads the same format from the local disk, and `over_local` is the ratio of both.

The S3 server is the small one of benchmarks/s3_server.py, on another core; it answers each request --delay-ms late. The rows run in
turn for --repeats rounds, and the result holds medians. A row that cannot run stays in the result, with the reason.
`requests_per_sample` is what the server counted.
"""

import functools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
from obstore.fsspec import FsspecStore
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import environments, side_by_side, workloads
from benchmarks.environments import EnvironmentFailed
from benchmarks.rows.protocol import ANSWER
from benchmarks.s3_server import BUCKET, Server, linked, slow_s3
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.cache import accounts
from offload.pipeline.feed.sizing import task_s
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.sources import read_ahead

BATCH = 64
AT_ONCE = read_ahead.REQUESTS
ONE_BY_ONE = 128  # samples, where each waits for its own request
WARM_UP = 16  # samples that each of offload's rows reads before its clock starts
ROW_TIMEOUT_S = 600.0
LOCAL = "local files"
PEERS = {"WebDataset": "webdataset", "MosaicML Streaming": "streaming", "LitData": "litdata"}
Pipeline = Any


@click.command()
@click.option("--delay-ms", default=40.0, show_default=True, type=click.FloatRange(min=0), help="Of each request.")
@click.option("--mbit-per-s", type=click.FloatRange(min=0, min_open=True), help="Limit of the server's rate.")
@click.option("--images", default=768, show_default=True, type=click.IntRange(min=128, max=workloads.JPEG_FILES))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--environments", "folder", default=environments.DEFAULT_FOLDER, show_default=True,
              type=click.Path(path_type=Path, file_okay=False), help="Folder of the libraries' environments.")  # fmt: skip
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(
    delay_ms: float, mbit_per_s: float | None, images: int, repeats: int, folder: Path, output: Path | None
) -> None:
    """Compare local files with S3 behind a delay."""
    jpegs = workloads.jpeg_files(Path(tempfile.gettempdir()) / "offload-benchmark-jpeg")
    paths = sorted(jpegs.rglob("*.jpg"))[:images]
    cores, machine = side_by_side.cores(), side_by_side.machine()
    limit = None if mbit_per_s is None else mbit_per_s * 1e6 / 8
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        linked({f"train/{path.relative_to(jpegs)}": path for path in paths}, place)
        with slow_s3(place, delay_ms / 1000, cores[1], limit) as server:
            os.environ.update(server.environment())
            os.sched_setaffinity(0, {cores[0]})
            peers, lost = _peers(place, images, folder)
            rows = {**_own_rows(place, server, images), **peers}
            rates, requests, lost = _measure(rows, server, repeats, images, lost)
    document = {
        "samples_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "over_local": {
            name: statistics.median(rate / local for rate, local in zip(values, rates[_partner(name)], strict=True))
            for name, values in rates.items()
            if len(rates.get(_partner(name), [])) == len(values)
        },
        "requests_per_sample": requests,
        "cannot_run": lost,
        "repeats": rates,
        "delay_ms": delay_ms,
        "mbit_per_s": mbit_per_s,
        "images": images,
        "command": shlex.join(["python", "benchmarks/storage_latency.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": side_by_side.versions(),
        "versions_of_peers": {name: environments.requirements(name) for name in (*PEERS.values(), "tensorflow")},
    }  # fmt: skip
    text = json.dumps(document, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def _measure(
    rows: dict[str, Callable[[], float]], server: Server, repeats: int, images: int, lost: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """The rates and the requests of each row, in turn; the first failure of a row ends it."""
    rates: dict[str, list[float]] = {}
    requests: dict[str, float] = {}
    for _ in range(repeats):
        for name, rate in rows.items():
            if name in lost:
                continue
            before = server.requests()
            try:
                rates.setdefault(name, []).append(rate())
            except EnvironmentFailed as error:
                lost[name] = str(error)
                rates.pop(name, None)
                continue
            made = sum(count - before[kind] for kind, count in server.requests().items())
            requests[name] = round(made / _read(name, images), 2)
            print(f"{name}: {rates[name][-1]:.1f}", file=sys.stderr)
    return rates, requests, lost


def _read(name: str, images: int) -> int:
    """The samples that a run of a row reads."""
    if name.split(",")[0] in PEERS:
        return images
    sizing = 2 * WARM_UP
    return sizing + WARM_UP + (min(images, ONE_BY_ONE) if "one request" in name else images)


def _partner(name: str) -> str:
    """The row that reads the same format from the local disk."""
    return f"{name.split(',')[0]}, local" if name.split(",")[0] in PEERS else LOCAL


# --- offload ----------------------------------------------------------------------------------------------------------


def _transform() -> Any:
    return v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.GaussianBlur(11), v2.GaussianBlur(11)])


def _own_rows(place: Path, server: Server, images: int) -> dict[str, Callable[[], float]]:
    """offload's rows. Those with a cache run an epoch before that counts."""
    url, bucket = f"s3://{BUCKET}/train", place / BUCKET
    single = FsspecStore("s3", endpoint=server.url, region="us-east-1", client_options={"allow_http": True})
    beside, remote = (offload.image_folder(path, _transform()) for path in (bucket / "train", url))
    through = offload.image_folder(f"{BUCKET}/train", _transform(), filesystem=single)
    files = offload.image_folder(url, _transform(), cache=f"ssd:{_folder(place, 'files')}:4GB")
    decoded = offload.image_folder(url, v2.Resize(256))
    kept = offload.cached(decoded, _transform(), cache=f"ssd:{_folder(place, 'kept')}:4GB", name="resized")
    rate = _rate(beside, images, task=images)

    def task(pipeline: Pipeline, **how: Any) -> int:
        """The samples of a task, as offload sizes it."""
        accounts.collect()
        _rate(pipeline, WARM_UP, task=WARM_UP, **how)
        return BATCH * max(1, int(rate * task_s(1, accounts.collect().first_wait_s / 2) / BATCH))

    def row(pipeline: Pipeline, samples: int = images, **how: Any) -> Callable[[], float]:
        return lambda: _rate(pipeline, samples, task=task(pipeline, **how), **how)

    rows = {
        LOCAL: row(beside),
        "S3, one request at a time": row(remote, min(images, ONE_BY_ONE), requests=1),
        "S3, requests ahead": row(remote),
        "S3 through obstore, requests ahead": row(through),
        'S3, cache="ssd:…", second epoch': row(files, epoch=1),
        "S3, offload.cached, second epoch": row(kept, epoch=1),
    }
    for warmed in (files, kept):
        _rate(warmed, images, task=images)
    if (bucket / "tar").exists():
        rows["tar shards on S3, requests ahead"] = row(offload.webdataset(f"s3://{BUCKET}/tar", _transform()))
    return rows


def _folder(place: Path, name: str) -> Path:
    (place / name).mkdir()
    return place / name


def _rate(pipeline: Pipeline, samples: int, *, task: int, requests: int = AT_ONCE, epoch: int = 0) -> float:
    """Samples/s of one core, in tasks of this many samples."""
    index = pipeline.list()
    with _requests(requests):
        recipe = pipeline.recipe(index, seed=0).ready()
        ids = np.arange(samples)
        rows = index.table.take(pa.array(ids)).append_column(SAMPLE_ID, pa.array(ids))
        rows = rows.append_column(POSITION, pa.array(ids))
        process(recipe, rows.slice(0, WARM_UP), epoch=epoch)
        began = time.perf_counter()
        for start in range(0, samples, task):
            process(recipe, rows.slice(start, task), epoch=epoch)
        return samples / (time.perf_counter() - began)


@contextmanager
def _requests(number: int) -> Iterator[None]:
    before, read_ahead.REQUESTS = read_ahead.REQUESTS, number
    try:
        yield
    finally:
        read_ahead.REQUESTS = before


# --- other libraries --------------------------------------------------------------------------------------------------


def _peers(place: Path, images: int, folder: Path) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """The rows of other libraries, and the reasons of those that cannot run."""
    rows: dict[str, Callable[[], float]] = {}
    lost: dict[str, str] = {}
    for title, name in PEERS.items():
        try:
            python = environments.make(name, folder.expanduser())
            _run(python, name, place, images, "--write")
        except EnvironmentFailed as error:
            lost[f"{title}, S3"] = str(error)
            continue
        rows[f"{title}, local"] = functools.partial(_run, python, name, place, images, "--local")
        rows[f"{title}, S3"] = functools.partial(_run, python, name, place, images)
    try:
        python = environments.make("tensorflow", folder.expanduser())
        key = f"s3://{BUCKET}/train"
        _answer([str(python), "-m", "benchmarks.rows.s3.tfdata_row", "--key", key])
    except EnvironmentFailed as error:
        lost["tf.data, S3"] = str(error)
    return rows, lost


def _run(python: Path, name: str, place: Path, images: int, *options: str) -> float:
    scratch = place / "scratch"  # each pass begins without what an earlier one has downloaded
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    given = ["--bucket", str(place / BUCKET), "--scratch", str(scratch), "--samples", str(images), *options]
    return _answer([str(python), "-m", f"benchmarks.rows.s3.{name}_row", *given])


def _answer(command: list[str]) -> float:
    """The number that a row answers; 0 if it answers nothing. Raises EnvironmentFailed with the end of its errors."""
    root = str(Path(__file__).resolve().parent.parent)
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ROW_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    if ran.returncode:
        raise EnvironmentFailed(([line for line in ran.stderr.splitlines() if "Error" in line or "not impl" in line] or
                                 [ran.stderr])[-1].strip()[-400:])  # fmt: skip
    answers = [line for line in ran.stdout.splitlines() if line.startswith(ANSWER)]
    return float(answers[-1].removeprefix(ANSWER)) if answers else 0.0


if __name__ == "__main__":
    main()
