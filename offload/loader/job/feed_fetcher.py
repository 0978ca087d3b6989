"""An iteration's batches from Ray: its fetcher orders them of the job's feed, and fetches them ahead on a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray

from offload.errors import OffloadError, RunError
from offload.loader.batch_recipe import BatchOrder, FinishedBatches, cannot_travel
from offload.loader.iterator import END, PATIENCE_S, IterationPlan, finished, timed_out
from offload.loader.job.loader_feed import NextBatches
from offload.loader.job.session import FeedSession
from offload.loader.remarks import say
from offload.loader.state.epoch_progress import too_few
from offload.loader.stats import MadeRates
from offload.pipeline.blocks.fetching import BlockLostError, BlocksAhead
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.program.printed import PrintedLine
from offload.report.terminal.standard_streams import write_line
from offload.train.cluster.connection import answer
from offload.train.cluster.ray_processes import no_new_ray

READY = 2  # batches that are fetched before the user's code asks for them
LEAST_TAKEN = 4  # batches in one answer of the feed


class FeedFetcher:
    """See :class:`offload.loader.iterator.Fetcher`. Its thread holds no reference to the iteration, so that the garbage collector can
    end it. ``owner``: the loader's name."""

    def __init__(self, session: FeedSession, plan: IterationPlan, owner: str) -> None:
        self.lead = 0
        self._name, self._session, self._plan, self._owner = uuid.uuid4().hex, session, plan, owner
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
            self._plan.recipe, self._owner
        )  # it lives as long as the iteration: this process owns it
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
                raise timed_out(timeout_s)
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

    def close(self, *, over: bool = False) -> None:
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
                if start >= skip and not self._put(finished(self._plan, block, place.item), block.samples_per_batch):
                    return
                start += 1
            else:
                if delivery.over:
                    self._put(END if start >= skip else too_few(skip, "data set", start))
                    return

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
        raise cannot_travel(recipe, error) from None


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
