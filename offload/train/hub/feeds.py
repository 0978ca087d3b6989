"""The feeds of a run: the hub's own, and on a large cluster others in actors of their own, each for its share of the ranks.

Where it stops: :mod:`offload.model.feeds` says how many there are, and :mod:`offload.train.hub.division` what each of them has.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from offload.pipeline.blocks.receiver import Pending
from offload.pipeline.feed.datasets import Cores
from offload.pipeline.feed.feed import Feed, Supply
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.order.parts import WHOLE, Part
from offload.train.hub.calls import FeedLostError, Opened, OtherFeed
from offload.train.hub.division import FeedTerms, divided, parts_of
from offload.train.messages import TRAIN

KEPT = 2  # passes of a data set before the newest, which a rank may still join


class _Other:
    """A feed beside the hub's own. ``cores``: those that it has at first."""

    def __init__(self, feed: OtherFeed, cores: Cores) -> None:
        self.feed = feed
        self._supply = Supply(
            cores=(cores.cores, cores.cores), spent={node: (count, 0.0) for node, count in cores.by_node.items()}
        )
        self._asked: Pending[Supply] | None = None

    def supply(self) -> Supply:
        """The measurements, as of the last call: the driver's question must not wait for another process."""
        asked = self._asked  # once: another thread may ask at the same time
        if asked is not None and not asked.done():
            return self._supply
        if asked is not None:
            try:
                self._supply = asked.result()
            except FeedLostError:  # its ranks say so
                self._supply = dataclasses.replace(self._supply, let_go=sys.maxsize)  # its cores are free
        self._asked = self.feed.supply()
        return self._supply


@dataclasses.dataclass(frozen=True)
class _Division:
    """The ranks of each feed, and the feeds beside the hub's own, in the same order. ``ended``: the CPU seconds of feeds that have ended
    before, by node."""

    parts: tuple[Part, ...] = (WHOLE,)
    others: tuple[_Other, ...] = ()
    ended: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of_rank(self, rank: int) -> int:
        """The number of a rank's feed, from 0, the hub's own."""
        return next(at for at, part in enumerate(self.parts) if part.whole or part.start <= rank < part.stop)


