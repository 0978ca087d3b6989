"""What a worker reports to the hub."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from offload.report.events import WorkerWaits
from offload.train.messages import Orders
from offload.train.worker.links import reporter as reporter_module
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from tests.helpers import eventually


@pytest.mark.parametrize("call", ["ctx.report(loss)", ""])
def test_a_call_that_waits_long_for_other_workers_is_told_once(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As under ``if ctx.rank == 0:`` within the loop, where the others wait for this worker's gradients. A wait for data is none."""
    monkeypatch.setattr(reporter_module, "PATIENCE_S", 0.0)
    pushes: list[Any] = []
    hub: Any = SimpleNamespace(push=lambda push: pushes.append(push) or Orders())
    start: Any = SimpleNamespace(orders=Orders(), attempt=0)
    watchdog = Watchdog(deadline_s=1000)
    reporter = Reporter(hub, 0, start, watchdog, node="here", interval_s=0.01)

    def pushed_since(number: int) -> bool:
        return len(pushes) > number + 2

    for _ in range(2):
        with watchdog.waiting(call):
            eventually(partial(pushed_since, len(pushes)))
        eventually(partial(pushed_since, len(pushes)))
    reporter.close()
    events = [event for push in pushes for event in push.events]
    assert [event.call for event in events if isinstance(event, WorkerWaits)] == [call] * (2 if call else 0)
    assert all(f"worker 0 has waited 0 s in {call} for" in event.sentence({}) for event in events)
