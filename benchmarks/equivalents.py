"""What the classes of offload.transforms gain over torchvision's, and how far their outputs differ: one core, images of 224² pixels.

    python benchmarks/equivalents.py [--json] [-o benchmarks/results/equivalents.json]

Both classes make the same images with equal seeds, in turn, for --repeats rounds on one core. A row holds the median of the rounds' ratios,
in CPU time, and the greatest and the mean difference of the outputs. Noise is the worst case for rounding, since no two pixels agree.
"""

import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from offload import transforms
from offload.pipeline.preprocessing.environment import hold_to_one_core

SIDE = 224
IMAGES = 8
KERNELS = (3, 11, 23)
JITTER = {
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
}  # as SimCLR and others use it, at half strength


@click.command(help=__doc__)
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(min=3))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there as JSON.")
def main(repeats: int, as_json: bool, output: Path | None) -> None:
    machine = side_by_side.machine()
    os.sched_setaffinity(0, {side_by_side.cores()[0]})
    transforms.GaussianBlur(3)  # loads OpenCV
    hold_to_one_core()
    rows = [
        {"transform": says, "input": kind, **_compare(theirs, ours, images, repeats)}
        for kind, images in _inputs().items()
        for says, theirs, ours in _transforms()
    ]
    result = {
        "rows": rows,
        "images": IMAGES,
        "side": SIDE,
        "repeats": repeats,
        "command": shlex.join(["python", "benchmarks/equivalents.py", *sys.argv[1:]]),
        "machine": machine,
        "versions": {
            **side_by_side.versions(),
            "opencv-python-headless": importlib.metadata.version("opencv-python-headless"),
        },
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if output is not None:
        output.write_text(text + "\n")
    print(text if as_json else _table(rows))


def _transforms() -> list[tuple[str, Any, Any]]:
    blurs = [(f"GaussianBlur({k})", v2.GaussianBlur(k), transforms.GaussianBlur(k)) for k in KERNELS]
    hue = {"hue": JITTER["hue"]}
    return [
        *blurs,
        ("ColorJitter(hue)", v2.ColorJitter(**hue), transforms.ColorJitter(**hue)),
        ("ColorJitter(all)", v2.ColorJitter(**JITTER), transforms.ColorJitter(**JITTER)),
    ]


def _inputs() -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(rng.integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8)) for _ in range(IMAGES)]
    return {
        "uint8": tensors,
        "uint8, channels last": [t.unsqueeze(0).contiguous(memory_format=torch.channels_last)[0] for t in tensors],
        "float32": [t.float() / 255 for t in tensors],
        "Pillow": [v2.functional.to_pil_image(t) for t in tensors],
    }


def _compare(theirs: Any, ours: Any, images: list[Any], repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"torchvision": [], "offload": []}
    for number in range(repeats + 1):
        for name, transform in (("torchvision", theirs), ("offload", ours)):
            began = time.thread_time()
            _made(transform, images, number)
            if number:  # the first round warms up
                times[name].append(time.thread_time() - began)
    apart = [
        abs(_numbers(a) - _numbers(b))
        for number in range(repeats)
        for a, b in zip(_made(theirs, images, number), _made(ours, images, number), strict=True)
    ]
    ratios = sorted(a / b for a, b in zip(times["torchvision"], times["offload"], strict=True))
    return {
        "torchvision_ms": statistics.median(times["torchvision"]) / IMAGES * 1e3,
        "offload_ms": statistics.median(times["offload"]) / IMAGES * 1e3,
        "speedup": statistics.median(ratios),
        "speedup_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "largest_difference": max(float(each.max()) for each in apart),
        "mean_difference": statistics.mean(float(each.mean()) for each in apart),
    }


def _made(transform: Any, images: list[Any], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return [transform(image) for image in images]


def _numbers(image: Any) -> np.ndarray[Any, Any]:
    return np.asarray(image, dtype=np.float64)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'transform':18} {'input':22} {'torchvision':>11} {'offload':>9} {'gain':>7}   largest (mean) difference"
    ]
    for row in rows:
        lines.append(
            f"{row['transform']:18} {row['input']:22} {row['torchvision_ms']:8.2f} ms {row['offload_ms']:6.2f} ms "
            f"{row['speedup']:5.1f} ×   {row['largest_difference']:.2g} ({row['mean_difference']:.2g})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