class Feeds:
    """All feeds of a run. Its methods run on several threads.

    Args:
        cores: the cores of the run.
        terms: what is known of its feeds.
        own: makes the hub's own feed, with its share of the cores.
        start: starts another feed with its share, in an actor of its own, and returns at once with its handle.
        end: ends such an actor.

    Attributes:
        own: the hub's own feed. A run with one feed has no other.
    """

    def __init__(
        self,
        cores: Cores,
        terms: FeedTerms,
        *,
        own: Callable[[Cores], Feed],
        start: Callable[[Cores], Any],
        end: Callable[[Any], None],
    ) -> None:
        self._start, self._end, self._terms = start, end, terms
        self._cores, self._homes = cores, terms.homes
        self._working = set[str]()
        self._lock = threading.Lock()  # guards all that follows
        self._reshaped = 0  # the driver's newest number
        self._divided = 0  # a number for each division of the cores
        self._newest = 0, 0  # the driver's newest number, and that of the division which follows from it
        self._let_go = 0  # the driver's number of the newest change that all feeds have carried out
        self._local_batch_size = 1  # of the newest training pass
        self._passes: dict[PassKey, _Division] = {}
        parts = parts_of(self._needed(len(terms.homes), None), len(terms.homes))
        shares = divided(cores, parts, terms.homes)
        self.own = own(shares[0])
        self._now = _Division(parts, tuple(self._started(share) for share in shares[1:]))

    # -- the driver ------------------------------------------------------------------------------------------------

    def reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int | None = None
    ) -> bool:
        """See :meth:`Feed.reshape`. Each feed gets its share of the cores."""
        with self._lock:
            if number is not None and number < self._reshaped:
                return True
            self._reshaped = self._reshaped if number is None else number
            self._cores = dataclasses.replace(self._cores, nodes=nodes, stores=stores)
            # In one step: a node may make its first block meanwhile.
            self._working = self._working.intersection(self._cores.by_node)
            own, divided_as, pending = self._divide_cores(timeout_s)
            # Begun here: behind a division that more feeds need, it would have nothing to wait for.
            wait = self.own.begin_reshape(own.nodes, own.stores, divided_as)
        released = [wait(timeout_s)]
        for answer in pending:
            try:
                released.append(answer.result())
            except FeedLostError:  # its cores are free
                continue
        return all(released)

    def start_ahead(self, request: PassRequest, name: str, homes: Collection[str]) -> None:
        """See :meth:`Feed.start_ahead`."""
        with self._lock:
            now = self._now
        for other, part in zip(now.others, now.parts[1:], strict=True):
            other.feed.start_ahead(request.of(part), name, homes)
        own = now.parts[0]
        self.own.start_ahead(request if own.whole else request.of(own), name, homes)

    def costs(self, name: str) -> list[tuple[float, float]]:
        """See :meth:`Feed.costs`."""
        costs = list(self.own.costs(name))
        for other in self._now.others:
            costs += other.feed.costs(name)
        return costs

    def core_counts(self) -> tuple[int, int]:
        """See :meth:`Feed.core_counts`."""
        others = [other.supply().cores for other in self._now.others]
        all_counts = [self.own.core_counts(), *others]
        return sum(cores for cores, _ in all_counts), sum(starting for _, starting in all_counts)

    def supply(self) -> Supply:
        """See :meth:`Feed.supply`: the sums of what all feeds have and do, and medians of what concerns a sample."""
        own = self.own.supply()
        now = self._now
        supplies = [own, *(other.supply() for other in now.others)]
        number, divided_as = self._newest  # without the lock, which somebody may hold who waits for another feed
        if all(supply.let_go >= divided_as for supply in supplies):
            self._let_go = number
        whole = merged(supplies, now.ended) if now.others or now.ended else own
        return dataclasses.replace(whole, let_go=self._let_go)

    # -- the workers -----------------------------------------------------------------------------------------------

    def begin(self, attempt: int, homes: Sequence[str] = ()) -> None:
        """Begin to feed a new worker group, whose ranks are on the nodes ``homes``, with as many feeds as its size needs. Feeds that have
        ended are replaced."""
        with self._lock:
            self._passes.clear()
            self._homes = tuple(homes)
            begun = [(other, other.feed.begin(attempt)) for other in self._now.others]
            alive = [other for other, answer in begun if _lives(answer)]
            self._divide_ranks(self._needed(len(homes), self._cost()), alive)
        self.own.begin(attempt)

    def open(self, key: PassKey, request: PassRequest, rank: int, node: str = "") -> Opened:
        """Join a pass at the rank's feed; see :meth:`Feed.open`."""
        with self._lock:
            division = self._division_of(key, request)
        if not division.others:
            return Opened(self.own.open(key, request, rank, node))
        at = division.of_rank(rank)
        part = division.parts[at]
        samples = request.rows(self.own.streams[key.name].samples)
        if at == 0:
            self.own.open(key, request.of(part), rank, node)
            return Opened(samples)
        feed = division.others[at - 1].feed
        feed.open(key, request.of(part), rank - part.start, node)
        return Opened(samples, part.start, feed.actor)

    def sender(self, node: str) -> Any:
        """See :meth:`Feed.sender`. One feed with cores there is enough."""
        if node not in self.own.cores.by_node:
            for other in self._now.others:
                if (sender := other.feed.sender(node)) is not None:
                    return sender
        return self.own.sender(node)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """See :meth:`Feed.given_up`. All feeds fail: nobody knows whose process it is, and one whose ranks have all they need would not
        tell them."""
        self.own.given_up(node, what, seconds)
        for other in self._now.others:
            other.feed.given_up(node, what, seconds)

    # -- the other feeds -------------------------------------------------------------------------------------------

    def works(self, node: str) -> bool:
        """Note that a node has made its first block for a feed; return whether it is the first of all feeds."""
        first = node not in self._working or not self._now.others
        self._working.add(node)
        return first

    def _division_of(self, key: PassKey, request: PassRequest) -> _Division:
        """The feeds of a pass, which stay the same until its end."""
        if key not in self._passes:
            if key.name == TRAIN:
                self._local_batch_size = request.first_rows // request.world_size
            if key.name == TRAIN and (cost := self._cost()) is not None:
                needed = self._needed(request.world_size, cost)
                # Only more: what the first epoch measured stays true, and processes that move between feeds start anew.
                if needed > len(self._now.parts) and len(self._homes) == request.world_size:
                    self._divide_ranks(needed, self._now.others)
            self._passes[key] = self._now
            for old in [k for k in self._passes if k.name == key.name and k.number < key.number - KEPT]:
                del self._passes[old]
        return self._passes[key]

    def _needed(self, ranks: int, cost: tuple[float, float] | None) -> int:
        """The number of feeds for so many ranks; 1 if their number is unknown."""
        return self._terms.rule.feeds(
            cores=self._cores.cores,
            workers=ranks,
            store_bytes=self._cores.store_bytes,
            cost=cost,
            local_batch_size=self._local_batch_size,
        )

    def _cost(self) -> tuple[float, float] | None:
        """The measured core-seconds and bytes of a training sample."""
        rates = self.own.meters[TRAIN].rates() if TRAIN in self.own.meters else None
        return None if rates is None else (rates.core_seconds_per_sample, rates.bytes_per_sample)

    def _divide_ranks(self, feeds: int, alive: Sequence[_Other]) -> None:
        """Divide the ranks among so many feeds, and the cores as well."""
        parts = parts_of(feeds, len(self._homes))
        before = self._now
        if (parts, tuple(alive)) == (before.parts, before.others) and len(parts) == 1:
            return
        staying, surplus = alive[: feeds - 1], alive[feeds - 1 :]
        shares = divided(self._cores, parts, self._homes)
        new = [self._started(share) for share in shares[len(staying) + 1 :]]
        # In one step: the driver reads meanwhile, and what feeds have spent counts once.
        ended = _with_spent(before.ended, [other for other in before.others if other not in staying])
        self._now = _Division(parts, (*staying, *new), ended)
        for other in surplus:
            self._end(other.feed.actor)
        own, divided_as, _ = self._divide_cores()
        self.own.begin_reshape(own.nodes, own.stores, divided_as)

    def _divide_cores(self, timeout_s: float = 0.0) -> tuple[Cores, int, list[Pending[bool]]]:
        """Give each other feed its share of the cores. Return the own feed's, the number of this division, and the others' answers."""
        now = self._now
        own, *shares = divided(self._cores, now.parts, self._homes)
        self._divided += 1
        self._newest = self._reshaped, self._divided
        pending: list[Pending[bool]] = []
        for other, share in zip(now.others, shares, strict=True):
            if not share.nodes and self._cores.nodes:
                # Its ranks would wait forever, and all others for them. The next group has fewer feeds.
                self._end(other.feed.actor)
            else:
                pending.append(other.feed.reshape(share.nodes, share.stores, timeout_s, self._divided))
        return own, self._divided, pending

    def _started(self, share: Cores) -> _Other:
        return _Other(OtherFeed(self._start(share)), share)


