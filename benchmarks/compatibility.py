"""Runs offload with other versions of Ray, Python and torch: everything within the window works, and what is beside it is refused.

    python -m benchmarks.compatibility [--only ROW] [--program NAME] [--jobs 2] [-o benchmarks/results/compatibility.json]

Each row is an environment, which uv makes and keeps in ~/.cache/offload-matrix. In each, seven programs run: a DataLoader, a Trainer, a
Dataset of Ray Data, a worker that is killed, a run that is resized, a run that is resumed, and a job on a Ray head. A row beside the window
must be refused instead: by the installer, at the import and by the command. Rows may run in separate calls: each replaces its own part of
the result. The command exits with 1 if something fails that should not.

How to read it: a row that passes says that these programs had the right outcome with these versions. It says nothing about speed.
"""

import json
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks import side_by_side
from benchmarks.matrix import environments, running
from benchmarks.matrix.environments import EnvironmentFailed, PythonMissing
from benchmarks.matrix.rows import PROGRAMS, REFUSAL, ROWS, Row, UnknownName, chosen_programs, chosen_rows

DEFAULT_OUTPUT = Path(__file__).parent / "results" / "compatibility.json"
PASSED, FAILED, NO_PYTHON = "passed", "failed", "no such Python here"


def merged(known: dict[str, Any], row: Row, new: dict[str, Any]) -> dict[str, Any]:
    """The rows of a result with the new entry of one row, in the order of ROWS. Programs that did not run now keep their outcomes, if
    the row has the same versions as then."""
    before = known.get(row.name, {})
    programs = dict(new["programs"])
    if before.get("versions") == new["versions"]:
        programs = {**before.get("programs", {}), **programs}
    order = [REFUSAL, *PROGRAMS]
    rows = {**known, row.name: {**new, "programs": {name: programs[name] for name in order if name in programs}}}
    return {each.name: rows[each.name] for each in ROWS if each.name in rows}


def state(entry: dict[str, Any]) -> str:
    """Whether a row passed, failed, or has a Python that this machine does not have. A row whose packages cannot be installed failed."""
    if entry.get("no_python"):
        return NO_PYTHON
    return PASSED if entry["programs"] and all(program["passed"] for program in entry["programs"].values()) else FAILED


def run_row(row: Row, programs: list[str], folder: Path, jobs: int, tell: Any) -> dict[str, Any]:
    """Run one row. An environment that cannot be made is an entry without programs."""
    entry: dict[str, Any] = {"expects": row.expects, "versions": {"python": row.python}, "programs": {}}
    began = time.monotonic()
    try:
        environment = environments.make(row, folder)
    except EnvironmentFailed as reason:
        tell(f"{row.name}: not made: {reason}")
        return {**entry, "why": str(reason), **({"no_python": True} if isinstance(reason, PythonMissing) else {})}
    entry["versions"] = environment.versions
    tell(f"{row.name}: {_words(environment.versions)}, made in {time.monotonic() - began:.0f} s")

    def outcome(program: str) -> dict[str, Any]:
        ended = running.refusal(environment) if program == REFUSAL else running.run(environment, program)
        tell(f"{row.name} {program}: {PASSED if ended.passed else f'{FAILED}: {ended.why}'} in {ended.seconds:.0f} s")
        return ended.document()

    names = programs if row.expects == "works" else [REFUSAL]
    pool = ThreadPoolExecutor(jobs)
    try:
        entry["programs"] = dict(zip(names, pool.map(outcome, names), strict=True))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        running.end_all()
        raise
    finally:
        pool.shutdown()
    return entry


def known_rows(output: Path) -> dict[str, Any]:
    """The rows of an earlier result. Raises click.UsageError for another file."""
    if not output.exists():
        return {}
    try:
        document = json.loads(output.read_text(encoding="utf-8"))
        if document["benchmark"] != "compatibility":
            raise KeyError
        rows: dict[str, Any] = document["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        raise click.UsageError(f"{output} is no result of this benchmark. Pass the path of another file.") from None
    return rows


def table(rows: dict[str, Any]) -> Table:
    made = Table("row", "Python", "Ray", "torch", *PROGRAMS, "outcome")
    for name, entry in rows.items():
        versions, programs = entry["versions"], entry["programs"]
        marks = [("✓" if programs[each]["passed"] else "✗") if each in programs else "" for each in PROGRAMS]
        refused = REFUSAL in programs and programs[REFUSAL]["passed"]
        outcome = "refused" if refused else state(entry)
        made.add_row(name, versions["python"], versions.get("ray", ""), versions.get("torch", ""), *marks, outcome)
    return made


def _words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


@click.command(help=__doc__)
@click.option("--only", multiple=True, metavar="ROW", help="A row to run; may be repeated. All by default.")
@click.option("--program", "names", multiple=True, metavar="NAME", help="A program to run; may be repeated.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Programs at a time.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=environments.DEFAULT_FOLDER,
    help="Where environments are kept.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write each row's result there.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON on stdout instead of a table.")
def main(
    only: tuple[str, ...], names: tuple[str, ...], jobs: int, folder: Path, output: Path | None, as_json: bool
) -> None:
    try:
        rows, programs = chosen_rows(only), chosen_programs(names)
    except UnknownName as error:
        raise click.UsageError(f"{error}.") from None
    recorded = {} if output is None else known_rows(output)
    found: dict[str, Any] = {}
    for row in rows:
        entry = run_row(row, programs, folder, jobs, lambda line: click.echo(line, err=as_json))
        found[row.name] = entry
        if output is not None:
            recorded = merged(
                recorded, row, {**entry, "command": _command(sys.argv[1:]), "machine": side_by_side.hardware()}
            )
            document = {
                "benchmark": "compatibility",
                "offload": side_by_side.versions().get("offload"),
                "rows": recorded,
            }
            output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
    else:
        Console(width=160).print(table(found))
    sys.exit(any(state(entry) == FAILED for entry in found.values()))


def _command(arguments: list[str]) -> str:
    """The command without the folders of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "-m", "benchmarks.compatibility", *words])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended first
    main()
