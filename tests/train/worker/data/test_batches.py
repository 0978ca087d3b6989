"""Cutting local batches, and agreeing on them: ranks stay in step however and wherever they stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from offload.model.batch_split import BatchSplit
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.train.worker.data import batches as batches_module
from offload.train.worker.data.batches import Batches, Cutting
from offload.train.worker.data.delivery import Delivery
from offload.train.worker.links.agreement import Agreed, Agreement, NoAgreement
from tests.emulation.in_threads import Peer, Ranks

BLOCK, LOCAL = 10, 4


class Blocks:
    """A feed of so many samples for each rank; a block's reference is its columns."""

    def __init__(self, samples: tuple[int, int]) -> None:
        self.waiting = {}
        for rank, count in enumerate(samples):
            starts = range(0, count, BLOCK)
            self.waiting[rank] = [Slice(None, first, min(first + BLOCK, count), 0) for first in starts]  # type: ignore[arg-type]
        self.left: set[int] = set()

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        if reach == "far":
            return [], True
        mine = self.waiting[rank]
        return [mine.pop(0)] if mine else [], not mine

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None: ...

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        ids = np.arange(piece.start, piece.stop)
        return lambda: {"x": ids.astype(np.float32), SAMPLE_ID: ids, POSITION: ids}

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        raise AssertionError("nothing was lost")

    def leave(self, key: PassKey, rank: int) -> None:
        self.left.add(rank)


class Broken(Blocks):
    """Every third sample is skipped."""

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        read = super().fetch(piece)

        def with_errors() -> Columns:
            columns = read()
            return {**columns, ERROR: ["broken" if i % 3 == 2 else None for i in columns[SAMPLE_ID]]}

        return with_errors


class Stopping(NoAgreement):
    """Says to stop once ``stop`` is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def ending(self) -> bool:
        return False

    def message(self) -> list[int]:
        return [int(self._stop.is_set())]

    def agreed(self, told: Sequence[Sequence[int]]) -> Agreed:
        return Agreed(end="stop" if any(each[0] for each in told) else "")


TWO = BatchSplit(local_batch_size=LOCAL, accum_steps=0, workers=2)


def make(
    feed: Blocks,
    peer: Any,
    stop: threading.Event | None = None,
    *,
    agreement: Agreement | None = None,
    split: BatchSplit = TWO,
    cutting: Cutting | None = None,
) -> Batches:
    return Batches(
        feed,
        PassKey(attempt=1, name="train", number=0),
        peers=peer,
        split=split,
        delivery=Delivery(torch.device("cpu")),
        cutting=cutting or Cutting(padded=True),
        agreement=agreement or Stopping(stop or threading.Event()),
        template={},
    )


def both(work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [future.result(timeout=800) for future in [threads.submit(work, rank) for rank in (0, 1)]]


@pytest.mark.parametrize("samples", [(40, 40), (40, 7), (0, 21), (3, 2)])
def test_every_rank_makes_the_same_number_of_steps_and_each_sample_comes_once(samples: tuple[int, int]) -> None:
    peers, feed = Ranks(2), Blocks(samples)

    def work(rank: int) -> tuple[list[int], list[int]]:
        batches = make(feed, Peer(peers, rank))
        ids, steps = [], []
        while (batch := batches.get()) is not None:
            ids += batch.content["sample_id"][: batch.rows].tolist()
            steps.append(batch.all_rows)
        batches.close()
        return ids, steps

    (ids_0, steps_0), (ids_1, steps_1) = both(work)
    assert (ids_0, ids_1) == (list(range(samples[0])), list(range(samples[1])))
    assert steps_0 == steps_1
    assert sum(steps_0) == sum(samples)
    assert feed.left == {0, 1}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [(40, 40), (4, 4), (3, 10)])
def test_a_skipped_sample_is_told_though_its_batch_is_left_out(samples: tuple[int, int], drop_last: bool) -> None:
    peers, feed = Ranks(2), Broken(samples)

    def work(rank: int) -> list[int]:
        batches = make(feed, Peer(peers, rank), cutting=Cutting(padded=True, drop_last=drop_last))
        skipped = []
        while (batch := batches.get()) is not None:
            skipped += batch.skipped
        batches.close()
        return [each.sample_id for each in [*skipped, *batches.leftover]]

    assert both(work) == [[*range(2, count, 3)] for count in samples]


@pytest.mark.parametrize("steps", [(1, 1), (3, 3), (1, 4), (5, 0)])
def test_ranks_that_break_out_of_a_pass_are_in_step_in_the_next(steps: tuple[int, int]) -> None:
    """Their threads are ahead by different numbers of batches then."""
    peers = Ranks(2)
    first, second = Blocks((80, 80)), Blocks((20, 20))

    def work(rank: int) -> list[int]:
        batches = make(first, Peer(peers, rank))
        for _ in range(steps[rank]):
            assert batches.get() is not None
        batches.close()
        again = make(second, Peer(peers, rank))
        rows = []
        while (batch := again.get()) is not None:
            rows.append(batch.all_rows)
        again.close()
        return rows

    assert both(work) == [[2 * LOCAL] * 5, [2 * LOCAL] * 5]


def test_a_rank_closes_though_the_other_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It died, or is stuck in a collective operation that this one's exception left undone."""
    monkeypatch.setattr(batches_module, "CLOSE_S", 0.3)
    peers, feed = Ranks(2), Blocks((400, 400))
    alone, stuck = make(feed, Peer(peers, 0)), make(feed, Peer(peers, 1))
    assert alone.get() is not None
    alone.close()
    peers.abort()
    stuck.close()


