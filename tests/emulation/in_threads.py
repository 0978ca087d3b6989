"""Stand-ins for the processes of a run, for rehearsals in threads: preprocessing nodes, ranks, the hub's client."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from offload.actors.errors import ProcessLostError
from offload.actors.values import Answer, Packed
from offload.model.feeds import ONE_FEED, FeedRule
from offload.pipeline.blocks.fetching import BlockLostError
from offload.pipeline.blocks.receiver import DirectBlocks, Pending
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, Reach, Slice
from offload.pipeline.pool.task import Assignment, Block, Cost, TaskSource
from offload.train.hub.actor import Hub
from offload.train.hub.board import Board
from offload.train.hub.calls import RankCalls
from offload.train.hub.client import HubClient
from offload.train.hub.division import FeedTerms
from offload.train.hub.feeds import Feeds
from offload.train.worker.data.feed_client import HubFeed
from offload.train.worker.links.peers import INTERNAL, check_agreed

CORE_SECONDS = 0.2  # the reported cost of a sample: it makes small tasks and many blocks
TASK_S = 0.0005


class Died(Exception):  # not an error: it stands for the death of a killed process
    """This rank's process was killed."""


# -- preprocessing -----------------------------------------------------------------------------------------------------


class _Ref:
    """The stand-in for a block's reference: its name."""

    def __init__(self, number: int) -> None:
        self._number = number

    def hex(self) -> str:
        return str(self._number)


