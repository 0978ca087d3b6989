"""The feed: one actor that runs the pipelines of a run and hands their blocks, as references, to the workers.

A pass (one epoch of one data set) is a row of *segments*, each a Ray Data execution over blocks of index rows. The first
segment's tasks are tiny, so that the first batch comes soon; the next ones are sized from what those cost. A segment
starts before the one before it has drained, and a pass before the one before it has, so that no core waits at a seam.

Where it stops: blocks are not opened here, and batches are cut in the workers (:mod:`offload.pipeline.reader`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray

from offload.errors import OffloadError, RunError, find_offload_error
from offload.pipeline import ray_data
from offload.pipeline.allot import Allotment, Share
from offload.pipeline.order import epoch_order
from offload.pipeline.ranges import Ranges
from offload.pipeline.ray_data import Block, PackedStage
from offload.pipeline.sizing import Rates, block_bytes, plan_tasks
from offload.pipeline.sources.base import Index
from offload.pipeline.spec import Pipeline
from offload.pipeline.stage import CHUNK
from offload.pipeline.wire import POSITION, SAMPLE_ID

# Shares of the cluster's object store: what one execution of Ray Data may hold, and what may wait here for workers.
# Two executions overlap at a seam; together with the blocks that workers hold this stays below the store's size.
DATA_SHARE = 0.2
QUEUE_SHARE = 0.15
TAKE_TIMEOUT_S = 5.0


class Slice(NamedTuple):
    """Rows ``[start, stop)`` of a block; the block's first row is number ``first`` of its pass."""

    ref: ray.ObjectRef[pa.Table]
    start: int
    stop: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A data set of the run, ready to be fed."""

    pipeline: Pipeline
    index: Index | None
    shuffle: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What preprocessing may use: cores, and the CPUs one task asks for (first without, then with a spare task)."""

    cores: int
    task_cpus: float
    spare_task_cpus: float
    store_bytes: float


@dataclass(frozen=True, kw_only=True)
class PassKey:
    """One visit of a data set: ``number`` counts them, and is the epoch for training data."""

    attempt: int
    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """How a pass is to be fed. ``done``: positions trained already; ``first_rows``: rows of the first global batch."""

    world_size: int
    first_rows: int
    epoch: int
    done: tuple[tuple[int, int], ...] = ()
    followed: bool = False


@dataclass
class _Pass:
    key: PassKey
    request: PassRequest
    queues: list[deque[tuple[Slice, int]]]
    changed: threading.Condition = field(default_factory=threading.Condition)
    queued_bytes: int = 0
    finished: bool = False
    closed: bool = False
    error: OffloadError | None = None
    left: int = 0


