"""A run rehearsed in threads: the real feed, batches, agreement and progress, with preprocessing nodes and workers that die,
leave and come at the turn of a seeded random generator.

Without processes, models and Ray a schedule takes a second, so that many can be tried. What the real processes add (Ray
Train's restarts, checkpoints on disk) is for tests on a real cluster.

A worker's state is here what the model is in a run: it learns from each global batch, is committed to a checkpoint, and lost
back to it when a process dies. What it has learned from, at the end, is the history to be judged.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from offload.pipeline.feed import Cores, Feed, Stream
from offload.pipeline.passes import PassKey, PassRequest, Slice
from offload.pipeline.pool import Block, Cost
from offload.pipeline.ranges import Ranges
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.pipeline.stage import untrained
from offload.pipeline.wire import POSITION, SAMPLE_ID, Columns
from offload.train.batches import Batches
from offload.train.config import BatchSize
from offload.train.feed_client import BlockLostError
from offload.train.monitor import Orders
from offload.train.voice import Mailbox, TrainingVoice

DEADLINE_S = 60.0  # of one attempt: past it something hangs
CORE_SECONDS = 0.2  # that a sample is said to cost: small tasks, many blocks
STORE_BYTES = 1e6
End = Literal["finished", "resize", "died", "hung"]


class _DiedError(Exception):
    """A worker's process was killed."""


@dataclass
class Outcome:
    """What became of a schedule. ``passes``: by pass, how often the final state learned from each id; what happened
    meanwhile is counted in ``happened``."""

    samples: int
    passes: dict[int, Counter[int]]
    happened: Counter[str]
    hung: bool = False

    @property
    def lost(self) -> int:
        """Samples missing from a pass."""
        return sum(self.samples - len(seen) for seen in self.passes.values())

    @property
    def repeated(self) -> int:
        """Samples that came again within a pass."""
        return sum(sum(seen.values()) - len(seen) for seen in self.passes.values())


@dataclass(frozen=True)
class _State:
    """A checkpoint: the pass under way, what of it is trained, and all that the model learned from."""

    epoch: int = 0
    step: int = 0
    trained: Ranges = field(default_factory=Ranges)
    learned: tuple[tuple[int, int], ...] = ()  # (pass, id), in any order


class _Ref:
    """A block's name."""

    def __init__(self, number: int) -> None:
        self._number = number

    def hex(self) -> str:
        return str(self._number)


