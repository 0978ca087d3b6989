"""What a sample costs that a node makes once and then finds on its disk (`offload.cached`): CPU time of making, keeping and finding it.

    python benchmarks/cached_samples.py [--repeats 5] -o result.json

One process runs the tasks of a pass over the samples, one after the other, as a preprocessing process does. It counts its own CPU time. A
found sample's CPU time is a line in its bytes: the model behind a probe's advice takes its two coefficients from here.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import reference, side_by_side
from benchmarks.workloads import BlurUint8, jpeg_files
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.preprocessing.processing import process

IMAGES = 256
TASK = 64  # samples of a task
SIZES = (1_000, 30_000, 150_000, 600_000)  # bytes of the samples behind the line


class Bytes(torch.utils.data.Dataset[Any]):
    """Samples of some bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, i: int) -> Any:
        return {"x": np.full(self.size, i, np.uint8)}


class Blurred(torch.utils.data.Dataset[Any]):
    """Images with ten Gaussian blurs."""

    def __len__(self) -> int:
        return TASK

    def __getitem__(self, i: int) -> Any:
        return BlurUint8().make(i)


def cpu_us(pipeline: offload.Pipeline) -> Callable[[], float]:
    """A function that runs a pass, and returns the CPU microseconds of a sample."""
    assert pipeline.list is not None
    index = pipeline.list()
    recipe = pipeline.recipe(index, seed=0).ready()
    numbers = np.arange(len(index))

    def a_pass() -> float:
        began = time.process_time()
        for start in range(0, len(numbers), TASK):
            ids = numbers[start : start + TASK]
            rows = index.table.slice(start, len(ids)).append_column(SAMPLE_ID, [ids]).append_column(POSITION, [ids])
            process(recipe, rows, epoch=0)
        return (time.process_time() - began) / len(numbers) * 1e6

    return a_pass


@click.command(help=__doc__)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the JPEG files; missing files are made there.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result's JSON here.")
def main(repeats: int, data: Path | None, output: Path | None) -> None:
    torch.set_num_threads(1)
    photos = jpeg_files(data or reference.folder_of("jpeg"), images=IMAGES)
    smaller = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    makers = {f"{size:,} bytes": offload.from_torch(Bytes(size)) for size in SIZES}
    makers |= {
        "jpeg: decode": offload.image_folder(photos, v2.Compose([v2.CenterCrop(224)]), decode="exact"),
        "jpeg: decode, Resize(256), CenterCrop(224)": offload.image_folder(photos, smaller),
        "blur-uint8: ten blurs": offload.from_torch(Blurred()),
    }
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, inner in makers.items():
            made: dict[str, list[float]] = {"make": [], "make and keep": [], "find": []}
            for repeat in range(repeats):
                kept = offload.cached(inner, cache=f"ssd:{folder}/{repeat}:4GB", name=name)
                made["make"].append(cpu_us(inner)())
                a_pass = cpu_us(kept)
                made["make and keep"].append(a_pass())
                made["find"].append(a_pass())
            figures[name] = {each: statistics.median(values) for each, values in made.items()}
            print(
                f"{name}: {', '.join(f'{each} {value:,.0f} µs' for each, value in figures[name].items())}", flush=True
            )
    # A sample without its making: the same task has the packing of a block in both.
    each_byte, each_sample = np.polyfit(SIZES, [figures[f"{size:,} bytes"]["find"] for size in SIZES], 1)
    result = {
        "benchmark": "cached_samples",
        "cpu_us_per_sample": figures,
        "find_us": float(each_sample),
        "find_ns_per_byte": float(each_byte * 1e3),
        "repeats": repeats,
        "command": f"python benchmarks/cached_samples.py --repeats {repeats}",
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
    }
    print(f"a found sample: {each_sample:,.0f} µs + {each_byte * 1e3:.2f} ns a byte")
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
