"""Processes of this machine that answer calls: a fork of this one, and forks of a fresh Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from offload.actors.errors import ProcessLostError, lost_errors
from offload.actors.processes import Actor, Handle, Served, answer_calls, start_actor
from offload.actors.starter import Starter
from tests.helpers import eventually

DEADLINE_S = 800.0
ROOT = Path(__file__).parents[2]
SET_UP = {"by": "nobody"}


class Worker:
    def __init__(self, base: int) -> None:
        if base < 0:
            raise ValueError("a base below zero")
        self.base, self.calls = base, list[int]()

    def add(self, number: int) -> int:
        self.calls.append(number)
        return self.base + number

    def called(self) -> list[int]:
        return self.calls

    def pair(self, size: int) -> tuple[Any, int]:
        return np.ones(size), size

    def total(self, array: Any) -> float:
        return float(array.result().sum())

    def fail(self) -> None:
        raise KeyError("a key")

    def leave(self, how: str) -> None:
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, hub: Handle, word: str) -> str:
        answer: str = hub.heard.remote(word).result(DEADLINE_S)
        return answer

    def wait(self) -> None:
        threading.Event().wait()

    def whereabouts(self) -> tuple[int, int, str]:
        return os.getpid(), os.getsid(0), SET_UP["by"]

    def printed(self) -> str:
        print("half a line", end="")
        return Path("/proc/self/fd/1").read_text()

    def fork(self) -> int:
        if not (pid := os.fork()):
            threading.Event().wait()
        return pid


def begun(kind: str) -> Starter:
    if kind == "forked":
        return Starter.forked(answer_calls)
    return Starter.fresh("offload.actors.processes:answer_calls", ["tests.actors.test_processes"])


@pytest.fixture(params=["forked", "fresh"])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    starter = begun(request.param)
    yield starter
    starter.close()


@pytest.fixture
def actor(starter: Starter) -> Actor:
    return start_actor(starter, Worker, 5, title="the worker")


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def result(answer: Any) -> Any:
    return answer.future().result(DEADLINE_S)


def test_calls_are_answered_in_their_order(actor: Actor) -> None:
    answers = [actor.add.remote(number) for number in range(50)]
    assert [result(answer) for answer in answers] == [5 + number for number in range(50)]
    assert result(actor.called.remote()) == list(range(50))


def test_a_result_goes_to_another_process_by_reference(starter: Starter, actor: Actor) -> None:
    array, size = actor.pair.options(num_returns=2).remote(200_000)
    assert result(size) == 200_000
    assert result(start_actor(starter, Worker, 0, title="another").total.remote(array)) == 200_000.0


def test_an_exception_arrives_and_the_process_goes_on(actor: Actor) -> None:
    with pytest.raises(KeyError, match="a key"):
        result(actor.fail.remote())
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        result(actor.leave.remote("sys.exit"))
    assert result(actor.add.remote(1)) == 6


def test_if_the_class_raises_so_does_every_call(starter: Starter) -> None:
    broken = start_actor(starter, Worker, -1, title="the worker")
    with pytest.raises(ValueError, match="a base below zero"):
        result(broken.add.remote(1))


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "ended with exit code 7"), ("kill", r"was ended by signal 9 \(SIGKILL\)")]
)
def test_the_end_of_a_process_ends_its_calls(actor: Actor, how: str, words: str) -> None:
    waiting = [actor.leave.remote(how), actor.add.remote(1)]
    for answer in waiting:
        with pytest.raises(ProcessLostError, match=f"the worker {words}"):
            result(answer)
    with pytest.raises(lost_errors()):
        result(actor.add.remote(1))


def test_what_a_process_prints_can_be_read_at_once(actor: Actor) -> None:
    assert result(actor.printed.remote()) == "half a line"


def test_a_killed_process_ends_though_its_call_waits_and_its_fork_lives(actor: Actor) -> None:
    fork = result(actor.fork.remote())
    waiting = actor.wait.remote()
    actor.kill()
    with pytest.raises(ProcessLostError, match="SIGKILL"):
        result(waiting)
    os.kill(fork, signal.SIGKILL)


def test_processes_call_an_object_of_the_program(actor: Actor) -> None:
    class Hub:
        def heard(self, word: str) -> str:
            return f"{word} in {os.getpid()}"

    served = Served(Hub())
    assert result(actor.tell.remote(served.handle, "hello")) == f"hello in {os.getpid()}"
    served.close()
    with pytest.raises(ProcessLostError, match="has ended"):
        result(actor.tell.remote(served.handle, "hello"))


def test_a_fork_has_what_the_program_has_set_up_and_both_have_sessions_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SET_UP, "by", "the program")
    for kind, by in (("forked", "the program"), ("fresh", "nobody")):
        starter = begun(kind)
        pid, session, said = result(start_actor(starter, Worker, 0, title="a worker").whereabouts.remote())
        assert said == by
        assert session not in (os.getsid(0), pid)
        starter.close()
        eventually(partial(is_gone, pid))


PROGRAM = """
import os, signal, sys
from tests.actors.test_processes import Worker, begun, start_actor
pids = []
for kind in ("forked", "fresh"):
    starter = begun(kind)
    actor = start_actor(starter, Worker, 0, title="a worker")
    pids += [starter._pid, actor.add.remote(0).result() or actor.pid]
    actor.wait.remote()
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_program_leaves_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=800)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4, done.stderr
    eventually(lambda: all(map(is_gone, pids)))
