"""How long a run waits until it knows its samples: tar shards on S3, behind a delay of each request.

    python benchmarks/listing.py -o result.json

The same shards are listed in four ways: header by header and shard by shard; with several shards and headers at once; by index files beside
the shards; and again, as a second start does. The S3 server is moto, on another core; a proxy holds every request back for --delay-ms. The
ways run in turn for --repeats rounds, and the result holds medians.
"""

import io
import json
import os
import shlex
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.slow_s3 import slow_s3
from offload.pipeline.sources import storage_paths
from offload.pipeline.sources import tar_index as listing
from offload.pipeline.sources.webdataset import list_webdataset

ONE, SEVERAL, INDEX, AGAIN = "one header at a time", "several at once", "index files", "second start"
DEFAULTS = (storage_paths.REMOTE_THREADS, listing.REQUEST_BYTES)


@click.command()
@click.option("--delay-ms", default=40.0, show_default=True, type=click.FloatRange(min=0), help="Of each request.")
@click.option("--shards", default=16, show_default=True, type=click.IntRange(min=2))
@click.option("--samples", default=50, show_default=True, type=click.IntRange(min=2), help="Of each shard.")
@click.option("--sample-kb", default=110, show_default=True, type=click.IntRange(min=1), help="The size of an image.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(delay_ms: float, shards: int, samples: int, sample_kb: int, repeats: int, output: Path | None) -> None:
    """Compare ways to list tar shards on S3 behind a delay."""
    cores, machine = side_by_side.cores(), side_by_side.machine()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        made = _files(Path(folder), shards, samples, sample_kb * 1000)
        with slow_s3(made, delay_ms / 1000, cores[1]) as bucket:
            os.sched_setaffinity(0, {cores[0]})
            rows: dict[str, list[float]] = {ONE: [], SEVERAL: [], INDEX: [], AGAIN: []}
            for _ in range(repeats):
                rows[ONE].append(
                    _seconds(f"s3://{bucket}/plain", Path(folder), threads=1, request_bytes=listing.HEADER)
                )
                rows[SEVERAL].append(_seconds(f"s3://{bucket}/plain", Path(folder)))
                rows[AGAIN].append(_seconds(f"s3://{bucket}/plain", Path(folder), cold=False))
                rows[INDEX].append(_seconds(f"s3://{bucket}/indexed", Path(folder)))
    medians = {name: statistics.median(seconds) for name, seconds in rows.items()}
    result = {
        "seconds": {name: round(seconds, 3) for name, seconds in medians.items()},
        "times_as_fast_as_one_header_at_a_time": {
            name: round(medians[ONE] / seconds, 1) for name, seconds in medians.items()
        },
        "repeats": rows,
        "delay_ms": delay_ms,
        "shards": shards,
        "samples_of_a_shard": samples,
        "sample_kb": sample_kb,
        "command": shlex.join(["python", "benchmarks/listing.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": side_by_side.versions(),
    }
    text = json.dumps(result, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def _files(folder: Path, shards: int, samples: int, size: int) -> dict[str, Path]:
    """Shards of images and labels, by their keys, with and without index files."""
    made: dict[str, Path] = {}
    for number in range(shards):
        path = folder / f"{number:04d}.tar"
        lines = []
        with tarfile.open(path, "w") as tar:
            for sample in range(samples):
                fields: list[object] = []
                for extension, content in (("jpg", os.urandom(size)), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{number:04d}{sample:06d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                    fields += [extension, tar.offset - -(-member.size // 512) * 512, member.size, member.name]
                lines.append(" ".join(map(str, fields)))
        index = path.with_suffix(".idx")
        index.write_text("\n".join([f"v1.2 {samples}", *lines, ""]))
        made |= {f"plain/{path.name}": path, f"indexed/{path.name}": path, f"indexed/{index.name}": index}
    return made


def _seconds(
    path: str, folder: Path, *, cold: bool = True, threads: int = DEFAULTS[0], request_bytes: int = DEFAULTS[1]
) -> float:
    if cold:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    storage_paths.REMOTE_THREADS, listing.REQUEST_BYTES = threads, request_bytes
    began = time.perf_counter()
    list_webdataset(path)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
