"""A plugin of pytest that writes down the outcome of each test as soon as it is known, in one Ray for all of them.

A test that ends its process leaves a line that says it began.
"""

import fnmatch
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest
import ray

_RECORD = pytest.StashKey[TextIO]()


def name_of(nodeid: str) -> str:
    """Return a test's name: its class or else its module, a dot, and its own. Without the values of its parameters."""
    path, *inner = nodeid.partition("[")[0].split("::")
    return ".".join(inner) if len(inner) > 1 else f"{Path(path).stem}.{inner[0]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the benchmark."""
    parser.addoption("--record", required=True, help="The file to which each test's outcome goes.")
    parser.addoption("--leave-out", help="A file with the names of tests that do not run.")
    parser.addoption("--only", action="append", default=[], help="A pattern of the tests to run, by name.")
    parser.addoption("--cores", type=int, default=2, help="The CPUs of the Ray cluster.")


def pytest_configure(config: pytest.Config) -> None:
    """Open the record. The markers that suites use need no declaration."""
    config.stash[_RECORD] = open(config.getoption("record"), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnknownMarkWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that an earlier process has run. Record the names of all."""
    path = config.getoption("leave_out")
    done = set(Path(path).read_text(encoding="utf-8").splitlines()) if path else set()
    only = config.getoption("only") or ["*"]
    named = ((item, name_of(item.nodeid)) for item in items)
    items[:] = [
        item for item, name in named if name not in done and any(fnmatch.fnmatchcase(name, pattern) for pattern in only)
    ]
    _write(config, {"collected": [name_of(item.nodeid) for item in items]})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start a Ray cluster before the first test's time runs. Programs that tests start begin their own, as programs of users do."""
    ray.init(num_cpus=session.config.getoption("cores"), include_dashboard=False, log_to_driver=False)


def pytest_sessionfinish() -> None:
    """End the cluster."""
    ray.shutdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record that a test begins and, over all its phases and subtests, how it ends."""
    _write(item.config, {"begins": name_of(item.nodeid)})
    reports: list[pytest.TestReport] = []
    listener = _Reports(reports)
    item.config.pluginmanager.register(listener)
    try:
        result = yield
    finally:
        item.config.pluginmanager.unregister(listener)
        outcome, why = ended(reports)
        seconds = sum(report.duration for report in reports)
        line = {"ends": name_of(item.nodeid), "outcome": outcome, "why": why, "seconds": round(seconds, 1)}
        _write(item.config, line)
    return result


class _Reports:
    def __init__(self, reports: list[pytest.TestReport]) -> None:
        self.reports = reports

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


def ended(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """Return the outcome of a test, "passed", "failed" or "skipped", and the line that says why."""
    for outcome in ("failed", "skipped"):
        for report in reports:
            if report.outcome == outcome:
                return outcome, _why(report)
    return "passed", ""


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: path, line and reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _write(config: pytest.Config, line: dict[str, Any]) -> None:
    config.stash[_RECORD].write(json.dumps(line) + "\n")
