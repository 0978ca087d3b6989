"""The model's side of serving: preprocessed samples of several requests as one batch, and each one's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import FAILURES, RunError
from offload.inference.predictor import Predictor
from offload.inference.weights import read_weights
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID, Columns
from offload.pipeline.preprocessing.wording import say
from offload.serving.requests import FAILED, Refusal
from offload.train.worker.data.batch import shown_batch
from offload.train.worker.data.cutting import Cutter, budget_of
from offload.train.worker.data.delivery import Delivery

Outputs = dict[str, Any]
"""The outputs of a sample: lists and numbers, by name."""


class ServedModel:
    """The model of a checkpoint on this process's device.

    Raises ConfigError if the checkpoint cannot be read, or is of another model.
    """

    def __init__(self, predictor: Predictor, checkpoint: str) -> None:
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._predictor = predictor
        self._model = read_weights(checkpoint).fill(predictor.built()).to(self._device)
        data = predictor.data
        self._budget = budget_of(data.collate_fn)
        self._delivery = Delivery(self._device, collate_fn=data.collate_fn, on_device=data.on_device)

    def answers(self, samples: Sequence[Columns | Refusal]) -> list[Outputs | Refusal]:
        """The outputs of samples, in their order. A refused sample stays refused. Samples that form no batch are answered one by one."""
        answers: list[Outputs | Refusal | None] = [
            sample if isinstance(sample, Refusal) else None for sample in samples
        ]
        good = [number for number, sample in enumerate(samples) if not isinstance(sample, Refusal)]
        try:
            outputs = self._outputs([samples[number] for number in good])
        except FAILURES:
            # Samples of several clients: one must not fail with another. The user's steps on the device may raise anything.
            outputs = [self._alone(samples[number]) for number in good]
        for number, output in zip(good, outputs, strict=True):
            answers[number] = output
        return [answer for answer in answers if answer is not None]

    def _alone(self, sample: Any) -> Outputs | Refusal:
        try:
            return self._outputs([sample])[0]
        except RunError as error:
            return Refusal(status=FAILED, text=f"The model cannot be called: {error}")
        except FAILURES as error:
            return Refusal(status=FAILED, text=f"The model cannot be called: {say(error)}.")

    def _outputs(self, samples: Sequence[Any]) -> list[Outputs | Refusal]:
        """The outputs of samples in one batch, or in as few as ``max_tokens`` of a ``collate_fn`` allows. Raises RunError."""
        cutter = Cutter(budget=self._budget)
        for number, columns in enumerate(samples):
            place = np.array([number])
            cutter.add({**columns, SAMPLE_ID: place, POSITION: place}, 1)
        outputs: list[Outputs | Refusal] = []
        while (cut := cutter.cut(len(samples), over=True, near_end=True)) is not None:
            content, event = self._delivery.deliver(cut)
            self._delivery.arrived(content, event)
            named = self._predictor.named_outputs(self._model, shown_batch(content), cut.rows)
            columns_of = {name: _values(column) for name, column in named.items()}
            outputs += [{name: values[row] for name, values in columns_of.items()} for row in range(cut.rows)]
        if len(outputs) != len(samples):
            # Nobody could say whose outputs are whose.
            raise RunError(f"{len(samples)} samples of requests became {len(outputs)} in a batch.")
        return outputs


def _values(column: Any) -> list[Any]:
    return [_plain(value) for value in column] if isinstance(column, list | tuple) else list(_plain(column))


def _plain(value: Any) -> Any:
    """A value as JSON holds it: numbers, text, and lists and objects of them. Raises RunError for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.tolist() if not value.is_complex() else _plain(value.resolve_conj().numpy())
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(
        f"an output is of type {type(value).__name__}, which JSON lacks. Return tensors, numbers or text, or lists or dicts of them."
    )
