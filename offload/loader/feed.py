"""The feed of a job's DataLoaders: one actor, which hands the batches of all ranks to the cluster's cores.

Every rank's loader sends its orders here and takes references to finished batches. A core always works for the loader that has the
fewest batches ahead, so that all ranks get the same share. The feed ends once no process uses it any more.

Where it stops: it never opens a batch, and it draws no indices.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.errors import OffloadError, RunError
from offload.loader.line import IterableLine, MapLine, Place
from offload.loader.node_choice import NodeChoice
from offload.loader.recipe import Batches, BatchOrder, Imports, IterableRecipe
from offload.pipeline.block_sender import BlockSenders
from offload.pipeline.engines.base import HELD_SHARE
from offload.pipeline.malloc import keep_freed_memory
from offload.pipeline.meter import Meter
from offload.pipeline.packing import Packed
from offload.pipeline.passes import as_user_error
from offload.pipeline.pool import IN_FLIGHT, Block, Cost, Done, PackedRecipe, Pool, Task
from offload.pipeline.streams import Cores
from offload.pipeline.watch import Nobody, Watch
from offload.train.cluster.connection import alive_nodes

TASK_S = 0.1  # work of a task, beside which its own cost of a millisecond or two does not matter
MOST_BATCHES = 64  # of a task
RECENT = 8  # tasks
TAKE_TIMEOUT_S = 5.0
LEASE_S = 60.0  # silence after which a process that iterates counts as gone
IDLE_LEASE_S = 15.0  # the same for one that does not iterate at present: it loses nothing
STUCK_S = 10.0  # time for the tasks of an ended iteration to end
UNUSED_S = 10.0  # time without a process after which the feed ends
LOOK_S = 5.0


class Taken(NamedTuple):
    """The answer to a loader: batches, the number of batches that it should order ahead, whether there are no more, and remarks."""

    places: list[Place]
    lead: int
    over: bool
    remarks: list[str]


class Read(NamedTuple):
    """What a reader of an iterable data set did: the number of batches that it made, whether they were the last, and their cost."""

    batches: int
    ended: bool
    cost: Cost


class _Reader(NamedTuple):
    """The process of one worker of an iterable data set, and its node."""

    actor: Any
    node: str


@dataclass(eq=False, kw_only=True)
class _Stream:
    """One iteration of a loader. ``client``: the process that iterates."""

    client: str
    meter: Meter
    batch_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    error: OffloadError | None = None
    remarks: list[str] = field(default_factory=list)

    def measure(self, block: Block, batches: int) -> None:
        """Count a finished block with this many batches."""
        self.meter.add(block)
        if batches:
            self.batch_s.append(max(block.cost.cpu_s, block.cost.wall_s / 2) / batches)

    @property
    def batches_in_task_s(self) -> int:
        """The number of batches that a core makes in TASK_S."""
        if not self.batch_s:
            return 1
        return max(1, min(int(TASK_S / max(statistics.median(self.batch_s), 1e-6)), MOST_BATCHES))


@dataclass(eq=False, kw_only=True)
class _MapStream(_Stream):
    recipe: PackedRecipe
    line: MapLine = field(default_factory=MapLine)
    tasks: list[Task] = field(default_factory=list)  # under way
    dropped_at: float = 0.0


@dataclass(eq=False, kw_only=True)
class _IterableStream(_Stream):
    line: IterableLine
    readers: list[_Reader] = field(default_factory=list)
    reading: set[int] = field(default_factory=set)
    most: int = 1  # batches of a reader's task so far


class LoaderFeed:
    """The actor. Its methods block, and run on many threads. ``pool`` makes the pool that runs the tasks."""

    def __init__(self, cores: Cores, choice: NodeChoice, pool: Callable[..., Any] = Pool) -> None:
        self.run = ray.get_runtime_context().current_actor if ray.is_initialized() else None
        self._cores, self._choice = cores, choice
        self._nodes = {node.node_id for node in alive_nodes()}
        self._streams: dict[str, _MapStream | _IterableStream] = {}
        self._seen: dict[str, float] = {}
        self._changed = threading.Condition(threading.RLock())
        self._makes_pool = pool
        self._pool: Any = None
        self._failure: BaseException | None = None
        self._readers = 0
        self._senders = BlockSenders(cores.runtime_env, lambda: self._cores.by_node)
        self._through_ray: set[str] = set()
        self._dropped: list[_MapStream] = []  # with tasks under way
        self._news: queue.SimpleQueue[tuple[_IterableStream, int, Any, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, daemon=True, name="readers").start()
        threading.Thread(target=self._end_leases, daemon=True, name="leases").start()

    # -- for loaders ------------------------------------------------------------------------------------------------

    def open(self, stream: str, client: str, recipe: PackedRecipe) -> int:
        """Begin an iteration over a map-style data set. Return the number of batches to order ahead."""
        opened = _MapStream(client=client, meter=self._meter(), recipe=recipe)
        with self._changed:
            self._streams[stream] = opened
            self._seen[client] = time.monotonic()
            if not self._cores.nodes:
                self._fail(opened, self._failure or RunError("no node of the cluster preprocesses: add nodes."))
            elif self._pool is None or self._failure is not None:  # all processes of the last pool have died
                self._failure = None
                self._pool = self._makes_pool(self._cores.nodes, self._cores.task_cpus, self, self._cores.runtime_env)
                self._pool.warm(PackedRecipe.of(Imports()))
            return self._lead(opened)

    def open_iterable(self, stream: str, client: str, recipes: Sequence[PackedRecipe]) -> None:
        """Begin an iteration over an iterable data set, with one process for each recipe."""
        opened = _IterableStream(client=client, meter=self._meter(), line=IterableLine(len(recipes)))
        with self._changed:
            self._streams[stream] = opened
            self._seen[client] = time.monotonic()
            if not self._cores.nodes:
                self._fail(opened, RunError("no node of the cluster preprocesses: add nodes."))
                return
            for worker, recipe in enumerate(recipes):
                opened.readers.append(self._new_reader(recipe))
                self._read(opened, worker)

    def order(self, stream: str, orders: list[BatchOrder]) -> None:
        """Make these batches."""
        with self._changed:
            current = self._streams.get(stream)
            if isinstance(current, _MapStream):
                current.line.order(orders)
        self._look()

    def take(self, stream: str, start: int, want: int) -> Taken:
        """Up to ``want`` batches from number ``start`` on. The loader has all batches before.

        Waits a few seconds for the first. Raises the error that keeps preprocessing from going on.
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
                lambda: current.error or line.take(start, want) or line.over(), timeout=TAKE_TIMEOUT_S
            )
            if current.error is not None:
                raise current.error
            places = line.take(start, want)
            if isinstance(current, _IterableStream):
                for worker in range(len(current.readers)):
                    self._read(current, worker)
            remarks, current.remarks = current.remarks, []
            answer = Taken(places, self._lead(current), not places and line.over(), remarks)
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

    def close(self, stream: str) -> None:
        """End an iteration, finished or not."""
        with self._changed:
            self._drop(stream)

    def alive(self, client: str) -> None:
        """Note that this process still exists."""
        self._seen[client] = time.monotonic()

    def leave(self, client: str) -> None:
        """Note that this process does not need the feed any more."""
        with self._changed:
            for name in [name for name, stream in self._streams.items() if stream.client == client]:
                self._drop(name)
            self._seen.pop(client, None)

    def open_streams(self) -> int:
        """The number of iterations that are fed."""
        return len(self._streams)

    def rates(self, stream: str) -> dict[str, float]:
        """``cores``, and the measured rates of an iteration as in :meth:`Meter.summary`."""
        current = self._streams.get(stream)
        return {"cores": float(self._cores.cores), **({} if current is None else current.meter.summary())}

    def costs(self, stream: str) -> list[tuple[float, float]]:
        """Core-seconds and bytes per sample of an iteration's recent tasks."""
        current = self._streams.get(stream)
        return [] if current is None else current.meter.costs()

    def sender(self, node: str) -> Any:
        """See :meth:`BlockSenders.of`."""
        return self._senders.of(node)

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """Tell the loaders that the batches of a node do not reach one of them directly. The first report of a node counts."""
        address = next((each.name for each in alive_nodes() if each.node_id == node), node)
        with self._changed:
            if node not in self._through_ray:
                self._through_ray.add(node)
                self._remark(
                    f"batches of node {address} could not be sent directly ({reason}): Ray carries them, which takes more CPU time. A "
                    "firewall may be blocking the ports of the processes that train"
                )

    # -- for the pool -----------------------------------------------------------------------------------------------

    def next_task(self, node: str) -> tuple[Task, Done] | None:
        """A task for a core of this node, for the loader with the fewest batches ahead; None if there is none."""
        with self._changed:
            room = self._has_room(node)
            maps = (each for each in self._streams.values() if isinstance(each, _MapStream))
            waiting = [each for each in maps if each.line.wanted and each.error is None]
            for stream in sorted(waiting, key=lambda each: each.line.ahead):
                # Over the limit, only a batch that its loader waits for: the memory comes back with the next batches that it takes.
                if room or stream.line.starving:
                    share = stream.line.wanted // max(self._cores.cores, 1)
                    orders = stream.line.begin(max(1, min(stream.batches_in_task_s, share)) if room else 1)
                    task = Task(recipe=stream.recipe, rows=orders, epoch=0)
                    stream.tasks.append(task)
                    return task, _done(self._made, stream, task)
        return None

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
        self._remark(f"a preprocessing process died; others make its batches again ({_first_line(error)})")

    def slow(self, node: str, what: str, seconds: float) -> None:
        """Tell the loaders that a preprocessing process has worked on one batch for a long time."""
        self._remark(f"{what} has taken {seconds:.0f} s so far")

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Fail all iterations: a preprocessing process ends because its call cannot be interrupted."""
        self.failed(RunError(f"{what} took longer than {seconds:g} s and cannot be interrupted."))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _meter(self) -> Meter:
        return Meter(lambda: self._cores.by_node)

    def _remark(self, text: str) -> None:
        with self._changed:
            for stream in self._streams.values():
                stream.remarks.append(text)

    def _made(self, stream: _MapStream, task: Task, made: Block | BaseException) -> None:
        orders: list[BatchOrder] = task.rows
        with self._changed:
            stream.tasks = [each for each in stream.tasks if each is not task]
            if isinstance(made, BaseException):
                self._fail(stream, made)
                return
            stream.measure(made, len(orders))
            stream.line.made(orders, made.ref, node=made.node, size_bytes=made.cost.size_bytes)
            self._changed.notify_all()

    def _fail(self, stream: _Stream, error: BaseException) -> None:
        with self._changed:
            stream.error = stream.error or as_user_error(error)
            self._changed.notify_all()

    def _drop(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            self._fail(stream, RunError("the iteration has ended."))  # whoever still waits for a batch
        if isinstance(stream, _IterableStream):
            for reader in stream.readers:
                ray.kill(reader.actor)
        elif stream is not None and stream.tasks:
            stream.dropped_at = time.monotonic()
            self._dropped.append(stream)

    def _look(self) -> None:
        if self._pool is not None:
            self._pool.look()

    def _lead(self, stream: _Stream) -> int:
        """The number of batches that a loader should order ahead: for all cores' tasks, and as many as they take next."""
        return (IN_FLIGHT + 1) * self._cores.cores * stream.batches_in_task_s + 2

    def _has_room(self, node: str) -> bool:
        held: Counter[str] = Counter()
        for stream in self._streams.values():
            if isinstance(stream, _MapStream):
                held.update(stream.line.held_bytes)
        of_node = self._cores.stores.get(node, float("inf"))
        return held.total() < HELD_SHARE * self._cores.store_bytes and held[node] < HELD_SHARE * of_node

    def _new_reader(self, recipe: PackedRecipe) -> _Reader:
        nodes = sorted(set(self._cores.nodes))
        node = nodes[self._readers % len(nodes)]
        self._readers += 1
        made = ray.remote(IterableReader).options(
            num_cpus=0,
            runtime_env=dict(self._cores.runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return _Reader(made.remote(recipe), node)

    def _read(self, stream: _IterableStream, worker: int) -> None:
        """Let a reader make more batches, unless two of its tasks wait for the loader."""
        if worker in stream.reading or stream.line.has_ended(worker) or stream.line.waiting(worker) >= 2 * stream.most:
            return
        stream.reading.add(worker)
        ref, read = stream.readers[worker].actor.read.options(num_returns=2).remote()
        # Ray calls back on its own thread, which must not wait for the lock: whoever holds it may wait for Ray (to end a reader).
        read.future().add_done_callback(lambda made: self._news.put((stream, worker, ref, made)))

    def _hear(self) -> None:
        """Act on what readers have done."""
        while True:
            stream, worker, ref, made = self._news.get()
            try:
                self._has_read(stream, worker, ref, made)
            except Exception as error:  # this thread serves other iterations, too
                self._fail(stream, error)

    def _has_read(self, stream: _IterableStream, worker: int, ref: Any, made: Any) -> None:
        with self._changed:
            stream.reading.discard(worker)
            if (error := made.exception()) is not None:
                self._fail(stream, error)
                return
            read: Read = made.result()
            stream.measure(Block(ref=ref, cost=read.cost), read.batches)
            stream.most = max(stream.most, read.batches)
            for item in range(read.batches):
                stream.line.made(worker, Place(ref, item, stream.readers[worker].node))
            if read.ended:
                stream.line.end(worker)
            self._read(stream, worker)
            self._changed.notify_all()

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
            if now - unused_since > UNUSED_S and self.run is not None:
                ray.kill(self.run)


def _done(then: Callable[[_MapStream, Task, Any], None], stream: _MapStream, task: Task) -> Done:
    return lambda made: then(stream, task, made)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class IterableReader:
    """The process of one worker of an iterable data set."""

    def __init__(self, recipe: PackedRecipe) -> None:
        keep_freed_memory()
        self._watch = Watch(Nobody())
        self._recipe = recipe
        self._batches: Any = None

    def read(self) -> tuple[Batches, Read]:
        """The next batches: one or more, for about TASK_S."""
        if self._batches is None:
            recipe: IterableRecipe = self._recipe.ready()
            self._batches = recipe.batches(self._watch)
        items: list[Packed] = []
        samples, ended = 0, False
        cpu, wall = time.process_time(), time.perf_counter()
        while len(items) < MOST_BATCHES and (not items or time.perf_counter() - wall < TASK_S):
            if (made := next(self._batches, None)) is None:
                ended = True
                break
            items.append(made[0])
            samples += made[1]
        block = Batches(tuple(items), samples)
        cost = Cost(
            rows=samples,
            size_bytes=block.nbytes,
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )
        return block, Read(len(items), ended, cost)
