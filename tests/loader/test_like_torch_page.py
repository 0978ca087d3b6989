"""docs/dataloader-tests.md has a row for every test of the suites that it names, counts them right, and names tests of ours that exist."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tests.helpers import DATA, ROOT

PAGE = ROOT / "docs" / "dataloader-tests.md"
NAMES = {
    "torch": "torch-test-dataloader.txt",
    "torchdata": "torchdata-tests.txt",
    "webdataset": "webdataset-tests.txt",
}
STATES = ("same", "different on purpose", "open", "not applicable", "needs a GPU")


class Answer(NamedTuple):
    """A row of the page. ``ours``: the tests that show it."""

    state: str
    ours: list[str]


def answers() -> dict[str, dict[str, Answer]]:
    """The page's rows, by suite, and by class or module and name of its test. These come from the row, or else from the section's title."""
    found: dict[str, dict[str, Answer]] = {suite: {} for suite in NAMES}
    section, suite = "", "torch"
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            suite = next((each for each in NAMES if section.startswith(f"{each}'s ")), suite)
        elif line.startswith(("| `test_", "| `Test")):
            theirs, state, _, ours = (cell.strip() for cell in line.strip("|").split("|"))
            named = re.match(r"`(\w+)`: ", theirs)
            within, listed = (section, theirs) if named is None else (named[1], theirs[named.end() :])
            for test in re.findall(r"`(test\w*)`", listed):
                key = f"{within}.{test}"
                assert key not in found[suite], f"{key} has two rows"
                found[suite][key] = Answer(state, re.findall(r"`(test_\w+)`", ours))
    return found


def test_every_test_has_a_row() -> None:
    for suite, rows in answers().items():
        names = (DATA / NAMES[suite]).read_text(encoding="utf-8").split()
        assert sorted(rows) == sorted(names), suite


def test_the_page_counts_right() -> None:
    text = PAGE.read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| (\w+)'s [^|]+\| ([\d| ]+) \|$", text, re.MULTILINE))
    assert set(said) == set(NAMES)
    for suite, rows in answers().items():
        counts = Counter(row.state for row in rows.values())
        assert set(counts) <= set(STATES)
        assert [*map(int, said[suite].split("|"))] == [counts.total(), *(counts[state] for state in STATES)], suite


def test_what_the_page_claims_is_shown_by_tests_that_exist() -> None:
    files = [path for folder in ("loader", "pipeline") for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    defined = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))}
    for suite, rows in answers().items():
        for name, row in rows.items():
            assert set(row.ours) <= defined, f"{suite}: {name}: {set(row.ours) - defined}"
            assert bool(row.ours) == (row.state in ("same", "different on purpose")), f"{suite}: {name}"
