"""Ctrl-C, SIGTERM and SIGHUP raise or are counted, and a process that takes too long to end is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.process import interrupts as interrupts_module
from offload.process.interrupts import INTERRUPTED, SIGNALS, handled

DEADLINE_S = 800.0


@pytest.fixture(autouse=True)
def _no_nohup() -> Iterator[None]:
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_handlers_are_given_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyboardInterrupt), handled():
        signal.raise_signal(number)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_behind_a_shield_signals_are_counted_and_told_later() -> None:
    with handled() as interrupts:
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            with handled() as same:
                assert same is interrupts
        assert interrupts.presses == 2
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_handlers_that_a_library_took_meanwhile_are_taken_back() -> None:
    """As ray.init does where a script calls it."""
    with handled():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        with handled(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_handler_that_is_not_pythons_does_not_break_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python is embedded in a program with handlers of its own."""
    before = signal.getsignal(signal.SIGTERM)
    real = interrupts_module.install
    monkeypatch.setattr(interrupts_module, "install", lambda found: {**real(found), signal.SIGTERM: None})
    try:
        with handled():
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.presses == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_on_another_thread_nothing_is_touched() -> None:
    seen = []

    def run() -> None:
        with handled() as interrupts:
            seen.append((interrupts.presses, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


COMMAND = """
import os, time
from offload.process import interrupts
interrupts.END_S = 0.2
handlers = interrupts.Interrupts()
interrupts.LastResort(handlers)
interrupts.install(handlers)
def ready():
    os.write(1, b"ready\\n")  # a signal during print() would find its buffer locked
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("then", "presses"),
    [
        pytest.param("with handlers.shielded(): ready()", 1, id="an end that takes too long"),
        pytest.param("with handlers.shielded(patient=True): ready()", 2, id="a commit that is not waited for"),
        pytest.param("with handlers.shielded(nothing_to_lose=True): ready()", 1, id="nothing to lose"),
        pytest.param("with handlers.finally_killing(lambda: os.write(1, b'killed\\n')): import takes_long", 1, id="an import"),
    ],
)  # fmt: skip
def test_the_last_resort(tmp_path: Path, then: str, presses: int) -> None:
    (tmp_path / "takes_long.py").write_text("import __main__\n__main__.ready()")
    (tmp_path / "command.py").write_text(COMMAND + then)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "command.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT)[:presses]:  # two of a kind may be taken for one
            process.send_signal(number)
        out, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED
    assert said == "offload: ended at once; the same command resumes from the last checkpoint.\n"
    assert out == ("killed\n" if "killed" in then else "")


def after_one_press(code: str) -> tuple[int, str]:
    """The exit code of a program that gets one Ctrl-C after its first line, and what it prints from then on."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out


def test_the_first_press_is_answered_in_order() -> None:
    """Longer than the last resort would wait otherwise."""
    code = COMMAND + (
        "with handlers.shielded(patient=True):\n"
        "    print('ready', flush=True)\n"
        "    while not handlers.presses: time.sleep(0.01)\n"
        "    time.sleep(1.0)\n"
        "    print('committed', flush=True)\n"
    )
    assert after_one_press(code) == (0, "committed\n")


def test_what_follows_a_commit_has_the_time_that_it_was_given() -> None:
    """Again longer than the last resort would wait otherwise: callbacks may still upload what they heard."""
    code = COMMAND + (
        "with handlers.shielded(patient=True):\n"
        "    print('ready', flush=True)\n"
        "    while not handlers.presses: time.sleep(0.01)\n"
        "    handlers.end_within(600.0)\n"
        "with handlers.shielded():\n"
        "    time.sleep(1.0)\n"
        "    print('ended', flush=True)\n"
    )
    assert after_one_press(code) == (0, "ended\n")
