"""The worker's end of the data path: slices of blocks in, local batches on the device out, ahead of the training thread.

One thread fetches blocks. A second thread cuts them into batches (in pinned memory for a GPU), agrees with the other ranks on the
batch's rows, and moves the batch to the device on a stream of its own. The ranks' agreement is a gather of a few numbers on a process
group of its own, ahead of training by the prefetch depth. The training thread never waits for it unless it waits for data. Other
agreements of the ranks travel with it (:mod:`offload.train.worker.agreement`).
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from offload.errors import RunError
from offload.model.batch_split import BatchSplit
from offload.pipeline.owned_memory import writable
from offload.pipeline.passes import PassKey
from offload.pipeline.wire import ERROR, HIDDEN, POSITION, SAMPLE_ID, Columns, common_dtype, torch_only
from offload.train.worker.agreement import Agreement, Heard
from offload.train.worker.feed_client import BlockLostError, FeedClient

PREFETCH_BATCHES = 2
PREFETCH_BLOCKS = 2
CLOSE_S = 10.0
BREAK_OFF_S = 1.0  # time that a rank waits for samples when training should end
VIEWED_ROW_BYTES = 4096
_TENSORS = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)  # numpy types for torch tensors; columns of other types stay arrays


class Peers(Protocol):
    """The other ranks, as batches see them."""

    rank: int
    world_size: int

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, in the order of ranks."""

    def broadcast(self, value: Any, source: int) -> Any:
        """``value`` of rank ``source``, on every rank."""


