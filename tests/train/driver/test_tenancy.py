"""A run's own side of the arbiter, with an arbiter that answers when a test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from offload.arbiter.values import Lease, Report
from offload.model.allocation.values import Allotment, Holding
from offload.train.driver.platform import ray_platform
from offload.train.driver.platform.ray_platform import OnRay
from offload.train.steering import tenancy as tenancy_module
from offload.train.steering.listening import Listening
from offload.train.steering.tenancy import RayTenancy
from tests.arbiter.test_ledger import START, a_job
from tests.helpers import eventually

DEADLINE_S = 800.0


class Method:
    """A method of an actor. ``calls``: the answers that its callers wait for."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Future[Any]] = SimpleQueue()

    def remote(self, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self.calls.put(answer)
        return Reference(answer)


class Reference:
    """What a call returns."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def future(self) -> Future[Any]:
        return self._answer


class Actor:
    """The arbiter."""

    def __init__(self) -> None:
        self.report, self.changed, self.depart = Method(), Method(), Method()


def a_lease(number: int, workers: int) -> Lease:
    holding = Holding(kind="A", workers={"a": workers})
    allotment = Allotment(holding=holding, goodput=None, speedup=None, restarts=False, reason="")
    return Lease(number=number, holding=holding, allotment=allotment, expires_at=START + 60.0)


def test_a_run_that_has_come_back_takes_no_answer_from_before_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, listening = Actor(), Listening()
    monkeypatch.setattr(tenancy_module, "_arbiter", lambda: actor)
    monkeypatch.setattr(tenancy_module, "no_new_ray", contextlib.nullcontext)
    tenancy = RayTenancy("run", listening)
    tenancy.start(lambda: None)
    try:
        tenancy.report(Report(job=a_job("run"), since=START))
        before = actor.report.calls.get(timeout=DEADLINE_S)
        tenancy.depart()
        tenancy.report(Report(job=a_job("run"), since=START + 1))
        before.set_result(a_lease(7, workers=2))
        after = actor.report.calls.get(timeout=DEADLINE_S)  # it has dealt with the answer before it
        assert tenancy.lease is None
        after.set_result(a_lease(0, workers=1))
        eventually(lambda: tenancy.lease == a_lease(0, workers=1))
    finally:
        listening.end()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_ends_before_it_trains_leaves_the_arbiter_and_ends_its_threads_before_the_connection(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    actor, reported, at_end = Actor(), [], []

    def listening_threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("arbiter: ")}

    @contextlib.contextmanager
    def connected(*arguments: Any, **named: Any) -> Iterator[Any]:
        try:
            yield SimpleNamespace()
        finally:
            at_end.append((listening_threads(), actor.depart.calls.qsize()))

    monkeypatch.setattr(ray_platform, "connection", SimpleNamespace(check_address=str, connected=connected))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.setattr(tenancy_module, "_arbiter", lambda: actor)
    monkeypatch.setattr(tenancy_module, "no_new_ray", contextlib.nullcontext)

    def ends_early() -> None:
        with OnRay("head:6379", leased=True).opened() as platform:
            tenancy = platform.open_tenancy()
            tenancy.start(lambda: None)
            tenancy.report(Report(job=a_job("run"), since=START))
            reported.append(actor.report.calls.get(timeout=DEADLINE_S))
            assert listening_threads()
            raise error

    with pytest.raises(error):
        ends_early()
    assert at_end == [(set(), 1)]
