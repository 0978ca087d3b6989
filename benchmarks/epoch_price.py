"""What an epoch costs by itself: the milliseconds of ten light batches, with torch's DataLoader and with offload's, once warm.

    python benchmarks/epoch_price.py [--repeats 3] [--epochs 15] [-o benchmarks/results/epoch_price.json]

People validate on small sets after each epoch. Two programs run in turns, one for each library, and iterate again and again over the same
80 small samples: map-style and iterable, with 0, 1 and 3 workers, torch's also with ``persistent_workers``. The processes of both may use
all cores. The claim: once a loader of offload is warm, such an epoch takes 50 ms at most.
"""

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.jobs.short_epochs import names

LIBRARIES = ("torch", "offload")
GOAL_MS = 50.0
TIMEOUT_S = 600


def measured(library: str, epochs: int) -> dict[str, list[float]]:
    """The milliseconds of each epoch of one program, by loader."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs.short_epochs", library, str(epochs)],
        cwd=side_by_side.ROOT, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["loader"]: line["epochs_ms"] for line in lines}


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Programs of each library.")
@click.option(
    "--epochs", type=click.IntRange(min=1), default=15, show_default=True, help="Epochs of each loader in a program."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON.")
def main(repeats: int, epochs: int, output: Path | None) -> None:
    seen: dict[str, list[list[float]]] = {name: [] for library in LIBRARIES for name in names(library)}
    for _ in range(repeats):
        for library in LIBRARIES:
            for name, epochs_ms in measured(library, epochs).items():
                seen[name].append(epochs_ms)
    medians = {name: [statistics.median(epochs_ms) for epochs_ms in runs] for name, runs in seen.items()}
    found = {name: statistics.median(runs) for name, runs in medians.items()}
    document = {
        "benchmark": "epoch_price",
        "claim": f"an epoch of ten light batches takes {GOAL_MS:g} ms at most, once a loader of offload is warm",
        "command": shlex.join(["python", "benchmarks/epoch_price.py", *sys.argv[1:]]),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
        "median_ms": found,
        "holds": all(each <= GOAL_MS for name, each in found.items() if name.startswith("offload")),
        "repeats": seen,
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    for name, each in found.items():
        print(
            f"{name:40} {each:7.1f} ms   medians of the programs {min(medians[name]):.1f} to {max(medians[name]):.1f}"
        )


if __name__ == "__main__":
    main()
