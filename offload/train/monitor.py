"""The run's notice board: part of an actor that workers write to and the driver reads.

Workers push what they measured and what happened; the answer is the driver's newest orders. The driver polls and writes the
run directory. Where it stops: nothing is decided here.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from offload.adapt.commits import failures_per_s
from offload.measure.steps import Totals
from offload.train.config import BatchSplit
from offload.train.watchdog import Watchdog

HUNG = 70  # exit status of a process that hung
FAILURES = 2  # of workers on a node, within FORGET_S, after which it is done without
FORGET_S = 3600.0
FRUITLESS = 3  # attempts in a row that got no further than the one before


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the driver tells the workers: to stop, to commit and wait for another number of workers, and ``batch``: for how
    many workers, with which local batch size and accumulation steps global batches are to be cut (None: as they are).
    ``learned``: what adaptation learned, to be kept with checkpoints; ``most_local``: the largest local batch that may be
    tried again, after one that the device's memory did not hold; ``entries_followed``: the entries of the schedule of worker
    counts up to which the driver has done what it can."""

    stop: bool = False
    resize: bool = False
    batch: tuple[int, int, int] | None = None
    learned: dict[str, Any] | None = None
    most_local: int | None = None
    entries_followed: int = 0


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """How far adaptation is, told by rank 0.

    Args:
        workers: that train.
        batch: local batch size and accumulation steps of the newest step.
        changes: how often that changed since the worker started: totals between two of them belong to no one batch.
        useful: progress in samples as useful as those of initial batches.
        noise: ``(sqr, var)`` of all parameters at the initial batch; None before the first estimate.
        goal: of ``useful``; None where it is not known.
        learned: what the checkpoint that training resumed from held of :attr:`Orders.learned`.
        most_local: the largest local batch that fits into the device's memory, as far as that is known.
    """

    workers: int = 0
    batch: tuple[int, int] = (0, 0)
    changes: int = 0
    useful: float = 0.0
    noise: tuple[float, float] | None = None
    goal: float | None = None
    learned: dict[str, Any] | None = None
    most_local: int | None = None


@dataclass(frozen=True, kw_only=True)
class Push:
    """What one rank tells: where it runs, its totals since it started, how far the run is (steps, samples of all ranks), and news since the
    last push."""

    rank: int
    totals: Totals
    epoch: int
    step: int
    samples: int
    node: str = ""
    adapted: Adapted = field(default_factory=Adapted)
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class News:
    """What the driver gets: each rank's newest totals, those of the worker groups before (their number of workers, and all
    ranks' totals), what each data set's preprocessing was measured at, how many cores are to preprocess and how many of them
    have no process yet, all events since ``cursor``, how many worker groups were started, whether one is running, how many failed,
    the nodes of the workers that died last, :attr:`Orders.most_local`, the nodes on which workers failed repeatedly, those that hold
    workers now, how fast each node's cores are at each data set, and the most memory that a preprocessing process was seen to hold."""

    cursor: int
    totals: dict[int, Totals]
    epoch: int
    step: int
    samples: int
    metrics: dict[str, float]
    events: tuple[dict[str, Any], ...]
    past: tuple[tuple[int, Totals], ...] = ()
    adapted: Adapted = field(default_factory=Adapted)
    attempts: int = 0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    cores: tuple[int, int] = (0, 0)
    running: bool = False
    failures: int = 0
    suspects: tuple[str, ...] = ()
    most_local: int | None = None
    failing: tuple[str, ...] = ()
    worker_nodes: tuple[str, ...] = ()
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    process_bytes: int = 0


def sum_of(totals: Mapping[int, Totals]) -> Totals:
    """The ranks' totals together."""
    together = Totals()
    for each in totals.values():
        together = together.plus(each)
    return together


