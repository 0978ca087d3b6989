"""The feed of a job's DataLoaders: one actor, which hands the batches of all ranks to the cluster's cores.

Every rank's loader sends its orders here and takes references to finished batches. A core always works for the loader that has the
fewest batches ahead, so that all ranks get the same share. The feed ends once no process uses it any more.

Where it stops: it never opens a batch, and it draws no indices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.errors import OffloadError, RunError
from offload.loader.batch_recipe import BatchOrder, Imports
from offload.loader.job.node_choice import NodeChoice
from offload.loader.job.readers import (
    KEPT_PER_CORE,
    IterableReader,
    Read,
    ReadingProcess,
    Resting,
)
from offload.loader.line import BatchPlace, IterableLine, MapLine
from offload.loader.stats import MadeRates
from offload.pipeline.blocks.sender import BlockSenders
from offload.pipeline.feed.datasets import Cores
from offload.pipeline.feed.engine import HELD_SHARE
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.passes import as_user_error
from offload.pipeline.feed.sizing import BATCH_TASK_S, batches_in, batches_per_task
from offload.pipeline.pool.core_watch import CoreWatch, CpuUser
from offload.pipeline.pool.losses import is_dead
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.pool import IN_FLIGHT, Pool, PoolMaker
from offload.pipeline.pool.task import Assignment, Block, Task
from offload.pipeline.program.printed import Outlet, Printed, PrintedLine
from offload.train.cluster.connection import alive_nodes

RECENT = 8  # tasks
TAKE_TIMEOUT_S = 5.0
LEASE_S = 60.0  # silence after which a process that iterates counts as gone
IDLE_LEASE_S = 15.0  # the same for one that does not iterate at present: it loses nothing
STUCK_S = 10.0  # time for the tasks of an ended iteration to end
NEW_READER_S = 0.25  # time for a new reader to start
UNUSED_S = 10.0  # time without a process after which the feed ends
LOOK_S = 5.0


class NextBatches(NamedTuple):
    """The answer to a loader: batches, the number of batches that it should order ahead, whether these are the last, remarks, what the
    user's code has printed, whether some of it was only counted, and the error that keeps preprocessing from going on."""

    places: list[BatchPlace]
    lead: int
    over: bool
    remarks: list[str]
    printed: Sequence[PrintedLine] = ()
    counted: bool = False
    error: OffloadError | None = None


@dataclass(eq=False, kw_only=True)
class _Stream:
    """One iteration of a loader. ``client``: the process that iterates. ``outlet``: for what its data set prints. ``batch_s``: the work of
    the loader's recent batches, also those of earlier iterations."""

    client: str
    outlet: Outlet
    meter: Meter
    recipe: PackedRecipe
    batch_s: deque[float]
    error: OffloadError | None = None
    remarks: list[str] = field(default_factory=list)

    def measure(self, block: Block, batches: int) -> None:
        """Count a finished block with this many batches."""
        self.meter.add(block)
        if batches:
            self.batch_s.append(block.cost.work_s / batches)

    @property
    def usual_batch_s(self) -> float | None:
        """The work of a batch; None before the first."""
        return statistics.median(self.batch_s) if self.batch_s else None


@dataclass(eq=False, kw_only=True)
class _MapStream(_Stream):
    line: MapLine = field(default_factory=MapLine)
    tasks: list[Task] = field(default_factory=list)  # under way
    dropped_at: float = 0.0

    def forget(self, task: Task) -> None:
        """Note that a task is no longer under way."""
        self.tasks = [other for other in self.tasks if other is not task]

    def batches_of_task(self, cores: int) -> int:
        """The number of batches of the next task."""
        return batches_per_task(self.usual_batch_s, ahead=self.line.ahead, wanted=self.line.wanted, cores=cores)


