"""A preprocessing process tells of what takes long, interrupts what takes too long, and ends where it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload.pipeline.preprocessing.watchdog import GRACE_S, SLOW_S, Watch
from offload.report.events import PreprocessingSlow


class Heard:
    """A board that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float]] = []

    def slow(self, what: str, seconds: float) -> None:
        self.told.append(("slow", what, seconds))

    def given_up(self, what: str, seconds: float) -> None:
        self.told.append(("given up", what, seconds))


class Clock:
    """A time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_takes_long_is_told_of_after_a_minute_and_ever_less_often(clock: Clock) -> None:
    heard = Heard()
    watch = Watch(heard, clock)
    watch.doing(lambda: "reading sample 3")
    told_at = []
    for second in range(int(5 * SLOW_S)):
        clock.now = float(second)
        before = len(heard.told)
        watch.look(lambda: pytest.fail("it has no deadline"))
        told_at += [second] * (len(heard.told) - before)
    assert told_at == [SLOW_S, 2 * SLOW_S, 4 * SLOW_S]
    assert {what for _, what, _ in heard.told} == {"reading sample 3"}


def test_what_ends_in_time_is_not_told_of(clock: Clock) -> None:
    watch = Watch(heard := Heard(), clock)
    for sample in range(10):
        watch.doing(lambda: "reading", 30.0)
        clock.now += 29.0
        watch.look(lambda: pytest.fail("it is within its deadline"))
        assert sample >= 0
    watch.idle()
    clock.now += 1000.0
    watch.look(lambda: pytest.fail("nothing is being done"))
    assert not heard.told


def test_what_takes_too_long_is_interrupted_once_and_then_given_up(clock: Clock) -> None:
    watch = Watch(heard := Heard(), clock)
    watch.doing(lambda: "reading sample 3", 5.0)
    interrupted = []
    for second in range(int(5 + GRACE_S)):
        clock.now = float(second)
        watch.look(lambda: interrupted.append(clock.now))
    assert interrupted == [5.0]
    assert not heard.told
    clock.now = 5.0 + GRACE_S
    watch.look(lambda: pytest.fail("it was interrupted before"))
    assert heard.told == [("given up", "reading sample 3", 5.0)]


SLEEPS = """
import time
from offload.pipeline.preprocessing.watchdog import NoReports, SampleTimeoutError, Watch
watch = Watch(NoReports())
watch.start()
for _ in range(2):
    watch.doing(lambda: "sleeping", 0.1)
    try:
        try:
            time.sleep(1000)
        except Exception:
            print("swallowed")
    except SampleTimeoutError:
        print("interrupted")
    watch.idle()
"""


def test_a_call_that_sleeps_is_interrupted_whatever_it_catches() -> None:
    # In a process of its own: it takes over a signal that the test runner uses.
    done = subprocess.run([sys.executable, "-c", SLEEPS], capture_output=True, text=True, timeout=800, check=True)
    assert done.stdout.split() == ["interrupted", "interrupted"]


def test_what_is_said_of_it() -> None:
    event = PreprocessingSlow(what="reading sample 3 (item 3 of Slow) of 'train'", seconds=60, node="10.0.0.2")
    said = event.sentence({})
    assert said is not None
    assert said.startswith("reading sample 3 (item 3 of Slow) of 'train' has taken 60 s so far on 10.0.0.2")
