"""What decoding only the crop's region gains: one core, JPEG files in the page cache, RandomResizedCrop(224) and a flip.

    python benchmarks/decode.py [--json] [-o benchmarks/results/decode.json]

The rows run in turn for --repeats rounds on one core: a plain loop (Pillow and torchvision), the workload jpeg's loop (simplejpeg), and
preprocessing tasks of offload with decode="exact" and decode="auto", with torchvision's transforms of tensors (v2) and of Pillow images
(v1). Each round's rates are divided by those of that round's other rows; the result holds medians. Rates are samples per CPU second, so
that other programs on the core disturb less.

The files are photographs of 500×375, and the same ones enlarged to 2000×1500. These have noise added, since enlarged photographs alone
compress too well. The PSNR compares the crops of "auto" with those of "exact", which draw the same random numbers.
"""

import importlib.metadata
import io
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import PIL.Image
import pyarrow as pa
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import side_by_side, workloads
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.images import turbojpeg
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.environment import keep_freed_memory
from offload.pipeline.preprocessing.processing import process

BATCH = 64
PLAIN, SIMPLEJPEG, EXACT, AUTO = "plain loop", "simplejpeg loop", 'offload, decode="exact"', 'offload, decode="auto"'
OF_PILLOW = ", of Pillow images"
TENSORS = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)])
PILLOW = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor()])
ENLARGED = 4
NOISE = 4.0  # the standard deviation, of 255: about a camera's
QUALITY = 90