class Feed:
    """The actor. Its methods block; it runs with many threads."""

    def __init__(self, streams: dict[str, Stream], cores: Cores) -> None:
        ray_data.configure(store_bytes=DATA_SHARE * cores.store_bytes)
        self._streams, self._cores = streams, cores
        self._packed = {n: PackedStage.of(s.pipeline.stage(s.index, seed=s.seed)) for n, s in streams.items()}
        self._passes: dict[PassKey, _Pass] = {}
        self._lock = threading.Lock()
        self._attempt = 0
        self._meters = {name: Meter(cores.cores) for name in streams}

    def begin(self) -> int:
        """A worker group starts: whatever was fed to the one before it is dropped. Returns the number of the attempt."""
        with self._lock:
            for old in self._passes.values():
                _close(old)
            self._passes.clear()
            self._attempt += 1
            return self._attempt

    def open(self, key: PassKey, request: PassRequest) -> int | None:
        """Join a pass; the first rank to ask starts it. Returns how many rows it will deliver, None if unknown."""
        with self._lock:
            current = self._passes.get(key)
            if current is not None and current.request.done != request.done:
                _close(current)  # it was started ahead for an epoch that turned out to be partly trained
                current = None
            if current is None:
                current = self._start(key, request)
            else:
                current.request = request
            for other in [p for k, p in self._passes.items() if k.name == key.name and k.number < key.number]:
                _close(other)
                del self._passes[other.key]
        index = self._streams[key.name].index
        return None if index is None else len(index) - len(Ranges(request.done))

    def take(self, key: PassKey, rank: int, want: int = 2) -> tuple[list[Slice], bool]:
        """Up to ``want`` slices for this rank, and whether the pass is over for it. Waits a few seconds for the first;
        an empty answer that is not the end means: ask again. Raises what went wrong in preprocessing."""
        current = self._passes.get(key)
        if current is None:
            return [], True
        mine = current.queues[rank]
        with current.changed:
            current.changed.wait_for(
                lambda: mine or current.finished or current.closed or current.error, timeout=TAKE_TIMEOUT_S
            )
            if current.error is not None:
                raise current.error
            taken = [mine.popleft() for _ in range(min(want, len(mine)))]
            current.queued_bytes -= sum(size for _, size in taken)
            current.changed.notify_all()
            return [piece for piece, _ in taken], not mine and (current.finished or current.closed)

    def rates(self) -> dict[str, dict[str, float]]:
        """What each data set's preprocessing was measured at, so far."""
        return {name: meter.summary() for name, meter in self._meters.items()}

    def _start(self, key: PassKey, request: PassRequest) -> _Pass:
        started = _Pass(key=key, request=request, queues=[deque() for _ in range(request.world_size)])
        self._passes[key] = started
        threading.Thread(
            target=self._produce, args=(started,), name=f"pass-{key.name}-{key.number}", daemon=True
        ).start()
        return started

    def _produce(self, current: _Pass) -> None:
        stream = self._streams[current.key.name]
        try:
            total = None if stream.index is None else len(stream.index) - len(Ranges(current.request.done))
            allotment = Allotment(current.request.world_size, total)
            blocks = (
                self._plain_blocks(current) if stream.index is None else self._indexed_blocks(current, stream.index)
            )
            held: dict[int, tuple[Block, int]] = {}
            first = 0
            for number, block in enumerate(blocks):
                self._meters[current.key.name].add(block)
                held[number] = (block, first)
                first += block.rows
                self._deliver(current, allotment.add(block.rows), held)
                if current.closed:
                    return
            self._deliver(current, allotment.finish(), held)
        except BaseException as error:
            current.error = _as_user_error(error)
        finally:
            with current.changed:
                current.finished = True
                current.changed.notify_all()

    def _deliver(self, current: _Pass, shares: list[Share], held: dict[int, tuple[Block, int]]) -> None:
        limit = QUEUE_SHARE * self._cores.store_bytes
        with current.changed:
            # Whatever the limit, no rank starves: it may be the one that all others wait for.
            current.changed.wait_for(lambda: current.closed or current.queued_bytes < limit or not all(current.queues))
            for share in shares:
                block, first = held[share.block]
                size = block.size_bytes * share.rows // max(block.rows, 1)
                current.queues[share.rank].append((Slice(block.ref, share.start, share.stop, first), size))
                current.queued_bytes += size
            newest = max((s.block for s in shares), default=-1)
            for number in [n for n in held if n < newest]:
                del held[number]
            current.changed.notify_all()

    def _plain_blocks(self, current: _Pass) -> Iterator[Block]:
        stream = self._streams[current.key.name]
        assert stream.pipeline.dataset is not None
        yield from ray_data.encode_dataset(
            stream.pipeline.dataset,
            self._packed[current.key.name],
            id_column=stream.pipeline.id_column,
            done=Ranges(current.request.done),
            task_cpus=self._cores.task_cpus,
            actors=self._cores.cores if stream.pipeline.has_setup else None,
        )

    def _indexed_blocks(self, current: _Pass, index: Index) -> Iterator[Block]:
        stream = self._streams[current.key.name]
        meter = self._meters[current.key.name]
        order = epoch_order(
            len(index), seed=stream.seed, epoch=current.request.epoch, shuffle=stream.shuffle, groups=index.groups
        )
        positions = Ranges(current.request.done).missing_from(len(index))
        cursor = 0

        def next_segment() -> _Segment | None:
            nonlocal cursor
            sizes = plan_tasks(
                len(positions) - cursor,
                cores=self._cores.cores,
                first_rows=current.request.first_rows,
                rates=meter.rates(),
                block_bytes=block_bytes(self._cores.store_bytes, self._cores.cores),
            )
            if not sizes:
                return None
            if stream.pipeline.has_setup:  # a new execution would construct every actor again
                sizes += [max(sizes)] * ((len(positions) - cursor - sum(sizes)) // max(sizes) + 1)
            ramping = meter.rates() is None
            cuts = _chunk_cuts(positions, cursor, sizes)
            blocks = [_index_rows(index.table, order, positions[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
            cursor = cuts[-1]
            return _Segment(
                lambda: ray_data.preprocess(
                    blocks,
                    self._packed[current.key.name],
                    epoch=current.request.epoch,
                    task_cpus=self._cores.task_cpus if ramping else self._cores.spare_task_cpus,
                    actors=self._cores.cores if stream.pipeline.has_setup else None,
                ),
                len(blocks),
            )

        segment = next_segment()
        while segment is not None:
            following: _Segment | None = None
            for left, block in segment:
                # The seam: while the last tasks of this segment run, the cores that finish first need the next one's.
                if following is None and left <= self._cores.cores:
                    following = next_segment()
                    if following is None and current.request.followed and not stream.pipeline.has_setup:
                        self._start_ahead(current)
                yield block
                if current.closed:
                    segment.close()
                    if following is not None:
                        following.close()
                    return
            segment = following

    def _start_ahead(self, current: _Pass) -> None:
        """Start the next epoch's pass while this one's last tasks run."""
        key = PassKey(attempt=current.key.attempt, name=current.key.name, number=current.key.number + 1)
        with self._lock:
            if key not in self._passes and not current.closed and key.attempt == self._attempt:
                request = PassRequest(
                    world_size=current.request.world_size,
                    first_rows=current.request.first_rows,
                    epoch=current.request.epoch + 1,
                )
                self._start(key, request)


class _Segment:
    """A Ray Data execution on a thread of its own, started at once. Iterating gives (blocks still to come, block)."""

    def __init__(self, run: Callable[[], Iterator[Block]], blocks: int) -> None:
        self._results: queue.Queue[Block | BaseException | None] = queue.Queue(maxsize=2)
        self._blocks, self._closed = blocks, threading.Event()
        threading.Thread(target=self._work, args=(run,), daemon=True).start()

    def close(self) -> None:
        """Let the execution end with the next block that it finishes."""
        self._closed.set()

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        left = self._blocks
        while (result := self._results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            left -= 1
            yield left, result

    def _work(self, run: Callable[[], Iterator[Block]]) -> None:
        try:
            blocks = run()
            for block in blocks:
                self._offer(block)
                if self._closed.is_set():
                    return
            self._offer(None)
        except BaseException as error:
            self._offer(error)

    def _offer(self, result: Block | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._results.put(result, timeout=0.5)
                return
            except queue.Full:
                continue


class Meter:
    """What preprocessing costs, from the statistics of finished tasks."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=max(12, 4 * cores))
        self._rows = 0
        self._cpu_s = 0.0
        self._bytes = 0

    def add(self, block: Block) -> None:
        """Count a finished block."""
        if block.rows and block.cpu_s == block.cpu_s:
            self._rows += block.rows
            self._cpu_s += block.cpu_s
            self._bytes += block.size_bytes
            seconds = max(block.cpu_s, block.wall_s / 2)  # a task that mostly waits for storage is not a short one
            self._recent.append((seconds / block.rows, block.cpu_s / block.rows, block.size_bytes / block.rows))

    def rates(self) -> Rates | None:
        """The lower quartile of recent tasks: the first task of a process also imports its libraries, and a spare task
        of a one-core node takes twice its time. None until there is enough to go by."""
        if len(self._recent) < min(2 * self._cores, 12):
            return None
        seconds, _, size = np.quantile(np.array(self._recent), 0.25, axis=0)
        return Rates(core_seconds_per_sample=float(seconds), bytes_per_sample=float(size))

    def summary(self) -> dict[str, float]:
        """``core_seconds_per_sample``, ``wire_bytes_per_sample`` and ``input_ceiling_samples_per_s``; empty at first."""
        if not self._recent:
            return {}
        _, cpu, size = np.quantile(np.array(self._recent), 0.5, axis=0)
        return {
            "core_seconds_per_sample": float(cpu),
            "wire_bytes_per_sample": float(size),
            "input_ceiling_samples_per_s": self._cores / float(cpu) if cpu > 0 else 0.0,
        }


def _index_rows(table: pa.Table, order: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> pa.Table:
    ids = order[positions]
    rows = table.take(pa.array(ids)).combine_chunks()
    return rows.append_column(SAMPLE_ID, pa.array(ids)).append_column(POSITION, pa.array(positions))


def _chunk_cuts(positions: np.ndarray[Any, Any], cursor: int, sizes: list[int]) -> list[int]:
    """Where to cut ``positions[cursor:]`` into tasks: near these sizes, never inside a transform's chunk."""
    cuts = [cursor]
    goal = cursor
    for size in sizes:
        goal = min(goal + size, len(positions))
        cut = goal
        while cut < len(positions) and positions[cut] // CHUNK == positions[cut - 1] // CHUNK:
            cut += 1
        if cut > cuts[-1]:
            cuts.append(cut)
        if cut >= len(positions):
            break
    return cuts


def _close(current: _Pass) -> None:
    with current.changed:
        current.closed = True
        for waiting in current.queues:
            waiting.clear()
        current.queued_bytes = 0
        current.changed.notify_all()


def _as_user_error(error: BaseException) -> OffloadError:
    found = find_offload_error(error)
    if found is not None:
        return found
    lines = str(error).strip().splitlines()
    return RunError(f"preprocessing failed: {type(error).__name__}: {lines[-1] if lines else 'no message'}.")
