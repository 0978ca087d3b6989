"""Runs on one Ray cluster share it by an arbiter: they start, change and end as it decides, and train each sample once all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import offload
from offload import runs
from offload.arbiter import registry
from offload.model.allocation.values import Rules
from tests.helpers import eventually
from tests.train.driver.test_steered import SAMPLES, Running, all_is_free, reason, state

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def arbiter() -> Iterator[Any]:
    registry.start(Rules())
    yield registry.arbiter()
    if registry.arbiter() is not None:
        registry.stop()


def shared(folder: Path, name: str, **cluster: Any) -> Running:
    (folder / name).mkdir()
    return Running(folder / name, name=name, workers=(1, 1), cluster=offload.Cluster(arbiter=True, **cluster))


def trained_once(run: Running) -> bool:
    """Whether each epoch but the last, which the end has cut short, has trained each sample once."""
    counts = run.trained()
    last = max(int(line.partition(" ")[0]) for line in counts)
    finished = Counter({line: count for line, count in counts.items() if int(line.partition(" ")[0]) < last})
    return set(finished.values()) == {1} and len(finished) == last * SAMPLES


def test_runs_share_a_cluster_and_the_arbiter_may_die(tmp_path: Path, arbiter: Any) -> None:
    first = shared(tmp_path, "first")
    eventually(lambda: state("first") == "training")
    second = shared(tmp_path, "second")
    eventually(lambda: state("second") == "training")
    assert state("first") == "training"

    ray.kill(arbiter, no_restart=False)
    before = {run: run.trained().total() for run in (first, second)}
    eventually(lambda: all(run.trained().total() > count for run, count in before.items()))
    eventually(lambda: {run.name for run in registry.status().runs} == {"first", "second"})

    # Four CPUs: a worker and a core for two runs, and nothing for the third.
    urgent = shared(tmp_path, "urgent", priority=1)
    eventually(lambda: state("urgent") == "training")
    eventually(lambda: "waiting" in {state("first"), state("second")})
    (waits,) = (name for name in ("first", "second") if state(name) == "waiting")
    assert reason(waits).startswith("the arbiter: ")
    runs.stop("urgent")
    eventually(lambda: state(waits) == "training")
    for name in ("first", "second"):
        runs.stop(name)
    for run in (first, second, urgent):
        run.thread.join()
        assert run.error is None
        assert trained_once(run)
    eventually(lambda: not registry.status().runs)
    eventually(all_is_free)


def test_a_run_that_asks_for_an_arbiter_says_when_there_is_none(tmp_path: Path) -> None:
    run = shared(tmp_path, "vit")
    run.thread.join()
    assert "none runs on this Ray cluster: start one with offload arbiter start" in str(run.error)
