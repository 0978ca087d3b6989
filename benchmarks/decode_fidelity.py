"""How far images of decode="auto" are from those of decode="exact", on photographs, and whether training notices.

    python benchmarks/decode_fidelity.py PHOTOGRAPHS [--json] [-o benchmarks/results/decode_fidelity.json]

PHOTOGRAPHS is a folder of JPEG files as cameras make them. From these the benchmark takes --cutouts cutouts, with a short side of 375
to 1,600 pixels, and stores each as a JPEG of its own (quality 90, halved chroma). Every transform then makes each cutout's sample
twice, with equal random numbers. The table holds the number of equal samples and the PSNR of the others.

For the accuracy, a ResNet-10 learns the demo's digits from 64 pixels, with both ways of decoding, once for each seed. At that size,
most crops are decoded at a half or a quarter of their scale.
"""

import importlib.metadata
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import PIL.Image
import pyarrow as pa
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torchvision import transforms as v1
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

import offload
from benchmarks import side_by_side
from offload.cli.demo.workload import small_resnet
from offload.demo_data import make_demo_data
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.images import turbojpeg
from offload.pipeline.preprocessing.processing import process

SHORT_SIDE = (375, 1600)  # of a cutout, in pixels
QUALITY = 90
TASK_ROWS = 64
PIXELS = 64
BATCH = 32
PERCENTILE = 5

TRANSFORMS: dict[str, list[Any]] = {
    "RandomResizedCrop(224)": [v2.RandomResizedCrop(224, antialias=True)],
    "RandomResizedCrop(96)": [v2.RandomResizedCrop(96, antialias=True)],
    "Resize(256), CenterCrop(224)": [v2.Resize(256, antialias=True), v2.CenterCrop(224)],
    "Resize((64, 64))": [v2.Resize((64, 64), antialias=True)],
    "RandomResizedCrop(224) of Pillow images": [v1.RandomResizedCrop(224)],
    "RandomResizedCrop(224, bicubic) of Pillow images": [
        v1.RandomResizedCrop(224, interpolation=v1.InterpolationMode.BICUBIC)
    ],
    "Resize(256), CenterCrop(224) of Pillow images": [v1.Resize(256), v1.CenterCrop(224)],
}