def _with_spent(before: Mapping[str, float], ended: Sequence[_Other]) -> dict[str, float]:
    """The CPU seconds by node, and what these feeds have spent, now that they tell no more: sums must not fall."""
    seconds = dict(before)
    for other in ended:
        for node, (_, cpu_s) in other.supply().spent.items():
            seconds[node] = seconds.get(node, 0.0) + cpu_s
    return seconds


def _lives(answer: Pending[None]) -> bool:
    try:
        answer.result()
    except FeedLostError:
        return False
    return True


# Of the measured rates of a data set, those that grow with the number of cores. All others concern a sample, or a part of the time.
_GROWING = ("input_ceiling_samples_per_s", "input_pace_samples_per_s", "cache_bytes", "storage_bytes")


def merged(supplies: Sequence[Supply], ended: Mapping[str, float] = MappingProxyType({})) -> Supply:
    """The measurements of several feeds as if one had made them. ``ended``: the CPU seconds of others, which have ended, by node."""
    names = supplies[0].rates
    return Supply(
        rates={name: _merged_rates([supply.rates.get(name, {}) for supply in supplies]) for name in names},
        cores=(sum(supply.cores[0] for supply in supplies), sum(supply.cores[1] for supply in supplies)),
        speeds={name: _merged_speeds([supply.speeds.get(name, {}) for supply in supplies]) for name in names},
        process_bytes=max(supply.process_bytes for supply in supplies),
        spent=_merged_spent(
            [*(supply.spent for supply in supplies), {node: (0, cpu_s) for node, cpu_s in ended.items()}]
        ),
    )


def _merged_rates(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    measured: dict[str, list[float]] = {}
    for of_feed in rates:
        for name, value in of_feed.items():
            measured.setdefault(name, []).append(value)
    # A feed without a measurement so far counts as a mean one.
    return {
        name: sum(values) * len(rates) / len(values) if name in _GROWING else median(values)
        for name, values in measured.items()
    }


def _merged_speeds(speeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    by_node: dict[str, list[float]] = {}
    for of_feed in speeds:
        for node, speed in of_feed.items():
            by_node.setdefault(node, []).append(speed)
    return {node: median(values) for node, values in by_node.items()}


def _merged_spent(spent: Sequence[Mapping[str, tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    cores, cpu_s = Counter[str](), dict[str, float]()
    for of_feed in spent:
        for node, (number, seconds) in of_feed.items():
            cores[node] += number
            cpu_s[node] = cpu_s.get(node, 0.0) + seconds
    return {node: (cores[node], cpu_s[node]) for node in cpu_s}