class Nodes:
    """A pool of threads, one core each, on nodes that hold their own blocks. It stands in for :class:`offload.pipeline.pool.pool.Pool`."""

    def __init__(self, nodes: Sequence[str], task_cpus: float, source: TaskSource, runtime_env: Any) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._again: deque[Assignment] = deque()
        self._blocks: dict[str, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._alive: Counter[str] = Counter()
        self.reshape(nodes)

    def warm(self, recipe: Any) -> None: ...

    def starting(self) -> int:
        return 0

    def look(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def reshape(self, nodes: Sequence[str]) -> threading.Event:
        with self._changed:
            for node in set(nodes):
                if not self._alive[node]:
                    self._alive[node] += 1
                    threading.Thread(target=self._work_on, args=(node,), daemon=True).start()
            for node in set(self._alive) - set(nodes):
                self._alive[node] = 0
            self._changed.notify_all()
        done = threading.Event()
        done.set()
        return done

    def kill(self, node: str) -> None:
        """Kill a node, with its blocks and its current task."""
        with self._changed:
            self._alive[node] = 0
            self._blocks = {name: block for name, block in self._blocks.items() if block[0] != node}
            self._changed.notify_all()

    def close(self) -> None:
        """End all threads."""
        with self._changed:
            self._alive.clear()
            self._changed.notify_all()

    def fetch(self, ref: Any) -> Any:
        with self._changed:
            if ref.hex() not in self._blocks:
                raise BlockLostError(ref.hex())
            return self._blocks[ref.hex()][1]

    def _work_on(self, node: str) -> None:
        while True:
            with self._changed:
                if not self._alive[node]:
                    return
                assignment = self._again.popleft() if self._again else None
            # Without the lock: the feed calls look() with its own held.
            assignment = assignment or self._source.next_task(node)
            if assignment is None:
                with self._changed:
                    self._changed.wait(0.05)
                continue
            time.sleep(TASK_S)
            with self._changed:
                if not self._alive[node]:
                    self._again.append(assignment)
                    self._changed.notify_all()
                    return
                ref = _Ref(next(self._numbers))
                block = assignment.task.rows.returned()
                self._blocks[ref.hex()] = node, block
            rows = block.num_rows
            cost = Cost(rows=rows, size_bytes=8 * rows, cpu_s=CORE_SECONDS * rows, wall_s=0.01)
            with self._one_at_a_time:  # like the pool, whose one thread reports all blocks
                assignment.finished(Block(ref=ref, cost=cost, node=node))


# -- the hub -----------------------------------------------------------------------------------------------------------


class LocalHub(Hub):
    """The hub, in this process, with :class:`Nodes` as its pool. ``rule``: the number of feeds, each of which is a :class:`LocalActor`
    but for the hub's own."""

    def __init__(self, streams: dict[str, FeedDataset], cores: Cores, rule: FeedRule = ONE_FEED) -> None:
        self._streams = streams
        self.others: list[LocalActor] = []
        self.board = Board(lambda: self.feeds.supply(), nodes=len(cores.by_node))
        self.feeds = Feeds(
            cores,
            FeedTerms(rule=rule),
            own=self._feed,
            start=self._start_feed,
            end=self._end_feed,
        )
        self.nodes: Nodes = nodes_of(self.feed)

    def close(self) -> None:
        """End all preprocessing."""
        for nodes in (self.nodes, *(other.nodes for other in self.others)):
            nodes.close()

    def kill(self, node: str) -> None:
        """Kill a node, for all feeds."""
        for nodes in (self.nodes, *(other.nodes for other in self.others)):
            nodes.kill(node)

    def _feed(self, cores: Cores) -> Feed:
        return Feed(self._streams, cores, pool=Nodes, listener=self)

    def _start_feed(self, cores: Cores) -> LocalActor:
        self.others.append(LocalActor(self._feed(cores)))
        return self.others[-1]

    def _end_feed(self, feed: LocalActor) -> None:
        feed.kill()


class LocalActor:
    """A feed as an actor, whose calls threads answer."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.nodes, self.killed = feed, nodes_of(feed), False
        self._threads = ThreadPoolExecutor(64)

    def kill(self) -> None:
        """End the actor, with its preprocessing."""
        self.killed = True
        self.nodes.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.feed, name)

        def answered(*arguments: Any) -> Packed:
            answer = Packed.of(method(*arguments))
            if self.killed:
                raise ProcessLostError("the process was killed")
            return answer

        return SimpleNamespace(remote=lambda *arguments: Answer(self._threads.submit(answered, *arguments)))


def nodes_of(feed: Feed) -> Nodes:
    """The pool of a feed."""
    pool: Any = feed.pool
    nodes: Nodes = pool._pool
    return nodes


class LocalClient(HubClient):
    """The client of a :class:`LocalHub` for one process. Once the process is killed, its calls no longer arrive."""

    def __init__(self, hub: LocalHub, killed: Callable[[], bool] = lambda: False) -> None:
        super().__init__(hub)
        self._killed = killed

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach, arrived: int, timeout_s: float | None = None
    ) -> Pending[tuple[list[Slice], bool]]:
        return _Later(lambda: self._call(Hub.next_slices, key, rank, want, reach, arrived, timeout_s))

    def leave(self, key: PassKey, rank: int) -> None:
        if not self._killed():
            super().leave(key, rank)

    def _start(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        answer = self._call(method, *args, **named)
        return _Later(lambda: answer)

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._killed():
            raise ray.exceptions.RayError("this process was killed")
        return getattr(self.actor, method.__name__)(*args, **named)


class _Later:
    """An answer that is computed on demand."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._answer()


class LocalFeed(HubFeed):
    """A feed that reads blocks of :class:`Nodes`."""

    def __init__(self, hub: RankCalls, direct: DirectBlocks, first: int = 0) -> None:
        super().__init__(hub, direct, first)
        self._nodes: Nodes = hub.actor.nodes

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach = "any", *, arrived: int = 0, wait: bool = True
    ) -> tuple[list[Slice], bool]:
        if not wait and isinstance(self._hub, LocalClient):  # its answers are never under way
            return self._hub.next_slices(key, rank - self._first, want, reach, arrived, timeout_s=0.0).result()
        return super().next_slices(key, rank, want, reach, arrived=arrived, wait=wait)

    def fetch(self, piece: Slice) -> Callable[[], Columns]:
        def columns() -> Columns:
            rows = self._nodes.fetch(piece.ref).slice(piece.start, piece.stop - piece.start)
            return {name: rows[name].to_numpy().astype(np.int64) for name in (SAMPLE_ID, POSITION)}

        return columns


# -- ranks -------------------------------------------------------------------------------------------------------------


class Ranks:
    """Collective operations of ranks that are threads. All break once one of them dies."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._told: list[Any] = [None] * world_size
        self.world_size = world_size

    def gather(self, rank: int, mine: Any) -> list[Any]:
        """Return every rank's object. Raises threading.BrokenBarrierError."""
        self._told[rank] = mine
        self._barrier.wait()
        messages = list(self._told)
        self._barrier.wait()
        return messages

    def abort(self) -> None:
        """Break all operations: a rank has died."""
        self._barrier.abort()


class Peer:
    """One rank's end of the operations: the ``Peers`` and the ``Talk`` of :mod:`offload.train.worker.links.peers`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(objects) for objects in self._ranks.gather(self.rank, list(mine))]

    def gather_objects(self, mine: Any, what: str = INTERNAL) -> list[Any]:
        check_agreed(self._ranks.gather(self.rank, what))
        return self._ranks.gather(self.rank, mine)

    def broadcast(self, value: Any, source: int) -> Any:
        return self.gather_objects(value)[source]

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        return [float(sum(of_ranks)) for of_ranks in zip(*self.gather_objects(list(values), what), strict=True)]


# -- learned samples ---------------------------------------------------------------------------------------------------


class Book:
    """The samples from which the optimizers of all ranks have learned: (pass, sample id), once for each step on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.learned: list[tuple[int, int]] = []

    def add(self, more: Sequence[tuple[int, int]]) -> None:
        """Add samples of a step."""
        with self._lock:
            self.learned += more


class Bookkeeper(torch.optim.SGD):
    """An optimizer that records the samples of each step. Its state holds the records of all ranks, so that a checkpoint restores
    them along with the model. ``pending``: the samples since the last step."""

    def __init__(self, parameters: Any, book: Book) -> None:
        super().__init__(parameters, lr=0.0)
        self._book = book
        self.pending: list[tuple[int, int]] = []

    def step(self, closure: Any = None) -> Any:
        self._book.add(self.pending)
        self.pending = []
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        learned = torch.tensor(self._book.learned, dtype=torch.int64).reshape(-1, 2)
        return {**super().state_dict(), "learned": learned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        learned = state_dict.pop("learned")
        super().load_state_dict(state_dict)
        self._book.learned = [(int(epoch), int(sample)) for epoch, sample in learned.tolist()]


class Unjoined:
    """The :class:`offload.train.worker.steps.joining.Join` of ranks whose models stay alone."""

    def wrap(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        return model

    def average(self, gradients: Sequence[torch.Tensor]) -> None: ...


def run_ranks(
    work: Callable[[int], None], workers: int, exchanges: Collection[Ranks], deadline_s: float
) -> BaseException | None:
    """Run ``work`` for each rank on a thread of its own. Return the first error, after which the ``exchanges`` of the others end, too.

    Raises TimeoutError if a rank does not end within ``deadline_s``.
    """
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            for each in exchanges:
                each.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    if hanging := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        raise TimeoutError(f"ranks {hanging} have not ended within {deadline_s:g} s")
    return errors[0] if errors else None


def share(talk: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the tensors of rank 0."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(talk.broadcast(tensor.clone(), 0))
