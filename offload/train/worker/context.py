"""The context, which the user's function gets as ``ctx``.

A plain PyTorch loop stays a loop. The context brings preprocessed batches, keeps gradients exact if ranks hold unequal batches,
measures the use of time, and commits the state that a resume needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch

from offload.errors import RunError
from offload.model.checks import check_count, check_number, shown
from offload.train.messages import TRAIN
from offload.train.worker.batch import Batch, BatchIterator
from offload.train.worker.loop import TrainingLoop

MOST_EPOCHS = 10**9  # a larger number is a mistake

Model = TypeVar("Model", bound=torch.nn.Module)
Other = TypeVar("Other")
Third = TypeVar("Third")


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts about a data set. ``samples``: the number of samples, None for a ``ray.data.Dataset``; ``class_names``: the classes of an
    image folder in the order of the labels, None for other sources."""

    # Not "classes": cloudpickle mistakes torch and a name "classes" in one function for torch.classes, which it cannot pickle.
    samples: int | None
    class_names: tuple[str, ...] | None


class Context:
    """One worker of a run."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._loop.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._loop.world_size

    @property
    def device(self) -> torch.device:
        """The device of the model and the batches."""
        return self._loop.device

    @property
    def config(self) -> dict[str, Any]:
        """The Trainer's ``train_loop_config``."""
        return self._loop.setup.config

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._loop.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps of the run so far, including those before a restart."""
        return self._loop.state.progress.step

    @property
    def rows(self) -> int:
        """The number of real samples in the current batch; 0 for the filler of a worker that has no samples left."""
        return self._loop.rows

    def info(self, name: str = TRAIN) -> DatasetInfo:
        """Facts about a data set. Raises RunError if the Trainer has no data set of this name."""
        setup = self._loop.setup
        self._check_dataset(name)
        return DatasetInfo(samples=setup.sized[name], class_names=setup.classes.get(name))

    # -- model -----------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: Model) -> Model: ...

    @overload
    def prepare(self, model: Model, optimizer: Other, /) -> tuple[Model, Other]: ...

    @overload
    def prepare(self, model: Model, optimizer: Other, scheduler: Third, /) -> tuple[Model, Other, Third]: ...

    @overload
    def prepare(self, model: Model, *others: Any) -> tuple[Any, ...]: ...

    def prepare(self, model: torch.nn.Module, *others: Any) -> Any:
        """Put a model on this worker's device, join it with the other workers' models, and restore it and the others from the run's
        checkpoint, if there is one. Several workers join their models with DistributedDataParallel.

        ``others`` are optimizers, and any other objects with ``state_dict`` and ``load_state_dict``, such as learning-rate schedulers.
        Returns the arguments in their order, with the model wrapped; only the model if it was the only argument.
        """
        model = self._loop.prepare(model, others)
        return (model, *others) if others else model

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """``with ctx.autocast(): ...`` computes in the Trainer's ``precision``; nothing changes for ``"fp32"``."""
        precision = self._loop.setup.precision
        if precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    # -- data ------------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to train, of ``n`` in all. After a restart, it goes on with the interrupted epoch.
        Commits a checkpoint at the end of each epoch.

        Raises ConfigError if ``n`` is not a whole number of at least 0.
        """
        count = check_count("the number of epochs in ctx.epochs(n)", n, most=MOST_EPOCHS, sane="such as 10")
        return self._loop.epochs(count)

    @overload
    def batches(self, name: str = TRAIN) -> BatchIterator[Batch]: ...

    @overload
    def batches(self, name: str, *columns: str) -> BatchIterator[tuple[Any, ...]]: ...

    def batches(self, name: str = TRAIN, *columns: str) -> Iterator[Any]:
        """Yield this worker's batches of a data set: dicts of tensors on the device. With ``columns``, yield tuples of these, as a
        DataLoader does: ``for images, labels in ctx.batches("train", "image", "label")``.

        ``batch["sample_id"]``, or the column ``"sample_id"``, gives the samples' ids, int64. They are not among a batch's own columns,
        so that ``model(**batch)`` works. ``len()`` of the result is the number of this worker's batches at the present batch size.

        Over all workers, each sample comes once. In a pass over ``"train"``, all workers get equally many batches. The last ones are
        smaller, and a worker without samples gets a filler to which :meth:`backward` gives no weight. For other data sets
        (validation), each worker gets only its own samples.
        """
        self._check_dataset(name)
        found = self._loop.batches(name)
        count = self._loop.expected_batches(name)
        return BatchIterator((batch.columns(columns) for batch in found) if columns else found, count)

    def _check_dataset(self, name: str) -> None:
        names = self._loop.setup.sized
        if name not in names:
            raise RunError(f"there is no data set {name!r}; the Trainer's datasets are {', '.join(names)}.")

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is the mean over the current batch.

        It weights the gradient so that the optimizer sees the mean over all samples of the global batch, even if the workers' parts
        are unequal, and scales it for fp16. Workers exchange gradients with the last micro-batch of the global batch.
        """
        self._loop.backward(loss)

    def step(self, *, clip_norm: float | None = None) -> bool:
        """Step the prepared optimizers and clear their gradients, if the global batch is complete; return whether it is.

        ``clip_norm`` clips the norm of the whole gradient first. Raises ConfigError if it is not above 0.
        """
        if clip_norm is not None:
            clip_norm = check_number("ctx.step(clip_norm=...)", clip_norm, above=0.0, infinite=True, sane="such as 1.0")
        return self._loop.step(clip_norm)

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """Return the sum of a number over all workers, as a float; of a tensor or array with several elements, the tensor of their sums.
        All workers must call it, with the same shape.

        Raises RunError for anything else.
        """
        if not has_many(value):
            return self._loop.sum([_number("ctx.sum(value)", value)])[0]
        parts = [torch.as_tensor(part) for part in self.gather(value)]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise RunError(f"ctx.sum(value) takes values of one shape, and the workers have {shapes}.")
        return torch.stack(parts).sum(0).to(getattr(value, "device", "cpu"))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, in the order of their ranks: numbers, tensors (on the CPU), or anything that can be pickled.
        All workers must call it. Shapes may differ."""
        return self._loop.gather(value.detach().cpu() if isinstance(value, torch.Tensor) else value)

    def accumulate(self, **values: Any) -> None:
        """Add numbers or tensors to this epoch's sums, for a batch of ``ctx.batches("train")``, after its ``ctx.step()``:
        ``ctx.accumulate(loss=loss.detach() * ctx.rows, rows=ctx.rows)``."""
        numbers = {name: _number(f"ctx.accumulate({name}=...)", value) for name, value in values.items()}
        self._loop.state.accumulate(numbers)

    def accumulated(self) -> dict[str, float]:
        """Return this epoch's sums over all workers. They count each sample once, even if workers restarted or their number changed.
        All workers must call it."""
        return self._loop.accumulated()

    def report(self, **metrics: Any) -> None:
        """Record metrics (numbers or tensors) as means over the workers. All workers must call it equally often."""
        self._loop.report({name: _number(f"ctx.report({name}=...)", value) for name, value in metrics.items()})


def has_many(value: Any) -> bool:
    """Whether this is a tensor or array, and not of a single element."""
    return isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) != 1


def _number(name: str, value: Any) -> float:
    """A number, or a tensor or array of one element, as a float. NaN and infinity are allowed: a loss may be either. Raises RunError
    for anything else."""
    try:
        return float(value.detach().item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
        raise RunError(f"{name} takes a number, or a tensor of one element, found {found}.") from None
