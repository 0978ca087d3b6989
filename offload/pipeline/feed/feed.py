"""The feed, the part of the hub that hands preprocessed blocks, as references, to the workers.

A pass is one visit of a data set: an epoch of the training data, or one validation. An engine makes its blocks, and the feed delivers them
in the order of the pass. While the last blocks of an epoch are made, those of the next one start.

Where it stops: engines cut a pass into tasks (:mod:`offload.pipeline.feed.engine`), and workers cut blocks into batches
(:mod:`offload.train.worker.data.batches`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import RunError
from offload.pipeline.blocks.sender import BlockSenders
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.feed.engine import Engine
from offload.pipeline.feed.meter import Meter
from offload.pipeline.feed.pace import Pace
from offload.pipeline.feed.passes import Pass, PassKey, PassRequest, Reach, Slice
from offload.pipeline.feed.pool_engine import PoolEngine
from offload.pipeline.feed.ray_engine import RayDataEngine
from offload.pipeline.pool.pool import Pool, PoolMaker


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The measurements of preprocessing at one moment.

    Args:
        rates: see :meth:`Feed.rates`.
        cores: see :meth:`Feed.core_counts`.
        let_go: see :meth:`Feed.let_go`.
        speeds: see :meth:`Feed.speeds`.
        process_bytes: see :meth:`Feed.process_bytes`.
        spent: see :meth:`Feed.spent`.
    """

    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    cores: tuple[int, int] = (0, 0)
    let_go: int = 0
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    process_bytes: int = 0
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)


class FeedListener:
    """Hears what happens in a feed. By default, it ignores everything."""

    def lost(self, node: str, error: BaseException) -> None:
        """A preprocessing process on this node died."""

    def works(self, node: str) -> None:
        """This node has made its first block."""