@dataclass(eq=False, kw_only=True)
class _IterableStream(_Stream):
    line: IterableLine
    fresh: bool
    readers: dict[int, ReadingProcess] = field(default_factory=dict)  # by worker
    reading: set[int] = field(default_factory=set)
    most: int = 1  # batches of a reader's task so far


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class _BatchTask:
    """A task of an iteration, under way on a core (an :class:`Assignment`). Its rows are the orders of batches."""

    feed: LoaderFeed
    stream: _MapStream
    task: Task

    def finished(self, block: Block) -> None:
        """Add the batches of the block to the iteration."""
        self.feed.task_finished(self.stream, self.task, block)

    def failed(self, error: BaseException) -> None:
        """Fail the iteration."""
        self.feed.task_failed(self.stream, self.task, error)


class _LoaderCpus(CpuUser):
    """The preprocessing of a job's DataLoaders, as the watch for waiting CPUs sees it."""

    def __init__(self, feed: LoaderFeed) -> None:
        self._feed = feed

    def starving(self) -> str:
        return self._feed.starving()

    def reserves_cores(self) -> bool:
        return self._feed.reserves_cores()

    def share_cores(self) -> None:
        self._feed.share(0.0)
        self._feed.remark(
            "other tasks of this program wait for CPUs that preprocessing reserves: its processes go on, and reserve none from now on"
        )

    def waits(self, what: str, seconds: float, held: str) -> None:
        self._feed.remark(
            f"{what} has waited {seconds:.0f} s for a CPU. CPUs are held by: {held or 'nobody'}. End what you do not need, or add nodes"
        )


