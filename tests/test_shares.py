"""Whatever happens to the processes that share out the tests, each test runs once, and the session ends."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shares import LONGEST, OneByOneOrByFile, rank

PROCESSES = 3
FILES = (LONGEST[0], "launch/ray/test_cli.py", "model/test_laws.py", "adapt/test_joint.py")


class Process:
    """A process of pytest-xdist: it holds back the last test that it has until more come, or the session ends."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.waiting: deque[int] = deque()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def runs(self) -> bool:
        return len(self.waiting) > (0 if self.shutting_down else 1)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=len(FILES)), data=st.data())
def test_each_test_runs_once_though_processes_die(sizes: list[int], data: st.DataObject) -> None:
    files = zip(FILES, sizes, strict=False)
    tests = [f"tests/{file}::test_{number}" for file, count in files for number in range(count)]
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False), getvalue=lambda name: [f"{PROCESSES}*popen"]
    )
    scheduler = OneByOneOrByFile(config)
    ran: Counter[str] = Counter()
    processes: list[Any] = []
    collecting: list[Any] = []

    def begins() -> None:
        process: Any = Process()
        scheduler.add_node(process)
        collecting.append(process)

    def collects(process: Any) -> None:
        collecting.remove(process)
        processes.append(process)
        scheduler.add_node_collection(process, tests)
        if scheduler.collection_is_completed:
            scheduler.schedule()

    for _ in range(PROCESSES):
        begins()
    while len(processes) < PROCESSES:
        collects(collecting[0])
    deaths = 0
    while not scheduler.tests_finished or any(process.runs() for process in processes):
        able = [process for process in processes if process.runs()]
        assert able or collecting, "nobody goes on"
        process = data.draw(st.sampled_from([*able, *collecting]))
        if process in collecting:
            collects(process)
        elif deaths < 4 and data.draw(st.integers(0, 3)) == 0:
            deaths += 1
            processes.remove(process)
            ran[str(scheduler.remove_node(process))] += 1  # the session reports it as failed
            begins()
        else:
            number = process.waiting.popleft()
            ran[tests[number]] += 1
            scheduler.mark_test_complete(process, number)
        for other in [*processes, *collecting]:
            if scheduler.tests_finished:
                other.shutdown()
    assert ran == Counter(tests)


def test_long_files_begin_first() -> None:
    others = ("model/test_laws.py", "test_docs.py")
    ranks = [rank(f"tests/{file}::test_a[b::c]") for file in (*LONGEST, *others)]
    assert ranks == sorted(ranks)
    assert ranks[-1] == ranks[-2] == len(LONGEST)


def test_long_files_are_there(pytestconfig: pytest.Config) -> None:
    assert [file for file in LONGEST if not (pytestconfig.rootpath / "tests" / file).is_file()] == []
