"""From nothing to the report of a demo: seconds and CPU seconds of ``git clone`` and ``make demo``, with empty caches of packages.

    python benchmarks/first_minutes.py [--revision COMMIT ...] [--repeats 3] [-o benchmarks/results/first_minutes.json]

Each repeat clones every revision into an empty folder and runs ``make demo`` there, one revision after the other, so that all meet the
same machine. CPU seconds are those of all processes, Ray's daemons included. The claim: a new user has a report within 150 seconds, of
which the demo itself takes at most 60.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from tests.programs.cpu_minutes import meter

LOOK_S = 0.1
STAMPS = (".demo-installed", ".installed")  # the file in .venv that make touches once the demo can start
FIGURES = ("seconds", "cpu_s", "install_s", "install_cpu_s", "demo_s", "demo_cpu_s", "packages")


def measured(revision: str) -> dict[str, Any]:
    """One fresh clone: the seconds and CPU seconds of the whole, of installing and of the demo, and the packages installed."""
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as folder:
        clone = Path(folder) / "offload"
        caches = {"UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip"}
        counting, began = meter(), time.monotonic()
        subprocess.run(["git", "clone", "--quiet", side_by_side.ROOT, clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", revision], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | caches
        with (Path(folder) / "printed").open("w+") as printed:
            process = subprocess.Popen(
                ["make", "demo"], cwd=clone, env=environment, stdout=printed, stderr=subprocess.STDOUT
            )
            installed: tuple[float, float] | None = None
            while process.poll() is None:
                if installed is None and any((clone / ".venv" / stamp).exists() for stamp in STAMPS):
                    installed = time.monotonic() - began, counting.cpu_s()
                time.sleep(LOOK_S)
            seconds, cpu_s = time.monotonic() - began, counting.cpu_s()
            counting.close()
            if process.returncode or installed is None:
                printed.seek(0)
                raise click.ClickException(f"make demo at {revision} failed: {printed.read()[-2000:]}")
        if not (clone / "runs" / "demo" / "report.html").exists():
            raise click.ClickException(f"make demo at {revision} wrote no report")
        install_s, install_cpu_s = installed
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "install_s": install_s,
            "install_cpu_s": install_cpu_s,
            "demo_s": seconds - install_s,
            "demo_cpu_s": cpu_s - install_cpu_s,
            "packages": sum(1 for _ in clone.glob(".venv/lib/python*/site-packages/*.dist-info")),
            "load": os.getloadavg()[0],
        }


@click.command(help=__doc__)
@click.option("--revision", "revisions", multiple=True, default=("HEAD",), show_default=True, help="May be repeated.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the result there as JSON, beside earlier runs."
)
def main(revisions: tuple[str, ...], repeats: int, output: Path | None) -> None:
    commits = [
        subprocess.run(
            ["git", "-C", side_by_side.ROOT, "rev-parse", "--short", revision],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
        for revision in revisions
    ]  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {}
    if output is not None and output.exists():
        runs = json.loads(output.read_text(encoding="utf-8"))["repeats"]
    for _ in range(repeats):
        for commit in commits:
            runs.setdefault(commit, []).append(measured(commit))
            print(commit, json.dumps(runs[commit][-1]), flush=True)
            if output is not None:  # after each run: all of them take long
                output.write_text(json.dumps(document_of(runs), indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document_of(runs)["medians"], indent=2))


def document_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The result of the runs, by commit."""
    return {
        "benchmark": "first_minutes",
        "claim": "a new user has a report within 150 seconds of git clone, of which the demo itself takes at most 60",
        "command": shlex.join(["python", "benchmarks/first_minutes.py", *sys.argv[1:]]),
        "machine": side_by_side.hardware(),
        "versions": side_by_side.versions(),
        "medians": {
            commit: {name: statistics.median(run[name] for run in seen) for name in FIGURES}
            for commit, seen in runs.items()
        },
        "repeats": runs,
    }


if __name__ == "__main__":
    main()
