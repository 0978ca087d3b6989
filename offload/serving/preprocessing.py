"""The preprocessing of a request's sample, by the recipe of the validation data.

The recipe is that of a data set, with a reader of its own: the sample comes in the request, and not from a source.
Where it stops: the device part of the preprocessing belongs to the model's batches (:mod:`offload.serving.batches`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from typing import Any

import numpy as np
import pyarrow as pa

from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID, Columns
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.images.decode import DecodeError
from offload.pipeline.images.region_decode import read_image
from offload.pipeline.index.source import At, Reader, Samples, nowhere
from offload.pipeline.preprocessing.block import Scratch
from offload.pipeline.preprocessing.processing import process
from offload.serving.requests import UNUSABLE, Refusal, Sample

_SAMPLE = "sample"
_BROKEN = "corrupt or truncated image"


def check_servable(pipeline: Pipeline) -> None:
    """Raise ConfigError for data whose preprocessing begins before the sample, or makes several of one."""
    why = ""
    if pipeline.parts:
        why = "joins several data sets, each with its own preprocessing (offload.mix). Pass one of them"
    elif pipeline.kept:
        why = "keeps samples in a cache (offload.cached), and a request's sample is new. Pass the data set with all of its preprocessing"
    elif pipeline.yields:
        why = "has a transform that yields any number of samples for one, and a request has one answer. Pass a transform that returns one"
    if why:
        raise ConfigError(f"the data of the Predictor {why}.")


class RequestPreprocessing:
    """The preprocessing of samples, ready in this process. It is not for several threads."""

    def __init__(self, pipeline: Pipeline) -> None:
        check_servable(pipeline)
        reader = _RequestReader(
            encoded=pipeline.decodes_regions, pillow=bool(getattr(pipeline.transform, "from_dataset", False))
        )
        # With "skip", a sample that cannot be read carries its reason instead of raising.
        recipe = dataclasses.replace(pipeline.recipe(None, seed=0), reader=reader, on_error="skip")
        self._recipe, self._scratch = recipe.ready(), Scratch()

    def __call__(self, sample: Sample) -> Columns | Refusal:
        """The columns of the sample, as they travel to the device, or why there are none."""
        rows = pa.table({_SAMPLE: [pickle.dumps(sample)], SAMPLE_ID: [0], POSITION: [0]})
        try:
            block = process(self._recipe, rows, epoch=0, scratch=self._scratch)
        except RunError as error:
            return Refusal(status=UNUSABLE, text=f"The sample cannot be preprocessed: {error}")
        columns = wire.decode(block)
        if (reasons := columns.pop(ERROR, [None])) and reasons[0] is not None:
            return Refusal(status=UNUSABLE, text=f"The sample cannot be used: {reasons[0]}.")
        # Copies: the block lies in memory that serves the next request.
        return {name: column.copy() if isinstance(column, np.ndarray) else column for name, column in columns.items()}


class _RequestReader(Reader):
    """A reader of samples that lie in their index rows.

    Args:
        encoded: whether the transform decodes JPEG files itself.
        pillow: whether the transform takes images as a torch data set returns them, so of Pillow.
    """

    def __init__(self, *, encoded: bool, pillow: bool) -> None:
        self._encoded, self._pillow = encoded, pillow

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        (content,) = rows.column(_SAMPLE).to_pylist()
        sample: Sample = pickle.loads(content)
        if sample.image is None:
            return Samples({name: _column(value) for name, value in (sample.row or {}).items()})
        try:
            image = self._decoded(sample.image)
        except DecodeError as error:
            return Samples({"image": [None], "label": np.array([-1])}, {0: f"{_BROKEN}: {error}"})
        return Samples({"image": [image], "label": np.array([-1])})

    def _decoded(self, content: bytes) -> Any:
        if not self._pillow:
            return read_image(content, _BROKEN, encoded=self._encoded)
        import PIL.Image

        try:
            return PIL.Image.open(io.BytesIO(content)).convert("RGB")  # as torchvision's data sets do
        except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise DecodeError(str(error)) from None

    def describe(self, rows: pa.Table, row: int) -> str:
        return "the request"


def _column(value: Any) -> Any:
    """The column of one value, as sources have it: numbers as an array."""
    if isinstance(value, bool | int | float):
        return np.array([value])
    if isinstance(value, list) and value and all(isinstance(item, bool | int | float | list) for item in value):
        with contextlib.suppress(ValueError):  # lists that differ in length stay lists, as those of a Parquet file do
            array = np.asarray(value)
            return [array if array.dtype.kind in "biuf" else value]
    return [value]