class Feed:
    """The part of the hub that feeds the workers. Its methods block, and run on many threads.

    Args:
        streams: the data sets, by name.
        cores: the cores that preprocess at first.
        pool: makes the pool of preprocessing processes.
        handle: the hub's own, to which processes report.
        clock: tells the time in seconds.
        listener: hears of lost processes and of nodes that begin.
    """

    def __init__(
        self,
        streams: dict[str, FeedDataset],
        cores: Cores,
        pool: PoolMaker = Pool,
        handle: Any = None,
        clock: Callable[[], float] = time.monotonic,
        listener: FeedListener | None = None,
    ) -> None:
        self.streams, self.cores, self.handle = streams, cores, handle
        self._listener = listener or FeedListener()
        self.meters = {
            name: Meter(lambda: self.cores.by_node, shared=stream.shared) for name, stream in streams.items()
        }
        # The lock of a single pass is taken while this one is held, never the other way round: two threads could
        # otherwise wait for each other.
        self.lock = threading.RLock()
        self.pace = Pace(clock)
        self._homes: dict[int, str] = {}  # the node of each rank
        self._expected = frozenset[str]()
        self._passes: dict[PassKey, Pass] = {}
        self._failure: BaseException | None = None
        self._attempt = self._reshaped = self._let_go = 0
        self._surplus: list[threading.Event] = []  # of the newest reshape
        self._senders = BlockSenders(cores.runtime_env, lambda: self.cores.by_node)
        pooled = any(stream.pooled for stream in streams.values())
        self.pool = PoolEngine(self, pool) if pooled else None
        self._ray_data = RayDataEngine(self)
        self._engines: list[Engine] = [engine for engine in (self.pool, self._ray_data) if engine is not None]

    def begin(self, attempt: int) -> None:
        """Start to feed a new worker group; drop all passes of earlier groups."""
        with self.lock:
            self._attempt = attempt
            self._homes.clear()
            for key in [k for k in self._passes if k.attempt != self._attempt]:
                self._drop(key)
            self._look()

    def start_ahead(self, request: PassRequest, name: str, homes: Collection[str] = ()) -> None:
        """Start the first pass of the first attempt while its workers are still starting, on the nodes ``homes``. It is too late once they
        have begun: no worker would take the blocks."""
        with self.lock:
            if self._attempt:
                return
            self._expected = frozenset(homes)
            self._start(PassKey(attempt=self._attempt + 1, name=name, number=request.epoch), request)

    def open(self, key: PassKey, request: PassRequest, rank: int, node: str = "") -> int | None:
        """Join a pass; the first rank that joins starts it. Return the number of rows that it will deliver, None if unknown. ``node``: the
        rank's own node; empty if unknown."""
        with self.lock:
            if node:
                self._homes[rank] = node
            current = self._passes.get(key)
            if current is not None and not current.suits(request):
                self._drop(key)  # started ahead, but the epoch was partly trained, or the worker group has changed
                current = None
            if current is None:
                self._start(key, request)
            else:
                # Only the rank's own request says whether another epoch follows: the driver, which started this pass
                # ahead, does not know.
                current.request = request
                if self._engine(key).exhausted(key):
                    self.issued(current)
            self._passes[key].join(rank)
            # If one rank alone visits a data set, the other ranks never leave its passes.
            older = [k for k in self._passes if k.name == key.name and k.number < key.number]
            for old in [k for k in older if self._passes[k].abandoned()]:
                self._drop(old)
        self._look()
        return request.rows(self.streams[key.name].samples)

    def next_slices(
        self,
        key: PassKey,
        rank: int,
        want: int = 1,
        reach: Reach = "any",
        arrived: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[Slice], bool]:
        """Hand this rank up to ``want`` slices. Return them, and whether the pass is over for it. ``reach``: which slices. ``arrived``: see
        :meth:`arrived`; None: all that the rank was handed.

        Waits ``timeout_s``, by default a few seconds, for the first slice. After an empty answer before the end, the rank asks again.
        Raises the error of preprocessing, if it failed.
        """
        current = self._passes.get(key)
        if current is None:
            return [], True
        self._note_arrived(current, rank, reach, arrived)
        # Without the feed's lock: this call waits, and the cores need that lock for their next tasks.
        slices, over = current.next_slices(rank, want, reach, timeout_s)
        self._look()
        return slices, over

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        """Note that a rank has got its first ``arrived`` slices of this reach, those included that were lost.

        A rank whose request for more still waits tells it so. Otherwise, tasks that wait for the link's pace would wait for the request's
        timeout.
        """
        if (current := self._passes.get(key)) is not None:
            self._note_arrived(current, rank, reach, arrived)
            self._look()

    def _note_arrived(self, current: Pass, rank: int, reach: Reach, arrived: int | None) -> None:
        sizes, homes = current.arrived(rank, reach, arrived), self.homes()
        self.pace.carried(
            {node: size for node, size in sizes.items() if node not in homes},
            more=any(size > 0 for node, size in self.travelling().items() if node not in homes),
        )

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        """Make a slice again that this rank cannot fetch because its node is gone."""
        current = self._passes.get(key)
        if current is not None:
            self._engine(key).again(current, rank, piece)

    def sender(self, node: str) -> Any:
        """The actor that sends the blocks of a node to workers on other nodes, :class:`BlockSender`. None while it starts, or if the node
        does not preprocess."""
        return self._senders.of(node)

    def leave(self, key: PassKey, rank: int) -> None:
        """Note that this rank takes no more of a pass, at its end or earlier. Once all ranks have left, drop the pass."""
        with self.lock:
            current = self._passes.get(key)
            if current is not None and current.leave(rank):
                self._drop(key)
        self._look()

    def failed(self, error: BaseException) -> None:
        """Raise an engine's error in every call that waits for a block, now and later: the engine cannot go on."""
        with self.lock:
            self._failure = error
            for current in self._passes.values():
                current.fail(error)

    def close(self) -> None:
        """Start nothing any more, and drop all passes: the run is over."""
        if self.pool is not None:
            self.pool.close()
        with self.lock:
            for key in list(self._passes):
                self._drop(key)

    def lost(self, node: str, error: BaseException) -> None:
        """The pool reports that a core's process died."""
        self._listener.lost(node, error)

    def works(self, node: str) -> None:
        """The pool reports a node's first block."""
        self._listener.works(node)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """Fail the run: a preprocessing process ends because its call cannot be interrupted."""
        self.failed(
            RunError(
                f"{what} on {node} took longer than sample_timeout_s={seconds:g}, and cannot be interrupted, so it cannot be skipped. "
                "Repair or remove the sample."
            )
        )

    def reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int | None = None
    ) -> bool:
        """Preprocess on these nodes from now on, one core for each mention; ``stores``: the present object stores.

        Return whether the surplus cores finished their last tasks in time. ``number``: a serial number. Ray does not keep the order of
        calls: one that arrives behind a call with a higher number changes nothing.
        """
        return self.begin_reshape(nodes, stores, number)(timeout_s)

    def begin_reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], number: int | None = None
    ) -> Callable[[float], bool]:
        """As :meth:`reshape`, but return a function at once, which waits for so many seconds for the surplus cores."""
        with self.lock:
            if number is not None:
                # The newer call has set the cores already. This one has nothing to wait for.
                if number < self._reshaped:
                    return lambda timeout_s: True
                self._reshaped = number
            # A failure of the old cores says nothing about the new ones: passes that begin from now on may work.
            self.cores, self._failure = dataclasses.replace(self.cores, nodes=nodes, stores=stores), None
            for meter in self.meters.values():
                meter.reshaped()
            surplus = self._surplus = [engine.reshape() for engine in self._engines]
        self._senders.end_unused()

        def wait(timeout_s: float) -> bool:
            until = time.monotonic() + timeout_s
            # Outside the lock: the surplus cores must be able to hand in their last blocks.
            return all(released.wait(max(until - time.monotonic(), 0.0)) for released in surplus)

        return wait

    def starving(self) -> str:
        """The data set for whose blocks workers wait while no preprocessing process runs, or while Ray Data makes them; empty if they wait
        for none."""
        waited_for = [key.name for key, current in list(self._passes.items()) if current.waited_for()]
        return next((name for name in waited_for if self.executed(name) or not (self.pool and self.pool.runs())), "")

    def executed(self, name: str) -> bool:
        """Return whether Ray Data executes a data set."""
        return not self.streams[name].pooled

    def reserves_cores(self) -> bool:
        """Return whether all preprocessing processes run, and reserve CPUs of Ray."""
        return self.pool is not None and self.pool.reserves()

    def supply(self) -> Supply:
        """All measurements at once."""
        return Supply(
            rates=self.rates(),
            cores=self.core_counts(),
            let_go=self.let_go(),
            speeds=self.speeds(),
            process_bytes=self.process_bytes(),
            spent=self.spent(),
        )

    def rates(self) -> dict[str, dict[str, float]]:
        """The measured rates of each data set's preprocessing."""
        return {name: meter.summary() for name, meter in self.meters.items()}

    def speeds(self) -> dict[str, dict[str, float]]:
        """The speed of each node's cores for each data set; see :meth:`Meter.speeds`."""
        return {name: meter.speeds() for name, meter in self.meters.items()}

    def process_bytes(self) -> int:
        """The largest private memory measured in a preprocessing process, in bytes; 0 before the first measurement."""
        return max((meter.process_bytes for meter in self.meters.values()), default=0)

    def core_counts(self) -> tuple[int, int]:
        """The number of cores that should preprocess, and the number of those whose processes are still starting."""
        with self.lock:
            return self.cores.cores, sum(engine.starting() for engine in self._engines)

    def let_go(self) -> int:
        """The serial number of the newest reshape whose surplus cores, and those of all before, preprocess no more."""
        with self.lock:
            if all(released.is_set() for released in self._surplus):
                self._let_go = self._reshaped
            return self._let_go

    def spent(self) -> dict[str, tuple[int, float]]:
        """The number of cores of each node that should preprocess, and the CPU seconds of its finished tasks, over all data sets."""
        cores, cpu_s = Counter(self.cores.by_node), Counter[str]()
        for meter in self.meters.values():
            cpu_s.update(meter.cpu_s())  # a counter adds up seconds as well
        return {node: (cores[node], float(cpu_s[node])) for node in {*cores, *cpu_s}}

    def costs(self, name: str) -> list[tuple[float, float]]:
        """The costs of a data set's newest tasks: core-seconds and bytes per sample."""
        return self.meters[name].costs()

    def homes(self) -> frozenset[str]:
        """The nodes of the workers, or those on which they are starting; empty if unknown."""
        return frozenset(self._homes.values()) or self._expected

    def held(self) -> Counter[str]:
        """The bytes of blocks that no worker has taken yet, by node."""
        return _sums(current.held_bytes for current in list(self._passes.values()))

    def travelling(self) -> Counter[str]:
        """The bytes that workers have taken and that have not arrived, by node."""
        return _sums(current.travelling for current in list(self._passes.values()))

    def issued(self, current: Pass) -> None:
        """All blocks of a pass are made or under way: start the next epoch's, for the cores that find no more work in this one."""
        if not current.request.followed:
            return
        key = PassKey(attempt=current.key.attempt, name=current.key.name, number=current.key.number + 1)
        if key not in self._passes:
            epoch = current.request.epoch + 1
            self._start(key, dataclasses.replace(current.request, epoch=epoch, done=(), followed=False))

    def _engine(self, key: PassKey) -> Engine:
        if self.pool is not None and self.streams[key.name].pooled:
            return self.pool
        return self._ray_data

    def _start(self, key: PassKey, request: PassRequest) -> None:
        stream = self.streams[key.name]
        started = self._passes[key] = Pass(
            key,
            request,
            request.rows(stream.samples),
            homes=self._homes,
            preprocessing=lambda: self.cores.by_node,
            ordered=not stream.shuffle,
        )
        if self._failure is not None:
            # Nobody would make its blocks, and its workers would wait forever.
            started.fail(self._failure)
        try:
            self._engine(key).start(started)
        except RunError as error:
            started.fail(error)

    def _drop(self, key: PassKey) -> None:
        self._passes.pop(key).close()
        self._engine(key).drop(key)

    def _look(self) -> None:
        for engine in self._engines:
            engine.look()


def _sums(counts: Iterable[Counter[str]]) -> Counter[str]:
    sums = Counter[str]()
    for count in counts:
        sums.update(count.copy())  # a copy at once: blocks arrive meanwhile
    return sums