class NoPeers:
    """The peers of a rank in a world of one."""

    world_size = 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine)]

    def broadcast(self, value: Any, source: int) -> Any:
        return value


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A skipped sample, and the reason."""

    sample_id: int
    reason: str


@dataclass(kw_only=True)
class LocalBatch:
    """One rank's part of a micro-batch.

    ``rows`` is the number of this rank's samples (0: a filler that must weigh nothing), ``all_rows`` that of all ranks. ``positions``
    are the positions that the batch trains. ``split`` is the split of its global batch, and ``heard`` the ranks' agreement with it.
    """

    tensors: dict[str, Any]
    rows: int
    all_rows: int
    positions: np.ndarray[Any, Any]
    skipped: tuple[Skipped, ...]
    own_ready_s: float
    split: BatchSplit
    heard: Heard
    moved: Any = None


class Batches:
    """The local batches of one pass on one rank. Iterate once; ``close()`` ends its threads.

    ``padded``: every rank takes part in every step of the pass (a DDP step needs all ranks); a rank without samples gets a filler that
    weighs nothing. Otherwise, a rank simply ends when its samples do. ``split``: the split of global batches, until ``agreement``
    gives another. ``in_order``: a lost block delays the blocks after it.
    """

    def __init__(
        self,
        feed: FeedClient,
        key: PassKey,
        *,
        peers: Peers,
        split: BatchSplit,
        device: torch.device,
        on_device: Sequence[Callable[[dict[str, Any]], dict[str, Any]]],
        padded: bool,
        agreement: Agreement,
        template: dict[str, Columns],
        in_order: bool = False,
    ) -> None:
        self._feed, self._key, self._peers = feed, key, peers
        self._split, self._next_split, self._micro = split, split, 0
        self._device, self._on_device = device, on_device
        self._padded, self._agreement, self._template, self._in_order = padded, agreement, template, in_order
        self._pieces: queue.Queue[tuple[Columns, int] | BaseException | None] = queue.Queue(maxsize=PREFETCH_BLOCKS)
        self._batches: queue.Queue[LocalBatch | BaseException | None] = queue.Queue(maxsize=PREFETCH_BATCHES)
        # Skipped samples and agreements after the last batch, complete once get() has returned None.
        self.leftover: list[Skipped] = []
        self.last_heard = Heard()
        self._closed = threading.Event()
        self._broken_off = False  # this rank stopped waiting for samples because training ends
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{key.name}", daemon=True)
            for name, work in (("fetch", self._fetch), ("batch", self._batch))
        ]
        for thread in self._threads:
            thread.start()

    def get(self) -> LocalBatch | None:
        """Return the next batch, None at the end of the pass. Raises the error of preprocessing."""
        item = self._batches.get()
        if isinstance(item, BaseException):
            raise item
        if item is not None and item.moved is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(item.moved)
            for value in item.tensors.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(current)
        return item

    def close(self) -> None:
        """End the threads and wait for them, but not forever: another rank may have died."""
        self._closed.set()
        self._feed.leave(self._key, self._peers.rank)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until:
                for waiting in (self._pieces, self._batches):
                    try:
                        waiting.get_nowait()
                    except queue.Empty:
                        pass
                thread.join(timeout=0.05)

    def _put(self, where: queue.Queue[Any], item: Any) -> bool:
        while not self._closed.is_set():
            try:
                where.put(item, timeout=0.2)
                return not self._closed.is_set()  # close() makes room, so that a thread that waits here ends
            except queue.Full:
                continue
        return False

    def _next_piece(self) -> tuple[Columns, int] | BaseException | None:
        waiting_since = time.monotonic()
        while not self._closed.is_set():
            # A sample may never come. A worker that should end does not wait for it; the sample is not trained yet.
            if self._agreement.ending() and time.monotonic() - waiting_since > BREAK_OFF_S and self._pieces.empty():
                self._broken_off = True
                return None
            with contextlib.suppress(queue.Empty):
                return self._pieces.get(timeout=0.2)
        return None

    def _fetch(self) -> None:
        try:
            over = False
            line = _Line(self._in_order)
            while (not over or line.lost) and not self._closed.is_set():
                slices, over = self._feed.take(self._key, self._peers.rank, 1)
                self._feed.start_fetching(slices)
                for piece in slices:
                    place = piece.first, piece.start, piece.stop
                    try:
                        columns = self._feed.columns(piece)
                    except BlockLostError:
                        self._feed.again(self._key, self._peers.rank, piece)
                        line.lose(place)
                        continue
                    for fetched in line.came(place, (columns, piece.stop - piece.start)):
                        if not self._put(self._pieces, fetched):
                            return
            self._put(self._pieces, None)
        except BaseException as error:
            self._put(self._pieces, error)

    def _batch(self) -> None:
        try:
            for columns, rows, skipped in self._cut():
                batch = self._agree(columns, rows, skipped)
                if batch is None:
                    break
                self._put(self._batches, batch)
                if batch.heard.end:
                    break
            else:
                # This rank has no more samples, or must close; the others may have some. All ranks make the same number of
                # agreements in a pass: otherwise, the next pass's first would meet this one's last.
                while self._padded:
                    batch = self._agree(None, 0, ())
                    if batch is None:
                        break
                    self._put(self._batches, batch)
                    if batch.heard.end:
                        break
            self._put(self._batches, None)
        except BaseException as error:
            self._put(self._batches, error)

    def _cut(self) -> Iterator[tuple[Columns, int, tuple[Skipped, ...]]]:
        """Yield batches of the local size, which may change meanwhile, from pieces as they come; the last batch holds the rest."""
        pieces: list[Columns] = []
        counts: list[int] = []
        skipped: list[Skipped] = []
        while (piece := self._next_piece()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            columns, rows = _without_errors(*piece, skipped)
            if rows == 0:
                continue
            pieces.append(columns)
            counts.append(rows)
            while sum(counts) >= (size := self._split.local_batch_size) and not self._closed.is_set():
                head, pieces, counts = _split(pieces, counts, size)
                yield self._joined(head), size, tuple(skipped)
                skipped.clear()
        if self._closed.is_set() or self._broken_off:
            return
        if pieces:
            yield self._joined(pieces), sum(counts), tuple(skipped)
        else:
            self.leftover += skipped

    def _joined(self, pieces: list[Columns]) -> Columns:
        """Join views of blocks to one batch. This is the only copy of the data path, to pinned memory for a GPU. On a CPU, a batch
        that lies within a block is a view of it."""
        joined: Columns = {}
        for name in pieces[0]:
            parts = [p[name] for p in pieces]
            if not all(isinstance(p, np.ndarray) for p in parts):
                joined[name] = [row for part in parts for row in part]
                continue
            arrays = [p for p in parts if isinstance(p, np.ndarray)]
            if len(arrays) == 1 and self._stream is None and _worth_a_view(arrays[0]):
                joined[name] = writable(arrays[0])
                continue
            odd = next((i for i, a in enumerate(arrays) if a.shape[1:] != arrays[0].shape[1:]), None)
            if odd is not None:
                ids = [int(pieces[i][SAMPLE_ID][0]) for i in (0, odd)]
                raise RunError(
                    f"column {name!r} has rows of different shapes: {arrays[0].shape[1:]} for sample {ids[0]}, "
                    f"{arrays[odd].shape[1:]} for sample {ids[1]}. Samples of a batch must agree: resize or crop them to "
                    "one size in the transform."
                )
            dtype = common_dtype(array.dtype for array in arrays)
            if dtype is None:
                joined[name] = [row for array in arrays for row in array]
                continue
            shape = (sum(len(a) for a in arrays), *arrays[0].shape[1:])
            pin = self._stream is not None and _is_numeric(arrays[0])
            target = _pinned(shape, dtype) if pin else np.empty(shape, dtype)
            joined[name] = np.concatenate(arrays, out=target)
        return joined

    def _agree(self, columns: Columns | None, rows: int, skipped: tuple[Skipped, ...]) -> LocalBatch | None:
        """The batch with what all ranks know about it; None once no rank has samples left."""
        moved = self._move(columns) if rows and columns is not None else None
        own_ready_s = time.monotonic()
        if rows and columns is not None and self._key.name not in self._template:
            # Copies: views would keep their block for the rest of the run.
            self._template[self._key.name] = {n: copy.copy(c[:1]) for n, c in columns.items()}
        all_rows, heard, split, broken_off = rows, Heard(), self._split, False
        if self._padded:
            lacking = not rows and self._key.name not in self._template
            told = self._peers.gather([rows, int(lacking), int(self._broken_off), *self._agreement.says()])
            all_rows = sum(each[0] for each in told)
            broken_off = any(each[2] for each in told)
            heard = self._agreement.heard([each[3:] for each in told])
            if any(each[1] for each in told) and all_rows:
                source = next(rank for rank, each in enumerate(told) if each[0])
                filler = self._peers.broadcast(self._template.get(self._key.name), source)
                self._template.setdefault(self._key.name, filler)
            self._advance(heard)
        if not all_rows and not broken_off:
            # End training with the epoch: after a resume from here, the user's loop would see a pass without batches.
            self.last_heard = heard
            return None
        positions = columns[POSITION] if rows and columns is not None else np.zeros(0, dtype=np.int64)
        if moved is None:
            moved = self._move(self._template.get(self._key.name, {}))
        tensors, event = moved
        return LocalBatch(
            tensors=tensors,
            rows=rows,
            all_rows=all_rows,
            positions=np.asarray(positions),
            skipped=skipped,
            own_ready_s=own_ready_s,
            split=split,
            heard=heard,
            moved=event,
        )

    def _advance(self, heard: Heard) -> None:
        """Advance by a micro-batch on which the ranks have agreed. A new split begins with a global batch."""
        self._next_split = heard.split or self._next_split
        last = self._micro == self._split.accum_steps
        self._micro = 0 if last else self._micro + 1
        if last:
            self._split = self._next_split

    def _move(self, columns: Columns) -> tuple[dict[str, Any], Any]:
        visible = {name: column for name, column in columns.items() if name not in HIDDEN}
        tensors = {name: _as_tensor(column) for name, column in visible.items()}
        if self._stream is None:
            return self._finish(tensors), None
        with torch.cuda.stream(self._stream):
            on_gpu = {
                n: t.to(self._device, non_blocking=True) if isinstance(t, torch.Tensor) else t
                for n, t in tensors.items()
            }
            finished = self._finish(on_gpu)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return finished, event

    def _finish(self, tensors: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            for step in self._on_device:
                tensors = step(tensors)
        return tensors


class _Line:
    """The pieces on their way into batches. A lost piece comes again later; with ``in_order``, the others wait for it."""

    def __init__(self, in_order: bool) -> None:
        self.lost: set[tuple[int, int, int]] = set()
        self._in_order = in_order
        self._waiting: dict[tuple[int, int, int], tuple[Columns, int] | None] = {}

    def lose(self, place: tuple[int, int, int]) -> None:
        """Note that the piece at this place is lost, perhaps again."""
        self.lost.add(place)
        self._waiting.setdefault(place, None)

    def came(self, place: tuple[int, int, int], piece: tuple[Columns, int]) -> list[tuple[Columns, int]]:
        """Add a piece that arrived; return the pieces that may now go on."""
        self.lost.discard(place)
        if not self._in_order:
            return [piece]
        self._waiting[place] = piece
        free: list[tuple[Columns, int]] = []
        for first, waiting in list(self._waiting.items()):
            if waiting is None:
                break
            free.append(waiting)
            del self._waiting[first]
        return free


def _worth_a_view(column: np.ndarray[Any, Any]) -> bool:
    """Whether the rows are large. Small rows (labels) are copied: users keep them, and a view would keep the whole block."""
    return column.nbytes >= VIEWED_ROW_BYTES * len(column) and column.flags.c_contiguous


def _is_numeric(column: object) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.name in _TENSORS


def _as_tensor(column: Any) -> Any:
    """The array as a tensor, if torch has its type; anything else unchanged."""
    if not isinstance(column, np.ndarray):
        return column
    if (name := torch_only(column.dtype)) is not None:
        return torch.from_numpy(column.view(f"i{column.dtype.itemsize}")).view(getattr(torch, name))
    return torch.from_numpy(column) if _is_numeric(column) else column


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return np.asarray(torch.empty(shape, dtype=kind, pin_memory=True).numpy())


def _without_errors(columns: Columns, rows: int, skipped: list[Skipped]) -> tuple[Columns, int]:
    reasons = columns.pop(ERROR, None)
    if reasons is None or not any(reasons):
        return columns, rows
    ids = columns[SAMPLE_ID]
    skipped += [Skipped(sample_id=int(ids[i]), reason=r) for i, r in enumerate(reasons) if r]
    good = np.array([i for i, r in enumerate(reasons) if not r], dtype=np.int64)
    kept: Columns = {n: c[good] if isinstance(c, np.ndarray) else [c[i] for i in good] for n, c in columns.items()}
    return kept, len(good)


def _split(pieces: list[Columns], counts: list[int], size: int) -> tuple[list[Columns], list[Columns], list[int]]:
    """The first ``size`` rows as views, and the rest."""
    head: list[Columns] = []
    while size:
        take = min(size, counts[0])
        head.append({n: c[:take] for n, c in pieces[0].items()})
        if take == counts[0]:
            pieces, counts = pieces[1:], counts[1:]
        else:
            pieces = [{n: c[take:] for n, c in pieces[0].items()}, *pieces[1:]]
            counts = [counts[0] - take, *counts[1:]]
        size -= take
    return head, pieces, counts
