"""Batch inference on JPEG files: offload.predict, with Ray and without, beside Ray Data's own map_batches, on two cores.

    python benchmarks/inference.py --repeats 5 -o benchmarks/results/inference.json

All rows read the same files, decode and crop them by the same libraries, call the same model with batches of 64, and write Parquet. Each
repeat runs every row once, one after the other in turns, each as a process of its own. A row's time begins once its Ray has started, and
ends with the written file: processes, listing, all samples. Figures are medians, and ratios are medians of the ratios of each repeat.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side, workloads
from benchmarks.rows import protocol

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("ray-data", "offload-ray", "offload")
TIMEOUT_S = 900


@click.command()
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--images", default=1000, show_default=True, type=click.IntRange(min=64), help="Files to predict.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the result to this file.")
def main(repeats: int, images: int, output: Path | None) -> None:
    """Compare batch inference."""
    runs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = workloads.jpeg_files(folder / "source")
        data = _copies(source, folder / "images", images)
        for repeat in range(repeats):
            order = ROWS if repeat % 2 else ROWS[::-1]
            runs.append({row: _run(row, data, folder / f"{row}-{repeat}.parquet") for row in order})
            if {one["samples"] for one in runs[-1].values()} != {images}:
                raise click.ClickException(f"the rows have different samples: {runs[-1]}")
            click.echo(f"{repeat + 1}/{repeats}: {json.dumps(runs[-1])}", err=True)
    document = {
        "benchmark": "inference",
        "claim": "batch inference of JPEG files on two cores: offload.predict beside Ray Data's map_batches",
        "command": " ".join(["python", "benchmarks/inference.py", *sys.argv[1:]]),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
        "repeats": repeats,
        "images": images,
        "rows": {row: _summary(row, runs, images) for row in ROWS},
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=2) + "\n")
    click.echo(json.dumps(document["rows"], indent=2))


def _copies(source: Path, target: Path, images: int) -> Path:
    """A class folder with this number of files, links to those of the source."""
    files = sorted(source.rglob("*.jpg"))
    (target / "images").mkdir(parents=True)
    for number in range(images):
        os.link(files[number % len(files)], target / "images" / f"{number:06d}.jpg")
    return target


def _run(row: str, data: Path, output: Path) -> dict[str, float]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs.inference_row", row, str(data), str(output)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"{row} failed:\n{done.stderr[-2000:]}")
    answer = next(line for line in done.stdout.splitlines() if line.startswith(protocol.ANSWER))
    measured: dict[str, float] = json.loads(answer.removeprefix(protocol.ANSWER))
    return measured


def _summary(row: str, runs: list[dict[str, dict[str, float]]], images: int) -> dict[str, float | list[float]]:
    ratios = [run["ray-data"]["work_s"] / run[row]["work_s"] for run in runs]
    return {
        "work_s": round(statistics.median(run[row]["work_s"] for run in runs), 3),
        "samples_per_s": round(images / statistics.median(run[row]["work_s"] for run in runs), 1),
        "start_s": round(statistics.median(run[row]["start_s"] for run in runs), 3),
        "speed_over_ray_data": round(statistics.median(ratios), 3),
        "speed_over_ray_data_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


if __name__ == "__main__":
    main()
