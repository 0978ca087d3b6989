"""The feed, the part of the hub that hands preprocessed blocks, as references, to the workers.

A pass is one visit of a data set: an epoch of the training data, or one validation. The feed cuts its samples into tasks of index
rows: tiny tasks first, so that the first batch comes soon, then tasks of a second or more of measured work. The pool runs them,
and the feed delivers their blocks in the order of the pass. While the last tasks of an epoch run, those of the next one start.

Where it stops: the feed does not open blocks, and the workers cut batches (:mod:`offload.train.worker.batches`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from offload.errors import RunError
from offload.pipeline.calls import CHUNK
from offload.pipeline.draws import Draws
from offload.pipeline.meter import Meter
from offload.pipeline.passes import Pass, PassKey, PassRequest, Slice
from offload.pipeline.pool import Block, PackedRecipe, Pool, Task
from offload.pipeline.ranges import Ranges
from offload.pipeline.recipe import TRAINED, whole_chunks
from offload.pipeline.shuffling import epoch_permutation
from offload.pipeline.sizing import aligned, block_bytes, for_speed, plan_tasks
from offload.pipeline.wire import POSITION, SAMPLE_ID

if TYPE_CHECKING:
    import ray.data

# Shares of the cluster's object store: the limit of a Ray Data execution, and the limit of the pool's blocks that no worker has
# taken yet, over all passes. The blocks that workers hold (a few each) come on top.
DATA_SHARE = 0.3
HELD_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A data set of the run, ready to feed: an index (``table``, ``groups`` and ``draws`` of its source) or a ``dataset``.

    Unpickling it does not import the libraries of the transforms, which stay packed in ``recipe``.
    """

    recipe: PackedRecipe
    table: pa.Table | None = None
    groups: NDArray[np.int64] | None = None
    draws: Draws | None = None
    dataset: ray.data.Dataset | None = None
    id_column: str | None = None
    shuffle: bool = False
    seed: int = 0

    @property
    def samples(self) -> int | None:
        """The number of samples of a pass; None if it is unknown."""
        if self.table is None:
            return None
        return len(self.table) if self.draws is None else self.draws.number

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The sample ids of a pass over an index, one for each position."""
        if self.draws is not None:
            return self.draws.order(seed=self.seed, epoch=epoch, groups=self.groups)
        assert self.table is not None
        return epoch_permutation(len(self.table), seed=self.seed, epoch=epoch, shuffle=self.shuffle, groups=self.groups)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The resources of preprocessing: the node of each core, the CPUs that Ray counts for one core, and each node's object store
    in bytes. ``runtime_env`` is Ray's runtime environment for its processes."""

    nodes: tuple[str, ...]
    task_cpus: float
    stores: Mapping[str, float]
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store_bytes(self) -> float:
        """The size of the cluster's object store."""
        return sum(self.stores.values())

    @functools.cached_property
    def by_node(self) -> Counter[str]:
        """The number of cores on each node."""
        return Counter(self.nodes)

    @property
    def cores(self) -> int:
        """How many."""
        return len(self.nodes)