class _Nodes:
    """A pool of threads, one core each, on nodes that hold the blocks made there. Stands for :class:`Pool`."""

    def __init__(self, nodes: Sequence[str], task_cpus: float, work: Any, runtime_env: Any) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._again: deque[Any] = deque()
        self._blocks: dict[str, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._alive: Counter[str] = Counter()
        self.reshape(nodes)

    def warm(self, stage: Any) -> None: ...

    def look(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def reshape(self, nodes: Sequence[str]) -> threading.Event:
        with self._changed:
            for node in nodes:
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
        """A node dies, with the blocks that it holds and the task that it is at."""
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
                given = self._again.popleft() if self._again else None
            given = given or self._work.next_task(node)  # without the lock: the feed calls look() with its own
            if given is None:
                with self._changed:
                    self._changed.wait(0.05)
                continue
            time.sleep(0.0005)
            task, done = given
            with self._changed:
                if not self._alive[node]:
                    self._again.append(given)
                    self._changed.notify_all()
                    return
                ref = _Ref(next(self._numbers))
                block = task.rows.take(untrained(task.rows))
                self._blocks[ref.hex()] = node, block
            with self._one_at_a_time:  # as the pool, whose one thread does all the telling
                done(_block(ref, block.num_rows))


def _block(ref: Any, rows: int) -> Block:
    return Block(ref=ref, cost=Cost(rows=rows, size_bytes=8 * rows, cpu_s=CORE_SECONDS * rows, wall_s=0.01))


class _Client:
    """The feed of one rank."""

    def __init__(self, feed: Feed, nodes: _Nodes) -> None:
        self._feed, self._nodes = feed, nodes
        self.take, self.again, self.leave = feed.take, feed.again, feed.leave

    def start_fetching(self, slices: Sequence[Slice]) -> None: ...

    def columns(self, piece: Slice) -> Columns:
        rows = self._nodes.fetch(piece.ref).slice(piece.start, piece.stop - piece.start)
        return {name: rows[name].to_numpy().astype(np.int64) for name in (SAMPLE_ID, POSITION)}


class _Ranks:
    """Collective operations of ranks that are threads. Broken when one of them dies."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._told: list[Any] = [None] * world_size
        self.world_size = world_size

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self._told[rank] = mine
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def abort(self) -> None:
        self._barrier.abort()


class _Peer:
    def __init__(self, ranks: _Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(each) for each in self._ranks.gather(self.rank, list(mine))]

    def broadcast(self, value: Any, source: int) -> Any:
        return self._ranks.gather(self.rank, value)[source]

    def abort(self) -> None:
        self._ranks.abort()


class Rehearsal:
    """One seeded schedule. ``go()`` plays it to its end."""

    def __init__(self, seed: int, *, samples: int = 240, passes: int = 3, disturbances: int = 6) -> None:
        self._random = random.Random(seed)
        self._seed, self._samples, self._passes = seed, samples, passes
        self._left = disturbances
        self._sizes = BatchSize(initial=16, max=64, local=(2, 16))
        self._saved = _State()
        self._happened: Counter[str] = Counter()
        self._orders = Orders()
        self._workers = self._random.randint(1, 4)
        self._node_names = [f"node-{i}" for i in range(3)]

    def go(self) -> Outcome:
        """Play the schedule, driver and all; at its end every pass is complete or the test has failed."""
        hung = False
        feed, nodes = self._driver()
        while self._saved.epoch < self._passes and not hung:
            end = self._attempt(feed, nodes)
            hung = end == "hung"
            self._happened[end] += 1
            if end in ("resize", "died") and self._random.random() < 0.5:
                self._workers = self._random.randint(1, 4)
            if end == "died" and self._random.random() < 0.3:  # the whole job is started again
                nodes.close()
                feed, nodes = self._driver()
                self._happened["driver"] += 1
            self._orders = Orders()
        nodes.close()
        passes: dict[int, Counter[int]] = {}
        for epoch, sample in self._saved.learned:
            passes.setdefault(epoch, Counter())[sample] += 1
        return Outcome(self._samples, passes, self._happened, hung)

    def _driver(self) -> tuple[Feed, _Nodes]:
        table = list_torch_dataset(range(self._samples)).table
        stage: Any = None
        stream = Stream(stage=stage, table=table, shuffle=True, seed=self._seed)
        made: list[_Nodes] = []

        def pool(*arguments: Any) -> _Nodes:
            made.append(_Nodes(*arguments))
            return made[0]

        stores = dict.fromkeys(self._node_names, STORE_BYTES / len(self._node_names))
        cores = Cores(nodes=tuple(self._node_names), task_cpus=1.0, stores=stores)
        return Feed({"train": stream}, cores, pool=pool), made[0]

    def _attempt(self, feed: Feed, nodes: _Nodes) -> End:
        """One worker group, until it finishes, dies or gives way to another."""
        number = feed.begin()
        ends: list[End] = []
        ranks, talk = _Ranks(self._workers), _Ranks(self._workers)
        plans = [self._plan(nodes) for _ in range(self._workers)]

        def work(rank: int) -> None:
            try:
                _Worker(self, feed, nodes, number, rank, (ranks, talk), plans[rank]).train(ends)
            except (_DiedError, threading.BrokenBarrierError):
                ends.append("died")
                ranks.abort()
                talk.abort()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self._workers)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in threads) or not ends:
            return "hung"
        return "died" if "died" in ends else ends[0]

    def _plan(self, nodes: _Nodes) -> Callable[[int], None]:
        """What befalls one rank: called with each step that it begins."""
        generator = random.Random(self._random.random())

        def befalls(step: int) -> None:
            if self._left <= 0 or generator.random() > 0.06:
                return
            self._left -= 1
            what = generator.choice(("kill", "resize", "rebatch", "node", "drain", "join"))
            self._happened[what] += 1
            if what == "kill":
                raise _DiedError
            node = generator.choice(self._node_names)
            if what == "node":
                nodes.kill(node)
                nodes.reshape(self._node_names)  # it comes back, with nothing of what it held
            elif what == "drain":
                nodes.reshape([name for name in self._node_names if name != node])
                self._orders = Orders(resize=True)
            elif what == "join":
                nodes.reshape(self._node_names)
            elif what == "resize":
                self._orders = Orders(resize=True)
            else:
                local, accum = generator.randint(2, 16), generator.randint(0, 2)
                self._orders = Orders(batch=(self._workers, local, accum))

        return befalls

    def save(self, state: _State) -> None:
        """Rank 0: a checkpoint is stored."""
        self._saved = state


class _Worker:
    """One rank of one attempt: what a context does of a run, without the model."""

    def __init__(
        self,
        run: Rehearsal,
        feed: Feed,
        nodes: _Nodes,
        attempt: int,
        rank: int,
        groups: tuple[_Ranks, _Ranks],
        befalls: Callable[[int], None],
    ) -> None:
        self._run, self._feed, self._nodes = run, feed, nodes
        self._attempt, self._rank, self._befalls = attempt, rank, befalls
        self._peer, self._talk = _Peer(groups[0], rank), groups[1]
        self._state = run._saved
        self._split = run._sizes.split(self._peer.world_size)
        self._new: list[tuple[int, int]] = []  # (position, id) since the last commit

    def train(self, ends: list[End]) -> None:
        for epoch in range(self._state.epoch, self._run._passes):
            if not self._one_pass(epoch):
                ends.append("resize")
                return
            self._commit(epoch + 1, finished=True)
        ends.append("finished")

    def _one_pass(self, epoch: int) -> bool:
        key = PassKey(attempt=self._attempt, name="train", number=epoch)
        world_size = self._peer.world_size
        request = PassRequest(
            world_size=world_size,
            first_rows=self._split.local_batch_size * world_size,
            epoch=epoch,
            done=self._state.trained.pairs,
            followed=epoch + 1 < self._run._passes,
        )
        self._feed.open(key, request, self._rank)
        batches = Batches(
            _Client(self._feed, self._nodes), key, peers=self._peer, split=self._split, device=torch.device("cpu"),
            on_device=(), padded=True, voice=self._voice(), template={},
        )  # fmt: skip
        try:
            return self._steps(batches, epoch)
        finally:
            batches.close()

    def _voice(self) -> TrainingVoice:
        due = random.Random(self._run._seed + self._attempt).random
        return TrainingVoice(
            self._rank, self._peer.world_size, lambda: self._run._orders, lambda: due() < 0.2, Mailbox(3)
        )

    def _steps(self, batches: Batches, epoch: int) -> bool:
        micro, rows, pending = 0, 0, list[tuple[int, int]]()
        due = False
        while (batch := batches.get()) is not None:
            due = due or batch.heard.due
            if batch.heard.end:
                self._commit(epoch)
                return False
            if micro == 0:
                self._split = batch.split
                if due:
                    self._commit(epoch)
                    due = False
                self._live_on()
            ids = batch.tensors["sample_id"][: batch.rows].tolist()
            pending += zip(batch.positions.tolist(), ids, strict=True)
            rows += batch.all_rows
            micro += 1
            if micro > batch.split.accum_steps:
                self._new += pending
                micro, rows, pending = 0, 0, []
        self._new += pending  # the last global batch of a pass may be smaller
        return True

    def _live_on(self) -> None:
        try:
            self._befalls(self._state.step)
        except _DiedError:  # a process that is killed leaves its connections at once
            self._peer.abort()
            self._talk.abort()
            raise

    def _commit(self, epoch: int, *, finished: bool = False) -> None:
        told = self._talk.gather(self._rank, self._new)
        new = [pair for each in told for pair in each]
        self._new = []
        learned_in = epoch - 1 if finished else epoch
        trained = self._state.trained.union(Ranges.of([position for position, _ in new]))
        self._state = _State(
            epoch=epoch,
            step=self._state.step + 1,
            trained=Ranges() if finished else trained,
            learned=(*self._state.learned, *((learned_in, sample) for _, sample in new)),
        )
        if self._rank == 0:
            self._run.save(self._state)
        self._talk.gather(self._rank, None)  # stored, before anybody goes on
