"""Where the suite's CPU minutes go: ``pytest --cpu-report FILE`` writes a line for each test.

Each line is a JSON object: the test, the CPU seconds of its process and of all that this process has started (Ray's
daemons included), and seconds by the clock. A module's setup counts for the test that it runs for; what daemons do
between tests, for the next one. ``python -m tests.cpu_report FILE`` sums them up, by file and by test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from tests.programs.cpu_minutes import meter

COLLECTION, END = "(collection)", "(end)"


class Reporter:
    """Counts in each process that runs tests, and appends to one file."""

    def __init__(self, path: Path) -> None:
        """Start counting."""
        self._path = path
        self._meter = meter()
        self._counted_s = self._meter.cpu_s()
        self._time = time.monotonic()

    def _write(self, nodeid: str) -> None:
        counted_s, now = self._meter.cpu_s(), time.monotonic()
        line = {
            "test": nodeid,
            "cpu_s": round(counted_s - self._counted_s, 3),
            "wall_s": round(now - self._time, 3),
        }
        self._counted_s, self._time = counted_s, now
        # One write to a file opened for appending: processes do not mix their lines.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Count imports and collection apart."""
        self._write(COLLECTION)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count one test with its setup and teardown."""
        result = yield
        self._write(item.nodeid)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Count what was left: the end of fixtures that last as long as the process."""
        self._write(END)
        self._meter.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of pytest: the option."""
    parser.addoption(
        "--cpu-report", type=Path, metavar="FILE", help="append each test's CPU seconds to FILE, as JSON lines"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Of pytest: count, unless other processes run the tests."""
    path = config.getoption("--cpu-report")
    if path is not None and not config.getoption("numprocesses", None):
        config.pluginmanager.register(Reporter(path.absolute()))


def summary(lines: Iterable[str], rows: int = 30) -> str:
    """Return the dearest files and tests as a table."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for line in lines:
        entry = json.loads(line)
        files[entry["test"].partition("::")[0]] += entry["cpu_s"]
        tests[entry["test"]] += entry["cpu_s"]
    parts = [f"{files.total() / 60:.1f} CPU minutes, {len(tests):,} tests, {len(files):,} files"]
    for title, counted in (("file", files), ("test", tests)):
        parts.append(f"\nCPU s  {title}")
        parts += [f"{cpu_s:5.1f}  {name}" for name, cpu_s in counted.most_common(rows)]
    return "\n".join(parts)


if __name__ == "__main__":
    print(summary(Path(sys.argv[1]).read_text().splitlines(), *map(int, sys.argv[2:])))
