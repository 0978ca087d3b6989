"""The context of a probed script's function: it replays batches from memory and measures steps.

The loop runs unchanged, and never waits for data. Where it stops: :mod:`offload.measure.findings` draws the conclusions.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from offload.errors import RunError
from offload.measure.sizes import FEW_STEPS, FEW_WARM_STEPS, STEPS, WARM_STEPS, Measured, next_size
from offload.probe.depth import Depth, repeated_blocks
from offload.train.messages import TRAIN
from offload.train.worker.batch import Batch, BatchIterator
from offload.train.worker.context import Context, has_many
from offload.train.worker.loop import StopRun, TrainingLoop
from offload.train.worker.stepping import step_all

NOISE_GROUPS = 4
FEW_GROUPS = 2
NOISE_GRADIENTS = 4  # gradients compared within a group, at equal parameters


class ProbeContext(Context):
    """A context that replays ``cached`` rows at several local batch sizes, then as small batches, to compare their gradients.

    ``budget_s`` is the time for all sizes together; ``told`` receives the completed share of the work.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__(loop)
        self.depth: Depth | None = None
        self.may_cut = True
        self.cached: dict[str, Any] = {}
        self.budget_s = 20.0
        self.told: Callable[[float], None] = lambda share: None
        self.measured: list[Measured] = []
        self.gradients: list[tuple[float, float]] = []  # by group: mean of squared norms, squared norm of the mean
        self.samples_each = 0
        self._comparing = self._syncing = False
        self._group: list[float] = []
        self._sum: list[torch.Tensor] | None = None
        self._began = 0.0
        self._open = False

    def prepare(self, model: torch.nn.Module, *others: Any) -> Any:
        """Prepare as in training; on a CPU, the probe may measure a deep model at a smaller depth."""
        self.depth = None
        # DDP expects gradients of all the parameters that it was built with.
        if self.device.type == "cpu" and self.may_cut and self.world_size == 1:
            self.depth = repeated_blocks(getattr(model, "_orig_mod", model))
        return super().prepare(model, *others)

    def begin_anew(self) -> None:
        """Forget all measurements: the script's function runs again, on the whole model."""
        self.may_cut = False
        self._loop.state.model = None
        self.measured.clear()
        self.gradients.clear()
        self._group, self._sum, self._comparing = [], None, False

    def epochs(self, n: int) -> Iterator[int]:
        """Yield one epoch, in which the probe measures everything."""
        super().epochs(n)  # checks the number
        return self._one_epoch()

    def _one_epoch(self) -> Iterator[int]:
        yield 0
        raise StopRun

    def batches(self, name: str = TRAIN, *columns: str) -> BatchIterator[Any]:
        """Yield replayed batches of the training data, and none of other data sets."""
        count = self._loop.expected_batches(name) if name == TRAIN else 0
        return BatchIterator(self._replays(name, columns), count)

    def _replays(self, name: str, columns: tuple[str, ...]) -> Iterator[Any]:
        if name != TRAIN:
            return
        for batch in self._replayed():
            self._open = True
            self._loop.rows = len(next(iter(batch.values())))
            shown = Batch(batch)
            yield shown.columns(columns) if columns else shown
            if self._open:
                raise RunError(
                    "a batch went by without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch of "
                    "ctx.batches('train')."
                )
        raise StopRun

    def _replayed(self) -> Iterator[dict[str, Any]]:
        began, wanted = time.monotonic(), self._loop.setup.split.local_batch_size
        share = self.budget_s * (0.5 if self.depth is not None else 0.8)
        memory = self.device_memory()
        if self.depth is not None:
            self.depth.cut(2)
        while (
            size := self._agreed(
                next_size(
                    self.measured,
                    wanted=wanted,
                    left_s=share - (time.monotonic() - began),
                    memory_bytes=memory,
                    steps=(self._warm + self._steps) * (2 if self.world_size > 1 else 1),
                )
            )
        ) is not None:
            yield from self._steps_of(size, depth=2 if self.depth is not None else 0)
            self.told(min((time.monotonic() - began) / self.budget_s, 0.8))
        if self.depth is not None:
            self.depth.cut(1)
            for size in [each.size for each in self.measured]:
                yield from self._steps_of(size, depth=1)
        self.told(0.8)
        self._comparing = True
        small = self.samples_each = max(1, min(self.measured[-1].size, wanted) // 2)
        groups = NOISE_GROUPS if self.device.type == "cuda" else FEW_GROUPS
        for number in range(groups * NOISE_GRADIENTS):
            yield self._rows(small, number * small)
        self.told(1.0)

    @property
    def _warm(self) -> int:
        return WARM_STEPS if self.device.type == "cuda" else FEW_WARM_STEPS

    @property
    def _steps(self) -> int:
        return STEPS if self.device.type == "cuda" else FEW_STEPS

    def _steps_of(self, size: int, *, depth: int) -> Iterator[dict[str, Any]]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds: list[float] = []
        # First alone, then with the other workers: the difference is the cost of synchronisation.
        for syncing in (False, True)[: min(self.world_size, 2)]:
            self._syncing = syncing
            times: list[float] = []
            yield from self._timed_steps(size, times)
            seconds.append(float(np.median(times)))
        self._syncing = False
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        self.measured.append(
            Measured(
                size=size,
                step_s=seconds[0],
                peak_bytes=float(peak),
                depth=depth,
                synced_s=seconds[1] if len(seconds) > 1 else 0.0,
            )
        )

    def _timed_steps(self, size: int, times: list[float]) -> Iterator[dict[str, Any]]:
        for number in range(self._warm + self._steps):
            batch = self._rows(size, 0)
            self.synchronize()
            began = time.monotonic()
            yield batch
            self.synchronize()
            if number >= self._warm:
                times.append(time.monotonic() - began)

    def _agreed(self, value: int | None) -> int | None:
        """Rank 0's value: all ranks measure the same sizes."""
        return value if self._loop.talk is None else self._loop.talk.broadcast(value, 0)

    def _rows(self, size: int, first: int) -> dict[str, Any]:
        """``size`` of the cached rows from ``first`` on, wrapping around at their end."""
        rows = len(next(iter(self.cached.values())))
        chosen = [(first + i) % rows for i in range(size)]
        index = torch.tensor(chosen, device=self.device)
        return {
            name: column[index] if isinstance(column, torch.Tensor) else [column[i] for i in chosen]
            for name, column in self.cached.items()
        }

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradient of the loss; record its norm if gradients are compared."""
        scaler = self._loop.state.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        joined = self._loop.stepper.model
        alone = isinstance(joined, torch.nn.parallel.DistributedDataParallel) and not self._syncing
        with joined.no_sync() if alone else contextlib.nullcontext():  # type: ignore[union-attr,operator]
            scaled.backward()  # type: ignore[no-untyped-call]
        if self._comparing:
            self._note_gradient(1.0 if scaler is None else float(scaler.get_scale()))

    def step(self, *, clip_norm: float | None = None) -> bool:
        """Step the optimizers."""
        self._open = False
        if self._comparing and self._group:
            return False  # the next gradient must be at equal parameters
        scaler = self._loop.state.scaler
        for optimizer in self._loop.state.optimizers:
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip_norm is not None:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        step_all(self._loop.state.optimizers, scaler)
        return True

    def _note_gradient(self, scale: float) -> None:
        parameters = [p for o in self._loop.state.optimizers for g in o.param_groups for p in g["params"]]
        reached = [p for p in parameters if p.grad is not None]
        gradients = [p.grad / scale for p in reached if p.grad is not None]
        for parameter in reached:
            parameter.grad = None
        if not gradients:
            raise RunError("the probed loss reaches no parameter of the prepared optimizers.")
        self._group.append(float(sum(g.double().square().sum() for g in gradients)))
        if self._sum is None:
            self._sum = gradients
        else:
            torch._foreach_add_(self._sum, gradients)
        if len(self._group) == NOISE_GRADIENTS:
            mean = [total / NOISE_GRADIENTS for total in self._sum]
            square = float(sum(m.double().square().sum() for m in mean))
            self.gradients.append((float(np.mean(self._group)), square))
            # One optimizer step between groups: the noise is that of a short run, not only of the first weights.
            for parameter, value in zip(reached, mean, strict=True):
                parameter.grad = value * scale
            self._group, self._sum = [], None

    def sum(self, value: Any) -> Any:
        """Return the value of this worker: a probe reports nothing."""
        if has_many(value):
            return torch.as_tensor(value)
        return float(value.item() if isinstance(value, torch.Tensor) else value)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of this worker alone."""
        return [value]

    def report(self, **metrics: Any) -> None:
        """Ignore the metrics: a probe records nothing."""

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def device_memory(self) -> float | None:
        """The GPU memory that this process could use, in bytes; None without a GPU."""
        if self.device.type != "cuda":
            return None
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return float(free + torch.cuda.memory_allocated(self.device))


class Kept:
    """Copies of the first ``most`` rows of batches. They are joined only at the end, since copying takes time from the cores under
    measurement."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._parts: dict[str, list[Any]] = {}

    def add(self, batch: Mapping[str, Any]) -> None:
        """Keep as many rows of this batch as are still missing."""
        if not self._left:
            return
        for name, column in batch.items():
            rows = column[: self._left]
            self._parts.setdefault(name, []).append(rows.clone() if isinstance(rows, torch.Tensor) else list(rows))
        self._left -= len(rows)

    def joined(self) -> dict[str, Any]:
        """All kept rows as one batch."""
        return {
            name: torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [row for part in parts for row in part]
            for name, parts in self._parts.items()
        }
