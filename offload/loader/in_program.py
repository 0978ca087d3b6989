"""An iteration over an iterable data set with ``num_workers=0``: the program itself reads, by torch's own iterator.

Its methods may store what they want in the data set: the program and the next epoch find it there, as with torch. Random numbers come from
the program's generators. No Ray is needed.

Where it stops: nothing is read ahead, while the program's step runs.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from offload.loader.device import Finish
from offload.loader.state.draws import SecondGenerators, global_state
from offload.loader.state.epoch_progress import EpochProgress, too_few
from offload.loader.stats import MadeRates, WaitClock
from offload.pipeline.blocks.tensors import bytes_of
from offload.pipeline.feed.meter import Meter
from offload.pipeline.pool.task import Block, Cost
from offload.pipeline.preprocessing.worker_role import seed_as_torch


def seeded(seed: int) -> SecondGenerators:
    """Generators with this seed, beside the program's."""
    with SecondGenerators(global_state()).used():
        seed_as_torch(0, seed)
        return SecondGenerators(global_state())


_NOTHING = object()


class InProgram:
    """The iterator.

    Args:
        aside: the generators from which the data set draws. None: the program's own.
        progress: the place in the epoch. The iteration begins after its batches.
    """

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        *,
        aside: SecondGenerators | None,
        finish: Finish,
        progress: EpochProgress,
        clock: WaitClock,
    ) -> None:
        self.loader = loader
        self._drawing = contextlib.nullcontext if aside is None else aside.used
        self._finish, self._progress, self._clock = finish, progress, clock
        self._skip = progress.batches
        self._newest = [0]  # the number of the newest batch's samples
        self._read_count = 0
        self._sample_bytes = 0.0
        self._meter = Meter(lambda: {"": 1})
        with self._drawing():
            batches: Any = torch.utils.data.DataLoader._get_iterator(loader)
        # torch's iterator does not tell the number of a batch's samples.
        fetcher = batches._dataset_fetcher
        # It must not refer to this iterator: the data set's own ends with the last reference.
        fetcher.collate_fn = functools.partial(
            _collated, fetcher.collate_fn, loader.batch_size is not None, self._newest
        )
        self._batches: Iterator[Any] = batches

    def __iter__(self) -> InProgram:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        self._skip_read()
        with self._clock.waiting():
            try:
                batch = self._read()
            except Exception:
                self._progress.batches += 1  # the iteration can go on with the next
                raise
        if batch is _NOTHING:
            self._progress.over = True
            self._clock.pause()
            self.measure()
            raise StopIteration
        self._progress.batches += 1
        self._clock.count(self._newest[0])
        return batch

    def _skip_read(self) -> None:
        """Skip the batches that the program has had before. Raises ConfigError if there are fewer."""
        for number in range(self._skip):
            batch = None
            with contextlib.suppress(Exception):  # it has been raised before
                batch = self._read()
            if batch is _NOTHING:
                raise too_few(self._skip, "data set", number)
        self._skip = 0

    def close(self) -> None:
        """End the iteration."""
        self._batches = iter(())

    def measure(self) -> None:
        """Tell the clock the present rates."""
        self._clock.ask = functools.partial(_measured, self._meter)

    def with_samples(self) -> Iterator[tuple[Any, int]]:
        """Each batch with the number of its samples."""
        for batch in self:
            yield batch, self._newest[0]

    def costs(self) -> list[tuple[float, float]]:
        """Core-seconds and bytes per sample of recent batches."""
        return self._meter.costs()

    def _read(self) -> Any:
        """The next batch, or _NOTHING after the last."""
        cpu, wall = time.process_time(), time.perf_counter()
        with self._drawing():
            batch = next(self._batches, _NOTHING)
        if batch is _NOTHING:
            self.close()
            return batch
        cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
        # Sizes hardly change, and a batch may hold many small things: measure the first, second, fourth, … batch.
        self._read_count += 1
        if not self._read_count & (self._read_count - 1):
            self._sample_bytes = bytes_of(batch) / max(self._newest[0], 1)
        size_bytes = round(self._sample_bytes * self._newest[0])
        cost = Cost(rows=self._newest[0], size_bytes=size_bytes, cpu_s=cpu_s, wall_s=wall_s)
        self._meter.add(Block(ref=None, cost=cost))
        batch = self._finish(batch)
        self._finish.hand_over(batch)
        return batch


def _collated(collate: Any, several: bool, newest: list[int], samples: Any) -> Any:
    """Collate these samples, and note their number in ``newest``."""
    newest[0] = len(samples) if several else 1
    return collate(samples)


def _measured(meter: Meter) -> MadeRates:
    return MadeRates({"cores": 1.0, **meter.summary()}, meter.costs())
