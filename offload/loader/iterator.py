"""One iteration over a DataLoader: it orders batches ahead, and yields them in the order of the sampler.

The user's thread runs the sampler, as in torch, so that random numbers are drawn where torch would draw them. Where it stops: a
:class:`Fetcher` has the batches made, by an engine.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from torch._utils import ExceptionWrapper

from offload.errors import OffloadError, RunError
from offload.loader.batch_recipe import BatchOrder, FinishedBatches
from offload.loader.device import Finish
from offload.loader.remarks import Remarks
from offload.loader.state.epoch_progress import EpochProgress
from offload.loader.stats import MadeRates, WaitClock
from offload.pipeline.blocks.packing import unpack
from offload.uncaught import tells_all

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
    told_length: int | None
    remarks: Remarks


END: Final = object()
"""The end of an iterable data set, in the place of a batch."""


class Fetcher(Protocol):
    """The side of an iteration that knows an engine. It holds no reference to the iteration, so that the garbage collector can end it."""

    @property
    def lead(self) -> int:
        """The number of batches to order ahead."""

    def open(self) -> int:
        """Begin. Return the number of batches to order ahead."""

    def order(self, orders: list[BatchOrder]) -> None:
        """Order batches of a map-style data set. Raises RunError if nobody can make them any more."""

    def get(self, timeout_s: float) -> tuple[Any, int]:
        """The next batch, exception or END, and the number of its samples.

        Raises RuntimeError after ``timeout_s`` seconds, if it is not 0, as torch does.
        """

    def hand_over(self, batch: Any) -> None:
        """See :meth:`offload.loader.device.Finish.hand_over`."""

    def asked(self) -> Callable[[], MadeRates]:
        """A function that waits for the measurements: the present ones, or the last after the end. It keeps no data set."""

    def tell_counts(self) -> None:
        """Say how many lines of the user's code were held back, if any were."""

    def close(self, *, over: bool = False) -> None:
        """End the iteration. ``over``: the program has had all batches. Never waits, since the garbage collector may call it on any
        thread."""


class Iteration:
    """The iterator over an iteration's batches. It ends itself when it is exhausted, closed, or no longer referenced."""

    loader: object = None  # keeps the loader, and with it the connection, as long as there is an iteration

    def __init__(self, plan: IterationPlan, fetcher: Fetcher, progress: EpochProgress, clock: WaitClock) -> None:
        self._orders = plan.orders
        self._ordered = self._received = 0
        self._progress = progress
        self._timeout_s = plan.timeout_s
        self._told_length = plan.told_length
        self._clock = clock
        self._over = False
        self._samples = 0
        self._fetcher = fetcher
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
        if item is END:
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
        self._fetcher.close(over=True)
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


def finished(plan: IterationPlan, block: FinishedBatches, item: int) -> Any:
    """Batch ``item`` of a block, unpacked and finished, or an ExceptionWrapper."""
    if block.stored:
        plan.remarks.once(
            "stored",
            f"the preprocessing processes change {block.stored}, each in its own copy of the data set: the program's does not change. "
            "Return with the samples what the program needs; num_workers of 1 or more says that each process may have its own",
        )
    try:
        batch = unpack(block.items[item])
        return batch if isinstance(batch, ExceptionWrapper) else plan.finish(batch)
    except Exception:
        return ExceptionWrapper(where="while offload.DataLoader finished a batch (pin_memory, on_device)")  # type: ignore[no-untyped-call]


def timed_out(timeout_s: float) -> RuntimeError:
    """The error of a program that has waited this long for a batch, as torch words it."""
    return tells_all(RuntimeError(f"DataLoader timed out after {timeout_s} seconds"))
