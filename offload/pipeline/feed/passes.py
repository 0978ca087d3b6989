"""A pass under way, with the finished blocks of its tasks, put in order and shared out to the ranks.

A pass is one visit of a data set: an epoch of the training data, or one validation. A block is near a rank if the rank's own node made it;
otherwise it is far, and a network link carries it. Where near blocks had to wait for far ones that come before them, a slow link would
hold up all cores. So far blocks may be overtaken in a pass of random order. Where it stops: :mod:`offload.pipeline.feed.feed` decides which
tasks make the blocks, and when.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offload.errors import OffloadError, RunError, find_offload_error
from offload.pipeline.order.allot import Allotment, Share, Stripes
from offload.pipeline.order.parts import WHOLE, Part
from offload.pipeline.order.ranges import Missing, Ranges
from offload.pipeline.pool.losses import was_killed
from offload.pipeline.pool.task import Block

# A call that waits holds a thread of the hub. It comes back now and then, so that one of a worker that is gone ends.
TAKE_TIMEOUT_S = 5.0

Reach = Literal["any", "near", "far"]
"""Which blocks a rank asks for: those of its own node, those of other nodes, or both."""


class Slice(NamedTuple):
    """Rows ``[start, stop)`` of the block ``ref``, whose first row is number ``first`` of its pass. ``node`` holds the block; empty if
    unknown."""

    ref: Any
    start: int
    stop: int
    first: int
    node: str = ""


class _WaitingSlice(NamedTuple):
    """A slice that waits for its rank, with its bytes in a node's object store."""

    piece: Slice
    node: str = ""
    size_bytes: int = 0


class _RankLine:
    """What waits for one rank. ``near`` holds the slices of unknown nodes, too, and all of an ordered pass. ``changed``: tells the rank's
    calls that something came, or that nothing more will."""

    def __init__(self, lock: threading.RLock) -> None:
        self.near: deque[_WaitingSlice] = deque()
        self.far: deque[_WaitingSlice] = deque()
        self.owed = 0  # lost slices that tasks are making again
        # One lock for all lines of a pass, since a block may concern several of them.
        self.changed = threading.Condition(lock)

    def __bool__(self) -> bool:
        return bool(self.near or self.far)

    def pop(self, reach: Reach) -> _WaitingSlice | None:
        """The next slice within reach, taken out; None if there is none."""
        # Near first where both will do: a far slice occupies the link for a while, and the workers fetch those ahead
        # by other calls.
        if reach != "near" and self.far and not (reach == "any" and self.near):
            return self.far.popleft()
        return self.near.popleft() if self._holds_near(reach) else None

    def holds(self, reach: Reach) -> bool:
        """Return whether a slice is within reach."""
        return bool(self.far and reach != "near") or self._holds_near(reach)

    def clear(self) -> None:
        """Drop all slices."""
        self.near.clear()
        self.far.clear()

    def _holds_near(self, reach: Reach) -> bool:
        # A slice of an unknown node, such as one made again after a loss, goes to whichever call asks first.
        return bool(self.near) and (reach != "far" or not self.near[0].node)


