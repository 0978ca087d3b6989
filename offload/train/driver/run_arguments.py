"""The arguments that a run gets from its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from offload.pipeline.describe.pipeline import Pipeline
from offload.train.callback import Callback
from offload.train.config import Adaptation, BatchSize, Checkpoints, Cluster, Precision, WorkerOverrides

if TYPE_CHECKING:  # a run needs no Ray Train
    from ray.train import RunConfig, ScalingConfig


class Arguments(Protocol):
    """Checked arguments; see :class:`offload.train.driver.trainer.Trainer`."""

    train: Callable[[Any], None]
    datasets: dict[str, Pipeline]
    batch_size: BatchSize
    workers: tuple[int, int] | None
    adaptation: Adaptation
    cluster: Cluster
    precision: Precision
    checkpoints: Checkpoints
    seed: int
    deterministic: bool
    hang_s: float
    train_loop_config: dict[str, Any]
    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    callbacks: tuple[Callback, ...]
    overrides: WorkerOverrides
    other_options_at: int | None
