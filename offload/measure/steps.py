"""The parts of a step's time on one rank: waiting for data, waiting for the peers' data, computing, synchronising.

``data_wait_s`` near 0: the accelerator is the bottleneck; near ``step_time_s``: the input pipeline is. ``peer_wait_s`` is the part of
a wait in which this rank's own batch was ready and another rank's was not. It would otherwise look like slow synchronisation.
``sync_s`` is the all-reduce that backward did not hide.

On a GPU, compute and sync come from CUDA events, which the meter reads some steps later, so that nothing waits for them. Elsewhere,
they come from the monotonic clock. A GPU still works through queued kernels while its process waits for a batch. Such a wait counts only
as far as the GPU had nothing to do: the time between the marks of its last work and of its next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

INPUT_BOUND = 0.05
"""The stall from which on the input counts as the bottleneck; below it, the accelerator does. It is an assumption: even an input that
keeps up lets a step wait now and then, as batches come unevenly, and a gain below a twentieth would convince nobody to add cores."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One optimizer step of one rank, in seconds of wall time, including all its micro-batches. ``pass_start_s``: the part of
    ``data_wait_s`` for the first batch of a pass; ``useful``: the worth of its samples, in samples of initial batches."""

    step_time_s: float
    data_wait_s: float
    peer_wait_s: float
    compute_s: float
    sync_s: float
    samples: int
    pass_start_s: float = 0.0
    useful: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over steps, of one or several ranks."""

    steps: int = 0
    samples: int = 0
    step_time_s: float = 0.0
    data_wait_s: float = 0.0
    peer_wait_s: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    pass_start_s: float = 0.0
    useful: float = 0.0

    def plus(self, other: Totals) -> Totals:
        """The sums of both."""
        return Totals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def minus(self, other: Totals) -> Totals:
        """The differences to an earlier ``other``."""
        return Totals(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    @property
    def stall(self) -> float:
        """``data_wait_s / step_time_s`` (0 before the first step)."""
        return self.data_wait_s / self.step_time_s if self.step_time_s > 0 else 0.0

    def add(self, step: StepTimes) -> Totals:
        """The sums with one more step."""
        return Totals(
            steps=self.steps + 1,
            samples=self.samples + step.samples,
            step_time_s=self.step_time_s + step.step_time_s,
            data_wait_s=self.data_wait_s + step.data_wait_s,
            peer_wait_s=self.peer_wait_s + step.peer_wait_s,
            compute_s=self.compute_s + step.compute_s,
            sync_s=self.sync_s + step.sync_s,
            pass_start_s=self.pass_start_s + step.pass_start_s,
            useful=self.useful + step.useful,
        )


class StepClock:
    """Marks of time from the monotonic clock. ``elapsed`` is None while a mark is still unknown."""

    def mark(self) -> Any:
        """Now."""
        return time.monotonic()

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Seconds between two marks."""
        return float(end - start)


class CudaClock(StepClock):
    """Marks in the GPU's own order of work: CUDA events on the current stream."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Any, end: Any) -> float | None:
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1000


@dataclass
class _Open:
    """A step whose device marks may still be unknown. Waits as the process saw them; ``idle``: the device's times without work."""

    wall_s: float
    wait_s: float
    peer_s: float
    first_s: float
    samples: int
    useful: float
    busy: list[tuple[Any, Any]]
    sync: list[tuple[Any, Any]]
    idle: list[tuple[Any, Any]]


class StepMeter:
    """The meter of one rank's steps. Call its methods in this order: waited, [last_gradient], backward_done, stepped. A batch may have
    several backward passes, and exchange gradients after them: each call of backward_done ends what the last_gradient before it began.
    """

    def __init__(self, clock: StepClock, now: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._now = clock, now
        self._pending: deque[_Open] = deque()
        self._totals = Totals()
        self._begun = 0
        self.restart()

    def restart(self) -> None:
        """Forget the step under way, and begin another one now: after the gap between two passes."""
        self._free_mark = self._clock.mark()
        self._begin(self._now())

    def _begin(self, at: float) -> None:
        self._began = at
        self._begun += 1
        self._outside_s = 0.0
        self._wait_s = self._peer_s = self._first_s = 0.0
        self._samples = 0
        self._busy: list[tuple[Any, Any]] = []
        self._sync: list[tuple[Any, Any]] = []
        self._idle: list[tuple[Any, Any]] = []
        self._batch_mark: Any = None
        self._gradient_mark: Any = None

    def waited(self, own_s: float, peer_s: float, samples: int, *, first: bool = False) -> None:
        """Note that a local batch of ``samples`` samples came after these waits. ``first``: whether it is the first of a pass."""
        self._wait_s += own_s
        self._first_s += own_s if first else 0.0
        self._peer_s += peer_s
        self._samples += samples
        self._open_batch()
        self._gradient_mark = None

    def last_gradient(self) -> None:
        """Note that a bucket of gradients is ready for reduction. The last such call before the end of backward counts."""
        self._gradient_mark = self._clock.mark()

    def backward_done(self) -> None:
        """Note that backward has returned, with gradients reduced if this micro-batch reduces them."""
        if self._gradient_mark is not None:
            self._sync.append((self._gradient_mark, self._clock.mark()))
            self._gradient_mark = None

    def stepped(self, efficiency: float = 1.0) -> None:
        """Note that the optimizer has stepped, which completes the step. ``efficiency``: the worth of one of its samples relative to a
        sample of an initial batch."""
        end = self._now()
        self._close_batch()
        waits = self._wait_s, self._peer_s, self._first_s
        useful = self._samples * efficiency
        step = _Open(
            end - self._began - self._outside_s, *waits, self._samples, useful, self._busy, self._sync, self._idle
        )
        self._pending.append(step)
        self._begin(end)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time belongs to no batch: the worker looks for the next batch while this one is under way."""
        self._close_batch()
        yield
        self._open_batch()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A context whose time belongs to no step: validation, a checkpoint. Between two steps, the time since the last one does not
        belong to the next, either. Within a step, the step keeps what it has measured so far. Contexts may lie within each other.
        """
        at, before_s = (self._begun, len(self._idle)), self._outside_s
        computing = self._batch_mark is not None
        self._close_batch()
        began = self._now()  # after the mark, so that no moment of computing counts as outside
        try:
            yield
        finally:
            if not self._idle:  # no batch of the next step has come
                self.restart()
            elif (self._begun, len(self._idle)) == at:  # the caller may keep the context open while training goes on
                self._outside_s = before_s + self._now() - began
                self._free_mark = self._clock.mark()
                if computing:
                    self._batch_mark = self._free_mark

    def micro_batch_done(self) -> None:
        """Note the end of a micro-batch that does not complete a step."""
        self._close_batch()

    def _open_batch(self) -> None:
        self._batch_mark = self._clock.mark()
        self._idle.append((self._free_mark, self._batch_mark))

    def _close_batch(self) -> None:
        if self._batch_mark is not None:
            self._free_mark = self._clock.mark()
            self._busy.append((self._batch_mark, self._free_mark))
            self._batch_mark = None

    def totals(self) -> Totals:
        """The sums over all steps whose times are known so far."""
        while self._pending:
            step = self._pending[0]
            busy = [self._clock.elapsed(a, b) for a, b in step.busy]
            sync = [self._clock.elapsed(a, b) for a, b in step.sync]
            idle = [self._clock.elapsed(a, b) for a, b in step.idle]
            if any(s is None for s in (*busy, *sync, *idle)):
                break
            sync_s = sum(s for s in sync if s is not None)
            compute_s = max(sum(b for b in busy if b is not None) - sync_s, 0.0)
            waited_s = step.wait_s + step.peer_s
            share = min(sum(i for i in idle if i is not None) / waited_s, 1.0) if waited_s > 0 else 1.0
            self._totals = self._totals.add(
                StepTimes(
                    step_time_s=step.wall_s,
                    data_wait_s=step.wait_s * share,
                    peer_wait_s=step.peer_s * share,
                    compute_s=compute_s,
                    sync_s=sync_s,
                    samples=step.samples,
                    pass_start_s=step.first_s * share,
                    useful=step.useful,
                )
            )
            self._pending.popleft()
        return self._totals
