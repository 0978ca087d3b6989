"""Several feeds of one run, as the driver and the next worker group see them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import RunError
from offload.model.feeds import FeedRule
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Supply
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.report.events import NodePreprocesses
from offload.train.hub.calls import FeedLostError
from offload.train.hub.feeds import merged
from offload.train.messages import TRAIN
from tests.emulation.in_threads import LocalHub
from tests.helpers import eventually

HOMES = ("a", "a", "b", "b")
KEY = PassKey(attempt=1, name=TRAIN, number=0)
REQUEST = PassRequest(world_size=4, first_rows=64, epoch=0)
BLOCK = Block(ref=None, cost=Cost(rows=10, size_bytes=100, cpu_s=1.0, wall_s=1.0), node="b")  # type: ignore[arg-type]
STORES = {"a": 1e9, "b": 1e9}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A hub with a feed beside its own, for two ranks on each of two nodes."""
    streams = {TRAIN: FeedDataset(recipe=None, rows=list_torch_dataset(range(640)).rows, shuffle=True)}  # type: ignore[arg-type]
    made = LocalHub(streams, Cores(nodes=("a",) * 3 + ("b",) * 3, task_cpus=1.0, stores=STORES), FeedRule(least=2))
    made.begin_group(1, HOMES)
    yield made
    made.close()


def shares(hub: LocalHub) -> list[Counter[str]]:
    return [hub.feed.cores.by_node, *(other.feed.cores.by_node for other in hub.others if not other.killed)]


def test_each_feed_has_the_cores_beside_its_ranks(hub: LocalHub) -> None:
    assert shares(hub) == [{"a": 3}, {"b": 3}]
    assert hub.core_counts()[0] == 6


def test_a_rank_learns_its_feed_and_the_samples_of_the_whole_pass(hub: LocalHub) -> None:
    opened = [hub.open(KEY, REQUEST, rank, home) for rank, home in enumerate(HOMES)]
    assert [each.samples for each in opened] == [640] * 4
    assert [each.first for each in opened] == [0, 0, 2, 2]
    assert [each.feed for each in opened] == [None, None, hub.others[0], hub.others[0]]


def test_a_run_with_one_feed_starts_no_other_and_passes_requests_on_as_they_are() -> None:
    streams = {TRAIN: FeedDataset(recipe=None, rows=list_torch_dataset(range(640)).rows)}  # type: ignore[arg-type]
    alone = LocalHub(streams, Cores(nodes=("a",) * 6, task_cpus=1.0, stores=STORES), FeedRule())
    alone.begin_group(1, HOMES)
    opened = alone.open(KEY, REQUEST, 3, "b")
    assert (opened.samples, opened.first, opened.feed, alone.others) == (640, 0, None, [])
    assert alone.feed._passes[KEY].request == REQUEST
    alone.close()


def test_the_next_group_has_another_feed_in_place_of_one_that_has_ended(hub: LocalHub) -> None:
    lost = hub.others[0]
    lost.feed.meters[TRAIN].add(BLOCK)
    eventually(lambda: hub.read(0).spent["b"] == (3, 1.0))
    lost.kill()
    with pytest.raises(FeedLostError):
        hub.open(KEY, REQUEST, 2, "b")
    assert hub.reshape(("a", "a", "b", "b"), STORES, 10.0, 1), "the cores of a feed that has ended are free"
    hub.begin_group(2, HOMES)
    assert shares(hub) == [{"a": 2}, {"b": 2}]
    assert hub.read(0).spent["b"] == (2, 1.0), "what the other has spent counts"
    again = hub.open(PassKey(attempt=2, name=TRAIN, number=0), REQUEST, 2, "b")
    assert again.feed is hub.others[1]
    assert again.feed is not lost


