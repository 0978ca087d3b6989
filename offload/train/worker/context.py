"""The context, which the user's function gets as ``ctx``.

A plain PyTorch loop stays a loop. The context brings preprocessed batches, keeps gradients exact if ranks hold unequal batches,
measures the use of time, and commits the state that a resume needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch

from offload.errors import ConfigError, RunError
from offload.model.checks import check_count, check_flag, check_number, shown
from offload.train.messages import TRAIN
from offload.train.worker.data.batch import Batch, BatchIterator, columns_of
from offload.train.worker.goal import Goal
from offload.train.worker.loop import TrainingLoop
from offload.train.worker.steps.joining import check_ddp

MOST_EPOCHS = 10**9  # a larger number is a mistake

Model = TypeVar("Model", bound=torch.nn.Module)
Other = TypeVar("Other")
Third = TypeVar("Third")
DdpOptions = Mapping[str, Any] | bool | None


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts about a data set. ``samples``: the number of samples, None for a ``ray.data.Dataset``; ``class_names``: the classes of an
    image folder in the order of the labels, None for other sources."""

    # Not "classes": cloudpickle takes a function with torch and that name for a user of torch.classes, which it cannot pickle.
    samples: int | None
    class_names: tuple[str, ...] | None


class Context:
    """One worker of a run."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._loop.place.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._loop.place.world_size

    @property
    def device(self) -> torch.device:
        """The device of the model and the batches."""
        return self._loop.place.device

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
        self._check_dataset(name)
        dataset = self._loop.setup.datasets[name]
        return DatasetInfo(samples=dataset.samples, class_names=dataset.class_names)

    # -- model -----------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: Model, /, *, ddp: DdpOptions = ...) -> Model: ...

    @overload
    def prepare(self, model: Model, optimizer: Other, /, *, ddp: DdpOptions = ...) -> tuple[Model, Other]: ...

    @overload
    def prepare(
        self, model: Model, optimizer: Other, scheduler: Third, /, *, ddp: DdpOptions = ...
    ) -> tuple[Model, Other, Third]: ...

    @overload
    def prepare(self, *objects: Any, ddp: DdpOptions = ...) -> tuple[Any, ...]: ...

    def prepare(self, *objects: Any, ddp: DdpOptions = None) -> Any:
        """Put models on this worker's device, join them with the other workers' models, and restore all objects from the run's
        checkpoint, if there is one. Returns the arguments in their order, with trained models joined; the model alone if it was the only
        argument.

        ``objects`` are models, their optimizers, and any other objects with ``state_dict`` and ``load_state_dict``, such as learning-rate
        schedulers. A model of which an optimizer holds parameters is trained. Another one, such as a moving average of the weights or a
        frozen teacher, is only moved, saved and restored.

        Several workers join one trained model with DistributedDataParallel. ``ddp`` holds its arguments, such as
        ``{"find_unused_parameters": True}``. Several trained models exchange their gradients just before a step; ``ddp=False`` chooses that
        for one, too. It allows any number of forward and backward passes per batch, at the cost of overlapping nothing.

        Raises RunError for objects without state, ConfigError for unknown options.
        """
        options = check_ddp(ddp)
        if not any(isinstance(item, torch.nn.Module) for item in objects):
            raise RunError(
                f"ctx.prepare takes a model and its optimizers, found {', '.join(map(shown, objects)) or 'nothing'}."
            )
        stateless = next((item for item in objects if not hasattr(item, "load_state_dict")), None)
        if stateless is not None:
            raise RunError(
                f"ctx.prepare takes models, optimizers and objects with a state_dict; found {type(stateless).__name__}."
            )
        prepared = self._loop.prepare(objects, options)
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

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

    def steps(self, n: int | None = None, *columns: str, seconds: float | None = None) -> Iterator[Any]:
        """Yield training batches until the run has made ``n`` optimizer steps, over as many epochs as that takes, or until it has trained
        for ``seconds``. After a restart, it goes on where the checkpoint is. Steps and seconds before it count.

        ``columns`` are as in :meth:`batches`. With batches that adapt, ``n`` counts steps of the initial batch. :attr:`epoch` and
        :attr:`global_step` tell the place. Raises ConfigError without a goal, or for one below 0.
        """
        if n is None and seconds is None:
            raise ConfigError("ctx.steps(n) needs a number of steps, or seconds=...: for example ctx.steps(10_000).")
        if n is not None:
            n = check_count("the number of steps in ctx.steps(n)", n, most=MOST_EPOCHS, sane="such as 10_000")
        if seconds is not None:
            seconds = check_number("ctx.steps(seconds=...)", seconds, above=0.0, sane="such as 3600")
        return self._loop.steps(Goal(steps=n, seconds=seconds), lambda: self.batches(TRAIN, *columns))

    def stop(self) -> None:
        """End training early, for good: after the current batch, or with the epoch if called after it. One worker's call is enough; all
        workers end at the same batch, and :meth:`epochs` and :meth:`steps` yield no more, also after a restart."""
        self._loop.stop()

    @overload
    def batches(
        self, name: str = TRAIN, /, *, drop_last: bool | None = ..., min_rows: int = ...
    ) -> BatchIterator[Batch]: ...

    @overload
    def batches(
        self, name: str, /, *columns: str, drop_last: bool | None = ..., min_rows: int = ...
    ) -> BatchIterator[tuple[Any, ...]]: ...

    def batches(
        self, name: str = TRAIN, /, *columns: str, drop_last: bool | None = None, min_rows: int = 2
    ) -> Iterator[Any]:
        """Yield this worker's batches of a data set: dicts of tensors on the device. With ``columns``, yield tuples of these, as a
        DataLoader does: ``for images, labels in ctx.batches("train", "image", "label")``.

        ``batch["sample_id"]``, or the column ``"sample_id"``, gives the samples' ids, int64. They are not among a batch's own columns,
        so that ``model(**batch)`` works. ``len()`` of the result is the number of this worker's batches at the present batch size. Before
        the loop over :meth:`epochs`, it is that of a whole epoch, also after a restart. It raises a TypeError where only the pass tells: a
        data set that does not know its number of samples, a generator as transform, a ``collate_fn`` with ``max_tokens``.

        Over all workers, each sample comes once. In a pass over ``"train"``, all workers get equally many batches. The last ones are
        smaller, and a worker without samples gets a filler to which :meth:`backward` gives no weight. For other data sets
        (validation), each worker gets only its own samples, and all workers must take part. Any number of passes may follow one another:
        each over a shuffled data set has an order and random numbers of its own, and all over another one are alike. A data set with a
        ``collate_fn`` yields what that returned, on the device.

        Args:
            name: the name of the data set.
            columns: names of columns.
            drop_last: leave out the last batches of a training pass, which are not full. Their samples are not trained in this epoch.
                None: as the DataLoader that describes ``"train"`` says, or else keep them.
            min_rows: the fewest rows of a training batch. The last batch takes rows from the one before where it would have fewer:
                batch normalisation cannot train on a single row. A deterministic run cuts all batches full.

        Raises:
            RunError: if the Trainer has no data set of this name, or for a second pass over ``"train"`` in one epoch.
            ConfigError: for invalid options.
        """
        self._check_dataset(name)
        dropped = self._drops(name, drop_last)
        least = check_count("ctx.batches(min_rows=...)", min_rows, least=1, sane="such as 2")
        batches = self._loop.batches(name, drop_last=dropped, least=least)
        count = self._loop.expected_batches(name, drop_last=dropped)
        return BatchIterator((columns_of(batch, columns) for batch in batches) if columns else batches, count)

    def _drops(self, name: str, drop_last: bool | None) -> bool:
        """Return whether a pass leaves out batches that are not full: what the loop says, or else what the data set does."""
        if drop_last is None:
            return name == TRAIN and self._loop.setup.drop_last
        return check_flag("ctx.batches(drop_last=...)", drop_last)

    def _check_dataset(self, name: str) -> None:
        names = self._loop.setup.datasets
        if name not in names:
            raise RunError(f"there is no data set {name!r}; the Trainer's datasets are {', '.join(names)}.")

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradient of a loss that is the mean over the current batch.

        It weights the gradient so that the optimizer sees the mean over all samples of the global batch, even if the workers' parts
        are unequal, and scales it for fp16. Workers exchange gradients with the last micro-batch of the global batch. Several losses of
        one batch add up.

        Args:
            loss: a tensor of one element.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            RunError: outside a loop over ``ctx.batches("train")``, or for a second call after one forward pass of a model that
                DistributedDataParallel joins.
        """
        self._loop.backward(loss, retain_graph=retain_graph)

    def skip(self) -> None:
        """Let this worker's part of the batch add nothing to the gradient, instead of :meth:`backward`: for a loss that is not finite, for
        example. Other workers need not do the same; the weight of their samples does not change. If nobody's part counts, the optimizers
        do not step. The samples count as trained.

        ``ctx.step()`` may follow. If the loop goes on with the next batch, this worker repeats the steps of its last batch.

        Raises:
            RunError: outside a loop over ``ctx.batches("train")``, or after :meth:`backward` or :meth:`step` on the same batch.
        """
        self._loop.skip()

    def step(self, *optimizers: torch.optim.Optimizer, clip_norm: float | None = None) -> bool:
        """Step the prepared optimizers and clear their gradients, if the global batch is complete; return whether it is.

        With ``optimizers``, step only these; the batch goes on, for a second loss. A loop with fixed batches that fit without accumulation
        may also call ``loss.backward()`` and ``optimizer.step()`` itself.

        ``clip_norm`` clips the norm of the gradient of these optimizers first.

        Raises:
            ConfigError: if ``clip_norm`` is not above 0.
            RunError: for a batch without :meth:`backward` or :meth:`skip` on some worker, or for optimizers that :meth:`prepare` did
                not get.
        """
        if clip_norm is not None:
            clip_norm = check_number("ctx.step(clip_norm=...)", clip_norm, above=0.0, infinite=True, sane="such as 1.0")
        return self._loop.step(optimizers, clip_norm)

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """Return the sum of ``value`` over all workers: of a number as a float, of a tensor or array with several elements as the tensor of
        their sums, on the same device. All workers must call it, with the same shape.

        Raises RunError for anything else.
        """
        if not has_many(value):
            return self._loop.sum([_number("ctx.sum(value)", value)], "ctx.sum() of a number")[0]
        parts = [torch.as_tensor(part) for part in self.gather(value)]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise RunError(f"ctx.sum(value) takes values of one shape, and the workers have {shapes}.")
        return torch.stack(parts).sum(0).to(getattr(value, "device", "cpu"))

    def gather(self, value: Any) -> list[Any]:
        """Return each worker's ``value``, in the order of their ranks: numbers, tensors (on the CPU), or anything that can be pickled.
        All workers must call it. Shapes may differ."""
        return self._loop.gather(value.detach().cpu() if isinstance(value, torch.Tensor) else value)

    def accumulate(self, **values: Any) -> None:
        """Add numbers, or tensors or arrays of one element, to this epoch's sums, for a batch of ``ctx.batches("train")``, after its
        ``ctx.step()``: ``ctx.accumulate(loss=loss.detach() * ctx.rows, rows=ctx.rows)``. Raises RunError for other ``values``."""
        numbers = {name: _number(f"ctx.accumulate({name}=...)", value) for name, value in values.items()}
        self._loop.state.accumulate(numbers)

    def accumulated(self) -> dict[str, float]:
        """Return this epoch's sums over all workers. They count each sample once, even if workers restarted or their number changed.
        All workers must call it."""
        return self._loop.accumulated()

    def report(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Record ``metrics`` as means over the workers. All workers must call it equally often, with the same names.

        It takes what loggers take: keywords (``more``), or a dict whose names may be any text (``{"val/loss": 0.3}``) and whose values
        may be dicts (``{"val": {"loss": 0.3}}`` is the same). Values are numbers, flags, or tensors or arrays of one element. The run
        records text, too, as rank 0 gives it. Raises RunError for other values.
        """
        if not isinstance(metrics, Mapping | None):
            raise RunError(
                f"ctx.report(metrics) takes a dict of metrics, or keywords such as ctx.report(loss=0.5), found {shown(metrics)}."
            )
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {}
        for name, value in flattened({**(metrics or {}), **more}):
            if isinstance(value, str):
                texts[name] = value
            else:
                numbers[name] = _number(f"ctx.report({name}=...)", value)
        self._loop.report(numbers, texts)


def flattened(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The metrics of nested dicts, with names such as ``val/loss``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def has_many(value: Any) -> bool:
    """Return whether this is a tensor or array, and not of a single element."""
    return isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) != 1


def _number(name: str, value: Any) -> float:
    """A number, or a tensor or array of one element, as a float. NaN and infinity are allowed: a loss may be either. Raises RunError
    for anything else."""
    try:
        return float(value.item() if isinstance(value, torch.Tensor | np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array" if isinstance(value, np.ndarray) else ""
        what = f"{kind} of shape {tuple(value.shape)}" if kind and value.shape else shown(value)
        raise RunError(f"{name} takes a number, or a tensor or array of one element, found {what}.") from None
