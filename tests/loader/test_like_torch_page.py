"""docs/dataloader-tests.md has a row for every test of torch's file, counts them right, and names tests of ours that exist."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tests.helpers import DATA, ROOT

PAGE = ROOT / "docs" / "dataloader-tests.md"
STATES = ("same", "different on purpose", "not applicable", "needs a GPU")


class Answer(NamedTuple):
    """A row of the page. ``ours``: the tests that show it."""

    state: str
    ours: list[str]


def answers() -> dict[str, Answer]:
    """The page's rows, by class and name of torch's test. The class is the section's title, unless the row names it."""
    found: dict[str, Answer] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith(("| `test_", "| `Test")):
            theirs, state, _, ours = (cell.strip() for cell in line.strip("|").split("|"))
            named = re.match(r"`(Test\w+)`: ", theirs)
            for test in re.findall(r"`(test_\w+)`", theirs):
                key = f"{section if named is None else named[1]}.{test}"
                assert key not in found, f"{key} has two rows"
                found[key] = Answer(state, re.findall(r"`(test_\w+)`", ours))
    return found


def test_every_test_of_torch_has_a_row() -> None:
    names = (DATA / "torch-test-dataloader.txt").read_text(encoding="utf-8").split()
    assert sorted(answers()) == sorted(names)


def test_the_page_counts_right() -> None:
    counts = Counter(row.state for row in answers().values())
    assert set(counts) == set(STATES)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    said = re.search(
        r"Of its (\d+) tests, (\d+) find the same .*?, (\d+) .*? different on purpose, (\d+) are not applicable .*? (\d+) need a GPU",
        text,
    )
    assert said is not None
    assert [*map(int, said.groups())] == [counts.total(), *(counts[state] for state in STATES)]


def test_what_the_page_claims_is_shown_by_tests_that_exist() -> None:
    files = (ROOT / "tests" / "loader").glob("test_*.py")
    defined = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))}
    for name, row in answers().items():
        assert set(row.ours) <= defined, f"{name}: {set(row.ours) - defined}"
        assert bool(row.ours) == (row.state in ("same", "different on purpose")), name
