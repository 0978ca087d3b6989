"""Ray Train's controller with what a run of offload uses of it: what is private to Ray Train is touched here alone.

Each of Ray Train's helper actors is one more process that imports torch for some seconds while the run starts, and wakes
a hundred times a second while it runs: on a host with few cores, those are the cores that were to preprocess. Left out
are the actors for data sets (a run has its own feed), for removing placement groups (they end with the controller, and
with the job), for notices of preemption (unless the environment asks for it), and, where no Ray Data pipeline is to be
told what the workers take, the one that coordinates the two.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train.torch
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

UNUSED_CALLBACKS = ("DatasetsCallback", "PlacementGroupCleanerCallback")
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


class UncoordinatedWorkers(FixedScalingPolicy):
    """A fixed number of workers that are not announced to Ray Data."""

    def _send_resource_request(self) -> None: ...

    def _maybe_send_resource_request(self) -> None: ...

    def _cancel_resource_request(self) -> None: ...


# Statically ray.train.torch.TorchTrainer is version 1's, which lacks what version 2's has at run time.
class TorchTrainer(ray.train.torch.TorchTrainer):
    """Ray Train's trainer with fewer processes. ``beside_ray_data``: whether Ray Data pipelines run beside the workers."""

    def __init__(self, train: Any, *, beside_ray_data: bool, **options: Any) -> None:
        super().__init__(train, **options)
        self._beside_ray_data = beside_ray_data

    def fit(self) -> Any:
        os.environ.setdefault(PREEMPTION_WATCHER, "0")
        return super().fit()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [each for each in callbacks if type(each).__name__ not in UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        if not self._beside_ray_data:
            config: Any = self.scaling_config
            arguments["scaling_policy"] = UncoordinatedWorkers(config)
        return super()._initialize_and_run_controller(**arguments)  # type: ignore[misc]