class _Tasks:
    """The tasks of a pass over an indexed source. A task gets its size when a core takes it."""

    def __init__(
        self, stream: Stream, table: pa.Table, current: Pass, meter: Meter, cores: Callable[[], Cores]
    ) -> None:
        self._table, self._pass, self._packed, self._meter, self._cores = table, current, stream.recipe, meter, cores
        self._order = stream.order(current.request.epoch)
        self._positions = Ranges(current.request.done).missing_from(len(self._order))
        self._cursor = 0
        self._planned: deque[int] = deque()
        self._rows = [0] * current.request.world_size
        self._local_batch_size = current.request.first_rows // current.request.world_size
        self._issued = self._unfinished = 0
        # Keyed by the block's name: a reference would keep every block of the pass in the object store.
        self._made_by: dict[str, Task] = {}
        if not len(self._positions):
            current.end()

    def exhausted(self) -> bool:
        """Whether all tasks are issued."""
        return self._cursor >= len(self._positions)

    def under_way(self) -> bool:
        """Whether the block of an issued task is still to come."""
        return self._unfinished > 0

    def next(self, node: str) -> tuple[Task, Callable[[Block | BaseException], None]] | None:
        """The next task, for a core of this node; None if all are issued."""
        if self.exhausted():
            return None
        if not self._planned:
            self._plan()
        # As the allotment will decide: the next block goes to the rank with the fewest rows.
        rank = self._rows.index(min(self._rows))
        size = for_speed(self._planned.popleft(), self._meter.over_fastest(node), self._local_batch_size)
        size = aligned(min(size, self._most_rows(node)), self._rows[rank], self._local_batch_size)
        stop = _chunk_cut(self._positions, self._cursor, size)
        places = self._positions[self._cursor : stop]
        self._rows[rank] += stop - self._cursor
        self._cursor = stop
        number = self._issued
        self._issued += 1
        self._unfinished += 1
        task = Task(recipe=self._packed, rows=self._rows_of(places), epoch=self._pass.request.epoch)
        return task, lambda made: self._made(number, task, made)

    def _rows_of(self, places: NDArray[np.int64]) -> pa.Table:
        """The index rows at these positions of the pass, and the already trained rest of their chunks (see :data:`TRAINED`)."""
        whole = whole_chunks(places, len(self._order))
        ids = self._order[whole]
        rows = self._table.take(pa.array(ids)).combine_chunks()
        rows = rows.append_column(SAMPLE_ID, pa.array(ids)).append_column(POSITION, pa.array(whole))
        if len(whole) > len(places):
            rows = rows.append_column(TRAINED, pa.array(~np.isin(whole, places)))
        return rows

    def again(self, piece: Slice) -> tuple[Task, Callable[[Block], Slice]]:
        """The task that makes a lost slice's block again, and a function that finds the slice in the new block."""
        task = self._made_by[piece.ref.hex()]

        def found(block: Block) -> Slice:
            self._made_by[block.ref.hex()] = task
            return piece._replace(ref=block.ref)

        return task, found

    def _most_rows(self, node: str) -> int:
        """The most rows of a block that fit in this node's share of the object store."""
        rates, cores = self._meter.rates(), self._cores()
        if rates is None or node not in cores.stores:
            return len(self._positions)
        room = block_bytes(cores.stores[node], max(cores.by_node[node], 1))
        return max(1, int(room / max(rates.bytes_per_sample, 1.0)))

    def _plan(self) -> None:
        sizes = plan_tasks(
            len(self._positions) - self._cursor,
            cores=self._cores().cores,
            first_rows=self._pass.request.first_rows,
            rates=self._meter.rates(),
            block_bytes=block_bytes(self._cores().store_bytes, self._cores().cores),
            local_batch_size=self._local_batch_size,
        )
        self._planned.extend(sizes)

    def _made(self, number: int, task: Task, made: Block | BaseException) -> None:
        self._unfinished -= 1
        if isinstance(made, BaseException):
            self._pass.fail(made)
            return
        self._meter.add(made)
        self._made_by[made.ref.hex()] = task
        if not self._pass.closed:
            self._pass.put(number, made)
        if self.exhausted() and not self._unfinished:
            self._pass.end()


