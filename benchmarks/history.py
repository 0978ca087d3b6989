"""The history of the records: a page with a line chart of each figure over the commits that recorded it.

    python -m benchmarks.history -o history.html

It reads the results of all commits below HEAD with git. A figure is missing where a commit's record does not hold it yet. Machines differ
between records: the page is for finding the commit at which a figure changed, not for proving it.
"""

import io
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
import jinja2
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.claims import CLAIMS, RESULTS, Figure
from benchmarks.guard import FIGURES, RECORD

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>History of the records</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
 main { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); }
 figure { margin: 0; } figcaption { font-size: .9rem; } svg { height: auto; width: 100%; }
</style>
<h1>History of the records</h1>
<p>Each figure over the commits that recorded it. Machines differ between records.</p>
<main>
{% for title, points, drawing in charts %}
<figure>
{{ drawing | safe }}
<figcaption>{{ title }} <small>({{ points[-1].commit }}: {{ "%.3g" | format(points[-1].value) }})</small></figcaption>
</figure>
{% endfor %}
</main>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A figure as one commit recorded it."""

    commit: str
    at: datetime
    value: float


def history(figure: Figure, checkout: Path) -> list[Point]:
    """Return the figure's values, oldest first: one for each commit that changed it."""
    points: list[Point] = []
    for commit, at, text in _versions(f"benchmarks/results/{figure.file}", checkout):
        try:
            value = figure.of(json.loads(text))
        except (KeyError, IndexError, TypeError, ValueError):  # an earlier form of the record
            continue
        if not points or points[-1].value != value:
            points.append(Point(commit=commit, at=at, value=value))
    return points


def _versions(file: str, checkout: Path) -> Iterator[tuple[str, datetime, str]]:
    for line in reversed(_git(checkout, "log", "--format=%h %cI", "--diff-filter=AM", "--", file).splitlines()):
        commit, at = line.split()
        yield commit, datetime.fromisoformat(at), _git(checkout, "show", f"{commit}:{file}")


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"git {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _draw(points: list[Point]) -> str:
    """An SVG element."""
    picture, axes = plt.subplots(figsize=(4, 2), constrained_layout=True)
    axes.plot([point.value for point in points], marker="o", color="#2ca05a")
    axes.set_ylim(bottom=min(0.0, *(point.value for point in points)))
    axes.set_xticks(range(len(points)), [f"{point.at:%d %b %Y}" for point in points], fontsize=7)
    axes.grid(alpha=0.3)
    file = io.StringIO()
    picture.savefig(file, format="svg")
    plt.close(picture)
    return file.getvalue()[file.getvalue().index("<svg") :]


@click.command(help=__doc__)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The page, *.html."
)
def main(output: Path) -> None:
    charts = []
    for title, figure in _figures():
        if points := history(figure, RESULTS.parents[1]):
            charts.append((title, points, _draw(points)))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    output.write_text(environment.from_string(PAGE).render(charts=charts), encoding="utf-8")
    click.echo(f"{output}: {len(charts)} figures")


def _figures() -> Iterator[tuple[str, Figure]]:
    for name, kind in FIGURES.items():
        yield kind.says, Figure(file=RECORD.name, at=("medians", name))
    for claim in CLAIMS:
        for figure in claim.figures:
            yield f"{claim.says}: {figure.shown.partition('{')[0]} {figure.shown.rpartition('}')[2]}".strip(), figure


if __name__ == "__main__":
    main()
