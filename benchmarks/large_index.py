"""What an index of very many samples takes: seconds and memory to list it, to draw the order of an epoch, and to cut its tasks.

    python benchmarks/large_index.py [--rows 100000000] [--names 3000000] -o result.json

Parquet files have the rows of --rows samples. Tar shards and image folders have names, so that their indexes go to disk. They are listed
with a tenth of --names samples and with all of them; the difference is what each more sample takes. The shards are one sparse shard with an
index file, under many names. A file system that makes names up stands for the image folder. Like remote storage, it is always listed anew.

Each measurement runs in a process of its own, which reports its peak memory over that of a process that only imports offload.
"""

import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side

ROWS_PER_FILE, ROWS_PER_GROUP = 1_000_000, 50_000
PER_SHARD, PER_CLASS = 10_000, 10_000
IMAGE_BYTES = 100_000
IMAGES_CHANGED_NS = 10**18
TASK_ROWS = 1024
FEWER = 10  # the first listing of names has so many times fewer
PARQUET, SHARDS, IMAGES = "Parquet files", "tar shards", "image folders"
IMPORTS, LISTING, ORDER, TASKS, AGAIN = "imports", "listing", "order", "tasks", "second start"
Found = dict[str, dict[str, float]]
"""The seconds of each step, and the peak in MB after it."""


