"""One iteration over a DataLoader: it orders batches ahead, and yields them in the order of the sampler.

The user's thread runs the sampler, as in torch, so that random numbers are drawn where torch would draw them. A thread of the iteration
fetches finished batches, pins them and moves them to the device while the user's code trains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from torch._utils import ExceptionWrapper

from offload.errors import ConfigError, OffloadError, RunError
from offload.loader.batch_recipe import BatchOrder, FinishedBatches
from offload.loader.device import Finish
from offload.loader.job.loader_feed import NextBatches
from offload.loader.job.session import FeedSession
from offload.loader.remarks import Remarks, say
from offload.loader.state.epoch_progress import EpochProgress, too_few
from offload.loader.stats import MadeRates, WaitClock
from offload.pipeline.blocks.fetching import BlockLostError, BlocksAhead
from offload.pipeline.blocks.packing import unpack
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.preprocessing.unpicklable import used
from offload.pipeline.program.printed import PrintedLine
from offload.report.terminal.standard_streams import write_line
from offload.train.cluster.connection import answer
from offload.train.cluster.ray_processes import no_new_ray
from offload.uncaught import tells_all

READY = 2  # batches that are fetched before the user's code asks for them
LEAST_TAKEN = 4  # batches in one answer of the feed
PATIENCE_S = 0.5  # time between looks for the end of the iteration


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """What an iteration needs to know of its loader.

    Args:
        recipe: the work of a preprocessing process.
        workers: the number of processes that read an iterable data set.
        fresh: whether each of them serves this iteration alone.
        orders: the orders of a map-style data set; None for an iterable one.
        skip: the number of batches to leave out at the beginning of an iterable data set (``orders`` leave them out already).
        finish: what happens to a batch before the user gets it.
        timeout_s: how long the user waits for a batch, in seconds; 0: without end.
        owner: the loader's name.
        told_length: the length of an iterable data set, if the program asked for it.
        remarks: those of the loader.
    """

    recipe: Any
    workers: int
    fresh: bool
    orders: Iterator[BatchOrder] | None
    skip: int
    finish: Finish
    timeout_s: float
    owner: str
    told_length: int | None
    remarks: Remarks


class _End:
    """The end of an iteration, on its way through the queue."""


class Iteration:
    """The iterator over an iteration's batches. It ends itself when it is exhausted, closed, or no longer referenced."""

    loader: object = None  # keeps the loader, and with it the connection, as long as there is an iteration

    def __init__(self, plan: IterationPlan, session: FeedSession, progress: EpochProgress, clock: WaitClock) -> None:
        self._orders = plan.orders
        self._ordered = self._received = 0
        self._progress = progress
        self._timeout_s = plan.timeout_s
        self._told_length = plan.told_length
        self._clock = clock
        self._over = False
        self._samples = 0
        self._fetcher = _BatchFetcher(session, plan)
        self._failed: BaseException | None = None  # of the sampler
        self._pid = os.getpid()
        self._end = weakref.finalize(self, self._fetcher.close)
        self._end.atexit = False  # the session's own exit handler ends everything
        lead = self._fetcher.open()
        if self._orders is not None:
            self._order(lead)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if os.getpid() != self._pid:
            raise RunError(
                "an iteration cannot go on in a forked process: iterate there anew, in a process that was spawned."
            )
        if self._orders is not None:
            self._order(self._fetcher.lead)
            if self._received == self._ordered:
                self._end_epoch()
        with self._clock.waiting():
            item, samples = self._fetcher.get(self._timeout_s)
        if isinstance(item, BaseException):
            self.close()
            raise tells_all(item) if isinstance(item, OffloadError) else item
        if isinstance(item, _End):
            self._end_epoch()
        self._received += 1
        self._progress.batches += 1
        if isinstance(item, ExceptionWrapper):
            try:
                item.reraise()  # type: ignore[no-untyped-call]
            except BaseException as error:
                tells_all(error)
                raise
        if self._told_length is not None and self._received > self._told_length:
            warnings.warn(
                f"Length of IterableDataset is {self._told_length} according to its __len__, but it has yielded {self._received} batches. "
                "With num_workers > 0, every worker reads the whole data set, unless __iter__ takes the worker's share: see "
                "torch.utils.data.get_worker_info().",
                stacklevel=2,
            )
        self._samples = samples
        self._fetcher.hand_over(item)
        self._clock.count(samples)
        return item

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def _end_epoch(self) -> NoReturn:
        if self._failed is not None:
            self.close()
            raise self._failed
        self._progress.over = True
        self._clock.pause()
        self._fetcher.tell_counts()
        self.close()
        self.measure()
        raise StopIteration

    def close(self) -> None:
        """End the iteration: no more batches are made."""
        self._over = True
        self._orders = None
        self._end()

    def measure(self) -> None:
        """Tell the clock where it learns the feed's present rates, or the last ones of an iteration that has ended."""
        self._clock.ask = self._fetcher.asked()

    def with_samples(self) -> Iterator[tuple[Any, int]]:
        """Each batch with the number of its samples."""
        for batch in self:
            yield batch, self._samples

    def costs(self) -> list[tuple[float, float]]:
        """Core-seconds and bytes per sample of recent tasks."""
        return self._fetcher.asked()().costs

    def _order(self, lead: int) -> None:
        """Order batches until ``lead`` of them are under way, several at a time: a message costs a fraction of a millisecond."""
        assert self._orders is not None
        orders: list[BatchOrder] = []
        if self._ordered - self._received > lead - max(1, lead // 4):
            return
        try:
            while (
                self._failed is None
                and self._ordered - self._received < lead
                and (order := next(self._orders, None)) is not None
            ):
                orders.append(order)
                self._ordered += 1
        except Exception as error:  # raised after the batches before it, as torch would
            self._failed = error
        finally:
            if orders:
                self._fetcher.order(orders)


class _BatchFetcher:
    """The side of an iteration that knows the feed. Its thread holds no reference to the iteration, so that the garbage collector can
    end it."""

    def __init__(self, session: FeedSession, plan: IterationPlan) -> None:
        self.lead = 0
        self._name, self._session, self._plan = uuid.uuid4().hex, session, plan
        self._items: queue.Queue[Any] = queue.Queue(maxsize=READY)
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._packed: PackedRecipe | None = None
        self._feed: Any = session.feed
        self._last: Any = None  # the feed's answer to the end
        self._counted = False

    def open(self) -> int:
        """Begin to feed, and to fetch. Return the number of batches to order ahead."""
        self._packed = _packed(
            self._plan.recipe, self._plan.owner
        )  # this process owns it: it lives as long as the iteration
        self._session.begin(self._name)
        try:
            self._open()
        except ray.exceptions.RayActorError:  # it ended since the last iteration: nothing is lost
            self._session.lose_feed(self._feed)
            self._session.renew()
            try:
                self._open()
            except ray.exceptions.RayActorError as error:
                self._session.lose_feed(self._feed)
                raise _lost(error) from None
        threading.Thread(target=self._run, daemon=True, name="offload-loader").start()
        return self.lead

    def _open(self) -> None:
        self._feed, client = self._session.feed, self._session.client
        if self._plan.orders is not None:
            self.lead = answer(self._feed.open.remote(self._name, client, self._packed))
        else:
            workers, fresh = self._plan.workers, self._plan.fresh
            answer(self._feed.open_iterable.remote(self._name, client, self._packed, workers, fresh))

    def order(self, orders: list[BatchOrder]) -> None:
        """Order batches. Raises RunError if the connection to Ray has ended."""
        with no_new_ray():
            self._feed.order.remote(self._name, orders)

    def get(self, timeout_s: float) -> tuple[Any, int]:
        """The next batch, exception or end, and the number of its samples.

        Raises RuntimeError after ``timeout_s`` seconds, if it is not 0, as torch does.
        """
        until = time.monotonic() + timeout_s
        while True:
            wait_s = min(PATIENCE_S, max(until - time.monotonic(), 0.0)) if timeout_s else PATIENCE_S
            with contextlib.suppress(queue.Empty):
                item: tuple[Any, int] = self._items.get(timeout=wait_s)
                return item
            if timeout_s and time.monotonic() >= until:
                raise tells_all(RuntimeError(f"DataLoader timed out after {timeout_s} seconds"))
            if self._session.ended or not ray.is_initialized():
                raise RunError("the connection to Ray has ended during the iteration: iterate again.")

    def hand_over(self, batch: Any) -> None:
        """See :meth:`offload.loader.device.Finish.hand_over`."""
        self._plan.finish.hand_over(batch)

    def asked(self) -> Callable[[], MadeRates]:
        """A function that waits for the measurements: the present ones, or the last after the end. It keeps no data set."""
        ref = self._last
        if ref is None and not self._session.ended:
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                ref = self._feed.measured.remote(self._name)
        return functools.partial(_measured, self._session, ref)

    def tell_counts(self) -> None:
        """Say how many lines of the user's code were held back, if any were."""
        if self._counted and not self._session.ended:
            with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
                _show(answer(self._feed.counted.remote(self._name)))

    def close(self) -> None:
        """End the iteration. Never waits, since the garbage collector may call it on any thread."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        self._session.end(self._name)
        if not self._session.ended and ray.is_initialized():
            with contextlib.suppress(Exception), no_new_ray():
                self._last = self._feed.close.remote(self._name)

    def _run(self) -> None:
        try:
            self._plan.finish.begin()
            with no_new_ray():
                self._fetch()
        except ray.exceptions.RayActorError as error:
            self._session.lose_feed(self._feed)
            self._put(_lost(error))
        except BaseException as error:
            self._put(error if isinstance(error, OffloadError) else _lost(error))

    def _fetch(self) -> None:
        start, skip = 0, 0 if self._plan.orders is not None else self._plan.skip
        while not self._closed.is_set():
            want = max(LEAST_TAKEN, self.lead // 4)
            delivery: NextBatches = answer(self._feed.next_batches.remote(self._name, start, want))
            _show(delivery.printed)
            self._counted = delivery.counted
            if delivery.error is not None:
                raise delivery.error
            self.lead = max(delivery.lead, 1)
            for remark in delivery.remarks:
                say(remark)
            ahead = BlocksAhead(self._session.direct, [(place.ref, place.node) for place in delivery.places])
            for place in delivery.places:
                try:
                    block: FinishedBatches = ahead.block(place.ref)
                except BlockLostError:
                    answer(self._feed.make_again.remote(self._name, start))
                    break
                if start >= skip and not self._put(self._finished(block, place.item), block.samples_per_batch):
                    return
                start += 1
            else:
                if delivery.over:
                    self._put(_End() if start >= skip else too_few(skip, "data set", start))
                    return

    def _finished(self, block: FinishedBatches, item: int) -> Any:
        if block.stored:
            self._plan.remarks.once(
                "stored",
                f"the preprocessing processes change {block.stored}, each in its own copy of the data set: the program's does not change. "
                "Return with the samples what the program needs; num_workers of 1 or more says that each process may have its own",
            )
        try:
            batch = unpack(block.items[item])
            return batch if isinstance(batch, ExceptionWrapper) else self._plan.finish(batch)
        except Exception:
            return ExceptionWrapper(where="while offload.DataLoader finished a batch (pin_memory, on_device)")  # type: ignore[no-untyped-call]

    def _put(self, item: Any, samples: int = 0) -> bool:
        """Give the user's thread an item. False: the iteration is over."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put((item, samples), timeout=PATIENCE_S)
                return True
        return False


def _show(lines: Sequence[PrintedLine]) -> None:
    for line in lines:
        write_line(line.stream, line.text)


def _packed(recipe: Any, owner: str) -> PackedRecipe:
    try:
        return PackedRecipe.of(recipe, owner)
    except Exception as error:  # the user's classes may raise anything
        kind = type(recipe.dataset).__name__
        reason = used((recipe.dataset, recipe.collate_fn, recipe.worker_init_fn), error) or (
            f"{type(error).__name__}: {error}. Open files, connections and locks cannot be sent. Open them at the first __getitem__, or "
            f"let every process construct the data set itself with a method such as: def __reduce__(self): return {kind}, (self.path,)"
        )
        raise ConfigError(
            f"the data set {kind}, collate_fn or worker_init_fn cannot be sent to other processes: {reason}"
        ) from None


def _measured(session: FeedSession, ref: Any) -> MadeRates:
    if ref is not None and not session.ended:
        with contextlib.suppress(ray.exceptions.RayError, RunError), no_new_ray():
            measured: MadeRates = answer(ref)
            return measured
    return MadeRates({}, [])


def _lost(error: BaseException) -> RunError:
    lines = str(error).strip().splitlines()
    return RunError(
        f"the feed of the DataLoader is lost: {type(error).__name__}: {lines[0] if lines else 'no message'}. Iterate again."
    )
