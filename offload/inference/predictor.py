"""A trained model with the preprocessing of its data, as a user describes it once for prediction and serving.

Where it stops: :mod:`offload.inference.weights` reads checkpoints, and :mod:`offload.inference.model_worker` calls the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from offload.errors import FAILURES, ConfigError, RunError
from offload.inference.results import without_rows
from offload.model.checks import check_callable, check_names
from offload.pipeline.describe.combine import indexed
from offload.pipeline.describe.from_loader import described
from offload.pipeline.describe.pipeline import Pipeline, missing_arguments
from offload.pipeline.preprocessing.wording import say

IMAGE = "image"
OUTPUT = "output"


class Predictor:
    """A model, the preprocessing of its data, and how a batch becomes outputs. A checkpoint adds the weights.

    Args:
        model: a function without arguments that returns the model as training builds it, before ``ctx.prepare``.
        data: a data set with the preprocessing of validation: the result of :func:`offload.image_folder` or its siblings, such as
            ``build().datasets["val"]``, a ``ray.data.Dataset``, a map-style torch data set, a list of samples, or a torch ``DataLoader``.
        outputs: a function of the model and a batch, as ``ctx.batches`` yields it. It returns a tensor with one row for each sample, or a
            dict of such tensors by name. By default, it is ``model(batch["image"])``. It runs in evaluation mode and without gradients.
        keep: columns of the batch that the results hold, too, such as ``("label",)``.

    Raises:
        ConfigError: for invalid arguments.

    Example::

        def predictor():
            return offload.Predictor(build_model, build().datasets["val"], keep=("label",))
    """

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        data: Any,
        *,
        outputs: Callable[[torch.nn.Module, Any], Any] | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        if isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"Predictor: model must be a function that returns the model, found a {type(model).__name__}. Pass the function that "
                "builds it: each model worker calls it."
            )
        self.model = check_callable("Predictor: model", model, sane="a function that returns the model")
        if (needed := missing_arguments(model)) is not None:
            raise ConfigError(f"Predictor: offload calls model without arguments, and it {needed}.")
        pipeline = described("data", data)
        self.needs_ray = pipeline.dataset is not None
        """Whether only Ray can read the data."""
        self.data: Pipeline = indexed("Predictor: data", replace(pipeline, shuffle=False))
        if pipeline.drawn:
            raise ConfigError(
                "Predictor: data draws samples by weight, and a prediction visits each sample once. Pass the data set without "
                "offload.weighted."
            )
        self.outputs: Callable[[torch.nn.Module, Any], Any] = (
            _of_image
            if outputs is None
            else check_callable("Predictor: outputs", outputs, sane="a function of the model and a batch")
        )
        if outputs is not None and (needed := missing_arguments(outputs, None, None)) is not None:
            raise ConfigError(f"Predictor: offload calls outputs with the model and a batch, and it {needed}.")
        self.keep = check_names("Predictor: keep", keep, sane="such as ('label',)") if keep else ()

    def built(self) -> torch.nn.Module:
        """A new model. Raises ConfigError if the user's function raises, or returns something else."""
        name = getattr(self.model, "__qualname__", type(self.model).__name__)
        try:
            model = self.model()
        except FAILURES as error:
            raise ConfigError(f"the function {name}, which builds the model, raised {say(error)}.") from None
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"the function {name} returned {type(model).__name__}, and it must return the model, a torch.nn.Module."
            )
        return model

    def named_outputs(self, model: torch.nn.Module, batch: Any, rows: int) -> dict[str, Any]:
        """The outputs of a batch of so many samples, by name. Raises RunError if the user's function raises, or if an output does not
        have one row for each sample."""
        name = getattr(self.outputs, "__qualname__", type(self.outputs).__name__)
        try:
            with torch.inference_mode():
                value = self.outputs(model, batch)
        except RunError:
            raise
        except FAILURES as error:
            what = "the model" if self.outputs is _of_image else f"outputs ({name})"
            raise RunError(f"{what} raised {say(error)} on a batch of {rows} samples.") from None
        named = dict(value) if isinstance(value, Mapping) else {OUTPUT: value}
        named = {str(key): column for key, column in named.items() if column is not None}
        for key, column in named.items():
            if (reason := without_rows(column, rows)) is not None:
                raise RunError(
                    f"the output {key!r} {reason}, for {rows} samples. Return a dict of tensors from outputs=, each with one row for each "
                    "sample, and leave out what has none."
                )
        return named


def _of_image(model: torch.nn.Module, batch: Any) -> Any:
    """The outputs of a model of images."""
    if not isinstance(batch, Mapping) or IMAGE not in batch:
        has = f"columns {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise RunError(
            f"the model is called with batch[{IMAGE!r}], and a batch has {has}. Say how to call it: offload.Predictor(..., "
            "outputs=lambda model, batch: model(...))."
        )
    return model(batch[IMAGE])
