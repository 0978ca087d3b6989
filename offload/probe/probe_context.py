"""The context of a probed script's function: it replays batches from memory and measures steps.

The loop runs unchanged, and never waits for data. Where it stops: :mod:`offload.measure.findings` draws the conclusions.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from offload.errors import RunError
from offload.measure.sizes import FEW_STEPS, FEW_WARM_STEPS, STEPS, WARM_STEPS, MeasuredStep, next_size
from offload.model.noise import noise_from_gradients
from offload.probe.depth import Depth, repeated_blocks
from offload.probe.kept import Rows
from offload.train.checkpoints.sharded import is_sharded
from offload.train.messages import TRAIN
from offload.train.worker.context import Context, DdpOptions, has_many
from offload.train.worker.data.batch import BatchIterator, columns_of, shown_batch
from offload.train.worker.data.delivery import Delivery
from offload.train.worker.ends import StopRun
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.steps.optimizer_steps import OptimizerSteps

GRADIENTS = 16  # compared at equal parameters, to tell their noise; more if they do not, while time and rows last
FEW_GRADIENTS = 8  # gradients without a GPU, where a step takes long


class ProbeContext(Context):
    """A context that replays ``cached`` rows at several local batch sizes, then as small batches, to compare their gradients.

    ``budget_s`` is the time for all sizes together; ``on_progress`` receives the completed share of the work.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__(loop)
        self.depth: Depth | None = None
        self.may_cut = True
        self.cached = Rows({}, [])
        self.budget_s = 20.0
        self.on_progress: Callable[[float], None] = lambda share: None
        self.measured: list[MeasuredStep] = []
        # For each gradient: its squared norm, and its scalar product with the sum of all before it.
        self.gradients: list[tuple[float, float]] = []
        self.gradients_s = 0.0
        self.samples_each = 0
        self._comparing = self._syncing = False
        self._optimizer_steps = OptimizerSteps(loop.state)
        self._sum: list[torch.Tensor | None] | None = None  # by parameter; None: no gradient so far
        self._began = 0.0
        self._open = False
        # The loop steps optimizers one by one or itself, or its model is sharded: its batches cannot adapt.
        self._one_by_one = False
        self._backwards = self._taken = 0

    def prepare(self, *objects: Any, ddp: DdpOptions = None) -> Any:
        """Prepare as in training; on a CPU, the probe may measure a deep model at a smaller depth."""
        self.depth = None
        models = [model for model in objects if isinstance(model, torch.nn.Module)]
        # DDP expects gradients of all the parameters that it was built with.
        whole = len(models) == 1 and not is_sharded(models[0])
        if self.device.type == "cpu" and self.may_cut and self.world_size == 1 and whole:
            self.depth = repeated_blocks(getattr(models[0], "_orig_mod", models[0]))
        prepared = super().prepare(*objects, ddp=ddp)
        self._one_by_one = len(self._loop.state.models) > 1 or self._loop.stepper.joined.sharded
        for optimizer in self._loop.state.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._stepped)
        return prepared

    @property
    def global_step(self) -> int:
        """The number of this batch, from 1. What a loop does at every k-th step, such as logging, it then does as often as in training."""
        return self._taken

    def _before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self._comparing:  # the loop steps itself
            self._note_gradient()

    def _stepped(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._open = False

    def begin_anew(self) -> None:
        """Forget all measurements: the script's function runs again, on the whole model."""
        self.may_cut = False
        self._loop.state.objects.models = []
        self.measured.clear()
        self.gradients.clear()
        self._sum, self._comparing = None, False

    def epochs(self, n: int) -> Iterator[int]:
        """Yield one epoch, in which the probe measures everything."""
        super().epochs(n)  # checks the number
        return self._one_epoch()

    def _one_epoch(self) -> Iterator[int]:
        yield 0
        raise StopRun

    def steps(self, n: int | None = None, *columns: str, seconds: float | None = None) -> Iterator[Any]:
        """Yield replayed batches; the probe measures everything with them."""
        super().steps(n, *columns, seconds=seconds)  # checks the goal
        return self._replays(TRAIN, columns)

    def stop(self) -> None:
        """Ignore the end of a training that does not take place."""

    def batches(self, name: str = TRAIN, /, *columns: str, drop_last: bool | None = None, min_rows: int = 2) -> Any:
        """Yield replayed batches of the training data, and none of other data sets."""
        count = self._loop.expected_batches(name, drop_last=self._drops(name, drop_last)) if name == TRAIN else 0
        return BatchIterator(self._replays(name, columns), count)

    def _replays(self, name: str, columns: tuple[str, ...]) -> Iterator[Any]:
        if name != TRAIN:
            return
        for batch, size in self._replayed():
            self._open = True
            self._taken += 1
            self._loop.rows = size
            self._loop.stepper.joined.begin_batch(exchanges=self._syncing)
            shown = shown_batch(batch)
            yield columns_of(shown, columns) if columns else shown
            self._optimizer_steps.end_batch()
            if self._open:
                raise RunError(
                    "a batch went by without ctx.step(). Call ctx.backward(loss) and ctx.step() once for each batch of "
                    "ctx.batches('train')."
                )
        raise StopRun

    def _replayed(self) -> Iterator[tuple[Any, int]]:
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
            self.on_progress(min((time.monotonic() - began) / self.budget_s, 0.8))
        if self.depth is not None:
            self.depth.cut(1)
            for size in [step.size for step in self.measured]:
                yield from self._steps_of(size, depth=1)
        self.on_progress(0.8)
        if self._one_by_one or not self._backwards:  # such batches cannot adapt, and need no gradient noise
            return
        yield from self._compared(began, half=max(1, min(self.measured[-1].size, wanted) // 2))
        self.on_progress(1.0)

    def _compared(self, began: float, *, half: int) -> Iterator[tuple[Any, int]]:
        """Small batches at equal parameters, until their gradients tell the noise, or time or rows are used up.

        The rows are all different: the same gradients twice would hide the noise. The last rows come first, since the steps before
        trained the first ones.
        """
        least = GRADIENTS if self.device.type == "cuda" else FEW_GRADIENTS
        rows: int = self._agreed(len(self.cached)) or 1
        small = self.samples_each = max(min(half, rows // least), min(half, 2))
        self._comparing, comparing = True, time.monotonic()
        for number in range(rows // small):
            late = time.monotonic() - began > self.budget_s
            if self._agreed(int(number >= least and (late or self._told_noise()))):
                break
            yield self._rows(small, rows - (number + 1) * small), small
            self.gradients_s = time.monotonic() - comparing

    def _told_noise(self) -> bool:
        """Return whether the gradients so far tell their noise."""
        if len(self.gradients) < 2 or not np.isfinite(self.gradients).all():
            return False
        squares, products = zip(*self.gradients, strict=True)
        return noise_from_gradients(squares, products, 1, 1).told

    @property
    def _warm(self) -> int:
        return WARM_STEPS if self.device.type == "cuda" else FEW_WARM_STEPS

    @property
    def _steps(self) -> int:
        return STEPS if self.device.type == "cuda" else FEW_STEPS

    def _steps_of(self, size: int, *, depth: int) -> Iterator[tuple[Any, int]]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds: list[float] = []
        variations: list[float] = []
        host_s: list[float] = []
        # First alone, then with the other workers: the difference is the cost of synchronisation.
        for syncing in (False, True)[: min(self.world_size, 2)]:
            self._syncing = syncing
            times: list[float] = []
            yield from self._timed_steps(size, times, host_s)
            seconds.append(float(np.median(times)))
            variations.append(float(np.std(times, ddof=1) / np.mean(times)))
        self._syncing = False
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        self.measured.append(
            MeasuredStep(
                size=size,
                step_s=seconds[0],
                peak_bytes=float(peak),
                depth=depth,
                synced_s=seconds[1] if len(seconds) > 1 else 0.0,
                variation=variations[0],
                host_s=float(np.median(host_s)),
            )
        )

    def _timed_steps(self, size: int, times: list[float], host_s: list[float]) -> Iterator[tuple[Any, int]]:
        for number in range(self._warm + self._steps):
            batch = self._rows(size, 0)
            self.synchronize()
            began, cpu_s = time.monotonic(), time.process_time()
            yield batch, size
            queued_s = time.process_time() - cpu_s  # waiting for the device takes a core, too, but no work
            self.synchronize()
            if number >= self._warm:
                times.append(time.monotonic() - began)
                host_s.append(queued_s)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters that the optimizers train."""
        parameters = [p for o in self._loop.state.optimizers for g in o.param_groups for p in g["params"]]
        return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)

    def _agreed(self, value: int | None) -> int | None:
        """Rank 0's value: all ranks measure the same sizes."""
        agreed: int | None = self._loop.place.talk.broadcast(value, 0)
        return agreed

    def _rows(self, size: int, first: int) -> Any:
        """``size`` of the cached rows from ``first`` on, wrapping around at their end."""
        return self.cached.batch(size, first, self.delivery)

    @functools.cached_property
    def delivery(self) -> Delivery:
        """What makes the batches of the training data."""
        return self._loop.passes.delivery(TRAIN)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of the loss."""
        scaler = self._loop.state.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        self._loop.stepper.joined.backward(scaled, retain_graph=retain_graph, exchanges=self._syncing)
        self._backwards += 1

    def skip(self) -> None:
        """Take the next batch without a step."""
        self._open = False

    def step(self, *optimizers: torch.optim.Optimizer, clip_norm: float | None = None) -> bool:
        """Step the optimizers; if gradients are compared, note the batch's gradient instead."""
        self._one_by_one = self._one_by_one or bool(optimizers)
        if self._comparing:
            self._note_gradient()
            return False  # all gradients must be at equal parameters
        self._open = False
        chosen = optimizers or tuple(self._loop.state.optimizers)
        self._optimizer_steps.begin(chosen)
        for optimizer in chosen:
            if clip_norm is not None:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        self._optimizer_steps.step(chosen)
        return True

    def _note_gradient(self) -> None:
        """Note the gradient of the batch, which several losses may have added up, and clear it."""
        if not self._open:  # noted already, or skipped
            return
        self._open = False
        scaler = self._loop.state.scaler
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        parameters = [p for o in self._loop.state.optimizers for g in o.param_groups for p in g["params"]]
        # A loss may miss some of the parameters, and not always the same ones.
        gradients = [None if p.grad is None else p.grad / scale for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        reached = [g for g in gradients if g is not None]
        if not reached:
            raise RunError("the probed loss reaches no parameter of the prepared optimizers.")
        square = float(sum(g.double().square().sum() for g in reached))
        sums = self._sum or [None] * len(gradients)
        pairs = [(g, s) for g, s in zip(gradients, sums, strict=True) if g is not None and s is not None]
        product = float(sum((g.double() * s).sum() for g, s in pairs))
        if pairs:
            torch._foreach_add_([s for _, s in pairs], [g for g, _ in pairs])
        self._sum = [g if s is None else s for g, s in zip(gradients, sums, strict=True)]
        self.gradients.append((square, product))

    def sum(self, value: Any) -> Any:
        """Return the value of this worker: a probe reports nothing."""
        if has_many(value):
            return torch.as_tensor(value)
        return float(value.item() if isinstance(value, torch.Tensor) else value)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of this worker alone."""
        return [value]

    def report(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
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
