"""What the ranks tell each other with every batch, beyond how many samples it has: when to stop, what batch comes next, and
what each measured of the gradient.

It travels with the gather that batches need anyway, ahead of training by the prefetch depth; so all ranks act on it at the
same batch, and training never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from offload.train.config import BatchSplit
from offload.train.gradient_noise import Part
from offload.train.monitor import Orders

End = Literal["", "resize", "stop"]
ENDS: tuple[End, ...] = ("", "resize", "stop")  # the later outranks
NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Every rank's measurement of a step's gradient."""

    step: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What all ranks know with a batch. ``end``: training ends before it; ``due``: a checkpoint is due before it; ``split``:
    how the global batches after it are cut, where that is to change."""

    end: End = ""
    due: bool = False
    split: BatchSplit | None = None
    measured: tuple[Measured, ...] = ()


class Voice(Protocol):
    """Of one rank, for one kind of pass."""

    def says(self) -> list[int]:
        """This rank's numbers; as many on every rank."""

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        """What follows from all ranks' numbers."""

    def ending(self) -> bool:
        """Whether this rank was told that training ends."""


class Silent:
    """Says nothing: a validation pass."""

    def says(self) -> list[int]:
        return []

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        return Heard()

    def ending(self) -> bool:
        return False


class TrainingVoice:
    """Of a training pass. ``orders`` gives the driver's newest orders; rank 0's word on them counts, but any rank may say to
    stop. ``due``: rank 0's word on whether a checkpoint is due: clocks differ. ``mail``: measurements under way."""

    def __init__(self, rank: int, workers: int, orders: Callable[[], Orders], due: Callable[[], bool], mail: Mailbox):
        self._rank, self._workers, self._orders, self._due, self._mail = rank, workers, orders, due, mail

    def ending(self) -> bool:
        return bool(self._orders().stop or self._orders().resize)

    def says(self) -> list[int]:
        orders = self._orders()
        end: End = "stop" if orders.stop else "resize" if orders.resize else ""
        workers, local, accum = orders.batch or (0, 0, 0)
        if workers != self._workers:
            local = accum = 0
        due = self._rank == 0 and self._due()
        return [ENDS.index(end), int(due), local, accum, *self._mail.outgoing()]

    def heard(self, told: Sequence[Sequence[int]]) -> Heard:
        local, accum = told[0][2:4]
        split = BatchSplit(local_batch_size=local, accum_steps=accum, workers=self._workers) if local else None
        return Heard(
            end=ENDS[max(each[0] for each in told)],
            due=bool(told[0][1]),
            split=split,
            measured=self._mail.incoming([each[4:] for each in told]),
        )


class Mailbox:
    """Measurements on their way to all ranks. They outlive a pass: what was not sent in one is sent in the next.

    ``width``: numbers of a :class:`Part`.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._out: deque[tuple[int, Part]] = deque()
        self._in: dict[int, dict[int, Part]] = {}

    def post(self, step: int, part: Part) -> None:
        """This rank measured step ``step``."""
        self._out.append((step, part))

    def outgoing(self) -> list[int]:
        """The next one, as numbers of a message."""
        if not self._out:
            return [NOTHING] * (1 + self._width)
        step, part = self._out.popleft()
        return [step, *np.array(part.to_floats(), dtype=np.float64).view(np.int64).tolist()]

    def incoming(self, told: Sequence[Sequence[int]]) -> tuple[Measured, ...]:
        """What is complete with these messages, one of each rank."""
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
