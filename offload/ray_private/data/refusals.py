"""The steps of a ``ray.data.Dataset`` that the pool cannot run, so Ray Data must execute them.

Where it stops: :mod:`offload.ray_private.data.dataset_plan` decides which part of a plan this concerns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.data._internal.compute import TaskPoolStrategy
from ray.data._internal.logical.operators import Download

RANDOM_SPLIT = "Dataset.streaming_train_test_split.<locals>.random_split"
"""A function that draws by task. With units of other rows, both halves of the split would share some rows."""


class NotTakenOverError(Exception):
    """A Dataset has a step that only Ray Data can execute. The message names it."""


def left_to_ray(name: str, logical: Any) -> NotTakenOverError:
    """The error for a step that the pool cannot run."""
    if isinstance(logical, Download):
        return NotTakenOverError(
            f"its step {name} downloads with processes of Ray Data (a function of map() can download, too)"
        )
    return NotTakenOverError(f"its step {name} needs rows of several blocks at once")


def check_resources(name: str, remote_args: Mapping[str, Any], logical: Any) -> None:
    """Raise NotTakenOverError if a step needs something that a preprocessing core does not offer."""
    if remote_args.get("num_gpus"):
        raise NotTakenOverError(f"its step {name} takes GPUs")
    for setting in ("resources", "runtime_env", "accelerator_type", "label_selector"):
        if remote_args.get(setting):
            raise NotTakenOverError(f"its step {name} sets {setting}")
    if getattr(logical, "ray_remote_args_fn", None) is not None:
        raise NotTakenOverError(f"its step {name} sets ray_remote_args_fn")
    if isinstance(logical.compute, TaskPoolStrategy) and logical.compute.size is not None:
        raise NotTakenOverError(f"its step {name} limits its concurrency")
    if getattr(getattr(logical, "fn", None), "__qualname__", "") == RANDOM_SPLIT:
        raise NotTakenOverError(
            f'its step {name} draws by the tasks of Ray Data (pass split_type="hash", or take train_test_split)'
        )
