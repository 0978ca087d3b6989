"""Compares the outcomes of other libraries' tests with the expected ones, and counts them.

A test that is not expected to fail must pass. `expected.toml` names the others, with a kind and a reason each.
"""

import fnmatch
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["on purpose", "private", "environment", "open"]
"""Why a test fails: offload differs on purpose; the test looks at names that its library keeps for itself; it needs what is not
here; or offload is wrong."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a test ended.

    Args:
        test: its class or module, a dot, and its name.
        outcome: "passed", "failed", "skipped", "crashed" (it ended its process) or "hung".
        why: the first line of the reason.
    """

    test: str
    outcome: str
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Tests that may fail.

    Args:
        tests: their names; ``*`` stands for any characters.
        why: what makes them fail, in a sentence.
        sometimes: whether they may also pass, since it depends on timing, on the machine or on the suite's version.
    """

    tests: tuple[str, ...]
    kind: Kind
    why: str
    sometimes: bool = False

    def concerns(self, test: str) -> bool:
        """Return whether a test is one of them."""
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An outcome, and what it is called: "same", "skipped", a kind, or "unexpected"."""

    outcome: Outcome
    called: str
    why: str = ""


def expectations(text: str) -> dict[str, list[Expectation]]:
    """Return the expectations in a TOML text, by suite. Raises ValueError for an unknown kind, and TypeError for a wrong field."""
    found: dict[str, list[Expectation]] = {}
    for suite, entries in tomllib.loads(text).items():
        found[suite] = [Expectation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
        for entry in found[suite]:
            if entry.kind not in KINDS:
                raise ValueError(
                    f"{suite}: {', '.join(entry.tests)}: the kind must be one of {KINDS}, found {entry.kind!r}"
                )
    return found


def verdicts(outcomes: Sequence[Outcome], expected: Sequence[Expectation]) -> list[Verdict]:
    """Return a verdict on each outcome. The first expectation that names a test counts."""
    return [_verdict(outcome, next((e for e in expected if e.concerns(outcome.test)), None)) for outcome in outcomes]


def _verdict(outcome: Outcome, expected: Expectation | None) -> Verdict:
    if outcome.outcome == "skipped":
        return Verdict(outcome=outcome, called="skipped", why=outcome.why)
    if outcome.outcome == "passed":
        if expected is None or expected.sometimes:
            return Verdict(outcome=outcome, called="same")
        why = f"it passes, and expected.toml says that it fails: {expected.why}"
        return Verdict(outcome=outcome, called="unexpected", why=why)
    if expected is None:
        return Verdict(outcome=outcome, called="unexpected", why=outcome.why or outcome.outcome)
    return Verdict(outcome=outcome, called=expected.kind, why=expected.why)


CALLED = ("same", "skipped", *KINDS, "unexpected")


def counts(found: Sequence[Verdict]) -> Mapping[str, int]:
    """Return how many tests have each verdict."""
    return Counter(verdict.called for verdict in found)
