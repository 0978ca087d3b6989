"""The worker's end of the data path: slices of blocks in, local batches on the device out, ahead of the training thread.

Threads of their own fetch blocks (:mod:`offload.train.worker.data.fetching`). Another one cuts them into batches (in pinned memory for a
GPU), agrees with the other ranks on the batch's rows, and moves the batch to the device on a stream of its own. The ranks' agreement is a
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
from typing import Any

from offload.model.batch_split import BatchSplit
from offload.pipeline.feed.passes import PassKey
from offload.pipeline.order.ranges import Ranges
from offload.train.worker.data.cutting import Budget, Cut, Cutter, Skipped
from offload.train.worker.data.delivery import Delivery
from offload.train.worker.data.feed_client import FeedClient
from offload.train.worker.data.fetching import Fetcher, Piece
from offload.train.worker.links.agreement import Agreement, Heard
from offload.train.worker.links.peers import Peers

PREFETCH_BATCHES = 2
CLOSE_S = 10.0
BREAK_OFF_S = 1.0  # time that a rank waits for samples when training should end


@dataclass(kw_only=True)
class LocalBatch:
    """One rank's part of a micro-batch.

    ``content`` is the batch on the device: a dict of columns, or what a ``collate_fn`` returned. ``rows`` is the number of this rank's
    samples (0: a filler that must weigh nothing), ``all_rows`` that of all ranks; ``weight`` and ``all_weight`` are their weights in the
    gradient. ``positions`` are the positions that the batch trains. ``split`` is the split of its global batch, and ``heard`` the ranks'
    agreement with it. ``left``: ranks that have left the pass. ``samples``: the samples that were collated, if they travelled whole.
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
    heard: Heard
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
    budget: Budget | None = None
    ordered: bool = False


