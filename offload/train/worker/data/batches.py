"""The worker's end of the data path: slices of blocks in, local batches on the device out, ahead of the training thread.

Threads of their own fetch blocks (:mod:`offload.train.worker.data.slice_fetcher`). Another one cuts them into batches (in pinned memory for
a GPU), agrees with the other ranks on the batch's rows, and moves the batch to the device on a stream of its own. The ranks' agreement is a
gather of a few numbers on a process group of its own, ahead of training by the prefetch depth. The training thread never waits for it
unless it waits for data. Other agreements of the ranks travel with it (:mod:`offload.train.worker.links.agreement`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.model.batch_split import BatchSplit
from offload.pipeline.feed.passes import PassKey
from offload.pipeline.order.ranges import Ranges
from offload.train.worker.data.cutting import Cut, Cutter, Skipped, TokenBudget
from offload.train.worker.data.delivery import Delivery
from offload.train.worker.data.feed_client import FeedClient
from offload.train.worker.data.slice_fetcher import Fetcher, Piece
from offload.train.worker.links.agreement import Agreed, Agreement
from offload.train.worker.links.peers import Peers

PREFETCH_BATCHES = 2
CLOSE_S = 10.0
BREAK_OFF_S = 1.0  # time that a rank waits for samples when training should end


@dataclass(kw_only=True)
class LocalBatch:
    """One rank's part of a micro-batch.

    Args:
        content: the batch on the device: a dict of columns, or what a ``collate_fn`` returned.
        rows, all_rows: the number of this rank's samples, and of all ranks' samples. A filler has none, and must weigh nothing.
        weight, all_weight: their weights in the gradient.
        positions: the positions that the batch trains.
        skipped: the samples that were skipped just before.
        own_ready_s: when this rank's own samples were ready, by the monotonic clock.
        split: the split of its global batch.
        agreed: what the ranks have agreed on with it.
        left: the ranks that have left the pass.
        samples: the samples that were collated, if they travelled whole.
        moved: the event of the batch's arrival on the device; None if it is there.
    """

    content: Any
    rows: int
    all_rows: int
    weight: int
    all_weight: int
    positions: Ranges
    skipped: tuple[Skipped, ...]
    own_ready_s: float
    split: BatchSplit
    agreed: Agreed
    left: tuple[int, ...] = ()
    samples: tuple[Any, ...] = ()
    moved: Any = None


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How a pass is cut.

    Args:
        padded: every rank takes part in every step of the pass (a DDP step needs all ranks); a rank without samples gets a filler that
            weighs nothing. Otherwise, a rank simply ends when its samples do.
        least: the fewest rows of a batch, where that can be had.
        drop_last: leave out the last batches, which are not full.
        budget: a limit of batches beside their number of rows.
        ordered: blocks come in the order of the pass. A slow link or a lost block then delays the blocks after it.
    """

    padded: bool
    least: int = 1
    drop_last: bool = False
    budget: TokenBudget | None = None
    ordered: bool = False


class _Message(NamedTuple):
    """What a rank tells the others of its part of a micro-batch. The message of the pass's :class:`Agreement` follows."""

    rows: int
    weight: int
    lacks_filler: int
    broken_off: int  # it stopped waiting for samples because training ends
    partial: int  # its batch is not full
    closed: int  # its loop has left the pass
    delivered: int  # the batches that its loop has got


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What all ranks know of a micro-batch: the sums of their parts, and what they have agreed on."""

    rows: int
    weight: int
    partial: bool
    broken_off: bool
    left: tuple[int, ...]
    agreed: Agreed

    @classmethod
    def of_one(cls, cut: Cut | None) -> _Whole:
        """The micro-batch of a rank that goes its own way."""
        rows, weight, partial = (0, 0, False) if cut is None else (cut.rows, cut.weight, cut.partial)
        return cls(rows=rows, weight=weight, partial=partial, broken_off=False, left=(), agreed=Agreed())


class _SplitInUse:
    """The split of the global batch under way, and the split of the one after it."""

    def __init__(self, split: BatchSplit) -> None:
        self.now = self._next = split
        self._micro_batch = 0

    def advance(self, split: BatchSplit | None) -> None:
        """Advance by a micro-batch on which the ranks have agreed. A new ``split`` begins with a global batch."""
        self._next = split or self._next
        last = self._micro_batch == self.now.accum_steps
        self._micro_batch = 0 if last else self._micro_batch + 1
        if last:
            self.now = self._next


class _Supply:
    """This rank's samples as they come. ``share``: the number that it may expect; None if unknown."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._received = self._largest = 0

    def add(self, rows: int) -> None:
        """Add a piece."""
        self._received += rows
        self._largest = max(self._largest, rows)

    def near_end(self, size: int) -> bool:
        """Return whether the samples may end soon after a batch of this size.

        Ranks get about equally many: the next block goes to the one with the fewest, so that they differ by a block or two.
        """
        return self._share is None or self._received + size + 2 * self._largest >= self._share


