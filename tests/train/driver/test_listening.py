"""Threads that listen for a run, and their end."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from offload.train.steering.listening import Listening
from tests.helpers import eventually

DEADLINE_S = 800.0


class Reference:
    """What a call of an actor returns."""

    def __init__(self) -> None:
        self.value: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.value


def test_answers_come_and_errors_are_raised() -> None:
    listening, reference, heard = Listening(), Reference(), list[Any]()

    def listen() -> None:
        heard.append(listening.answer(lambda: reference))
        failing = Reference()
        failing.value.set_exception(ValueError("gone"))
        try:
            listening.answer(lambda: failing)
        except ValueError as error:
            heard.append(str(error))

    listening.start(listen, "listen")
    reference.value.set_result("yes")
    eventually(lambda: heard == ["yes", "gone"])
    listening.end()


def test_the_end_reaches_whoever_waits_and_nobody_calls_from_then_on() -> None:
    listening, calls, waits = Listening(), list[Reference](), threading.Event()

    def call() -> Reference:
        calls.append(Reference())
        return calls[-1]

    def listen() -> None:
        while True:
            listening.answer(call)

    def until() -> None:
        waits.set()
        listening.wait_for(lambda: False)

    threads = {"listen": listen, "until": until}
    for name, work in threads.items():
        listening.start(work, name)
    assert waits.wait(DEADLINE_S)
    eventually(lambda: len(calls) == 1)
    listening.end()
    assert not {thread.name for thread in threading.enumerate()} & threads.keys()
    calls[0].value.set_result("late")
    listening.start(listen, "later")
    assert len(calls) == 1


@pytest.mark.ray
def test_an_actor_that_never_answers_keeps_no_thread_from_its_end(ray_cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Silent:
        def __init__(self) -> None:
            self.never = threading.Event()

        def ask(self) -> None:
            self.never.wait()

    actor: Any = Silent.remote()  # type: ignore[attr-defined]
    listening = Listening()
    listening.start(lambda: listening.answer(actor.ask.remote), "silent")
    listening.end()
    assert "silent" not in {thread.name for thread in threading.enumerate()}
    ray.kill(actor)
