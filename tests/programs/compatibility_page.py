"""Writes docs/compatibility.md: which versions of Ray, Python and torch offload works with, from benchmarks/results/compatibility.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.matrix.rows import PROGRAMS, REFUSAL, ROWS
from offload.versions import LOWEST_RAY, TESTED_RAY, python_range

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = """# Versions

offload works with Ray {lowest} and newer, {pythons}, and torch 2.6 and newer, on Linux. An older Ray, or none, is refused when offload is
imported: in one sentence, with the version that was found and the command that installs another. `offload doctor` says which versions
are installed. Nobody has tried a Ray from {limit} on yet: a run with one begins with a warning.

`pyproject.toml` names the lowest version of every requirement. `make test-lowest` installs exactly these and runs a part of the tests.

## What was tried

`make matrix` makes one environment per row and runs seven programs in each. Each program checks its outcome: a sample that came twice or
never fails it. {machines} `make map` writes this page from
[the record](../benchmarks/results/compatibility.json); a test holds that it is current.

"""
LAUNCHERS = """\
* `offload launch ray`: a job runs with the cluster's Ray, of whatever minor version. The command refuses a cluster with an
  older one before it sends anything.
* `offload plan --emit ray-aws`, `kuberay` and `hosts`: the nodes get the Ray that is installed where the file is printed, or that of
  `--ray VERSION`.
* `offload launch sagemaker`: the image decides on Python and torch, and one outside of the range is refused before the job starts. The
  containers install the launching machine's Ray, or the one that your requirements.txt names.
"""
MARKS = {True: "✓", False: "**fails**", None: "–"}


def machines(rows: dict[str, Any]) -> str:
    """The machines of the record in words."""
    found = {f"{row['machine']['cores']} cores of {row['machine']['cpu_model']}" for row in rows.values()}
    return f"Recorded on {' and '.join(sorted(found))}." if found else "Nothing is recorded yet."


def mark(entry: dict[str, Any], program: str) -> str:
    ran = entry["programs"].get(program)
    return MARKS[None if ran is None else ran["passed"]]


def line(name: str, entry: dict[str, Any]) -> str:
    versions = entry["versions"]
    words = [name, versions["python"], versions.get("ray", "–"), versions.get("torch", "–")]
    return f"| {' | '.join([*words, *(mark(entry, program) for program in PROGRAMS)])} |\n"


def of_refused(name: str, entry: dict[str, Any]) -> str:
    """What a row beside the window is told."""
    outcome = entry["programs"].get(REFUSAL)
    if outcome is None or not outcome["passed"]:
        return f"* `{name}`: **not refused as it should be.**\n"
    return f"* `{name}`: `import offload` and the command say: {outcome['found']['import']} The installer refuses it, too.\n"


def without_programs(rows: dict[str, Any]) -> str:
    """Why some rows have no marks."""
    missing = [f"* `{row.name}`: not tried yet.\n" for row in ROWS if row.name not in rows]
    failed = [f"* `{name}`: {entry['why']}.\n" for name, entry in rows.items() if not entry["programs"]]
    return "".join(["\n## Rows without programs\n\n", *failed, *missing]) if failed or missing else ""


def written(rows: dict[str, Any]) -> str:
    """The page for the rows of a record."""
    works = {name: entry for name, entry in rows.items() if entry["expects"] == "works" and entry["programs"]}
    refused = {name: entry for name, entry in rows.items() if entry["expects"] == "refused"}
    head = HEAD.format(lowest=LOWEST_RAY, limit=TESTED_RAY[1], pythons=python_range(), machines=machines(rows))
    remarks = [f"* `{row.name}`: {row.remark}.\n" for row in ROWS if row.remark]
    return "".join(
        [
            head,
            f"| row | Python | Ray | torch | {' | '.join(PROGRAMS)} |\n",
            f"|---|---|---|---|{'---|' * len(PROGRAMS)}\n",
            *(line(name, entry) for name, entry in works.items()),
            "\n✓: the program had the right outcome. –: it has not run in this row.\n\n",
            *remarks,
            *(f"* {name}: {what}.\n" for name, what in PROGRAMS.items()),
            "\n## Refused\n\n",
            *(of_refused(name, entry) for name, entry in refused.items()),
            without_programs(rows),
            "\n## Where these versions matter\n\n",
            LAUNCHERS,
        ]
    )


def recorded() -> dict[str, Any]:
    """The rows of the record."""
    rows: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    return rows


if __name__ == "__main__":
    PAGE.write_text(written(recorded()), encoding="utf-8")