class Batches:
    """The local batches of one pass on one rank. Iterate once; ``close()`` ends its threads.

    Args:
        feed, key: bring the slices of the pass.
        peers: the ranks' threads that cut batches.
        split: the split of global batches, until ``agreement`` gives another.
        delivery: makes tensors on the device.
        cutting: how the pass is cut.
        agreement: the messages of ranks that travel with batches.
        template: the samples of fillers, by data set. Batches add to it.
        total: the samples of the pass on all ranks; None if that is unknown.

    Attributes:
        leftover: the samples that were skipped after the last batch. Complete once :meth:`get` has returned None.
        last_agreed: what the ranks agreed on after the last batch. Complete once :meth:`get` has returned None.
        went_on: the ranks that took more batches than this one after it had closed.
    """

    def __init__(
        self,
        feed: FeedClient,
        key: PassKey,
        *,
        peers: Peers,
        split: BatchSplit,
        delivery: Delivery,
        cutting: Cutting,
        agreement: Agreement,
        template: dict[str, Cut],
        total: int | None = None,
    ) -> None:
        self.leftover: list[Skipped] = []
        self.last_agreed = Agreed()
        self.went_on: tuple[int, ...] = ()
        self._feed, self._key, self._peers = feed, key, peers
        self._delivery, self._cutting, self._agreement, self._template = delivery, cutting, agreement, template
        self._split = _SplitInUse(split)
        self._supply = _Supply(None if total is None else total / peers.world_size)
        self._pieces = Fetcher(feed, key, peers.rank, ordered=cutting.ordered)
        # The limit also bounds how far the ranks' agreement runs ahead of training, and so how soon orders take
        # effect.
        self._ready: queue.Queue[LocalBatch | BaseException | None] = queue.Queue(maxsize=PREFETCH_BATCHES)
        self._delivered = 0
        self._closed = threading.Event()
        self._broken_off = False  # this rank stopped waiting for samples because training ends
        self._cutter = threading.Thread(target=self._run, name=f"batch-{key.name}", daemon=True)
        self._cutter.start()

    def get(self) -> LocalBatch | None:
        """Return the next batch, None at the end of the pass. Raises the error of preprocessing."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            self._delivered += 1
            self._delivery.arrived(item.content, item.moved)
        return item

    def close(self) -> None:
        """End the threads and wait for them, but not forever: another rank may have died, or goes on alone (:attr:`went_on`)."""
        self._closed.set()
        self._pieces.close()
        # First, so that a call that waits for slices returns: the pass is over for this rank.
        self._feed.leave(self._key, self._peers.rank)
        until = time.monotonic() + CLOSE_S
        for thread in (*self._pieces.threads, self._cutter):
            while thread.is_alive() and time.monotonic() < until and not self.went_on:
                with contextlib.suppress(queue.Empty):
                    self._ready.get_nowait()
                thread.join(timeout=0.05)

    # -- the cutting thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._deliver_own():
                self._follow_others()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _deliver_own(self) -> bool:
        """Put the batches of this rank's samples. Return whether other ranks may have more: neither the pass nor training has ended."""
        for cut in self._cuts():
            batch = self._agree(cut)
            if batch is None:
                return False
            self._put(batch)
            if batch.agreed.end:
                return False
        return True

    def _follow_others(self) -> None:
        """Put fillers while other ranks have samples, though this one has none or must close.

        All ranks make the same number of agreements in a pass: otherwise, the next pass's first would meet this one's last.
        """
        while self._cutting.padded:
            batch = self._agree(None)
            if batch is None:
                return
            self._put(batch)
            if batch.agreed.end:
                return

    def _put(self, item: LocalBatch | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def _next_piece(self) -> Piece | None:
        waiting_since = time.monotonic()
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                return self._pieces.get(timeout_s=0.2)
            # A sample may never come. A worker that should end does not wait for it; the sample is not trained yet.
            if self._agreement.ending() and time.monotonic() - waiting_since > BREAK_OFF_S:
                self._broken_off = True
                return None
        return None

    def _cuts(self) -> Iterator[Cut]:
        """Yield batches of the local size, which may change meanwhile, from pieces as they come; the last batch holds the rest."""
        least = self._cutting.least if self._cutting.padded and not self._cutting.drop_last else 1
        cutter = Cutter(least=least, budget=self._cutting.budget)
        while (piece := self._next_piece()) is not None:
            columns, rows = piece
            self._supply.add(rows)
            cutter.add(columns, rows)
            while not self._closed.is_set():
                size = self._split.now.local_batch_size
                cut = cutter.cut(size, over=False, near_end=self._supply.near_end(size))
                if cut is None:
                    break
                yield cut
        while not (self._closed.is_set() or self._broken_off):
            cut = cutter.cut(self._split.now.local_batch_size, over=True, near_end=True)
            if cut is None:
                self.leftover += cutter.leftover()
                return
            yield cut

    def _agree(self, cut: Cut | None) -> LocalBatch | None:
        """The batch with what all ranks know about it; None once no rank has samples left."""
        name, split = self._key.name, self._split.now
        moved: tuple[Any, Any] | None = None
        if cut is not None:
            # Before the ranks exchange their numbers, so that the copy to the device runs meanwhile.
            moved = self._delivery.deliver(cut)
            if name not in self._template:
                self._template[name] = cut.first(self._cutting.least)
        # Taken before the exchange: waiting for a slower rank is not waiting for one's own data.
        own_ready_s = time.monotonic()
        whole = self._exchange(cut) if self._cutting.padded else _Whole.of_one(cut)
        left_out = self._cutting.drop_last and whole.partial and not whole.broken_off
        if (left_out or not whole.rows) and not whole.broken_off:
            # What the ranks agreed on takes effect after the pass: a resume from here would meet a pass without batches.
            self.last_agreed = whole.agreed
            self.leftover += () if cut is None else cut.skipped  # drop_last leaves the batch out, but they were skipped
            return None
        if moved is None and name in self._template:
            moved = self._delivery.deliver(self._template[name].again())
        content, event = moved or ({}, None)
        return LocalBatch(
            content=content,
            rows=0 if cut is None else cut.rows,
            all_rows=whole.rows,
            weight=0 if cut is None else cut.weight,
            all_weight=whole.weight,
            positions=cut.positions if cut is not None else Ranges(),
            skipped=cut.skipped if cut is not None else (),
            own_ready_s=own_ready_s,
            split=split,
            agreed=whole.agreed,
            left=whole.left,
            samples=cut.samples if cut is not None else (),
            moved=event,
        )

    def _exchange(self, cut: Cut | None) -> _Whole:
        """Tell the other ranks of this one's part of a micro-batch, and hear of theirs. A rank without samples gets some for fillers."""
        name, rows = self._key.name, 0 if cut is None else cut.rows
        mine = _Message(
            rows=rows,
            weight=0 if cut is None else cut.weight,
            lacks_filler=not rows and name not in self._template,
            broken_off=self._broken_off,
            partial=not rows or (cut is not None and cut.partial),
            closed=self._closed.is_set(),
            delivered=self._delivered,
        )
        # One gather per micro-batch serves everything that ranks must agree on.
        numbers = self._peers.gather([*map(int, mine), *self._agreement.message()])
        ranks = [_Message(*of_rank[: len(mine)]) for of_rank in numbers]
        if mine.closed:
            self.went_on = tuple(rank for rank, message in enumerate(ranks) if message.delivered > mine.delivered)
        whole = _Whole(
            rows=sum(message.rows for message in ranks),
            weight=sum(message.weight for message in ranks),
            partial=any(message.partial for message in ranks),
            broken_off=any(message.broken_off for message in ranks),
            left=tuple(rank for rank, message in enumerate(ranks) if message.closed),
            agreed=self._agreement.agreed([of_rank[len(mine) :] for of_rank in numbers]),
        )
        if whole.rows and any(message.lacks_filler for message in ranks):
            source = next(rank for rank, message in enumerate(ranks) if message.rows)
            filler = self._peers.broadcast(self._template.get(name), source)
            self._template.setdefault(name, filler)
        self._split.advance(whole.agreed.split)
        return whole
