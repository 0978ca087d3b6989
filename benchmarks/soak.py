"""The release checks that take too long for every change: the tests marked soak, and fifty joins and leaves in one run.

    make soak            # or: python benchmarks/soak.py [-o benchmarks/results/soak.json]

The claim: nothing fails, no sample is lost or repeated, and no process and no byte stays behind. The marker ``soak`` selects the tests
from the whole suite: hundreds of rehearsed failure schedules, real clusters whose processes are killed, and SageMaker jobs that stop and
resume on other numbers of hosts. The result lists each test with its outcome and its seconds.
"""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this file also runs as a script

from benchmarks.side_by_side import ROOT, machine, versions

RESULT = ROOT / "benchmarks" / "results" / "soak.json"


@click.command()
@click.option("--joins", default=50, show_default=True, help="Joins and leaves in one run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
def main(joins: int, output: Path) -> None:
    """Run every test marked soak, and the joins and leaves. Exit code 1 if anything fails."""
    with tempfile.TemporaryDirectory() as folder:
        report, churn = Path(folder, "tests.xml"), Path(folder, "churn.json")
        pytest = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "soak", f"--junit-xml={report}"], cwd=ROOT, check=False
        )
        churned = subprocess.run(
            [sys.executable, "benchmarks/churn.py", "--events", str(joins), "-o", str(churn)], cwd=ROOT, check=False
        )
        tests = read_report(report)
        document = {
            "benchmark": "soak",
            "claim": "nothing fails, no sample is lost or repeated, nothing stays behind",
            "command": " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]]),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "outcomes": Counter(test["outcome"] for test in tests),
            "seconds": round(sum(test["seconds"] for test in tests)),
            "tests": tests,
            "joins_and_leaves": _churn(churn) if churned.returncode == 0 else None,
        }
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{dict(document['outcomes'])} in {document['seconds']} s; {joins} joins and leaves: {churned.returncode == 0}"
    )
    sys.exit(int(bool(pytest.returncode or churned.returncode)))


def _churn(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    del found["command"]  # names a temporary file
    return found


def read_report(path: Path) -> list[dict[str, Any]]:
    """Return name, outcome and seconds of each test in a JUnit file."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append({"test": name, "outcome": outcome, "seconds": round(float(case.get("time", 0)), 1)})
    return found


if __name__ == "__main__":
    main()