class Batches:
    """The local batches of one pass on one rank. Iterate once; ``close()`` ends its threads.

    Args:
        split: the split of global batches, until ``agreement`` gives another.
        cutting: how the pass is cut.
        total: the samples of the pass on all ranks; None if that is unknown.
        template: the samples of fillers, by data set. Batches add to it.
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
        self._feed, self._key, self._peers = feed, key, peers
        self._split, self._next_split, self._micro = split, split, 0
        self._delivery, self._cutting, self._agreement, self._template = delivery, cutting, agreement, template
        self._share = None if total is None else total / peers.world_size
        self._received = self._largest = 0
        self._pieces = Fetcher(feed, key, peers.rank, ordered=cutting.ordered)
        self._batches: queue.Queue[LocalBatch | BaseException | None] = queue.Queue(maxsize=PREFETCH_BATCHES)
        # Skipped samples and agreements after the last batch, complete once get() has returned None.
        self.leftover: list[Skipped] = []
        self.last_heard = Heard()
        # The ranks that took more batches than this one after it had closed.
        self.went_on: tuple[int, ...] = ()
        self._taken = 0
        self._closed = threading.Event()
        self._broken_off = False  # this rank stopped waiting for samples because training ends
        self._cutter = threading.Thread(target=self._batch, name=f"batch-{key.name}", daemon=True)
        self._cutter.start()

    def get(self) -> LocalBatch | None:
        """Return the next batch, None at the end of the pass. Raises the error of preprocessing."""
        item = self._batches.get()
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            self._taken += 1
            self._delivery.arrived(item.content, item.moved)
        return item

    def close(self) -> None:
        """End the threads and wait for them, but not forever: another rank may have died, or goes on alone (:attr:`went_on`)."""
        self._closed.set()
        self._pieces.close()
        self._feed.leave(self._key, self._peers.rank)
        until = time.monotonic() + CLOSE_S
        for thread in (*self._pieces.threads, self._cutter):
            while thread.is_alive() and time.monotonic() < until and not self.went_on:
                with contextlib.suppress(queue.Empty):
                    self._batches.get_nowait()
                thread.join(timeout=0.05)

    def _put(self, item: LocalBatch | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._batches.put(item, timeout=0.2)
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

    def _batch(self) -> None:
        try:
            for cut in self._cut():
                batch = self._agree(cut)
                if batch is None:
                    break
                self._put(batch)
                if batch.heard.end:
                    break
            else:
                # This rank has no more samples, or must close; the others may have some. All ranks make the same number of
                # agreements in a pass: otherwise, the next pass's first would meet this one's last.
                while self._cutting.padded:
                    batch = self._agree(None)
                    if batch is None:
                        break
                    self._put(batch)
                    if batch.heard.end:
                        break
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _cut(self) -> Iterator[Cut]:
        """Yield batches of the local size, which may change meanwhile, from pieces as they come; the last batch holds the rest."""
        least = self._cutting.least if self._cutting.padded and not self._cutting.drop_last else 1
        cutter = Cutter(least=least, budget=self._cutting.budget)
        while (piece := self._next_piece()) is not None:
            columns, rows = piece
            self._received += rows
            self._largest = max(self._largest, rows)
            cutter.add(columns, rows)
            while not self._closed.is_set():
                size = self._split.local_batch_size
                cut = cutter.cut(size, over=False, near_end=self._near_end(size))
                if cut is None:
                    break
                yield cut
        while not (self._closed.is_set() or self._broken_off):
            cut = cutter.cut(self._split.local_batch_size, over=True, near_end=True)
            if cut is None:
                self.leftover += cutter.leftover()
                return
            yield cut

    def _near_end(self, size: int) -> bool:
        """Whether this rank's samples may end soon. Ranks get about equally many: the next block goes to the one with the fewest."""
        return self._share is None or self._received + size + 2 * self._largest >= self._share

    def _agree(self, cut: Cut | None) -> LocalBatch | None:
        """The batch with what all ranks know about it; None once no rank has samples left."""
        name, rows, weight = self._key.name, 0, 0
        moved: tuple[Any, Any] | None = None
        if cut is not None:
            rows, weight = cut.rows, cut.weight
            moved = self._delivery.deliver(cut)
            if name not in self._template:
                self._template[name] = cut.first(self._cutting.least)
        own_ready_s = time.monotonic()
        all_rows, all_weight, heard, split = rows, weight, Heard(), self._split
        broken_off, left, partial = False, tuple[int, ...](), cut is not None and cut.partial
        if self._cutting.padded:
            lacking = not rows and name not in self._template
            closed = self._closed.is_set()
            mine = [rows, weight, lacking, self._broken_off, partial or not rows, closed, self._taken]
            told = self._peers.gather([*map(int, mine), *self._agreement.says()])
            all_rows, all_weight = sum(each[0] for each in told), sum(each[1] for each in told)
            broken_off, partial = any(each[3] for each in told), any(each[4] for each in told)
            left = tuple(rank for rank, each in enumerate(told) if each[5])
            if closed:
                self.went_on = tuple(rank for rank, each in enumerate(told) if each[6] > self._taken)
            heard = self._agreement.heard([each[7:] for each in told])
            if any(each[2] for each in told) and all_rows:
                source = next(rank for rank, each in enumerate(told) if each[0])
                filler = self._peers.broadcast(self._template.get(name), source)
                self._template.setdefault(name, filler)
            self._advance(heard)
        if self._cutting.drop_last and partial and not broken_off:
            all_rows = 0
        if not all_rows and not broken_off:
            # End training with the epoch: after a resume from here, the user's loop would see a pass without batches.
            self.last_heard = heard
            self.leftover += () if cut is None else cut.skipped  # those of a batch that drop_last leaves out
            return None
        if moved is None and name in self._template:
            moved = self._delivery.deliver(self._template[name].again())
        content, event = moved or ({}, None)
        return LocalBatch(
            content=content,
            rows=rows,
            all_rows=all_rows,
            weight=weight,
            all_weight=all_weight,
            positions=cut.positions if cut is not None else Ranges(),
            skipped=cut.skipped if cut is not None else (),
            own_ready_s=own_ready_s,
            split=split,
            heard=heard,
            left=left,
            samples=cut.samples if cut is not None else (),
            moved=event,
        )

    def _advance(self, heard: Heard) -> None:
        """Advance by a micro-batch on which the ranks have agreed. A new split begins with a global batch."""
        self._next_split = heard.split or self._next_split
        last = self._micro == self._split.accum_steps
        self._micro = 0 if last else self._micro + 1
        if last:
            self._split = self._next_split
