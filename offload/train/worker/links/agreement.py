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
NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Every rank's measurement of a step's gradient."""

    step: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The common knowledge of all ranks at a batch. ``end``: training ends before it; ``due``: a checkpoint is due before it;
    ``over``: training is over before its next global batch; ``split``: the new split of the global batches after it, if it changes."""

    end: End = ""
    due: bool = False
    over: Over = ""
    split: BatchSplit | None = None
    measured: tuple[Measured, ...] = ()


class Agreement(Protocol):
    """One rank's messages in one kind of pass."""

    def says(self) -> list[int]:
        """This rank's numbers; every rank has equally many."""

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        """The conclusion from all ranks' numbers."""

    def ending(self) -> bool:
        """Whether this rank knows that training ends."""


class NoAgreement:
    """The agreement of a validation pass: ranks have nothing to agree on."""

    def says(self) -> list[int]:
        return []

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        return Heard()

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

    def says(self) -> list[int]:
        split = self._split()
        local = accum = 0
        if split is not None and split.workers == self._workers:
            local, accum = split.local_batch_size, split.accum_steps
        due = self._rank == 0 and self._due()
        return [ENDS.index(self._end()), int(due), OVERS.index(self._over()), local, accum, *self._mail.outgoing()]

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        local, accum = told[0][3:5]
        split = BatchSplit(local_batch_size=local, accum_steps=accum, workers=self._workers) if local else None
        return Heard(
            end=ENDS[max(each[0] for each in told)],
            due=bool(told[0][1]),
            over=OVERS[max(each[2] for each in told)],
            split=split,
            measured=self._mail.incoming([each[5:] for each in told]),
        )


class Mailbox:
    """Measurements on their way to all ranks. The next pass sends the measurements that remain from this one.

    ``width``: the number of numbers in a :class:`Part`.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._out: deque[tuple[int, Part]] = deque()
        self._in: dict[int, dict[int, Part]] = {}

    def post(self, step: int, part: Part) -> None:
        """Add this rank's measurement of step ``step``."""
        self._out.append((step, part))

    def outgoing(self) -> list[int]:
        """The next measurement as the numbers of a message."""
        if not self._out:
            return [NOTHING] * (1 + self._width)
        step, part = self._out.popleft()
        return [step, *np.array(part.to_floats(), dtype=np.float64).view(np.int64).tolist()]

    def incoming(self, told: Sequence[Sequence[int]]) -> tuple[Measured, ...]:
        """The measurements that these messages, one from each rank, complete."""
        complete = []
        for rank, (step, *numbers) in enumerate(told):
            if step == NOTHING:
                continue
            floats = np.array(numbers, dtype=np.int64).view(np.float64).tolist()
            parts = self._in.setdefault(step, {})
            parts[rank] = Part.from_floats(floats)
            if len(parts) == len(told):
                complete.append(step)
        return tuple(
            Measured(step=step, parts=tuple(part for _, part in sorted(self._in.pop(step).items())))
            for step in sorted(complete)
        )


@dataclass(frozen=True, kw_only=True)
class Part:
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
    def from_floats(cls, values: Sequence[float]) -> Part:
        """The inverse of :meth:`to_floats`."""
        groups = (len(values) - 3) // 2
        return cls(
            count=int(values[0]),
            samples_each=int(values[1]),
            paired=bool(values[2]),
            squares=tuple(values[3 : 3 + groups]),
            total=tuple(values[3 + groups :]),
        )