def test_a_stop_reaches_both_ranks_at_the_same_batch() -> None:
    peers, feed = Ranks(2), Blocks((400, 400))
    stop = threading.Event()

    def work(rank: int) -> int:
        batches = make(feed, Peer(peers, rank), stop if rank == 1 else None)
        count = 0
        while (batch := batches.get()) is not None and not batch.agreed.end:
            count += 1
            if count == 3:
                stop.set()
        batches.close()
        return count

    one, other = both(work)
    assert one == other


class StoppingAfter(Stopping):
    """Says to stop once it has said ``after`` batches."""

    def __init__(self, after: int) -> None:
        super().__init__(threading.Event())
        self._left = after

    def ending(self) -> bool:
        return False

    def message(self) -> list[int]:
        self._left -= 1
        return [int(self._left < 0)]


def test_a_stop_that_comes_with_the_end_of_a_pass_is_for_the_end_of_the_epoch() -> None:
    """A checkpoint between the two would be resumed with a pass of no batch, and the loss of none to report."""
    peers, feed = Ranks(2), Blocks((3 * LOCAL, 3 * LOCAL))

    def work(rank: int) -> list[str]:
        batches = make(feed, Peer(peers, rank), agreement=StoppingAfter(3))
        ends: list[str] = []
        while (batch := batches.get()) is not None:
            ends.append(batch.agreed.end)
        batches.close()
        return [*ends, batches.last_agreed.end]

    assert both(work) == [["", "", "", "stop"]] * 2


class Ordering(NoAgreement):
    """Rank 0 asks for another split once it has said ``after`` batches."""

    def __init__(self, rank: int, after: int, split: tuple[int, int]) -> None:
        self._rank, self._after, self._split, self._said = rank, after, split, 0

    def ending(self) -> bool:
        return False

    def message(self) -> list[int]:
        self._said += 1
        return list(self._split) if self._rank == 0 and self._said > self._after else [0, 0]

    def agreed(self, told: Sequence[Sequence[int]]) -> Agreed:
        local, accum = told[0]
        return Agreed(split=BatchSplit(local_batch_size=local, accum_steps=accum, workers=2) if local else None)


@pytest.mark.parametrize(("first", "second"), [((4, 0), (7, 2)), ((4, 2), (3, 0)), ((2, 1), (20, 0))])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_a_new_batch_size_begins_with_a_global_batch_on_both_ranks(
    first: tuple[int, int], second: tuple[int, int], after: int
) -> None:
    peers, feed = Ranks(2), Blocks((80, 71))
    cut = [BatchSplit(local_batch_size=m, accum_steps=s, workers=2) for m, s in (first, second)]

    def work(rank: int) -> tuple[list[int], list[BatchSplit]]:
        batches = make(feed, Peer(peers, rank), agreement=Ordering(rank, after, second), split=cut[0])
        ids: list[int] = []
        splits: list[BatchSplit] = []
        while (batch := batches.get()) is not None:
            ids += batch.content["sample_id"][: batch.rows].tolist()
            splits.append(batch.split)
            assert batch.rows <= batch.split.local_batch_size
        batches.close()
        return ids, splits

    (ids_0, splits_0), (ids_1, splits_1) = both(work)
    assert (ids_0, ids_1) == (list(range(80)), list(range(71)))
    assert splits_0 == splits_1
    changed = splits_0.index(cut[1])
    assert changed % (first[1] + 1) == 0  # whole global batches before it
    assert after < changed <= after + 1 + first[1] + 1
    assert set(splits_0[changed:]) == {cut[1]}