@click.command(help=__doc__)
@click.argument("photographs", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--cutouts", default=2000, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--seeds", default=5, show_default=True, type=click.IntRange(min=0), help="Of the training; 0: no training."
)
@click.option("--images", default=1500, show_default=True, type=click.IntRange(min=100), help="Of the demo's data set.")
@click.option("--epochs", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there as JSON.")
def main(
    photographs: Path, cutouts: int, seeds: int, images: int, epochs: int, as_json: bool, output: Path | None
) -> None:
    if turbojpeg.library() is None:
        raise click.ClickException("no TurboJPEG 3 library: pip install 'offload[regions]'")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        files, mean_bytes = _cut(photographs, Path(temporary) / "cutouts", cutouts)
        distances = {
            name: _distances(Path(temporary) / "cutouts", steps, cutouts)
            for name, steps in track(TRANSFORMS.items(), "comparing", console=Console(stderr=True))
        }
        accuracy = _accuracy(Path(temporary) / "digits", seeds, images, epochs) if seeds else None
    result = {
        "photographs": files,
        "cutouts": cutouts,
        "bytes_per_cutout": mean_bytes,
        "transforms": distances,
        "accuracy": accuracy,
        "command": shlex.join(["python", "benchmarks/decode_fidelity.py", "PHOTOGRAPHS", *sys.argv[2:]]),
        "machine": side_by_side.machine(),
        "versions": {**side_by_side.versions(), "pylibjxl": importlib.metadata.version("pylibjxl")},
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        _show(result)


def _cut(photographs: Path, to: Path, cutouts: int) -> tuple[list[str], float]:
    """Cut them out, and return the photographs' names and the cutouts' mean size in bytes."""
    paths = sorted(path for path in photographs.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    if not paths:
        raise click.ClickException(f"{photographs} holds no JPEG files; name a folder of photographs")
    (to / "a").mkdir(parents=True)
    rng = np.random.default_rng(0)
    sizes = []
    for number, path in enumerate(track(paths, "cutting", console=Console(stderr=True))):
        with PIL.Image.open(path) as opened:
            photograph = opened.convert("RGB")
        for cutout in range(number, cutouts, len(paths)):
            short = int(rng.uniform(*SHORT_SIDE))
            sides = (short * 4 // 3, short) if rng.random() < 0.75 else (short, short * 4 // 3)
            width, height = (min(side, whole) for side, whole in zip(sides, photograph.size, strict=True))
            left, top = (
                int(rng.integers(photograph.width - width + 1)),
                int(rng.integers(photograph.height - height + 1)),
            )
            file = to / "a" / f"{cutout:06}.jpg"
            photograph.crop((left, top, left + width, top + height)).save(file, quality=QUALITY)
            sizes.append(file.stat().st_size)
    return [path.name for path in paths], statistics.mean(sizes)


def _distances(folder: Path, steps: list[Any], cutouts: int) -> dict[str, Any]:
    exact, auto = (_Samples(folder, v2.Compose(steps), decode, seed=0) for decode in ("exact", "auto"))
    equal, others = 0, []
    for start in range(0, cutouts, TASK_ROWS):
        for a, b in zip(exact.images(0, start), auto.images(0, start), strict=True):
            error = float(np.mean((a.astype(np.float64) - b) ** 2))
            if error:
                others.append(10 * float(np.log10(255**2 / error)))
            else:
                equal += 1
    return {
        "equal": equal,
        "others": len(others),
        "median_psnr_db": statistics.median(others) if others else None,
        f"percentile_{PERCENTILE}_psnr_db": float(np.percentile(others, PERCENTILE)) if others else None,
        "least_psnr_db": min(others, default=None),
    }


class _Samples:
    """A data set's samples, as a preprocessing task makes them."""

    def __init__(self, folder: Path, transform: Any, decode: Any, *, seed: int) -> None:
        pipeline = offload.image_folder(folder, transform, decode=decode)
        assert pipeline.list is not None
        index = pipeline.list()
        ids = pa.array(np.arange(len(index), dtype=np.int64))
        self.rows = index.table.append_column(SAMPLE_ID, ids).append_column(POSITION, ids)
        self.recipe = pipeline.recipe(index, seed=seed).ready()

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def images(self, epoch: int, start: int) -> Any:
        """(rows, height, width, 3), uint8."""
        return np.asarray(self._block(epoch, start)["image"])

    def all(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (samples, 3, height, width), float32 from -1 to 1, and labels."""
        blocks = [self._block(epoch, start) for start in range(0, len(self), TASK_ROWS)]
        images = torch.from_numpy(np.concatenate([np.asarray(block["image"]) for block in blocks]))
        labels = torch.from_numpy(np.concatenate([np.asarray(block["label"]) for block in blocks]))
        return images.permute(0, 3, 1, 2).float().div(127.5).sub(1.0), labels

    def _block(self, epoch: int, start: int) -> Any:
        return wire.decode(process(self.recipe, self.rows.slice(start, TASK_ROWS), epoch=epoch))


def _accuracy(folder: Path, seeds: int, images: int, epochs: int) -> dict[str, Any]:
    """The validation accuracy of each seed, in percent, trained and validated with either way of decoding."""
    made = make_demo_data(folder, images)
    found: dict[str, list[float]] = {"exact": [], "auto": []}
    for seed in track(range(seeds), "training", console=Console(stderr=True)):
        for decode, accuracies in found.items():
            train = _Samples(made.train, v2.Compose([v2.RandomResizedCrop(PIXELS, (0.7, 1.0))]), decode, seed=seed)
            val = _Samples(made.val, v2.Compose([v2.Resize((PIXELS, PIXELS), antialias=True)]), decode, seed=seed)
            accuracies.append(_train(train, val, seed, epochs))
    return {
        "percent": found,
        "mean": {decode: statistics.mean(each) for decode, each in found.items()},
        "spread": {decode: statistics.pstdev(each) for decode, each in found.items()},
        "images": images,
        "epochs": epochs,
        "pixels": PIXELS,
    }


def _train(train: _Samples, val: _Samples, seed: int, epochs: int) -> float:
    torch.manual_seed(seed)
    model = small_resnet(classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * -(-len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for epoch in range(epochs):
        images, labels = train.all(epoch)
        model.train()
        for batch in torch.randperm(len(labels)).split(BATCH):  # type: ignore[no-untyped-call]
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    images, labels = val.all(0)
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).float().mean())


def _show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{result['cutouts']:,} cutouts of {len(result['photographs'])} photographs")
    for column in ("transform", "equal", "others, median PSNR", f"{PERCENTILE} % below", "least"):
        table.add_column(column, justify="left" if column == "transform" else "right")
    for name, each in result["transforms"].items():
        values = (each["median_psnr_db"], each[f"percentile_{PERCENTILE}_psnr_db"], each["least_psnr_db"])
        table.add_row(name, f"{each['equal']:,}", *("-" if value is None else f"{value:.1f} dB" for value in values))
    console.print(table)
    if result["accuracy"]:
        for decode, mean in result["accuracy"]["mean"].items():
            spread = result["accuracy"]["spread"][decode]
            console.print(f'decode="{decode}": {mean:.1f} % right, standard deviation {spread:.1f} over the seeds')


if __name__ == "__main__":
    main()
