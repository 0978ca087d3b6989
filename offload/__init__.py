"""Preprocess on every CPU of the cluster so that GPUs never wait.

The names below are the public surface. They are imported at first use: a preprocessing task that needs one of them does not pay for
torch or Ray. Importing this package raises an ImportError if the installed Ray, or this Python, cannot work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from offload.process.program_state import restored
from offload.versions import check_versions, checks_by_itself

if TYPE_CHECKING:
    from offload import arbiter, collate, notebook, runs, transforms, tune
    from offload.errors import ConfigError, OffloadError, RunError
    from offload.inference.predict import Prediction, predict
    from offload.inference.predictor import Predictor
    from offload.loader.loader import DataLoader
    from offload.loader.stats import LoaderStats
    from offload.pipeline.describe.cached import cached
    from offload.pipeline.describe.combine import mix, weighted
    from offload.pipeline.describe.pipeline import Pipeline
    from offload.pipeline.describe.sources import from_ray, from_torch, image_folder, parquet, webdataset
    from offload.pipeline.images.on_device import Normalize
    from offload.train.callback import Callback
    from offload.train.config import Adaptation, BatchSize, Checkpoints, Cluster
    from offload.train.driver.trainer import Result, Trainer
    from offload.train.worker.context import Context

__version__ = "0.1.0"

if not checks_by_itself():
    check_versions()

_HOMES = {
    "Adaptation": "offload.train.config",
    "BatchSize": "offload.train.config",
    "Callback": "offload.train.callback",
    "Checkpoints": "offload.train.config",
    "Cluster": "offload.train.config",
    "ConfigError": "offload.errors",
    "Context": "offload.train.worker.context",
    "DataLoader": "offload.loader.loader",
    "LoaderStats": "offload.loader.stats",
    "Normalize": "offload.pipeline.images.on_device",
    "OffloadError": "offload.errors",
    "Pipeline": "offload.pipeline.describe.pipeline",
    "Prediction": "offload.inference.predict",
    "Predictor": "offload.inference.predictor",
    "Result": "offload.train.driver.trainer",
    "RunError": "offload.errors",
    "Trainer": "offload.train.driver.trainer",
    "cached": "offload.pipeline.describe.cached",
    "from_ray": "offload.pipeline.describe.sources",
    "from_torch": "offload.pipeline.describe.sources",
    "image_folder": "offload.pipeline.describe.sources",
    "mix": "offload.pipeline.describe.combine",
    "parquet": "offload.pipeline.describe.sources",
    "predict": "offload.inference.predict",
    "webdataset": "offload.pipeline.describe.sources",
    "weighted": "offload.pipeline.describe.combine",
}

__all__ = [
    "Adaptation",
    "BatchSize",
    "Callback",
    "Checkpoints",
    "Cluster",
    "ConfigError",
    "Context",
    "DataLoader",
    "LoaderStats",
    "Normalize",
    "OffloadError",
    "Pipeline",
    "Prediction",
    "Predictor",
    "Result",
    "RunError",
    "Trainer",
    "__version__",
    "arbiter",
    "cached",
    "collate",
    "from_ray",
    "from_torch",
    "image_folder",
    "mix",
    "notebook",
    "parquet",
    "predict",
    "runs",
    "transforms",
    "tune",
    "webdataset",
    "weighted",
]


def __getattr__(name: str) -> object:
    with restored():
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in ("arbiter", "collate", "notebook", "runs", "transforms", "tune"):
            return importlib.import_module(f"offload.{name}")
    raise AttributeError(f"module 'offload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