class LoaderFeed:
    """The actor. Its methods block, and run on many threads. ``pool`` makes the pool that runs the tasks."""

    def __init__(self, cores: Cores, choice: NodeChoice, pool: PoolMaker = Pool) -> None:
        self.handle = ray.get_runtime_context().current_actor if ray.is_initialized() else None
        self._cores, self._choice = cores, choice
        self._nodes = {node.node_id for node in alive_nodes()}
        self._streams: dict[str, _MapStream | _IterableStream] = {}
        self._seen: dict[str, float] = {}
        self._outlets: dict[str, Outlet] = {}  # by client
        self._changed = threading.Condition(threading.RLock())
        self._makes_pool = pool
        self._pool: Any = None
        self._failure: BaseException | None = None
        self._readers = 0  # started so far
        self._resting = Resting()
        self._batch_s: dict[tuple[str, str], deque[float]] = {}  # by client and loader
        self._senders = BlockSenders(cores.runtime_env, lambda: self._cores.by_node)
        self._through_ray: set[str] = set()
        self._dropped: list[_MapStream] = []  # with tasks under way
        self._news: queue.SimpleQueue[tuple[_IterableStream, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, daemon=True, name="readers").start()
        threading.Thread(target=self._end_leases, daemon=True, name="leases").start()
        if self.handle is not None:
            CoreWatch(_LoaderCpus(self)).start()

    def __repr__(self) -> str:
        return "DataLoader feed"

    # -- for loaders ------------------------------------------------------------------------------------------------

    def open(self, stream: str, client: str, recipe: PackedRecipe) -> int:
        """Begin an iteration over a map-style data set. Return the number of batches to order ahead."""
        with self._changed:
            opened = self._streams[stream] = _MapStream(**self._of(client, recipe))
            self._seen[client] = time.monotonic()
            if not self._cores.nodes:
                self._fail(opened, self._failure or RunError("no node of the cluster preprocesses: add nodes."))
            elif self._pool is None or self._failure is not None:  # all processes of the last pool have died
                self._failure = None
                self._pool = self._makes_pool(self._cores.nodes, self._cores.task_cpus, self, self._cores.runtime_env)
                self._pool.warm(PackedRecipe.of(Imports()))
            return self._lead(opened)

    def open_iterable(self, stream: str, client: str, recipe: PackedRecipe, workers: int, fresh: bool) -> None:
        """Begin an iteration over an iterable data set, with one process for each worker. ``fresh``: each process serves one iteration."""
        with self._changed:
            opened = self._streams[stream] = _IterableStream(
                **self._of(client, recipe), line=IterableLine(workers), fresh=fresh
            )
            self._seen[client] = time.monotonic()
            if not self._cores.nodes:
                self._fail(opened, RunError("no node of the cluster preprocesses: add nodes."))
                return
            # The readers of an iteration that the program has left end their last task first. One that takes longer is replaced.
            self._changed.wait_for(lambda: not self._resting.awaited(recipe.owner), timeout=NEW_READER_S)
            if stream not in self._streams:
                return
            for worker in range(workers):
                kept = self._resting.reuse(recipe.owner, worker, self._cores.nodes)
                self._begin(opened, kept or self._new_reader(client, recipe.owner, worker))
            _end(self._resting.drop(lambda resting: resting.owner == recipe.owner))

    def order(self, stream: str, orders: list[BatchOrder]) -> None:
        """Make these batches."""
        with self._changed:
            current = self._streams.get(stream)
            if isinstance(current, _MapStream):
                current.line.order(orders)
        self._look()

    def next_batches(self, stream: str, start: int, want: int) -> NextBatches:
        """Up to ``want`` batches from number ``start`` on. The loader has all batches before.

        Waits a few seconds for the first.
        """
        with self._changed:
            current = self._streams.get(stream)
            if current is None:
                raise RunError(
                    f"the feed has not heard from this process for {LEASE_S:.0f} s (was it suspended?) and has dropped its batches: "
                    "iterate again."
                )
            line = current.line
            self._changed.wait_for(
                lambda: current.error or line.deliver(start, want) or line.over(start), timeout=TAKE_TIMEOUT_S
            )
            if current.error is not None:
                return NextBatches([], 0, True, [], current.outlet.pop_lines(last=True), error=current.error)
            places = line.deliver(start, want)
            if isinstance(current, _IterableStream):
                for reader in current.readers.values():
                    self._read(current, reader)
            remarks, current.remarks = current.remarks, []
            over = line.over(start + len(places))
            printed = current.outlet.pop_lines(last=over)
            answer = NextBatches(places, self._lead(current), over, remarks, printed, current.outlet.holds_back)
        self._look()
        return answer

    def make_again(self, stream: str, number: int) -> None:
        """Make a batch again that is gone with its node."""
        with self._changed:
            current = self._streams.get(stream)
            if isinstance(current, _MapStream):
                current.line.lost(number)
            elif current is not None:
                self._fail(
                    current,
                    RunError(
                        "a node was lost with batches of an iterable data set, and these cannot be made again. Go on from the last "
                        "state_dict(), or use a map-style data set."
                    ),
                )
        self._look()

    def close(self, stream: str) -> MadeRates:
        """End an iteration, finished or not. Return its measurements."""
        with self._changed:
            measured = self.measured(stream)
            self._drop(stream)
        return measured

    def alive(self, client: str) -> None:
        """Note that this process still exists."""
        self._seen[client] = time.monotonic()

    def leave(self, client: str) -> None:
        """Note that this process does not need the feed any more."""
        with self._changed:
            for name in [name for name, stream in self._streams.items() if stream.client == client]:
                self._drop(name)
            _end(self._resting.drop(lambda resting: resting.client == client))
            self._batch_s = {of: batch_s for of, batch_s in self._batch_s.items() if of[0] != client}
            self._seen.pop(client, None)
            self._outlets.pop(client, None)

    def forget(self, client: str, owner: str) -> None:
        """End the iterations and the readers of a loader that is gone."""
        with self._changed:
            of_loader = [
                name
                for name, stream in self._streams.items()
                if (stream.client, stream.recipe.owner) == (client, owner)
            ]
            for name in of_loader:  # messages may overtake each other
                self._drop(name)
            _end(self._resting.drop(lambda resting: resting.owner == owner))
            self._batch_s.pop((client, owner), None)

    def open_streams(self) -> int:
        """The number of iterations that are fed."""
        return len(self._streams)

    def measured(self, stream: str) -> MadeRates:
        """The measurements of an iteration."""
        current = self._streams.get(stream)
        rates = {"cores": float(self._cores.cores)}
        if current is None:
            return MadeRates(rates, [])
        return MadeRates({**rates, **current.meter.summary()}, current.meter.costs())

    def counted(self, stream: str) -> list[PrintedLine]:
        """How many lines were held back that the user's code has printed, in words."""
        current = self._streams.get(stream)
        return [] if current is None else current.outlet.pop_lines(last=True)

    def sender(self, node: str) -> Any:
        """See :meth:`BlockSenders.of`."""
        return self._senders.of(node)

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """Tell the loaders that the batches of a node do not reach one of them directly. The first report of a node counts."""
        address = next((alive.name for alive in alive_nodes() if alive.node_id == node), node)
        with self._changed:
            if node not in self._through_ray:
                self._through_ray.add(node)
                self.remark(
                    f"batches of node {address} could not be sent directly ({reason}): Ray carries them, which takes more CPU time. A "
                    "firewall may be blocking the ports of the processes that train"
                )

    # -- for the pool -----------------------------------------------------------------------------------------------

    def next_task(self, node: str) -> Assignment | None:
        """A task for a core of this node, for the loader with the fewest batches ahead; None if there is none."""
        with self._changed:
            room = self._has_room(node)
            maps = (stream for stream in self._streams.values() if isinstance(stream, _MapStream))
            waiting = [stream for stream in maps if stream.line.wanted and stream.error is None]
            for stream in sorted(waiting, key=lambda stream: stream.line.ahead):
                # Over the limit, only a batch that its loader waits for: the memory comes back with the next batches that it takes.
                if room or stream.line.starving:
                    orders = stream.line.begin(stream.batches_of_task(max(self._cores.cores, 1)) if room else 1)
                    task = Task(recipe=stream.recipe, rows=orders, epoch=0)
                    stream.tasks.append(task)
                    return _BatchTask(feed=self, stream=stream, task=task)
        return None

    def task_finished(self, stream: _MapStream, task: Task, block: Block) -> None:
        """Add the batches of a task's block to its iteration."""
        orders: list[BatchOrder] = task.rows
        with self._changed:
            stream.forget(task)
            stream.measure(block, len(orders))
            stream.line.finish(orders, block.ref, node=block.node, size_bytes=block.cost.size_bytes)
            self._changed.notify_all()

    def task_failed(self, stream: _MapStream, task: Task, error: BaseException) -> None:
        """Fail an iteration: a task of it raised this error."""
        with self._changed:
            stream.forget(task)
            self._fail(stream, error)

    def failed(self, error: BaseException) -> None:
        """Fail all iterations: preprocessing cannot go on."""
        with self._changed:
            self._failure = error
            for stream in self._streams.values():
                self._fail(stream, error)

    def works(self, node: str) -> None:
        """The pool reports a node's first block."""

    def lost(self, node: str, error: BaseException) -> None:
        """The pool reports that a core's process died."""
        self.remark(f"a preprocessing process died; others make its batches again ({_first_line(error)})")

    def slow(self, node: str, what: str, seconds: float) -> None:
        """Tell the loaders that a preprocessing process has worked on one batch for a long time."""
        self.remark(f"{what} has taken {seconds:.0f} s so far")

    def printed(self, key: str, printed: Printed) -> None:
        """Keep what a process has printed while it worked at a recipe, for one of the processes that iterate with it, or else for any."""
        with self._changed:
            iterating = (stream.outlet for stream in self._streams.values() if key == stream.recipe.key)
            outlet = next(chain(iterating, self._outlets.values()), None)
        if outlet is not None:
            outlet.put(printed)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Fail all iterations: a preprocessing process ends because its call cannot be interrupted."""
        self.failed(RunError(f"{what} took longer than {seconds:g} s and cannot be interrupted."))

    def starving(self) -> str:
        """What waits for the first preprocessing process; empty if nothing does."""
        return "the DataLoader" if self._streams and self._pool is not None and not self._pool.runs else ""

    def reserves_cores(self) -> bool:
        """Return whether all preprocessing processes run, and reserve CPUs of Ray."""
        return self._pool is not None and self._pool.reserves and not self._pool.starting()

    def remark(self, text: str) -> None:
        """Tell all iterations something that their users should know."""
        with self._changed:
            for stream in self._streams.values():
                stream.remarks.append(text)

    def share(self, timeout_s: float) -> bool:
        """Reserve no CPUs from now on: others wait for them. Return whether none is reserved within ``timeout_s``."""
        with self._changed:
            self._cores = dataclasses.replace(self._cores, task_cpus=0.0)
            shared = None if self._pool is None else self._pool.share()
        return shared is None or shared.wait(timeout_s)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _of(self, client: str, recipe: PackedRecipe) -> dict[str, Any]:
        """What an iteration begins with."""
        return {
            "client": client,
            "recipe": recipe,
            "outlet": self._outlets.setdefault(client, Outlet()),
            "batch_s": self._batch_s.setdefault((client, recipe.owner), deque(maxlen=RECENT)),
            "meter": Meter(lambda: self._cores.by_node),
        }

    def _fail(self, stream: _Stream, error: BaseException) -> None:
        with self._changed:
            stream.error = stream.error or as_user_error(error)
            self._changed.notify_all()

    def _drop(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            self._fail(stream, RunError("the iteration has ended."))  # whoever still waits for a batch
        if isinstance(stream, _IterableStream):
            for worker in list(stream.readers):
                reader = stream.readers.pop(worker)
                if stream.fresh:
                    self._replace(reader)
                else:
                    self._rest(stream, reader)
        elif stream is not None and stream.tasks:
            stream.dropped_at = time.monotonic()
            self._dropped.append(stream)

    def _look(self) -> None:
        if self._pool is not None:
            self._pool.look()

    def _lead(self, stream: _Stream) -> int:
        """The number of batches that a loader should order ahead: for all cores' tasks, and as many as they take next."""
        return (IN_FLIGHT + 1) * self._cores.cores * batches_in(BATCH_TASK_S, stream.usual_batch_s) + 2

    def _has_room(self, node: str) -> bool:
        """Return whether the batches that no program has asked beyond leave room for more."""
        held: Counter[str] = Counter()
        for stream in self._streams.values():
            if isinstance(stream, _MapStream):
                held.update(stream.line.held_bytes)
        return self._cores.have_room(held, node, HELD_SHARE)

    def _new_reader(self, client: str, owner: str, worker: int) -> ReadingProcess:
        nodes = sorted(set(self._cores.nodes))
        node = nodes[self._readers % len(nodes)]
        self._readers += 1
        actor = ray.remote(IterableReader).options(
            num_cpus=0,
            runtime_env=dict(self._cores.runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return ReadingProcess(actor=actor.remote(self.handle), node=node, client=client, owner=owner, worker=worker)

    def _begin(self, stream: _IterableStream, reader: ReadingProcess) -> None:
        reader.begun = reader.actor.begin.remote(stream.recipe, reader.worker).future()
        stream.readers[reader.worker] = reader
        self._read(stream, reader)

    def _read(self, stream: _IterableStream, reader: ReadingProcess) -> None:
        """Let a reader make more batches, unless two of its tasks wait for the loader."""
        worker = reader.worker
        if worker in stream.reading or stream.line.has_ended(worker) or stream.line.waiting(worker) >= 2 * stream.most:
            return
        stream.reading.add(worker)
        ref, read = reader.actor.read.options(num_returns=2).remote()
        # Ray calls back on its own thread, which must not wait for the lock: whoever holds it may wait for Ray (to end a reader).
        read.future().add_done_callback(
            lambda outcome: self._news.put((stream, lambda: self._has_read(stream, reader, ref, outcome)))
        )

    def _hear(self) -> None:
        """Act on what readers have done."""
        while True:
            stream, act = self._news.get()
            try:
                act()
            except Exception as error:  # this thread serves other iterations, too
                self._fail(stream, error)

    def _has_read(self, stream: _IterableStream, reader: ReadingProcess, ref: Any, outcome: Future[Read]) -> None:
        worker = reader.worker
        with self._changed:
            if stream.readers.get(worker) is not reader:
                return  # the iteration has ended
            stream.reading.discard(worker)
            error = outcome.exception()
            if is_dead(error) and reader.was_gone:
                self._begin(stream, self._new_reader(reader.client, reader.owner, worker))
            elif error is not None:
                self._fail(stream, error)
            else:
                self._add(stream, reader, ref, outcome.result())
            self._changed.notify_all()

    def _add(self, stream: _IterableStream, reader: ReadingProcess, ref: Any, read: Read) -> None:
        stream.measure(Block(ref=ref, cost=read.cost), read.batches)
        stream.most = max(stream.most, read.batches)
        for item in range(read.batches):
            stream.line.add(reader.worker, BatchPlace(ref, item, reader.node))
        if read.ended:
            stream.line.end(reader.worker)
            if not stream.fresh:  # the next iteration may follow at once
                self._rest(stream, stream.readers.pop(reader.worker))
        self._read(stream, reader)

    def _rest(self, stream: _IterableStream, reader: ReadingProcess) -> None:
        """Keep a reader for the next iteration of its loader."""
        self._resting.rest(reader, time.monotonic())
        rested: Future[bool] = reader.actor.rest.remote().future()
        rested.add_done_callback(lambda outcome: self._news.put((stream, lambda: self._has_rested(reader, outcome))))

    def _has_rested(self, reader: ReadingProcess, rested: Future[bool]) -> None:
        with self._changed:
            if rested.exception() is None and rested.result():
                self._keep(reader)
            else:
                _end(self._resting.drop(lambda resting: resting is reader))
            self._changed.notify_all()

    def _keep(self, reader: ReadingProcess) -> None:
        reader.kept = True
        _end(self._resting.ready(reader, KEPT_PER_CORE * self._cores.cores))

    def _replace(self, reader: ReadingProcess) -> None:
        """End a reader, and start one in its place for the next iteration."""
        _end([reader])
        if self._cores.nodes:
            new = self._new_reader(reader.client, reader.owner, reader.worker)
            self._resting.rest(new, time.monotonic())
            self._keep(new)

    def _follow_nodes(self) -> None:
        """Preprocess on nodes that joined, and no longer on those that left."""
        alive = {node.node_id: node for node in alive_nodes()}
        with self._changed:
            joined, gone = alive.keys() - self._nodes, self._nodes - alive.keys()
            self._nodes = set(alive)
            if not (joined or gone):
                return
            new = [alive[node] for node in sorted(joined)]
            self._cores = self._choice.follow(self._cores, joined=new, gone=gone, alive=list(alive.values()))
            for stream in self._streams.values():
                stream.meter.reshaped()
            if not self._cores.nodes:
                self.failed(RunError("all nodes that preprocessed have left the cluster: add nodes and iterate again."))
            elif self._pool is not None:
                self._failure = None
                self._pool.reshape(self._cores.nodes)
        self._senders.end_unused()

    def _abandon_stuck(self, now: float) -> None:
        """Free the cores that still work, or hang, for iterations that ended some time ago."""
        with self._changed:
            late = [stream for stream in self._dropped if stream.tasks and now - stream.dropped_at > STUCK_S]
            self._dropped = [stream for stream in self._dropped if stream.tasks and stream not in late]
            _end(self._resting.late(now))
        if late:
            self._pool.abandon([task for stream in late for task in stream.tasks])

    def _end_leases(self) -> None:
        """Drop processes that are silent, and end the feed once it has had none for a while."""
        unused_since = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            self._abandon_stuck(now)
            with contextlib.suppress(ray.exceptions.RayError):
                self._follow_nodes()
            for client, seen in list(self._seen.items()):
                iterates = any(stream.client == client for stream in list(self._streams.values()))
                if now - seen > (LEASE_S if iterates else IDLE_LEASE_S):
                    self.leave(client)
            unused_since = now if self._seen else unused_since
            if now - unused_since > UNUSED_S and self.handle is not None:
                ray.kill(self.handle)


def _end(readers: Sequence[ReadingProcess]) -> None:
    for reader in readers:
        ray.kill(reader.actor)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
