"""The agreement of ranks with every batch: when to stop, how to split the next batch, and each rank's measurements of the gradient.

The numbers travel with the gather that batches need anyway, ahead of training by the prefetch depth. So all ranks act on them at the
same batch, and training never waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from offload.model.batch_split import BatchSplit
from offload.train.messages import End

Over = Literal["", "time", "stop"]
"""Why training is over although its goal is not reached: its time is up, or the user's code stopped it."""

OVERS: tuple[Over, ...] = ("", "time", "stop")
ENDS: tuple[End, ...] = ("", "resize", "stop")  # later ones outrank earlier ones
HEAD = 5  # the numbers of a message before those of a measurement
NOTHING = -1  # stands for the step of a measurement, in a message without one


@dataclass(frozen=True, kw_only=True)
class NoisePart:
    """One rank's part of a measurement, by parameter group.

    Args:
        count: the number of compared gradients, over all ranks.
        samples_each: the number of samples in each of them.
        paired: whether they belong to consecutive steps.
        squares: sums of the squared norms of this rank's gradients.
        total: squared norms of the mean of all gradients.
    """

    count: int
    samples_each: int
    paired: bool
    squares: tuple[float, ...]
    total: tuple[float, ...]

    def to_floats(self) -> list[float]:
        """The part as numbers of a message."""
        return [float(self.count), float(self.samples_each), float(self.paired), *self.squares, *self.total]

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> NoisePart:
        """The inverse of :meth:`to_floats`."""
        groups = (len(values) - 3) // 2
        return cls(
            count=int(values[0]),
            samples_each=int(values[1]),
            paired=bool(values[2]),
            squares=tuple(values[3 : 3 + groups]),
            total=tuple(values[3 + groups :]),
        )


@dataclass(frozen=True, kw_only=True)
class NoiseMeasurement:
    """Every rank's measurement of a step's gradient."""

    step: int
    parts: tuple[NoisePart, ...]


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The common knowledge of all ranks at a batch.

    Args:
        end: how the group ends before this batch, if it does.
        due: whether a checkpoint is due before it.
        over: why training is over before its next global batch, if it is.
        split: the split of the global batches after it; None: no change.
        measured: the measurements of gradients that are complete.
    """

    end: End = ""
    due: bool = False
    over: Over = ""
    split: BatchSplit | None = None
    measured: tuple[NoiseMeasurement, ...] = ()


class Agreement(Protocol):
    """What one rank tells the others with every batch of a pass, and what follows from all their messages."""

    def message(self) -> list[int]:
        """This rank's message: numbers, equally many on every rank."""

    def agreed(self, messages: Sequence[Sequence[int]]) -> Agreed:
        """The conclusion from the messages of all ranks, in their order."""

    def ending(self) -> bool:
        """Return whether this rank knows that training ends."""


class NoAgreement:
    """The agreement of a validation pass: ranks have nothing to agree on."""

    def message(self) -> list[int]:
        return []

    def agreed(self, messages: Sequence[Sequence[int]]) -> Agreed:
        return Agreed()

    def ending(self) -> bool:
        return False


class TrainingAgreement:
    """The agreement of one rank in a training pass.

    Args:
        rank, workers: this rank, and the number of ranks.
        end: how the driver's newest orders end the group. Any rank may announce it.
        split: the split of global batches in these orders. Rank 0 decides.
        due: whether a checkpoint is due. Rank 0 decides, since clocks differ.
        over: why training is over, as this rank sees it. Any rank may announce it.
        mail: the measurements under way.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        *,
        end: Callable[[], End],
        split: Callable[[], BatchSplit | None],
        due: Callable[[], bool],
        over: Callable[[], Over],
        mail: Mailbox,
    ) -> None:
        self._rank, self._workers, self._end, self._split, self._due, self._mail = rank, workers, end, split, due, mail
        self._over = over

    def ending(self) -> bool:
        return bool(self._end())

    def message(self) -> list[int]:
        split = self._split()
        local = accum = 0
        # A split for another number of workers is meant for the next group.
        if split is not None and split.workers == self._workers:
            local, accum = split.local_batch_size, split.accum_steps
        due = self._rank == 0 and self._due()
        head = [ENDS.index(self._end()), int(due), OVERS.index(self._over()), local, accum]
        return [*head, *self._mail.outgoing()]

    def agreed(self, messages: Sequence[Sequence[int]]) -> Agreed:
        # Rank 0 alone decides on the split and on checkpoints: the orders and the clocks of others may lag.
        ends, dues, overs, local_sizes, accum_steps, *_ = zip(*messages, strict=True)
        local, accum = local_sizes[0], accum_steps[0]
        split = BatchSplit(local_batch_size=local, accum_steps=accum, workers=self._workers) if local else None
        return Agreed(
            # Any rank may have heard of it first. The strongest end holds.
            end=ENDS[max(ends)],
            due=bool(dues[0]),
            over=OVERS[max(overs)],
            split=split,
            measured=self._mail.incoming([message[HEAD:] for message in messages]),
        )


class Mailbox:
    """Measurements on their way to all ranks. The next pass sends the measurements that remain from this one.

    ``width``: the number of numbers in a :class:`NoisePart`.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._out: deque[tuple[int, NoisePart]] = deque()
        self._in: dict[int, dict[int, NoisePart]] = {}

    def post(self, step: int, part: NoisePart) -> None:
        """Add this rank's measurement of step ``step``."""
        self._out.append((step, part))

    def outgoing(self) -> list[int]:
        """The next measurement as the numbers of a message: its step, then its floats bit by bit, so that all ranks get equal ones."""
        if not self._out:
            return [NOTHING] * (1 + self._width)
        step, part = self._out.popleft()
        return [step, *np.array(part.to_floats(), dtype=np.float64).view(np.int64).tolist()]

    def incoming(self, messages: Sequence[Sequence[int]]) -> tuple[NoiseMeasurement, ...]:
        """The measurements that these messages, one from each rank, complete."""
        complete = []
        for rank, (step, *numbers) in enumerate(messages):
            if step == NOTHING:
                continue
            floats = np.array(numbers, dtype=np.int64).view(np.float64).tolist()
            parts = self._in.setdefault(step, {})
            # Ranks finish a step at different times, so their parts of one measurement may travel with different
            # batches.
            parts[rank] = NoisePart.from_floats(floats)
            if len(parts) == len(messages):
                complete.append(step)
        return tuple(
            NoiseMeasurement(step=step, parts=tuple(part for _, part in sorted(self._in.pop(step).items())))
            for step in sorted(complete)
        )