class _FinishedBlocks:
    """Finished blocks that wait for those of earlier tasks."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}  # by the number of their task
        self._following = 0  # the number of the first task whose block has not left
        self._left_early: set[int] = set()  # the numbers of later tasks whose blocks have

    def put(self, number: int, block: Block) -> None:
        """Add the block of the ``number``-th task."""
        self._blocks[number] = block

    def pop(self, may_overtake: Callable[[], bool]) -> Block | None:
        """The block that leaves next; None if there is none. ``may_overtake``: whether one may leave before those of earlier tasks."""
        if self._following in self._blocks:
            number = self._following
        elif self._blocks and may_overtake():
            number = min(self._blocks)
        else:
            return None
        self._left_early.add(number)
        # Numbers are kept only as long as an earlier block is missing, so the set stays small in a long pass.
        while self._following in self._left_early:
            self._left_early.remove(self._following)
            self._following += 1
        return self._blocks.pop(number)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()


class _Delivered:
    """The blocks that have been put in order. The allotment counts them from 0, and may cut the newest ones later."""

    def __init__(self) -> None:
        self.rows = 0  # of all of them
        self._count = 0
        self._blocks: dict[int, tuple[Block, int]] = {}  # with the number of their first row in the pass

    def add(self, block: Block) -> None:
        """Add the next block."""
        self._blocks[self._count] = block, self.rows
        self.rows += block.cost.rows
        self._count += 1

    def at(self, number: int) -> tuple[Block, int]:
        """A block, and the number of its first row in the pass."""
        return self._blocks[number]

    def forget_before(self, number: int) -> None:
        """Drop earlier blocks: the allotment cuts them no more. Otherwise, the pass would keep all of its blocks in the object store."""
        for earlier in [kept for kept in self._blocks if kept < number]:
            del self._blocks[earlier]

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()


class _Transfers:
    """The slices that ranks were handed, and that have perhaps not arrived at them."""

    def __init__(self) -> None:
        self.bytes_from: Counter[str] = Counter()  # by the node that holds them
        self._under_way: defaultdict[tuple[int, Reach], deque[_WaitingSlice]] = defaultdict(deque)
        self._arrived: Counter[tuple[int, Reach]] = Counter()  # slices, lost ones included

    def begin(self, rank: int, reach: Reach, held: _WaitingSlice) -> None:
        """Note that a rank was handed this slice, on a request of this reach."""
        self.bytes_from[held.node] += held.size_bytes
        self._under_way[rank, reach].append(held)

    def end(self, rank: int, reach: Reach, count: int | None) -> Counter[str]:
        """Note that the first ``count`` slices of this reach have arrived; None: all. Return the bytes that are new, by node.

        Counts, not single slices: a message that arrives late, behind a newer one, then changes nothing.
        """
        sizes: Counter[str] = Counter()
        line = self._under_way[rank, reach]
        while line and (count is None or self._arrived[rank, reach] < count):
            held = line.popleft()
            self._arrived[rank, reach] += 1
            sizes[held.node] += held.size_bytes
        self.bytes_from.subtract(sizes)
        return sizes


@dataclass(frozen=True, kw_only=True)
class PassKey:
    """One visit of a data set. ``number`` counts the visits; for training data, it is the epoch."""

    attempt: int
    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """A rank's request for a pass.

    ``epoch`` determines the order and the random numbers, with the seed. ``done``: the positions already trained. ``first_rows``: the rows
    of the first global batch. ``batch``: the rows of every global batch if batches must hold the same rows for any number of workers; None
    if ranks take blocks as they come. ``part``: that of a feed beside others, whose ranks alone ``world_size`` and ``first_rows`` count.
    """

    world_size: int
    first_rows: int
    epoch: int
    done: tuple[tuple[int, int], ...] = ()
    followed: bool = False
    batch: int | None = None
    part: Part = WHOLE

    def of(self, part: Part) -> PassRequest:
        """The request, made to all feeds together, as the feed of this part gets it."""
        first_rows = self.first_rows // self.world_size * part.ranks
        return dataclasses.replace(self, world_size=part.ranks, first_rows=first_rows, part=part)

    def missing(self, samples: int) -> Missing:
        """The positions of a pass over so many samples that are to be handed out."""
        return self.part.missing(Ranges(self.done), samples)

    def rows(self, samples: int | None) -> int | None:
        """The number of rows to hand out; None if it is unknown."""
        if samples is None or self.part.whole:  # the positions of a pass over units are not below its number of samples
            return None if samples is None else samples - len(Ranges(self.done))
        return len(self.missing(samples))


class Pass:
    """A pass under way: its remaining tasks, its finished blocks, and the slices that wait for the workers.

    ``total``: its rows; None if unknown. ``homes``: the node of each rank, as far as known; ``preprocessing``: the nodes that make blocks;
    ``ordered``: blocks must come in the order of their tasks, from wherever.
    """

    def __init__(
        self,
        key: PassKey,
        request: PassRequest,
        total: int | None,
        *,
        homes: Mapping[int, str] | None = None,
        preprocessing: Callable[[], Collection[str]] = tuple,
        ordered: bool = True,
    ) -> None:
        self.key, self.request = key, request
        self._homes, self._preprocessing = homes if homes is not None else {}, preprocessing
        self.ordered = ordered or request.batch is not None
        self._lock = threading.RLock()
        # Each rank waits for its own line: of a hundred waiting calls, a block concerns two.
        self._lines = [_RankLine(self._lock) for _ in range(request.world_size)]
        self._room_changed = threading.Condition(self._lock)
        self.finished = self.closed = False
        self.error: OffloadError | None = None
        self.held_bytes: Counter[str] = Counter()  # of blocks that no worker has taken yet, by the node that holds them
        # Stripes need to know where the pass ends: its last, smaller batch is divided, too.
        self._allotment: Allotment | Stripes = Allotment(request.world_size, total)
        if request.batch is not None and total is not None:
            self._allotment = Stripes(request.world_size, request.batch, total)
        # A block's way: finished, delivered in order, cut into the lines of ranks, handed to them.
        self._finished, self._delivered, self._transfers = _FinishedBlocks(), _Delivered(), _Transfers()
        self._joined: set[int] = set()
        self._left: set[int] = set()

    @property
    def travelling(self) -> Counter[str]:
        """The bytes that workers have taken and that have not arrived, by node."""
        return self._transfers.bytes_from

    @property
    def delivered_rows(self) -> int:
        """The rows of all blocks that were put in order so far."""
        return self._delivered.rows

    def put(self, number: int, block: Block) -> None:
        """Add the finished block of the ``number``-th task. The pass delivers blocks in the order of their tasks, unless far ones may be
        overtaken. A closed pass drops it."""
        with self._lock:
            if self.closed:
                return
            self.held_bytes[block.node] += block.cost.size_bytes
            self._finished.put(number, block)
            while (ready := self._finished.pop(self._may_overtake)) is not None:
                self._delivered.add(ready)
                near = [rank for rank, home in list(self._homes.items()) if home == ready.node]
                self._share(self._allotment.add(ready.cost.rows, near))

    def _may_overtake(self) -> bool:
        """Return whether blocks may come in another order than their tasks. With cores on the workers' own nodes alone, no link is slow,
        and the order stays the same in every run."""
        return (
            not self.ordered and bool(self._homes) and not set(self._homes.values()).issuperset(self._preprocessing())
        )

    def end(self) -> None:
        """Note that there are no more blocks."""
        with self._lock:
            if not self.closed:  # otherwise, the blocks that the allotment still holds back are gone
                self._share(self._allotment.finish())
            self.finished = True
            self._wake_all()

    def fail(self, error: BaseException) -> None:
        """Preprocessing failed."""
        with self._lock:
            # The first error is the cause; those that follow are often its consequences.
            self.error = self.error or as_user_error(error)
            self._wake_all()

    def close(self) -> None:
        """Drop the rest of the pass, which nobody wants."""
        with self._lock:
            self.closed = True
            for line in self._lines:
                line.clear()
            self._finished.clear()
            self._delivered.clear()
            self.held_bytes.clear()
            self.travelling.clear()
            self._wake_all()

    def suits(self, request: PassRequest) -> bool:
        """Return whether this pass, started ahead, is the requested one."""
        mine, theirs = ((of.done, of.world_size, of.part) for of in (self.request, request))
        return mine == theirs

    def join(self, rank: int) -> None:
        """Note that this rank will take its share."""
        self._joined.add(rank)

    def leave(self, rank: int) -> bool:
        """Note that this rank takes no more: for it, the pass is over. Return whether all ranks have left."""
        with self._lock:
            self._left.add(rank)
            self._lines[rank].changed.notify_all()
            return len(self._left) == self.request.world_size

    def abandoned(self) -> bool:
        """Return whether all ranks that joined have left."""
        return self._joined <= self._left

    def next_slices(
        self, rank: int, want: int, reach: Reach = "any", timeout_s: float | None = None
    ) -> tuple[list[Slice], bool]:
        """See :meth:`Feed.next_slices`."""
        with self._lock:
            line, slices = self._lines[rank], list[Slice]()
            line.changed.wait_for(
                lambda: line.holds(reach) or self._over(rank) or self.error,
                timeout=TAKE_TIMEOUT_S if timeout_s is None else timeout_s,
            )
            if self.error is not None:
                raise self.error
            while len(slices) < want and (held := line.pop(reach)) is not None:
                self.held_bytes[held.node] -= held.size_bytes
                self._transfers.begin(rank, reach, held)
                slices.append(held.piece)
            self._room_changed.notify_all()
            return slices, not line.holds(reach) and self._over(rank)

    def arrived(self, rank: int, reach: Reach, count: int | None) -> Counter[str]:
        """The bytes of each node that have arrived at a rank since it last told: the first ``count`` slices of this reach have, or all
        (None)."""
        with self._lock:
            return self._transfers.end(rank, reach, count)

    def owe(self, rank: int) -> None:
        """Note that a slice of this rank is lost."""
        with self._lock:
            self._lines[rank].owed += 1

    def repay(self, rank: int, piece: Slice) -> None:
        """Add a lost slice that exists again."""
        with self._lock:
            line = self._lines[rank]
            line.owed -= 1
            line.near.append(_WaitingSlice(piece))
            line.changed.notify_all()

    def _wake_all(self) -> None:
        for line in self._lines:
            line.changed.notify_all()
        self._room_changed.notify_all()

    def _over(self, rank: int) -> bool:
        # A lost slice that is being made again comes after the end of the tasks, so the rank must wait for it.
        return self.closed or rank in self._left or (self.finished and not self._lines[rank].owed)

    def wait_for_room(self, limit: float) -> bool:
        """Wait until the pass holds less than ``limit`` bytes, or some rank has nothing to take. False: no rank wants more."""
        with self._lock:
            self._room_changed.wait_for(lambda: self.closed or self.held_bytes.total() < limit or self.starving())
            return not self.closed

    def starving(self) -> bool:
        """Return whether some rank has nothing to take. All other ranks may be waiting for it: they train in step."""
        return not all(self._lines)

    def waited_for(self) -> bool:
        """Return whether some rank waits for a block of this pass."""
        open_to = self._joined - self._left
        return bool(open_to) and not (self.finished or self.closed or self.error) and self.starving()

    def _share(self, shares: list[Share]) -> None:
        """Append these shares of delivered blocks to the lines of their ranks."""
        for share in shares:
            block, first = self._delivered.at(share.block)
            # In proportion: nobody has measured the bytes of single rows.
            size = block.cost.size_bytes * share.rows // max(block.cost.rows, 1)
            piece = Slice(block.ref, share.start, share.stop, first, block.node)
            line, home = self._lines[share.rank], self._homes.get(share.rank)
            far = not self.ordered and home is not None and block.node not in ("", home)
            (line.far if far else line.near).append(_WaitingSlice(piece, block.node, size))
            line.changed.notify_all()
        # Shares come in the order of their blocks, so older blocks than the newest are completely shared out.
        self._delivered.forget_before(max((share.block for share in shares), default=-1))


def as_user_error(error: BaseException) -> OffloadError:
    """The error of preprocessing that a user can act on: the first one inside ``error``, or a description of it."""
    own = find_offload_error(error)
    if own is not None:
        return own
    lines = str(error).strip().splitlines()
    if was_killed(error):
        return RunError(
            "preprocessing failed: the processes that got the same samples have died, one after the other. A library of the data set or "
            f"of the transform crashes on them, or the node has too little memory. Last: {lines[-1].strip() if lines else 'nothing'}"
        )
    return RunError(f"preprocessing failed: {type(error).__name__}: {lines[-1] if lines else 'no message'}.")