def test_what_an_ended_feed_has_spent_counts_once_at_any_time(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads while the next group begins."""
    hub.others[0].feed.meters[TRAIN].add(BLOCK)
    eventually(lambda: hub.read(0).spent["b"] == (3, 1.0))
    hub.others[0].kill()
    start, read = hub.feeds._start, list[float]()

    def started(cores: Cores) -> Any:
        read.append(hub.read(0).spent["b"][1])
        return start(cores)

    monkeypatch.setattr(hub.feeds, "_start", started)
    hub.begin_group(2, HOMES)
    assert [*read, hub.read(0).spent["b"][1]] == [1.0, 1.0]


def test_two_threads_may_read_of_a_feed_at_once(hub: LocalHub) -> None:
    """The driver reads, and a group that begins looks at what the feeds have spent."""
    other, answered = hub.feeds._now.others[0], Supply(process_bytes=1)
    taken, go_on = threading.Event(), threading.Event()
    beside = threading.Thread(target=other.supply)

    class Asked:
        """An answer that another thread takes while this one looks whether it is there."""

        def done(self) -> bool:
            if beside.ident is None:
                beside.start()
                assert taken.wait(300)
            return True

        def result(self) -> Supply:
            if threading.current_thread() is beside:
                taken.set()
                assert go_on.wait(300)
            return answered

    asked: Any = Asked()
    other._asked = asked
    assert other.supply() is answered
    go_on.set()
    beside.join(300)


def test_a_smaller_group_has_fewer_feeds(hub: LocalHub) -> None:
    hub.begin_group(2, ("b",))
    assert shares(hub) == [{"a": 3, "b": 3}]
    assert hub.others[0].killed
    assert hub.open(PassKey(attempt=2, name=TRAIN, number=0), REQUEST, 0, "b").feed is None


def test_a_feed_for_which_no_core_is_left_ends(hub: LocalHub) -> None:
    """Its ranks would wait forever. They start again, with fewer feeds."""
    hub.reshape((), STORES, 10.0, 1)
    assert not hub.others[0].killed, "preprocessing rests for all, as before a change of the workers"
    hub.reshape(("a",), STORES, 10.0, 2)
    assert hub.others[0].killed
    hub.begin_group(2, HOMES)
    assert shares(hub) == [{"a": 1}]


def test_a_sample_that_nothing_can_interrupt_fails_the_passes_of_all_feeds(hub: LocalHub) -> None:
    """The processes of all feeds report to the hub."""
    for rank, home in enumerate(HOMES):
        hub.open(KEY, REQUEST, rank, home)
    hub.given_up("b", "sample 7", 3.0)
    with pytest.raises(RunError, match="sample 7 on b took longer"):
        hub.next_slices(KEY, 0)
    other = hub.others[0].feed
    eventually(lambda: other._passes[KEY].error is not None)
    with pytest.raises(RunError, match="sample 7 on b took longer"):
        other.next_slices(KEY, 0)


def test_the_next_group_counts_its_feeds_with_the_batches_of_the_last_one() -> None:
    """Otherwise, feeds would end with each group, and start again with its first pass."""

    class ForLargeBatches(FeedRule):
        def feeds(self, *, local_batch_size: int = 1, **of_run: Any) -> int:
            return 2 if local_batch_size == 16 else 1

    streams = {TRAIN: FeedDataset(recipe=None, rows=list_torch_dataset(range(640)).rows, shuffle=True)}  # type: ignore[arg-type]
    hub = LocalHub(streams, Cores(nodes=("a",) * 3 + ("b",) * 3, task_cpus=1.0, stores=STORES), ForLargeBatches())
    hub.begin_group(1, HOMES)
    hub.feed.meters[TRAIN].add(BLOCK)
    hub.open(KEY, REQUEST, 0, "a")
    assert [other.killed for other in hub.others] == [False]
    hub.begin_group(2, HOMES)
    hub.open(PassKey(attempt=2, name=TRAIN, number=0), REQUEST, 0, "a")
    assert [other.killed for other in hub.others] == [False]
    hub.close()


def test_a_change_of_the_cores_that_arrives_behind_a_newer_one_changes_nothing(hub: LocalHub) -> None:
    hub.reshape(("a", "b"), STORES, 10.0, 2)
    hub.reshape(("a", "a", "b", "b"), STORES, 10.0, 1)
    assert shares(hub) == [{"a": 1}, {"b": 1}]


def test_another_feed_that_starts_meanwhile_does_not_end_the_wait_for_surplus_cores(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass may need another feed just when the driver changes the cores."""
    feed, begin, surplus = hub.feed, hub.feed.begin_reshape, threading.Event()
    feed.pool.reshape = lambda: surplus  # type: ignore[method-assign, union-attr]

    def grow() -> None:
        with hub.feeds._lock:
            hub.feeds._divide_ranks(3, hub.feeds._now.others)

    growing = threading.Thread(target=grow)

    def begun(*change: Any) -> Any:
        if growing.ident is None:
            comes_first = not hub.feeds._lock.locked()
            growing.start()
            if comes_first:
                growing.join(300)
        return begin(*change)

    monkeypatch.setattr(feed, "begin_reshape", begun)
    assert not hub.reshape(("a", "b"), STORES, 0.0, 1), "surplus cores still work"
    growing.join(300)


def test_a_change_of_the_cores_is_carried_out_once_all_feeds_have_let_go(hub: LocalHub) -> None:
    assert hub.read(0).let_go == 0
    other = hub.others[0].feed
    released, other.pool.reshape = threading.Event(), lambda: released
    hub.reshape(("a", "b"), STORES, 0.0, 3)
    eventually(lambda: hub.read(0).cores[0] == 2)
    assert hub.read(0).let_go == 0
    released.set()
    eventually(lambda: hub.read(0).let_go == 3)
    hub.others[0].kill()
    hub.reshape(("a",), STORES, 0.0, 4)
    eventually(lambda: hub.read(0).let_go == 4)


def test_a_node_has_one_sender_whichever_feed_has_its_cores(hub: LocalHub) -> None:
    """Workers ask the hub for the sender of any node, and the hub's own feed has no cores on some."""
    for name, feed in (("own", hub.feed), ("other", hub.others[0].feed)):
        senders: Any = SimpleNamespace(of=lambda node, name=name: f"{name} {node}", end_unused=lambda: None)
        feed._senders = senders
    assert [hub.sender(node) for node in ("a", "b")] == ["own a", "other b"]
    hub.reshape(("a",) * 4, STORES, 10.0, 1)
    assert hub.sender("a") == "own a"


def test_the_driver_reads_of_all_feeds(hub: LocalHub) -> None:
    hub.others[0].feed.meters[TRAIN].add(BLOCK)
    eventually(lambda: hub.read(0).spent["b"] == (3, 1.0))
    news = hub.read(0)
    assert news.cores == (6, 0)
    assert news.rates[TRAIN]["core_seconds_per_sample"] == 0.1
    assert news.rates[TRAIN]["input_ceiling_samples_per_s"] == 60.0, "of a feed without a measurement as well"
    assert hub.costs(TRAIN) == [(0.1, 10.0)]


def test_a_node_that_works_for_two_feeds_is_told_once(hub: LocalHub) -> None:
    def told() -> list[Any]:
        return [event.node for event in hub.read(0).events if isinstance(event, NodePreprocesses)]

    for node in ("a", "b", "a", "a"):
        hub.works(node)
    assert told() == ["a", "b"]
    hub.reshape(("b", "b"), STORES, 10.0, 1)
    hub.reshape(("a", "b"), STORES, 10.0, 2)
    hub.works("a")
    assert told() == ["a", "b", "a"], "it has left meanwhile"


def test_a_node_may_make_its_first_block_while_the_cores_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at a node lets others make their first blocks here. In a run, the thread of a pool does."""

    class Noted(Counter[str]):
        def __contains__(self, node: object) -> bool:
            alone.works(f"beside {node}")
            return super().__contains__(node)

    streams = {TRAIN: FeedDataset(recipe=None, rows=list_torch_dataset(range(640)).rows)}  # type: ignore[arg-type]
    alone = LocalHub(streams, Cores(nodes=("a", "b"), task_cpus=1.0, stores=STORES), FeedRule())
    for node in ("a", "b"):
        alone.works(node)
    monkeypatch.setattr(Cores, "by_node", property(lambda cores: Noted(cores.nodes)))
    assert alone.reshape(("a",), STORES, 10.0, 1)
    alone.close()


def test_sums_of_what_feeds_have_and_medians_of_what_a_sample_costs() -> None:
    rates = [{"core_seconds_per_sample": cost, "input_pace_samples_per_s": 10 * cost} for cost in (1.0, 2.0, 9.0)]
    supplies = [
        Supply(
            rates={TRAIN: of_feed},
            cores=(4, 1),
            speeds={TRAIN: {"a": of_feed["core_seconds_per_sample"]}},
            process_bytes=int(of_feed["core_seconds_per_sample"]),
            spent={"a": (2, 3.0), "b": (1, 0.5)},
        )
        for of_feed in rates
    ]
    assert merged(supplies) == Supply(
        rates={TRAIN: {"core_seconds_per_sample": 2.0, "input_pace_samples_per_s": 120.0}},
        cores=(12, 3),
        speeds={TRAIN: {"a": 2.0}},
        process_bytes=9,
        spent={"a": (6, 9.0), "b": (3, 1.5)},
    )