@click.command(help=__doc__)
@click.option("--images", default=256, show_default=True, type=click.IntRange(min=BATCH), help="Of 500×375.")
@click.option("--large-images", default=64, show_default=True, type=click.IntRange(min=0), help="Of 2000×1500.")
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there as JSON.")
def main(images: int, large_images: int, repeats: int, as_json: bool, output: Path | None) -> None:
    library = turbojpeg.library()
    if library is None:
        raise click.ClickException("no TurboJPEG 3 library: pip install 'offload[regions]'")
    machine = side_by_side.machine()
    os.sched_setaffinity(0, {side_by_side.cores()[0]})
    torch.set_num_threads(1)
    keep_freed_memory()  # as preprocessing processes do; every row gains from it
    photographs = workloads.jpeg_files(Path(tempfile.gettempdir()) / "offload-benchmark-jpeg")
    sets: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(photographs.rglob("*.jpg"))
        sets["500×375"] = _compare(_folder(Path(folder) / "small", paths[:images]), repeats)
        if large_images:
            large = _folder(Path(folder) / "large", paths[:large_images], enlarged=True)
            sets["2000×1500"] = _compare(large, repeats)
    result = {
        "files": sets,
        "repeats": repeats,
        "library": Path(library.path).name,
        "command": shlex.join(["python", "benchmarks/decode.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": {
            **side_by_side.versions(),
            **{name: importlib.metadata.version(name) for name in ("pillow", "pylibjxl")},
        },
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if output is not None:
        output.write_text(text + "\n")
    print(text if as_json else _table(sets))


def _folder(folder: Path, paths: list[Path], *, enlarged: bool = False) -> Path:
    """A class folder of these photographs."""
    rng = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    for i, path in enumerate(paths):
        to = folder / "a" / f"{i:05}.jpg"
        if not enlarged:
            to.write_bytes(path.read_bytes())
            continue
        with PIL.Image.open(path) as image:
            large = image.resize((image.width * ENLARGED, image.height * ENLARGED), PIL.Image.Resampling.BICUBIC)
        noisy = np.asarray(large) + rng.normal(0, NOISE, (large.height, large.width, 3))
        PIL.Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(to, quality=QUALITY)
    return folder


def _compare(folder: Path, repeats: int) -> dict[str, Any]:
    paths = sorted(folder.rglob("*.jpg"))
    loop = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()])
    workload = workloads.get("jpeg", folder)
    exact, auto = _tasks(folder, TENSORS, "exact"), _tasks(folder, TENSORS, "auto")
    exact_of_pillow, auto_of_pillow = _tasks(folder, PILLOW, "exact"), _tasks(folder, PILLOW, "auto")

    def plain(i: int) -> np.ndarray[Any, Any]:
        with PIL.Image.open(io.BytesIO(paths[i].read_bytes())) as image:
            return np.asarray(loop(image.convert("RGB")))

    rows: dict[str, Callable[[int], object]] = {
        PLAIN: lambda epoch: _loop(len(paths), plain),
        SIMPLEJPEG: lambda epoch: _loop(len(paths), lambda i: workload.make(i)["image"]),
        EXACT: exact,
        AUTO: auto,
        EXACT + OF_PILLOW: exact_of_pillow,
        AUTO + OF_PILLOW: auto_of_pillow,
    }
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for epoch in range(repeats + 1):
        for name, row in rows.items():
            torch.manual_seed(epoch)
            began = time.process_time()
            row(epoch)
            if epoch:  # the first round warms up
                rates[name].append(len(paths) / (time.process_time() - began))
    return {
        "images": len(paths),
        "bytes_per_image": statistics.mean(path.stat().st_size for path in paths),
        "samples_per_cpu_s": {name: statistics.median(each) for name, each in rates.items()},
        "over_plain": {name: _ratio(rates, name, PLAIN) for name in rows},
        "over_simplejpeg": {name: _ratio(rates, name, SIMPLEJPEG) for name in rows},
        "auto_over_exact": {kind: _ratio(rates, AUTO + kind, EXACT + kind) for kind in ("", OF_PILLOW)},
        "distances": {"": _distances(exact, auto), OF_PILLOW: _distances(exact_of_pillow, auto_of_pillow)},
        "rounds": rates,
    }


def _distances(exact: Callable[[int], list[Any]], auto: Callable[[int], list[Any]]) -> dict[str, Any]:
    """How far the images of one are from those of the other."""
    found = [_psnr(a, b) for a, b in zip(exact(0), auto(0), strict=True)]
    changed = [each for each in found if np.isfinite(each)]
    return {
        "equal_images": len(found) - len(changed),
        "median_psnr_db_of_others": statistics.median(changed) if changed else None,
        "least_psnr_db_of_others": min(changed) if changed else None,
    }


def _ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(rate / other for rate, other in zip(rates[name], rates[base], strict=True))


def _loop(samples: int, make: Callable[[int], np.ndarray[Any, Any]]) -> None:
    for start in range(0, samples, BATCH):
        np.stack([make(i) for i in range(start, min(start + BATCH, samples))])


def _tasks(folder: Path, transform: Any, decode: Any) -> Callable[[int], list[np.ndarray[Any, Any]]]:
    """A function of the epoch that runs a data set's tasks in this process and returns the images."""
    pipeline = offload.image_folder(folder, transform, decode=decode)
    assert pipeline.list is not None
    index = pipeline.list()
    recipe = pipeline.recipe(index, seed=0).ready()
    ids = pa.array(np.arange(len(index), dtype=np.int64))
    rows = index.table.append_column(SAMPLE_ID, ids).append_column(POSITION, ids)
    scratch = Scratch()

    def run(epoch: int) -> list[np.ndarray[Any, Any]]:
        blocks = [
            wire.decode(process(recipe, rows.slice(start, BATCH), epoch=epoch, scratch=scratch))["image"].copy()
            for start in range(0, len(index), BATCH)
        ]
        return [image for block in blocks for image in block]

    return run


def _psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """In dB; infinite for equal images."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else float("inf")


def _table(sets: dict[str, Any]) -> str:
    lines = []
    for name, made in sets.items():
        lines.append(f"{name}: {made['images']} files of {made['bytes_per_image'] / 1e3:,.0f} kB")
        for row, rate in made["samples_per_cpu_s"].items():
            lines.append(
                f"  {row:42} {rate:8,.0f} samples/CPU s  {made['over_plain'][row]:5.2f} × plain  "
                f"{made['over_simplejpeg'][row]:5.2f} × simplejpeg"
            )
        for kind, distance in made["distances"].items():
            psnr = distance["median_psnr_db_of_others"]
            others = "" if psnr is None else f", the others at a median of {psnr:.1f} dB"
            equal = f"equal images: {distance['equal_images']} of {made['images']}{others}"
            lines.append(f"  auto ÷ exact{kind}: {made['auto_over_exact'][kind]:.2f}; {equal}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
