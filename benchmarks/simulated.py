"""The project's own feed on a simulated clock. Its passes, tasks and allotment are real; cores, links and accelerators are simulated.

Each node has cores that take tasks as the pool's processes do, and a network card that carries as much in either direction at once. Cards
share their capacity fairly among transfers. Each rank fetches as a worker does: near blocks at once, and a few far ones at a time. All
ranks take a step together as soon as each has a local batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa

from offload.pipeline.blocks.fetching import AT_ONCE
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.feed import Feed
from offload.pipeline.feed.passes import PassKey, PassRequest, Reach, Slice
from offload.pipeline.pool.pool import IN_FLIGHT
from offload.pipeline.pool.task import Assignment, Block, Cost, TaskSource
from offload.train.worker.data.slice_fetcher import PREFETCH_BLOCKS, allowed

HUGE = 1e15  # bytes per second of memory


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: its preprocessing cores, their speed, its network card in bytes per second, its object store, and its workers."""

    name: str
    cores: int
    bytes_per_s: float
    workers: int = 0
    core_speed: float = 1.0
    store_bytes: float = 20e9


@dataclass(frozen=True, kw_only=True)
class World:
    """What is simulated. ``variation``: of the time of a task; ``step_s``: seconds of a step, 0: the input binds."""

    nodes: tuple[Node, ...]
    core_seconds_per_sample: float
    bytes_per_sample: float
    samples: int
    epochs: int = 2
    local_batch_size: int = 256
    step_s: float = 0.0
    variation: float = 0.1
    ordered: bool = False
    seed: int = 0


@dataclass
class Outcome:
    """``samples_per_s``: over whole epochs without the first quarter of the first one, ``near_share``: samples that no link carried."""

    samples_per_s: float
    near_share: float
    seconds: float


class Clock:
    """Simulated time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def step(self) -> bool:
        """Run the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, what = heapq.heappop(self._events)
        what()
        return True


class Ref:
    """A block: its node and size."""

    def __init__(self, node: str, rows: int, size_bytes: float) -> None:
        self.node, self.rows, self.size_bytes = node, rows, size_bytes

    def hex(self) -> str:
        return str(id(self))


@dataclass(eq=False)
class _Core:
    node: Node
    in_flight: deque[Assignment] = field(default_factory=deque)


class SimulatedPool:
    """The cores, with the pool's interface and its way to choose a core for a task."""

    def __init__(self, clock: Clock, world: World, source: TaskSource, made: Callable[[], None]) -> None:
        self._clock, self._world, self._source, self.made = clock, world, source, made
        self._cores = [_Core(node) for node in world.nodes for _ in range(node.cores)]
        self._rng = np.random.default_rng(world.seed)
        self._looks = False

    def warm(self, recipe: Any) -> None: ...

    def starting(self) -> int:
        return 0

    def look(self) -> None:
        if not self._looks:
            self._looks = True
            self._clock.after(0.0, self._give)

    def _give(self) -> None:
        self._looks = False
        able = [core for core in self._cores if len(core.in_flight) < IN_FLIGHT]
        while able:
            core = min(able, key=lambda core: len(core.in_flight))
            assignment = self._source.next_task(core.node.name)
            if assignment is None:
                able = [other for other in able if other.node is not core.node]
                continue
            core.in_flight.append(assignment)
            if len(core.in_flight) == 1:
                self._begin(core)
            if len(core.in_flight) >= IN_FLIGHT:
                able.remove(core)

    def _begin(self, core: _Core) -> None:
        task = core.in_flight[0].task
        world = self._world
        spread = np.sqrt(np.log1p(world.variation**2))
        each = world.core_seconds_per_sample / core.node.core_speed
        seconds = each * task.rows.num_rows * float(self._rng.lognormal(-(spread**2) / 2, spread))
        self._clock.after(seconds, lambda: self._finish(core, seconds))

    def _finish(self, core: _Core, seconds: float) -> None:
        assignment = core.in_flight.popleft()
        rows = assignment.task.rows.num_rows
        size = int(rows * self._world.bytes_per_sample)
        cost = Cost(rows=rows, size_bytes=size, cpu_s=seconds, wall_s=seconds)
        assignment.finished(Block(ref=cast(Any, Ref(core.node.name, rows, size)), cost=cost, node=core.node.name))
        if core.in_flight:
            self._begin(core)
        self.look()
        self.made()


