"""Trainings whose ranks get their samples from several feeds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.model.feeds import FeedRule
from offload.train.hub.calls import FeedLostError
from offload.train.messages import TRAIN
from offload.train.worker.context import Context
from tests.emulation.in_threads import Died
from tests.train.worker.local_runs import UNLABELED, VAL, LocalRun, commit, loss_of, prepared

SAMPLES = 203
EACH_ONCE = Counter(range(SAMPLES))
NODES = ("a", "b", "c", "d")


class Log:
    """The samples of all ranks, by epoch and data set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen: dict[tuple[int, str], Counter[int]] = {}

    def add(self, epoch: int, name: str, ids: list[int]) -> None:
        with self._lock:
            self.seen.setdefault((epoch, name), Counter()).update(ids)


def run_of(folder: Path, rule: FeedRule) -> LocalRun:
    return LocalRun(folder, samples=SAMPLES, rule=rule, nodes=NODES)


def trains(log: Log, *, epochs: int = 2, at: dict[int, Callable[[Context], None]] | None = None) -> Any:
    """A training function. ``at``: what each rank does before the steps of these numbers. Samples count once their step is done."""

    def train(ctx: Context) -> None:
        model, optimizer = prepared(ctx)
        for epoch in ctx.epochs(epochs):
            for batch in ctx.batches(TRAIN):
                (at or {}).get(ctx.global_step, lambda ctx: None)(ctx)
                ids = batch["sample_id"].tolist()[: ctx.rows]
                optimizer.zero_grad()
                ctx.backward(loss_of(model, batch))
                ctx.step()
                log.add(epoch, TRAIN, ids)
            for name in (VAL, UNLABELED):
                for batch in ctx.batches(name):
                    log.add(epoch, name, batch["sample_id"].tolist())

    return train


@pytest.mark.parametrize(("feeds", "workers"), [(2, 2), (2, 3), (3, 4)])
def test_every_sample_of_every_data_set_once_in_each_epoch(tmp_path: Path, feeds: int, workers: int) -> None:
    log, run = Log(), run_of(tmp_path, FeedRule(least=feeds))
    run.train(trains(log), workers=workers)
    assert log.seen == {(epoch, name): EACH_ONCE for epoch in (0, 1) for name in (TRAIN, VAL, UNLABELED)}
    assert run.hub is not None
    all_feeds = [run.hub.feed, *(other.feed for other in run.hub.others)]
    assert len(all_feeds) == feeds
    assert all(feed.meters[TRAIN].costs() for feed in all_feeds), "each has handed out its part"


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (2, 1)])
def test_a_run_resumes_in_the_middle_of_an_epoch_with_another_number_of_feeds(
    tmp_path: Path, before: int, after: int
) -> None:
    log = Log()

    def die(ctx: Context) -> None:
        if not ctx._loop.state.resumed:
            commit(ctx)
            raise Died

    def train(feeds: int, workers: int) -> None:
        run_of(tmp_path, FeedRule(least=feeds)).train(trains(log, at={9: die}), workers=workers)

    train(before, 2)
    assert 0 < log.seen[0, TRAIN].total() < SAMPLES
    train(after, 3)
    assert log.seen == {(epoch, name): EACH_ONCE for epoch in (0, 1) for name in (TRAIN, VAL, UNLABELED)}


def test_another_feed_starts_with_the_epoch_after_the_first_measurement(tmp_path: Path) -> None:
    class OneUntilMeasured(FeedRule):
        def feeds(self, *, cost: tuple[float, float] | None = None, **of_run: Any) -> int:
            return 1 if cost is None else 2

    log, run, others = Log(), run_of(tmp_path, OneUntilMeasured()), [-1, -1]

    def look(ctx: Context) -> None:
        assert run.hub is not None
        others[ctx.epoch] = len(run.hub.others)

    run.train(trains(log, at={5: look, 40: look}), workers=2)
    assert others == [0, 1]
    assert log.seen == {(epoch, name): EACH_ONCE for epoch in (0, 1) for name in (TRAIN, VAL, UNLABELED)}


def test_the_cores_of_all_feeds_change_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    log, run = Log(), run_of(tmp_path, FeedRule(least=2))

    def reshaped(*nodes: str) -> Callable[[Context], None]:
        def reshape(ctx: Context) -> None:
            if ctx.rank == 0:
                assert run.hub is not None
                assert run.hub.reshape(nodes, dict.fromkeys(nodes, 1e6), 10.0, ctx.global_step)
                shares = [run.hub.feed.cores, *(other.feed.cores for other in run.hub.others)]
                assert sum((share.by_node for share in shares), Counter[str]()) == Counter(nodes)

        return reshape

    changes = {4: reshaped("a", "d"), 11: reshaped("b", "c", "d", "e", "e"), 29: reshaped("a", "b")}
    run.train(trains(log, at=changes), workers=3)
    assert log.seen == {(epoch, name): EACH_ONCE for epoch in (0, 1) for name in (TRAIN, VAL, UNLABELED)}


def test_the_ranks_of_a_feed_that_ends_hear_of_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, FeedRule(least=2))

    def kill(ctx: Context) -> None:
        if ctx.rank == 0:
            assert run.hub is not None
            run.hub.others[0].kill()

    with pytest.raises(FeedLostError):
        run.train(trains(Log(), at={3: kill}), workers=2)
