"""A model worker: blocks of preprocessed samples in, rows of outputs out, on one device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from offload.errors import FAILURES, RunError
from offload.inference.blocks import Block
from offload.inference.predictor import OUTPUT, Predictor
from offload.inference.results import as_array, fitted, unified, without_rows
from offload.inference.weights import Weights
from offload.pipeline.blocks.wire import SAMPLE_ID
from offload.pipeline.preprocessing.wording import say
from offload.pipeline.program.surroundings import Program
from offload.train.worker.data.batch import shown_batch
from offload.train.worker.data.cutting import Cut, Cutter, Skipped, budget_of
from offload.train.worker.data.delivery import Delivery

KEY = "key"
PREDICTION = "prediction"


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """What a model worker needs. It travels to workers on other nodes.

    Args:
        program: the program's surroundings, which must be the first field: the others are unpickled in them.
        predictor: the model, and how it is called.
        weights: its weights.
        batch_size: the samples of a batch.
        argmax: whether results hold the number of the largest output, too.
    """

    program: Program = field(default_factory=Program.here)
    predictor: Predictor
    weights: Weights
    batch_size: int
    argmax: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The results for a task. ``batch``: its rows; None if all samples were skipped. ``skipped``: the samples without results."""

    number: int
    samples: int
    batch: pa.RecordBatch | None
    skipped: tuple[Skipped, ...] = ()


class ModelWorker:
    """The model on a device. Raises ConfigError if the weights belong to another model."""

    def __init__(self, job: ModelJob, device: torch.device) -> None:
        self._job, self._device = job, device
        self._model = job.weights.fill(job.predictor.built()).to(device)
        data = job.predictor.data
        self._budget = budget_of(data.collate_fn)
        self._delivery = Delivery(device, collate_fn=data.collate_fn, on_device=data.on_device)

    def answers(self, blocks: Iterable[Block]) -> Iterator[Answer]:
        """Yield the results of blocks, in order. The device computes a block while the next one is on its way to it.

        Raises RunError if the model cannot be called with a batch, or if its outputs are no rows.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        under_way: _Computed | None = None
        for block in blocks:
            computed = self._compute(block)
            if under_way is not None:
                yield self._answer(under_way)
            under_way = computed
        if under_way is not None:
            yield self._answer(under_way)

    def _compute(self, block: Block) -> _Computed:
        cutter = Cutter(budget=self._budget)
        cutter.add(dict(block.columns), block.rows)
        batches: list[tuple[Cut, dict[str, Any]]] = []
        skipped: list[Skipped] = []
        while (cut := cutter.cut(self._job.batch_size, over=True, near_end=True)) is not None:
            content, event = self._delivered(cut)
            self._delivery.arrived(content, event)
            batch = shown_batch(content)
            outputs = self._job.predictor.named_outputs(self._model, batch, cut.rows)
            self._check_names(outputs)
            kept = {name: _kept(batch, name, cut.rows) for name in self._job.predictor.keep}
            if self._job.argmax:
                outputs[PREDICTION] = _largest(outputs)
            batches.append((cut, {**kept, **outputs}))
            skipped += cut.skipped
        skipped += cutter.leftover()
        return _Computed(block=block, batches=tuple(batches), skipped=tuple(skipped))

    def _delivered(self, cut: Cut) -> tuple[Any, Any]:
        """A batch on the device, and the event of its arrival. Raises RunError if samples form no batch, or if a step there raises."""
        try:
            return self._delivery.deliver(cut)
        except RunError:
            raise
        except FAILURES as error:
            raise RunError(
                f"a step of on_device raised {say(error)} on a batch of {cut.rows} samples. Correct it."
            ) from None

    def _check_names(self, outputs: Iterable[str]) -> None:
        """Raise RunError for an output that would replace another column."""
        for name in outputs:
            if name in own_columns(argmax=self._job.argmax):
                raise RunError(
                    f"the name of an output is {name!r}, which the results use themselves. Give it another name."
                )
            if name in self._job.predictor.keep:
                raise RunError(
                    f"{name!r} is both an output and a column of keep. Give the output another name, or leave it out of keep."
                )

    def _answer(self, computed: _Computed) -> Answer:
        block = computed.block
        tables = [_rows(cut, columns, block) for cut, columns in computed.batches]
        return Answer(
            number=block.number,
            samples=len(block.names),
            batch=_joined(tables) if tables else None,
            skipped=computed.skipped,
        )


def own_columns(*, argmax: bool) -> tuple[str, ...]:
    """The names of the columns that results have besides the outputs and those of ``keep``."""
    return (SAMPLE_ID, KEY, PREDICTION) if argmax else (SAMPLE_ID, KEY)


def workers_in_words(gpus: int, cores: int) -> str:
    """Who does the work: ``2 GPUs and 16 cores``."""
    of_cores = f"{cores} core{'s' if cores != 1 else ''}"
    return f"{gpus} GPU{'s' if gpus > 1 else ''} and {of_cores}" if gpus else of_cores


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """The outputs of a block, which the device may still compute."""

    block: Block
    batches: tuple[tuple[Cut, dict[str, Any]], ...]
    skipped: tuple[Skipped, ...]


def _kept(batch: Any, name: str, rows: int) -> Any:
    """A column of a batch of so many samples. Raises RunError if the batch has no such column, or if it has no rows."""
    try:
        column = batch[name]
    except (KeyError, TypeError, IndexError):
        has = (
            f"has the columns {', '.join(map(str, batch))}"
            if isinstance(batch, dict)
            else f"is a {type(batch).__name__}"
        )
        raise RunError(f"keep names the column {name!r}, and a batch {has}. Keep one of these, or none.") from None
    if (reason := without_rows(column, rows)) is not None:
        raise RunError(
            f"keep names the column {name!r}, which {reason}, for {rows} samples. Keep columns with one value for each sample, such as "
            "numbers, lists or text."
        )
    return column


def _largest(outputs: dict[str, Any]) -> Any:
    """The number of the largest output of each sample."""
    scores = outputs.get(OUTPUT) if OUTPUT in outputs or len(outputs) != 1 else next(iter(outputs.values()))
    if scores is None:
        scores = outputs.get("logits")
    if isinstance(scores, torch.Tensor):
        numbers = scores.dtype != torch.bool and not scores.is_complex()
        if numbers and scores.ndim == 2 and scores.shape[1]:
            return scores.argmax(1)
        found = f"has the shape {tuple(scores.shape)} and the type {str(scores.dtype).removeprefix('torch.')}"
    else:
        found = "is none of them"
    raise RunError(
        f"argmax needs an output of one row of scores for each sample, and of {', '.join(outputs)} that one {found}. Leave argmax out, or "
        "compute the class in outputs=."
    )


def _rows(cut: Cut, columns: dict[str, Any], block: Block) -> pa.RecordBatch:
    """The results of a batch."""
    if cut.pieces:
        ids = np.concatenate([np.asarray(piece[SAMPLE_ID]) for piece in cut.pieces])
    else:
        ids = np.asarray(cut.ids, dtype=np.int64)
    first = block.columns[SAMPLE_ID][0]  # a task holds samples in a row
    names = [block.names[number] for number in (ids - first).tolist()]
    arrays = {SAMPLE_ID: pa.array(ids), KEY: pa.array(names, pa.string())}
    for name, column in columns.items():
        arrays[name] = as_array(name, column)
    return pa.record_batch(arrays)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    schema = functools.reduce(unified, (batch.schema for batch in batches))
    return pa.Table.from_batches([fitted(batch, schema) for batch in batches]).combine_chunks().to_batches()[0]
