"""The work of a preprocessing process for a DataLoader: it fetches the samples of a batch, and collates them.

It follows torch's own worker processes, with one difference. There, the random numbers of an augmentation depend on the process that
happens to load a sample, and on all samples that it loaded before. Here they depend on the loader's seed and on the sample's place in the
order of the sampler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._utils import ExceptionWrapper

from offload.errors import FAILURES, ConfigError
from offload.loader.attribute_watch import StoredWatch
from offload.pipeline.blocks.packing import Packed, pack
from offload.pipeline.feed.sizing import BATCH_TASK_S
from offload.pipeline.order.shuffling import mix
from offload.pipeline.preprocessing.environment import hold_to_one_core
from offload.pipeline.preprocessing.randomness import seed_generators
from offload.pipeline.preprocessing.unpicklable import used
from offload.pipeline.preprocessing.worker_role import in_role, once, seed_as_torch
from offload.pipeline.program.remedies import remedy
from offload.pipeline.program.surroundings import Program
from offload.uncaught import without_own

if TYPE_CHECKING:
    from offload.pipeline.preprocessing.block import Scratch
    from offload.pipeline.preprocessing.watchdog import Watch


class BatchOrder(NamedTuple):
    """A batch to make.

    Args:
        number: its place among the orders of the iteration.
        batch: its place in the epoch, which differs after a resume.
        indices: what the sampler gave, a list of indices or, without automatic batching, one index.
        first: the number of samples before it in the epoch.
        seed: the seed of the epoch.
    """

    number: int
    batch: int
    indices: Any
    first: int
    seed: int


@dataclass(frozen=True)
class FinishedBatches:
    """The finished batches of a task, in order, each packed.

    An exception of the user's code is an ExceptionWrapper in the place of its batch. The program raises it when it asks for that batch.

    Args:
        num_rows: the number of the batches' samples.
        stored: the name of an attribute that the data set's methods have changed, if that is worth a remark.
    """

    items: tuple[Packed, ...]
    num_rows: int
    stored: str = ""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return sum(item.nbytes for item in self.items)

    @property
    def samples_per_batch(self) -> int:
        """The number of samples of a batch, on average."""
        return self.num_rows // max(len(self.items), 1)


@dataclass(frozen=True, kw_only=True)
class Imports:
    """A recipe without work, with which processes import what batches need before there are any."""

    def ready(self) -> Imports:
        """Prepare this process."""
        hold_to_one_core()
        return self

    def process(self, rows: Any, *, epoch: int, scratch: Scratch, watch: Watch) -> FinishedBatches:
        """Make nothing."""
        return FinishedBatches((), 0)


@dataclass(frozen=True, kw_only=True)
class MapRecipe:
    """The recipe for a map-style data set.

    Args:
        program: the program's surroundings. They must be the first field, so that the others are unpickled in them.
        batches: whether an order holds the indices of a batch (torch's automatic batching).
        num_workers: torch's argument. If it is not 0, batch ``i`` is made in the role of worker ``i % num_workers``, as in torch.
        inherited: whether the process has it from the program, by a fork. It has the program's surroundings and classes, too.
        stored: notices what the data set stores in itself with ``num_workers=0``. With workers, it would be lost in torch, too.
    """

    program: Program = field(default_factory=Program.here)
    dataset: Any
    collate_fn: Callable[[Any], Any]
    batches: bool
    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    inherited: bool = False
    initialised: set[int] = field(default_factory=set)
    stored: StoredWatch = field(default_factory=StoredWatch)

    def ready(self) -> MapRecipe:
        """Prepare this process."""
        hold_to_one_core()
        return self

    def process(self, rows: Sequence[BatchOrder], *, epoch: int, scratch: Scratch, watch: Watch) -> FinishedBatches:
        """Make these batches."""
        return self.make(rows, watch)

    def make(self, rows: Sequence[BatchOrder], watch: Watch) -> FinishedBatches:
        """Make these batches."""
        if not self.inherited:  # iterations of one program may have begun in different folders, or with other variables
            self.program.enter()
        packed = []
        before = [] if self.num_workers else self.stored.look(self.dataset)
        for order in rows:
            watch.doing(_making(order.batch, self.dataset))
            # Several batches wait in memory for the end of the task, and a data set may reuse the memory of one for the next.
            packed.append(caught(order.batch, self._batch, order, copied=len(rows) > 1, by_name=self.inherited))
        watch.idle()
        samples = sum(len(order.indices) if self.batches else 1 for order in rows)
        return FinishedBatches(tuple(packed), samples, self.stored.since(before))

    def _batch(self, order: BatchOrder) -> Any:
        number = order.batch % self.num_workers if self.num_workers else 0
        with in_role(number, self.num_workers, order.seed, self.dataset):
            if self.num_workers:
                once(self.worker_init_fn, number, order.seed, self.initialised)
            return self.collate_fn(self._samples(order))

    def _samples(self, order: BatchOrder) -> Any:
        seed_generators(mix(order.seed, order.first))
        if not self.batches:
            return self.dataset[order.indices]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(order.indices)
        return list(self._one_by_one(order))

    def _one_by_one(self, order: BatchOrder) -> Iterator[Any]:
        for place, index in enumerate(order.indices):
            seed_generators(mix(order.seed, order.first + place))
            yield self.dataset[index]


@dataclass(frozen=True, kw_only=True)
class IterableRecipe:
    """The recipe for the workers of an iterable data set, each of which reads its share in a process of its own, batch after batch.

    Args:
        program: the program's surroundings. They must be the first field, so that the others are unpickled in them.
        batch_size: None without automatic batching.
        num_workers: torch's argument.
        variables: the environment variables of the program's rank, by which a data set may choose its share. Ray's processes have those
            of the rank that started Ray, or none.
        inherited: see :class:`MapRecipe`.
    """

    program: Program = field(default_factory=Program.here)
    dataset: Any
    collate_fn: Callable[[Any], Any]
    batch_size: int | None
    drop_last: bool
    num_workers: int
    seed: int
    worker_init_fn: Callable[[int], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    inherited: bool = False

    def ready(self) -> IterableRecipe:
        """Prepare this process."""
        os.environ.update(self.variables)
        hold_to_one_core()
        return self

    def batches(self, watch: Watch, worker: int, initialised: set[int] | None = None) -> Iterator[tuple[Packed, int]]:
        """Yield this worker's batches, each with the number of its samples. ``initialised``: the workers that this process has been."""
        number = 0
        state = _Reading(worker, initialised=set() if initialised is None else initialised)
        with in_role(worker, self.num_workers, self.seed, self.dataset):
            while True:
                watch.doing(_making(number, self.dataset))
                samples: list[Any] = []
                try:
                    item = caught(number, self._next, state, samples, copied=True, by_name=self.inherited)
                except _EndError:
                    return
                finally:
                    watch.idle()
                yield item, len(samples)
                number += 1

    def _next(self, state: _Reading, samples: list[Any]) -> Any:
        """The next batch. Its samples go to ``samples``, which counts them even if collating fails. Raises _EndError after the last batch.

        After an exception of the data set, the next call goes on with the same iterator, as in torch.
        """
        if state.samples is None:
            seed_as_torch(state.worker, self.seed)
            once(self.worker_init_fn, state.worker, self.seed, state.initialised)
            state.samples = iter(self.dataset)
        while not state.over and len(samples) < (self.batch_size or 1):
            try:
                samples.append(next(state.samples))
            except StopIteration:
                state.over = True
        if not samples or (self.drop_last and len(samples) < (self.batch_size or 1)):
            raise _EndError
        return self.collate_fn(samples[0] if self.batch_size is None else list(samples))


def cannot_travel(recipe: MapRecipe | IterableRecipe, error: Exception) -> ConfigError:
    """The error of a program whose recipe cannot be pickled, which raised ``error``."""
    kind = type(recipe.dataset).__name__
    reason = used((recipe.dataset, recipe.collate_fn, recipe.worker_init_fn), error) or (
        f"{type(error).__name__}: {error}. Open files, connections and locks cannot be sent. Open them at the first __getitem__, or let "
        f"every process construct the data set itself with a method such as: def __reduce__(self): return {kind}, (self.path,)"
    )
    return ConfigError(f"the data set {kind}, collate_fn or worker_init_fn cannot be sent to other processes: {reason}")


@dataclass
class _Reading:
    """The progress of a worker through an iterable data set."""

    worker: int
    samples: Iterator[Any] | None = None
    over: bool = False
    initialised: set[int] = field(default_factory=set)


class _EndError(Exception):
    """There are no more batches."""


def read_some(batches: Iterator[tuple[Packed, int]], most: int) -> tuple[FinishedBatches, bool]:
    """Read one batch, or up to ``most`` in about BATCH_TASK_S: (the batches, whether there are no more)."""
    items: list[Packed] = []
    samples, began = 0, time.perf_counter()
    while len(items) < most and (not items or time.perf_counter() - began < BATCH_TASK_S):
        batch = next(batches, None)
        if batch is None:
            return FinishedBatches(tuple(items), samples), True
        items.append(batch[0])
        samples += batch[1]
    return FinishedBatches(tuple(items), samples), False


def caught(number: int, make: Callable[..., Any], *args: Any, copied: bool = False, by_name: bool = False) -> Packed:
    """The packed result of ``make``, or its packed exception. Raises _EndError after the last batch of an iterable data set."""
    try:
        return pack(make(*args), copied=copied, home=True, by_name=by_name)
    except _EndError:
        raise
    except FAILURES as error:
        if mended := remedy(error):
            error.add_note(mended.strip())
        where = f"in a preprocessing process of offload.DataLoader, at batch {number}"
        shown = (type(error), error, without_own(error.__traceback__))
        wrapped = ExceptionWrapper(shown, where=where)  # type: ignore[no-untyped-call]
        try:
            return pack(wrapped, home=True, by_name=by_name)
        except Exception:
            wrapped.exc_type = RuntimeError  # its text names the type
            return pack(wrapped)


def _making(number: int, dataset: Any) -> Callable[[], str]:
    """The name of this batch for the watch, made only when somebody asks."""
    return lambda: f"batch {number} of a DataLoader over {type(dataset).__name__}"