class Feed:
    """The part of the hub that feeds the workers. Its methods block, and run on many threads. ``pool`` makes the pool that runs
    the tasks; ``run`` is the hub's handle."""

    def __init__(
        self, streams: dict[str, Stream], cores: Cores, pool: Callable[..., Any] = Pool, run: Any = None
    ) -> None:
        self.run = run
        self._streams, self._cores = streams, cores
        self._meters = {name: Meter(lambda: self._cores.by_node) for name in streams}
        self._lock = threading.RLock()
        self._passes: dict[PassKey, Pass] = {}
        self._tasks: dict[PassKey, _Tasks] = {}
        self._redo: deque[tuple[Task, Callable[[Block | BaseException], None]]] = deque()
        self._failure: BaseException | None = None
        self._attempt = 0
        indexed = [name for name, stream in streams.items() if stream.table is not None]
        self._pool: Pool | None = None
        if indexed:
            self._pool = pool(self._pool_nodes(), cores.task_cpus, self, cores.runtime_env)
            for name in indexed:
                self._pool.warm(streams[name].recipe)

    def begin(self, attempt: int) -> None:
        """Start to feed a new worker group; drop all passes of earlier groups."""
        with self._lock:
            self._attempt = attempt
            for key in [k for k in self._passes if k.attempt != self._attempt]:
                self._drop(key)
            self._look()

    def start_ahead(self, request: PassRequest, name: str) -> None:
        """Start the first pass of the first attempt while its workers are still starting."""
        with self._lock:
            self._start(PassKey(attempt=self._attempt + 1, name=name, number=request.epoch), request)

    def open(self, key: PassKey, request: PassRequest, rank: int) -> int | None:
        """Join a pass; the first rank that joins starts it. Return the number of rows that it will deliver, None if unknown."""
        with self._lock:
            current = self._passes.get(key)
            if current is not None and not current.suits(request):
                self._drop(key)  # started ahead, but the epoch was partly trained, or the worker group has changed
                current = None
            if current is None:
                self._start(key, request)
            else:
                current.request = request
                if request.followed and key in self._tasks and self._tasks[key].exhausted():
                    self._follow(current)
            self._passes[key].join(rank)
            # If one rank alone visits a data set, the other ranks never leave its passes.
            older = [k for k in self._passes if k.name == key.name and k.number < key.number]
            for old in [k for k in older if self._passes[k].abandoned()]:
                self._drop(old)
        self._look()
        samples = self._streams[key.name].samples
        return None if samples is None else samples - len(Ranges(request.done))

    def take(self, key: PassKey, rank: int, want: int = 1) -> tuple[list[Slice], bool]:
        """Return up to ``want`` slices for this rank, and whether the pass is over for it.

        Waits a few seconds for the first slice; after an empty answer before the end, the rank asks again. Raises the error of
        preprocessing, if it failed.
        """
        current = self._passes.get(key)
        if current is None:
            return [], True
        answer = current.take(rank, want)
        self._look()
        return answer

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        """Make a slice again that this rank cannot fetch because its node is gone."""
        with self._lock:
            current, tasks = self._passes.get(key), self._tasks.get(key)
            if current is None:
                return
            if tasks is None:
                current.fail(
                    RunError(
                        "a node was lost with blocks of a ray.data.Dataset that no worker had fetched yet, and Ray Data cannot "
                        "make single blocks again. The same command resumes from the last checkpoint."
                    )
                )
                return
            task, found = tasks.again(piece)
            current.owe(rank)

        def made(block: Block | BaseException) -> None:
            if isinstance(block, BaseException):
                current.fail(block)
            else:
                current.repay(rank, found(block))

        self._redo.append((task, made))
        self._look()

    def leave(self, key: PassKey, rank: int) -> None:
        """Note that this rank takes no more of a pass, at its end or earlier. Once all ranks have left, drop the pass."""
        with self._lock:
            current = self._passes.get(key)
            if current is not None and current.leave(rank):
                self._drop(key)
        self._look()

    def failed(self, error: BaseException) -> None:
        """Raise the pool's error in every call that waits for a block, now and later: the pool cannot go on."""
        with self._lock:
            self._failure = error
            for current in self._passes.values():
                current.fail(error)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Fail the run: a preprocessing process ends because its call cannot be interrupted."""
        self.failed(
            RunError(
                f"{what} on {node} took longer than sample_timeout_s={seconds:g}, and cannot be interrupted, so it cannot be skipped. "
                "Repair or remove the sample."
            )
        )

    def lost(self, node: str, error: BaseException) -> None:
        """The pool reports that a core's process died."""

    def works(self, node: str) -> None:
        """The pool reports a node's first block."""

    def reshape(self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float) -> bool:
        """Preprocess on these nodes from now on, one core for each mention; ``stores``: the present object stores.

        Return whether the surplus cores finished their last tasks in time.
        """
        with self._lock:
            self._cores, self._failure = dataclasses.replace(self._cores, nodes=nodes, stores=stores), None
            for meter in self._meters.values():
                meter.reshaped()
            if self._pool is None:
                return True
            left = self._pool.reshape(self._pool_nodes())
        return left.wait(timeout_s)

    def _pool_nodes(self) -> tuple[str, ...]:
        # A Ray Data pipeline in the same run needs cores of its own, which actors would never give back.
        mixed = any(stream.table is None for stream in self._streams.values())
        return self._cores.nodes[:: 2 if mixed else 1]

    def rates(self) -> dict[str, dict[str, float]]:
        """The measured rates of each data set's preprocessing."""
        return {name: meter.summary() for name, meter in self._meters.items()}

    def speeds(self) -> dict[str, dict[str, float]]:
        """The speed of each node's cores for each data set; see :meth:`Meter.speeds`."""
        return {name: meter.speeds() for name, meter in self._meters.items()}

    def process_bytes(self) -> int:
        """The largest private memory measured in a preprocessing process, in bytes; 0 before the first measurement."""
        return max((meter.process_bytes for meter in self._meters.values()), default=0)

    def cores(self) -> tuple[int, int]:
        """The number of cores that should preprocess, and the number of those whose processes are still starting."""
        with self._lock:
            return self._cores.cores, 0 if self._pool is None else self._pool.starting()

    def costs(self, name: str) -> list[tuple[float, float]]:
        """The costs of a data set's newest tasks: core-seconds and bytes per sample."""
        return self._meters[name].costs()

    def next_task(self, node: str) -> tuple[Task, Callable[[Block | BaseException], None]] | None:
        """A task for a core of this node, from the first opened pass that may go on; None if none may."""
        with self._lock:
            if self._redo:
                return self._redo.popleft()
            room = self._has_room(node)
            for key, tasks in list(self._tasks.items()):
                current = self._passes[key]
                if tasks.exhausted() or current.closed or current.error is not None:
                    continue
                # Exceed the limit only if the pass starves and none of its tasks is running. Otherwise, workers may be waiting
                # for the running task, and all other cores would fill the store behind one slow task.
                if room or (current.starving() and not tasks.under_way()):
                    found = tasks.next(node)
                    if tasks.exhausted() and current.request.followed:
                        self._follow(current)
                    return found
        return None

    def _has_room(self, node: str) -> bool:
        """Whether the blocks that no worker has taken yet leave room for more, on this node and in total."""
        held = sum((p.held_bytes for p in self._passes.values()), Counter[str]())
        of_node = self._cores.stores.get(node, math.inf)
        return held.total() < HELD_SHARE * self._cores.store_bytes and held[node] < HELD_SHARE * of_node

    def _start(self, key: PassKey, request: PassRequest) -> None:
        stream = self._streams[key.name]
        total = None if stream.samples is None else stream.samples - len(Ranges(request.done))
        started = self._passes[key] = Pass(key, request, total)
        if self._failure is not None:
            started.fail(self._failure)
        if stream.table is not None:
            self._tasks[key] = _Tasks(stream, stream.table, started, self._meters[key.name], lambda: self._cores)
            self._look()
        else:
            threading.Thread(target=self._run_dataset, args=(stream, started), daemon=True).start()

    def _follow(self, current: Pass) -> None:
        """Start the next epoch's pass, for the cores that find no more work in this one."""
        key = PassKey(attempt=current.key.attempt, name=current.key.name, number=current.key.number + 1)
        if key not in self._passes:
            epoch = current.request.epoch + 1
            self._start(key, dataclasses.replace(current.request, epoch=epoch, done=(), followed=False))

    def _drop(self, key: PassKey) -> None:
        self._passes.pop(key).close()
        self._tasks.pop(key, None)

    def _look(self) -> None:
        if self._pool is not None:
            self._pool.look()

    def _run_dataset(self, stream: Stream, current: Pass) -> None:
        """Run a ``ray.data.Dataset`` as its own execution, at the pace of the workers."""
        from offload.pipeline import ray_data  # most runs do not need it, and start sooner

        assert stream.dataset is not None
        ray_data.be_quiet()
        limit = HELD_SHARE * self._cores.store_bytes
        try:
            blocks = ray_data.encode_dataset(
                stream.dataset,
                stream.recipe,
                id_column=stream.id_column,
                done=Ranges(current.request.done),
                epoch=current.request.epoch,
                task_cpus=self._cores.task_cpus,
                store_bytes=DATA_SHARE * self._cores.store_bytes,
            )
            for number, block in enumerate(blocks):
                self._meters[current.key.name].add(block)
                current.put(number, block)
                if not current.wait_for_room(limit):
                    return
            current.end()
        except BaseException as error:
            current.fail(error)


def _chunk_cut(positions: np.ndarray[Any, Any], start: int, size: int) -> int:
    """The end of a task of about ``size`` rows from ``start`` on; it is never inside a transform's chunk."""
    cut = min(start + size, len(positions))
    while cut < len(positions) and positions[cut] // CHUNK == positions[cut - 1] // CHUNK:
        cut += 1
    return cut