@click.command(help=__doc__)
@click.option("--rows", default=100_000_000, show_default=True, type=click.IntRange(min=ROWS_PER_FILE))
@click.option("--names", default=3_000_000, show_default=True, type=click.IntRange(min=3_000_000))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Of Parquet files.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
@click.option("--measure", nargs=3, type=str, hidden=True)
def main(rows: int, names: int, repeats: int, output: Path | None, measure: tuple[str, str, int] | None) -> None:
    if measure is not None:
        kind, folder, samples = measure
        print(json.dumps(_measured(kind, folder, int(samples))))
        return
    base_mb = statistics.median(_in_a_process(IMPORTS, "", 0)[IMPORTS]["peak_mb"] for _ in range(repeats))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        table = pa.table({"x": pa.array(np.zeros(ROWS_PER_FILE, np.int8))})
        for number in range(rows // ROWS_PER_FILE):
            pq.write_table(table, Path(folder, f"{number:05}.parquet"), row_group_size=ROWS_PER_GROUP)
        parquet = [_in_a_process(PARQUET, folder, rows) for _ in range(repeats)]
    named: dict[str, dict[int, Found]] = {SHARDS: {}, IMAGES: {}}
    for samples in (names // FEWER, names):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            _write_shards(Path(folder, "data"), samples)
            named[SHARDS][samples] = _in_a_process(SHARDS, f"{folder}/data", samples)
            named[SHARDS][samples][AGAIN] = _in_a_process(SHARDS, f"{folder}/data", samples)[LISTING]
            named[IMAGES][samples] = _in_a_process(IMAGES, "data", samples)
    result = {
        "benchmark": "large_index",
        "rows": rows // ROWS_PER_FILE * ROWS_PER_FILE,
        "row_groups": rows // ROWS_PER_GROUP,
        "imports_mb": base_mb,
        "parquet": parquet,
        "named": named,
        "command": f"python benchmarks/large_index.py --rows {rows} --names {names} --repeats {repeats}",
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    for step in (LISTING, ORDER):
        seconds, peak = (statistics.median(each[step][of] for each in parquet) for of in ("seconds", "peak_mb"))
        print(f"{PARQUET}, {rows:,} samples, {step}: {seconds:.2f} s, {_over(peak, base_mb, rows)}")
    for kind, by_size in named.items():
        few, many = by_size.values()
        for step in many:
            seconds, peak = many[step]["seconds"], many[step]["peak_mb"]
            each = (peak - few[step]["peak_mb"]) * 1e6 / (names - names // FEWER)
            print(
                f"{kind}, {names:,} samples, {step}: {seconds:.2f} s ({seconds * 1e6 / names:.2f} s a million), "
                f"{_over(peak, base_mb, names)}, {each:.1f} bytes for each more"
            )


def _over(peak_mb: float, base_mb: float, samples: int) -> str:
    """The peak over the imports."""
    over = peak_mb - base_mb
    return f"{over:,.0f} MB over {base_mb:,.0f} MB of imports ({over * 1e6 / samples:.1f} bytes a sample)"


def _in_a_process(kind: str, folder: str, samples: int) -> Found:
    ran = subprocess.run(
        [sys.executable, __file__, "--measure", kind, folder, str(samples)], capture_output=True, text=True, check=True
    )
    found: Found = json.loads(ran.stdout)
    print(f"{kind}, {samples:,} samples: {found}", file=sys.stderr, flush=True)  # all of them may take hours
    return found


def _measured(kind: str, folder: str, samples: int) -> Found:
    import offload
    from offload.pipeline.index.rows import Picked
    from offload.pipeline.order.ranges import Ranges
    from offload.pipeline.order.shuffling import epoch_permutation
    from offload.pipeline.sources.image_folder import list_image_folder
    from offload.pipeline.sources.parquet import list_parquet
    from offload.pipeline.sources.webdataset import list_webdataset

    _ = offload.parquet  # whatever a program imports belongs to the base
    found: Found = {}

    def step(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - began
        found[name] = {"seconds": seconds, "peak_mb": _peak_mb()}
        return made

    if kind == IMPORTS:
        step(IMPORTS, lambda: None)
        return found
    listers: dict[str, Callable[[], Any]] = {
        PARQUET: lambda: list_parquet(folder),
        SHARDS: lambda: list_webdataset(folder),
        IMAGES: lambda: list_image_folder(
            folder, filesystem=pafs.PyFileSystem(MadeUp(samples // PER_CLASS, PER_CLASS))
        ),
    }
    index = step(LISTING, listers[kind])
    order = step(ORDER, lambda: epoch_permutation(len(index), seed=0, epoch=0, groups=index.groups))

    if kind == PARQUET:
        return found

    def cut() -> None:
        for start in range(0, len(order), TASK_ROWS):
            at = Ranges(((start, min(start + TASK_ROWS, len(order))),))
            pickle.dumps(Picked(ids=order[start : start + TASK_ROWS], source=index.rows, positions=at, wanted=at))

    step(TASKS, cut)
    return found


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _write_shards(folder: Path, samples: int) -> None:
    """One shard without content, which has an index file, under as many names as the samples take."""
    folder.mkdir()
    lines, headers, at = [], [], 0
    for number in range(PER_SHARD):
        fields: list[object] = []
        for extension, size in (("jpg", IMAGE_BYTES), ("cls", 1)):
            member = tarfile.TarInfo(f"sample-{number:08d}.{extension}")
            member.size = size
            headers.append((at, member))
            fields += [extension, at + tarfile.BLOCKSIZE, size, member.name]
            at += tarfile.BLOCKSIZE - (-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        lines.append(" ".join(map(str, fields)))
    first = folder / "00000.tar"
    with first.open("wb") as file:
        for place, member in (headers[0], headers[-1]):  # which the listing compares with the index file
            file.seek(place)
            file.write(member.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(at)
    first.with_suffix(".idx").write_text("\n".join([f"v1.2 {PER_SHARD}", *lines, ""]))
    for number in range(1, samples // PER_SHARD):
        for suffix in (".tar", ".idx"):
            os.link(first.with_suffix(suffix), folder / f"{number:05d}{suffix}")


class MadeUp(pafs.FileSystemHandler):  # type: ignore[misc]
    """A file system whose folder ``data`` has folders of so many images each, which nobody wrote."""

    def __init__(self, classes: int, images: int) -> None:
        self._classes, self._images = classes, images

    def get_type_name(self) -> str:
        return "made up"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [pafs.FileInfo(path, type=pafs.FileType.Directory) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        folder = selector.base_dir
        if folder == "data":
            names = [f"data/class-{number:05d}" for number in range(self._classes)]
            return [pafs.FileInfo(name, type=pafs.FileType.Directory) for name in names]
        names = [f"{folder}/image-{number:08d}.jpg" for number in range(self._images)]
        return [
            pafs.FileInfo(name, type=pafs.FileType.File, size=IMAGE_BYTES, mtime_ns=IMAGES_CHANGED_NS) for name in names
        ]

    def _refuse(self, *unused: Any) -> Any:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _refuse
    open_input_stream = open_input_file = open_output_stream = open_append_stream = normalize_path = _refuse


if __name__ == "__main__":
    main()
