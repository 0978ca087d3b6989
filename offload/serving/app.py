"""The Serve application: HTTP in front, preprocessing on CPUs behind it, then the model. Each part scales by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from offload.errors import ConfigError
from offload.inference.predictor import Predictor
from offload.inference.weights import read_weights
from offload.model.checks import check_count, check_mapping, check_number, check_path, shown
from offload.pipeline.blocks.wire import Columns
from offload.pipeline.program import pickling
from offload.pipeline.program.surroundings import Program
from offload.serving.batches import Outputs, ServedModel
from offload.serving.preprocessing import RequestPreprocessing, check_servable
from offload.serving.requests import Refusal, Sample

try:
    from ray import serve

    from offload.serving.ingress import Ingress
except ImportError as missing:
    raise ConfigError(
        f"offload.serving needs Ray Serve, and {missing.name} is not installed: pip install 'offload[serve]'."
    ) from None

Replicas = int | tuple[int, int]
AHEAD = 2  # batches' worth of requests at a model replica: one under way, one that gathers


class Preprocessing:
    """A replica that preprocesses samples, one at a time, on one core."""

    def __init__(self, packed: bytes) -> None:
        _, predictor = pickling.loads(packed)
        self._preprocessing = RequestPreprocessing(predictor.data)

    async def __call__(self, sample: Sample) -> Columns | Refusal:
        return self._preprocessing(sample)


class Model:
    """A replica that holds the model. It gathers the samples of several requests in a batch."""

    def __init__(self, packed: bytes, checkpoint: str, batch_size: int, batch_wait_s: float) -> None:
        _, predictor = pickling.loads(packed)
        self._model = ServedModel(predictor, checkpoint)
        self._answers = cast(Any, self._batch)
        self._answers.set_max_batch_size(batch_size)
        self._answers.set_batch_wait_timeout_s(batch_wait_s)

    @serve.batch
    async def _batch(self, samples: list[Columns | Refusal]) -> list[Outputs | Refusal]:
        return self._model.answers(samples)

    async def __call__(self, sample: Columns | Refusal) -> Outputs | Refusal:
        answer: Outputs | Refusal = await self._answers(sample)
        return answer


def app(
    predictor: Predictor,
    checkpoint: str | os.PathLike[str],
    *,
    preprocessing_replicas: Replicas = 1,
    model_replicas: Replicas = 1,
    gpus_per_model: float = 0.0,
    batch_size: int = 16,
    batch_wait_s: float = 0.005,
) -> serve.Application:
    """The Serve application of a checkpoint, for ``serve.run``, ``serve run`` and ``serve build``.

    ``POST /predict`` takes an image as the body or in a form, or a row as JSON. It returns the outputs as JSON. Errors have a 4xx or 5xx
    status and a sentence in ``error``.

    Args:
        predictor: the model, and its data with the preprocessing of validation. The data themselves are not read.
        checkpoint: a run directory (its newest checkpoint), a folder ``checkpoint_TIME``, or a file with a ``state_dict``. Every node with
            a model replica must be able to read it.
        preprocessing_replicas: the replicas that preprocess, with a core each: a number, or (least, most), between which Serve scales.
        model_replicas: the replicas that hold the model, likewise.
        gpus_per_model: the GPUs that each of these reserves; 0 for a model on the CPU.
        batch_size: the most samples of a batch.
        batch_wait_s: the time that a batch waits for more samples, in seconds.

    Raises:
        ConfigError: for invalid arguments, for a checkpoint that cannot be read or is of another model, and for data that cannot be served:
            mixed or cached ones, and transforms that yield several samples.
    """
    if not isinstance(predictor, Predictor):
        raise ConfigError(f"serving.app takes an offload.Predictor, found {shown(predictor)}.")
    check_servable(predictor.data)
    path = check_path("serving.app: checkpoint", os.fspath(checkpoint), sane="a run directory or a checkpoint")
    path = path if "://" in path else str(Path(path).expanduser().absolute())
    size = check_count("serving.app: batch_size", batch_size, least=1, sane="such as 16")
    wait_s = check_number("serving.app: batch_wait_s", batch_wait_s, sane="seconds, such as 0.005")
    gpus = check_number("serving.app: gpus_per_model", gpus_per_model, sane="such as 1")
    read_weights(path).fill(predictor.built())  # mistakes show here, and not in the logs of replicas
    packed = pickling.dumps((Program.here(), predictor))
    preprocessing = serve.deployment(
        name="preprocessing",
        ray_actor_options={"num_cpus": 1},
        **_replicas("preprocessing_replicas", preprocessing_replicas),
    )(Preprocessing).bind(packed)
    model = serve.deployment(
        name="model",
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=AHEAD * size,
        **_replicas("model_replicas", model_replicas),
    )(Model).bind(packed, path, size, wait_s)
    ingress = serve.deployment(name="ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)(Ingress)
    return ingress.bind(preprocessing, model)


def _replicas(name: str, value: Replicas) -> dict[str, Any]:
    """Serve's options for a number of replicas, or for a range."""
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ConfigError(f"serving.app: {name} must be a number or (least, most), found {shown(value)}.")
        least, most = (check_count(f"serving.app: {name}", number, sane="such as (1, 4)") for number in value)
        if not 1 <= most >= least:
            raise ConfigError(
                f"serving.app: {name} must be (least, most) with most ≥ least and ≥ 1, found {shown(value)}."
            )
        return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 2}}
    return {"num_replicas": check_count(f"serving.app: {name}", value, least=1, sane="such as 2, or (1, 4)")}


_OPTIONS = ("preprocessing_replicas", "model_replicas", "gpus_per_model", "batch_size", "batch_wait_s")


def build(args: dict[str, Any]) -> serve.Application:
    """The application for ``serve run offload.serving:build script=train.py checkpoint=runs/train``.

    Args:
        args: ``script``, a Python file that defines ``predictor()``, and ``checkpoint``, as :func:`app` takes it. The others are those of
            :func:`app`; a range of replicas is ``1-4``. ``args`` of a Serve config file may hold numbers and lists.

    Raises:
        ConfigError: for missing and unknown arguments, and as :func:`app`.
    """
    from offload.cli.script import build_predictor

    known = check_mapping("args", args, sane="such as script=train.py checkpoint=runs/train")
    for name in ("script", "checkpoint"):
        if name not in known:
            raise ConfigError(f"serving.build needs {name}=..., such as script=train.py checkpoint=runs/train.")
    if unknown := set(known) - {"script", "checkpoint", *_OPTIONS}:
        raise ConfigError(
            f"serving.build takes script, checkpoint, {', '.join(_OPTIONS)}, found {', '.join(sorted(unknown))}."
        )
    options = {name: _number(name, known[name]) for name in _OPTIONS if name in known}
    predictor = build_predictor(Path(known["script"]), (), "auto")  # Serve has a Ray already
    return app(predictor, known["checkpoint"], **options)


def _number(name: str, value: Any) -> Any:
    """An option's value: on the command line it is text."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        if "-" in value and name.endswith("replicas"):
            least, _, most = value.partition("-")
            return int(least), int(most)
        return float(value) if name in ("gpus_per_model", "batch_wait_s") else int(value)
    except ValueError:
        raise ConfigError(f"serving.build: {name} must be a number, found {value!r}.") from None