class Monitor:
    """What the actor answers. Its methods run on several threads. ``rates``, ``cores``, ``speeds``, ``process_bytes``:
    where to ask for those; ``workers``: how many to begin with; ``nodes``: of the cluster."""

    def __init__(
        self,
        rates: Callable[[], dict[str, dict[str, float]]] = dict,
        cores: Callable[[], tuple[int, int]] = lambda: (0, 0),
        speeds: Callable[[], dict[str, dict[str, float]]] = dict,
        process_bytes: Callable[[], int] = int,
        *,
        workers: int = 1,
        nodes: int = 1,
    ) -> None:
        self._rates_now, self._cores_now, self._speeds_now = rates, cores, speeds
        self._process_bytes_now = process_bytes
        self._board = threading.Lock()
        self._totals: dict[int, Totals] = {}
        self._past: list[tuple[int, Totals]] = []
        self._metrics: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._epoch = self._step = self._samples = 0
        self._adapted = Adapted()
        self._orders = Orders()
        self._changed = threading.Condition(self._board)
        self._ready = self._stale = self._running = False
        self._wanted = workers
        self._node_of: dict[int, str] = {}
        self._failed_at: dict[str, list[float]] = {}
        self._suspects: tuple[str, ...] = ()
        self._avoided: tuple[str, ...] = ()
        self._nodes, self._began_at, self._failures = nodes, time.monotonic(), 0
        self._fruitless = self._attempts = 0
        self._furthest = -1

    def push(self, push: Push) -> Orders:
        """Take in what a rank tells; returns the newest orders."""
        with self._board:
            self._totals[push.rank] = push.totals
            self._node_of[push.rank] = push.node
            if push.rank == 0:
                self._epoch, self._step, self._samples = push.epoch, push.step, push.samples
                self._adapted = push.adapted
                self._running = push.adapted.workers > 0
                self._metrics.update(push.metrics)
            self._events.extend(push.events)
            return self._orders

    def read(self, cursor: int) -> News:
        """Everything since ``cursor``."""
        with self._board:
            return News(
                cursor=len(self._events),
                totals=dict(self._totals),
                past=tuple(self._past),
                epoch=self._epoch,
                step=self._step,
                samples=self._samples,
                metrics=dict(self._metrics),
                events=tuple(self._events[cursor:]),
                adapted=self._adapted,
                attempts=self._attempts,
                rates=self._rates_now(),
                cores=self._cores_now(),
                running=self._running,
                failures=self._failures,
                suspects=self._suspects,
                most_local=self._orders.most_local,
                failing=tuple(node for node, at in self._failed_at.items() if len(at) >= FAILURES),
                worker_nodes=tuple(set(self._node_of.values())),
                speeds=self._speeds_now(),
                process_bytes=self._process_bytes_now(),
            )

    def looked(self, wanted: int, failures: int) -> None:
        """The driver has looked at the cluster, knowing of so many failures, and wants this many workers."""
        with self._changed:
            self._wanted = wanted
            self._stale = self._stale and failures < self._failures
            self._changed.notify_all()

    def note(self, kind: str, **values: Any) -> None:
        """An event of the actor's own."""
        with self._board:
            self._events.append({"event": kind, "at": time.time(), "rank": None, **values})

    def anew(self) -> None:
        """Another worker group starts: totals are its own, and a resize that was ordered is done."""
        with self._board:
            if self._totals:
                self._past.append((max(self._adapted.workers, 1), sum_of(self._totals)))
            self._totals.clear()
            self._node_of.clear()
            self._adapted = Adapted()
            self._orders = replace(self._orders, resize=False)
            self._ready = self._running = False
            self._attempts += 1

    def ready_to_resize(self) -> None:
        """Rank 0: all ranks have committed, and wait to be ended."""
        with self._changed:
            self._ready = True
            self._changed.notify_all()

    def replace_workers(self, wanted: int) -> None:
        """The driver: end the workers as they are, and start ``wanted`` others from the last checkpoint."""
        with self._changed:
            self._orders = replace(self._orders, resize=True)
            self._wanted, self._ready = wanted, True
            self._changed.notify_all()

    def wait_until_ready(self, timeout_s: float) -> int:
        """How many workers are to take over from those that train, once these are ready for it; 0 where that is not so
        within the time, or nobody asked for it. Said once: the next look may come before the next workers began."""
        with self._changed:
            if not self._orders.resize or self._orders.stop:
                return 0
            self._changed.wait_for(lambda: self._ready, timeout_s)
            if not (self._ready and self._wanted):
                return 0
            self._ready = False
            return self._wanted

    def wanted_now(self, timeout_s: float) -> int:
        """How many workers to start; 0 for none at present. After a failure the driver looks first at what is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stale and self._wanted, timeout_s)
            return 0 if self._stale else self._wanted

    def worker_failed(self, reason: str, ranks: Sequence[int] = ()) -> bool:
        """Processes of these ranks died; without any, one did of which it is not known yet which: its peers noticed before Ray.
        Returns whether to try again: not when several attempts in a row got no further."""
        self.note("worker_lost", reason=reason)
        with self._changed:
            self._failures += 1
            self._running = False
            now = time.monotonic()
            died_on = {self._node_of[rank] for rank in ranks if rank in self._node_of}
            self._suspects = tuple(died_on if ranks else set(self._node_of.values()))
            for node in died_on:
                recent = [at for at in self._failed_at.get(node, []) if now - at < FORGET_S]
                self._failed_at[node] = [*recent, now]
            self._fruitless = 0 if self._step > self._furthest else self._fruitless + 1
            self._furthest = max(self._furthest, self._step)
            self._stale = True
            return self._fruitless < FRUITLESS

    def order(self, orders: Orders, wanted: int | None = None) -> None:
        """From now on tell the workers this; ``wanted``: how many are to take over. What was ordered to end a worker group
        stays ordered until it has ended. What was learned, and the batch, stay where the new orders say nothing of them: who
        orders workers to leave a node knows of neither."""
        with self._board:
            before = self._orders
            self._orders = replace(
                orders,
                stop=before.stop or orders.stop,
                resize=before.resize or orders.resize,
                most_local=before.most_local,
                batch=_within(orders.batch or before.batch, before.most_local),
                learned=orders.learned or before.learned,
                entries_followed=max(orders.entries_followed, before.entries_followed),
            )
            self._wanted = self._wanted if wanted is None else wanted

    def avoid(self, nodes: tuple[str, ...]) -> None:
        """The driver: no worker on these nodes."""
        self._avoided = nodes

    def avoided(self) -> tuple[str, ...]:
        """Nodes that are to hold no worker."""
        return self._avoided

    def out_of_memory(self, rank: int, split: BatchSplit) -> bool:
        """A local batch did not fit into the device's memory: from now on they are half as large at most. False where
        there is nothing left to halve."""
        with self._board:
            most = min(split.local_batch_size // 2, self._orders.most_local or split.local_batch_size)
            if most < 1:
                return False
            smaller = split.with_local_at_most(most)
            self._events.append(
                {
                    "event": "out_of_memory",
                    "at": time.time(),
                    "rank": rank,
                    "did_not_fit": split.local_batch_size,
                    "local_batch_size": smaller.local_batch_size,
                    "accum_steps": smaller.accum_steps,
                }
            )
            batch = _within(self._orders.batch, most) or (split.workers, smaller.local_batch_size, smaller.accum_steps)
            self._orders = replace(self._orders, most_local=most, batch=batch)
            return True

    def failures_per_s(self) -> float:
        """How often this run is interrupted, as far as is known."""
        with self._board:
            return failures_per_s(self._failures, time.monotonic() - self._began_at, self._nodes)

    def orders(self) -> Orders:
        """What the workers are told now."""
        return self._orders


def _within(batch: tuple[int, int, int] | None, most_local: int | None) -> tuple[int, int, int] | None:
    """An ordered batch, in local batches of ``most_local`` at most."""
    if batch is None:
        return None
    workers, local, accum = batch
    split = BatchSplit(local_batch_size=local, accum_steps=accum, workers=workers).with_local_at_most(most_local)
    return workers, split.local_batch_size, split.accum_steps


class Reporter:
    """A worker's side: pushes every ``interval_s`` from a thread, and at once when asked. Ends the process when ``watchdog``
    says that it hangs."""

    def __init__(self, monitor: Any, rank: int, watchdog: Watchdog | None = None, interval_s: float = 2.0) -> None:
        self.orders = Orders()
        self.totals = Totals()
        self.adapted = Adapted()
        self.epoch = self.step = self.samples = 0
        self._monitor, self._rank, self._interval_s = monitor, rank, interval_s
        self._node = ray.get_runtime_context().get_node_id()
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")
        self._thread.start()

    def event(self, kind: str, **values: Any) -> None:
        """Something happened; goes to ``events.jsonl``."""
        with self._lock:
            self._events.append({"event": kind, "at": time.time(), "rank": self._rank, **values})

    def metrics(self, values: dict[str, float]) -> None:
        """The newest values of the user's metrics, for the live line."""
        with self._lock:
            self._metrics.update(values)

    def flush(self) -> None:
        """Push now, and learn the newest orders."""
        with self._lock:
            events, self._events = tuple(self._events), []
            push = Push(
                rank=self._rank,
                totals=self.totals,
                epoch=self.epoch,
                step=self.step,
                samples=self.samples,
                node=self._node,
                adapted=self.adapted,
                metrics=dict(self._metrics),
                events=events,
            )
        self.orders = ray.get(self._monitor.push.remote(push))

    def close(self) -> None:
        """Push what is left and end the thread."""
        self._ended.set()
        self._thread.join(timeout=5)
        self.flush()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._watch()
                self.flush()
            except ray.exceptions.RayError:
                return  # the driver is gone; the worker will be stopped

    def _watch(self) -> None:
        where = self._watchdog.hung_at() if self._watchdog is not None else None
        if self._watchdog is None or where is None:
            return
        self.event("worker_hung", deadline_s=self._watchdog.deadline_s, where=where)
        self.flush()
        os._exit(HUNG)  # nothing gentler ends a thread that hangs


class Forward(io.TextIOBase):
    """A text stream that forwards whole lines to the driver, and to the worker's own log."""

    def __init__(self, reporter: Reporter, log: Any) -> None:
        self._reporter, self._log = reporter, log
        self._rest = ""

    def write(self, text: str) -> int:
        self._log.write(text)
        lines, _, self._rest = (self._rest + text).rpartition("\n")
        if lines:
            self._reporter.event("print", text=lines)
        return len(text)

    def flush(self) -> None:
        self._log.flush()