@dataclass(eq=False)
class _Transfer:
    source: str
    target: str
    left: float
    then: Callable[[], None]
    rate: float = 0.0


class Links:
    """The network cards of all nodes. Transfers share them max-min fairly."""

    def __init__(self, clock: Clock, nodes: Sequence[Node]) -> None:
        self._clock = clock
        self._capacity = {node.name: node.bytes_per_s for node in nodes}
        self._transfers: list[_Transfer] = []
        self._at, self._plan = 0.0, 0

    def carry(self, source: str, target: str, size: float, then: Callable[[], None]) -> None:
        """Carry ``size`` bytes, and call ``then``."""
        self._advance()
        self._transfers.append(_Transfer(source, target, size, then))
        self._share()

    def _advance(self) -> None:
        passed, self._at = self._clock.now - self._at, self._clock.now
        for each in self._transfers:
            each.left -= each.rate * passed

    def _share(self) -> None:
        """Progressive filling: the card with the least room per transfer fixes the rate of its transfers."""
        room = {(way, name): size for way in ("out", "in") for name, size in self._capacity.items()}
        open_ = list(self._transfers)
        while open_:
            users = Counter(end for each in open_ for end in (("out", each.source), ("in", each.target)))
            tight = min(users, key=lambda end: room[end] / users[end])
            rate = room[tight] / users[tight]
            for each in [e for e in open_ if tight in (("out", e.source), ("in", e.target))]:
                each.rate = rate
                for end in (("out", each.source), ("in", each.target)):
                    room[end] = max(room[end] - rate, 0.0)
                open_.remove(each)
        self._plan += 1
        plan = self._plan
        if self._transfers:
            first = min(self._transfers, key=lambda each: each.left / max(each.rate, 1e-9))
            self._clock.after(max(first.left, 0.0) / max(first.rate, 1e-9), lambda: self._ended(plan))

    def _ended(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        over = [each for each in self._transfers if each.left <= 1e-3 * max(each.rate, 1.0) * 1e-3 + 1e-6]
        self._transfers = [each for each in self._transfers if each not in over]
        self._share()
        for each in over:
            each.then()


class Rank:
    """A rank: what it fetches, and the rows that are ready for its steps."""

    def __init__(self, run: Simulation, number: int, node: Node) -> None:
        self.run, self.number, self.node = run, number, node
        self.ready: dict[Reach, deque[Slice]] = {"near": deque(), "far": deque()}
        self.coming: Counter[Reach] = Counter()
        self.most: dict[Reach, int] = {"near": 1, "far": 1, "any": 1}  # under way at a time, as a worker allows itself
        self.asked_ahead: dict[Reach, deque[Slice]] = {"near": deque(), "far": deque(), "any": deque()}
        self.line: deque[Slice] = deque()  # of an ordered pass, in order; a slice is ready once it has come
        self.came: set[int] = set()
        self.arrived: Counter[tuple[PassKey, Reach]] = Counter()
        self.rows = 0
        self.over = False

    def look(self) -> None:
        """Take what there is room for, and begin to fetch it."""
        lines: tuple[tuple[Reach, int], ...] = (("near", 1), ("far", AT_ONCE))
        if self.run.world.ordered:
            lines = (("any", AT_ONCE),)
        self.over = True
        for reach, at_once in lines:
            ahead, coming = self.asked_ahead[reach], self.coming[reach]
            ready = len(self.line) - coming if reach == "any" else len(self.ready[reach])
            while ahead and coming < self.most[reach] and ready < PREFETCH_BLOCKS:
                self._fetch(reach, at_once, ahead.popleft())
                coming += 1
            if ahead:
                self.over = False
                continue
            # A worker asks for the next slices while it fetches the last ones.
            want = max(self.most[reach] - coming, 1)
            key = self.run.key
            slices, over = self.run.feed.next_slices(
                key, self.number, want, reach, self.arrived[key, reach], timeout_s=0.0
            )
            ahead.extend(slices)
            self.over = self.over and over and not slices
            if slices:
                self.run.look()
        self.over = self.over and not (self.line or any(self.ready.values()) or self.coming.total())

    def _fetch(self, reach: Reach, at_once: int, piece: Slice) -> None:
        source = cast(Any, piece.ref).node
        size = (piece.stop - piece.start) * self.run.world.bytes_per_sample
        self.coming[reach] += 1
        began, key = self.run.clock.now, self.run.key
        if reach == "any":
            self.line.append(piece)

        def arrived() -> None:
            self.coming[reach] -= 1
            self.arrived[key, reach] += 1
            self.most[reach] = allowed(self.most[reach], at_once, self.run.clock.now - began)
            if reach == "any":
                self.came.add(id(piece))
            else:
                self.ready[reach].append(piece)
            self.run.look()

        if source == self.node.name:
            self.run.clock.after(0.0, arrived)
        else:
            self.run.links.carry(source, self.node.name, size, arrived)

    def fill(self) -> None:
        """Cut what has come into rows, until there are enough for a step."""
        while self.rows < self.run.world.local_batch_size:
            if self.run.world.ordered:
                if not self.line or id(self.line[0]) not in self.came:
                    return
                piece = self.line.popleft()
            elif line := self.ready["near"] or self.ready["far"]:
                piece = line.popleft()
            else:
                return
            rows = piece.stop - piece.start
            self.rows += rows
            self.run.rows_near += rows if cast(Any, piece.ref).node == self.node.name else 0


class Simulation:
    """A run over all epochs of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.clock = world, Clock()
        self.links = Links(self.clock, world.nodes)
        stream = FeedDataset(
            recipe=cast(Any, None), rows=pa.table({"i": np.arange(world.samples)}), shuffle=True, seed=world.seed
        )
        cores = Cores(
            nodes=tuple(node.name for node in world.nodes for _ in range(node.cores)),
            task_cpus=1.0,
            stores={node.name: node.store_bytes for node in world.nodes},
        )

        def pool(nodes: Any, task_cpus: float, work: Any, runtime_env: Any) -> SimulatedPool:
            return SimulatedPool(self.clock, world, work, self.look)

        self._looks = False
        self.feed = Feed({"train": stream}, cores, pool=pool, clock=lambda: self.clock.now)
        self.feed.begin(1)
        homes = [node for node in world.nodes for _ in range(node.workers)]
        self.ranks = [Rank(self, number, node) for number, node in enumerate(homes)]
        self.rows_near = self.trained = 0
        self._epoch, self._busy = 0, False
        self._from: tuple[float, int] | None = None
        self.key = self._open()

    def go(self) -> Outcome:
        """Run to the end."""
        self.look()
        while self._epoch < self.world.epochs:
            if not self.clock.step():
                raise RuntimeError("the simulated run stands still")
        assert self._from is not None
        began, before = self._from
        total = self.world.samples * self.world.epochs
        return Outcome(
            samples_per_s=(total - before) / (self.clock.now - began),
            near_share=self.rows_near / total,
            seconds=self.clock.now,
        )

    def look(self) -> None:
        """Look at the ranks soon: something has changed."""
        if not self._looks:
            self._looks = True
            self.clock.after(0.0, self._look)

    def _open(self) -> PassKey:
        world = self.world
        key = PassKey(attempt=1, name="train", number=self._epoch)
        size = len(self.ranks)
        request = PassRequest(
            world_size=size,
            first_rows=world.local_batch_size * size,
            epoch=self._epoch,
            followed=self._epoch + 1 < world.epochs,
            batch=world.local_batch_size * size if world.ordered else None,
        )
        for rank in self.ranks:
            rank.line.clear()
            self.feed.open(key, request, rank.number, rank.node.name)
        return key

    def _look(self) -> None:
        self._looks = False
        for rank in self.ranks:
            rank.fill()
            rank.look()
        if self._busy:
            return
        batch = self.world.local_batch_size
        if all(rank.rows >= batch or rank.over for rank in self.ranks) and any(rank.rows for rank in self.ranks):
            for rank in self.ranks:
                taken = min(batch, rank.rows)
                rank.rows -= taken
                self.trained += taken
            self._busy = True
            self.clock.after(self.world.step_s, self._stepped)
        elif all(rank.over for rank in self.ranks):
            for rank in self.ranks:
                self.feed.leave(self.key, rank.number)
            self._epoch += 1
            if self._epoch < self.world.epochs:
                self.key = self._open()
                self.look()

    def _stepped(self) -> None:
        self._busy = False
        if self._from is None and self.trained >= self.world.samples / 4:
            self._from = (self.clock.now, self.trained)
        self.look()


def simulate(world: World) -> Outcome:
    """Run a world."""
    return Simulation(world).go()
