"""Ray Train's controller with what a run of offload uses of it: what is private to Ray Train is touched here alone.

How many workers train is decided elsewhere and asked for here, at the run's actor (:class:`offload.train.monitor.Monitor`).

Each of Ray Train's helper actors is one more process that imports torch for some seconds while the run starts, and wakes
a hundred times a second while it runs: on a host with few cores, those are the cores that were to preprocess. Left out
are the actors for data sets (a run has its own feed), for removing placement groups (they end with the controller, and
with the job), for notices of preemption (unless the environment asks for it), and, where no Ray Data pipeline is to be
told what the workers take, the one that coordinates the two. The controller is started with its imports done, as the
workers are (:mod:`offload.preload`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import ray.train.torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError

from offload.errors import RunError
from offload.train.deaths import how_worker_ended
from offload.train.device_memory import DeviceMemoryError

NODE_ID = "ray.io/node-id"  # a label that every node has
BLOCKING_GET_WARNING = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
UNUSED_CALLBACKS = ("DatasetsCallback", "PlacementGroupCleanerCallback")
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
READY_WAIT_S = 1.5  # less than Ray Train's interval between two looks at the workers, who may wait for that look
ANSWER_S = 10.0
LAST_LOOK_S = 5.0
WORKER_LOST = (WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
NOT_STARTED = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused")


class DecidedWorkers(FixedScalingPolicy):
    """As many workers as ``monitor`` says. ``announced``: whether Ray Data is told of them."""

    def __init__(self, scaling_config: Any, monitor: Any, *, announced: bool) -> None:
        super().__init__(scaling_config)
        self._monitor, self._announced = monitor, announced

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        wanted = ray.get(self._monitor.wanted_now.remote(ANSWER_S))
        return self._resize(wanted) if wanted else NoopDecision()

    def make_decision_for_running_worker_group(self, *status: Any, **named: Any) -> ScalingDecision:
        self._maybe_send_resource_request()
        wanted = ray.get(self._monitor.wait_until_ready.remote(READY_WAIT_S))
        return self._resize(wanted) if wanted else NoopDecision()

    def _resize(self, workers: int) -> ScalingDecision:
        per_worker = self.scaling_config._resources_per_worker_not_none
        return ResizeDecision(num_workers=workers, resources_per_worker=per_worker)

    def _send_resource_request(self) -> None:
        if self._announced:
            super()._send_resource_request()  # type: ignore[no-untyped-call]

    def _maybe_send_resource_request(self) -> None:
        if self._announced:
            super()._maybe_send_resource_request()  # type: ignore[no-untyped-call]

    def _cancel_resource_request(self) -> None:
        if self._announced:
            super()._cancel_resource_request()  # type: ignore[no-untyped-call]


class GoOn(FailurePolicy):
    """Start the workers again after a process or a host died, unless several attempts in a row got no step further. An
    exception of the user's function would be raised again: it ends the run, but for ``max_failures`` times. Workers that
    find no room yet are waited for, ``controller_failure_limit`` times."""

    def __init__(self, failure_config: Any, monitor: Any) -> None:
        super().__init__(failure_config)
        self._monitor = monitor
        self._raised = self._not_started = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        error = training_failed_error
        if isinstance(error, PreemptionError):
            return self._lost(_first_line(error))
        if isinstance(error, WorkerGroupError):
            failures = {rank: getattr(each, "_base_exc", each) for rank, each in error.worker_failures.items()}
            too_large = [each for each in failures.values() if isinstance(each, DeviceMemoryError)]
            if too_large:  # raised only where smaller batches come next; the other ranks waited for that one
                return FailureDecision.RETRY
            lost = {rank: each for rank, each in failures.items() if isinstance(each, WORKER_LOST)}
            # When a host dies its peers notice before Ray does: their connections to it break.
            if lost or all(map(is_broken_connection, failures.values())):
                rank, cause = next(iter((lost or failures).items()))
                how = how_worker_ended(rank, cause) or _first_line(cause)
                if lost:  # said instead of Ray's words, should this end the run
                    again = "the same command tries again from the last checkpoint"
                    error.worker_failures[rank] = RunError(f"training failed several times in a row: {how}; {again}.")
                return self._lost(how, tuple(lost))
            self._raised += 1
            return _within(self._raised, self.failure_config.max_failures)
        if isinstance(error, ControllerError) and isinstance(error.controller_failure, NOT_STARTED):
            self._not_started += 1
            return _within(self._not_started, self.failure_config.controller_failure_limit)
        return FailureDecision.RAISE

    def _lost(self, reason: str, ranks: Sequence[int] = ()) -> FailureDecision:
        again = ray.get(self._monitor.worker_failed.remote(reason, tuple(ranks)))
        return FailureDecision.RETRY if again else FailureDecision.RAISE


def _within(count: int, limit: int) -> FailureDecision:
    return FailureDecision.RETRY if limit < 0 or count <= limit else FailureDecision.RAISE


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective operation failed because a peer is gone (gloo's and NCCL's words for it)."""
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in BROKEN_CONNECTION)
    )


class Avoiding(ControllerCallback):
    """Keeps workers off the nodes that ``monitor`` says are to be avoided."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        avoided = ray.get(self._monitor.avoided.remote())
        given = scaling_config.label_selector
        if not avoided or isinstance(given, list):
            return None
        return {**(given or {}), NODE_ID: f"!in({','.join(avoided)})"}


class LastLook(WorkerGroupCallback):
    """Takes in what workers reported before they are ended: the checkpoint that the next ones are to begin from."""

    def __init__(self) -> None:
        self._worker_group: Any = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._worker_group = worker_group

    @contextlib.contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        # Entered before any callback takes apart what takes reports in.
        group, self._worker_group = self._worker_group, None
        if group is not None:
            with contextlib.suppress(RayError, RuntimeError):  # workers that died report nothing any more
                group.poll_status(timeout=LAST_LOOK_S)
        yield


# Statically ray.train.torch.TorchTrainer is version 1's, which lacks what version 2's has at run time.
class TorchTrainer(ray.train.torch.TorchTrainer):
    """Ray Train's trainer with fewer processes. ``beside_ray_data``: whether Ray Data pipelines run beside the workers;
    ``monitor``: the actor that knows how many workers are wanted; ``controller_env``: the controller's runtime environment."""

    def __init__(
        self, train: Any, *, monitor: Any, beside_ray_data: bool, controller_env: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(train, **options)
        self._monitor, self._beside_ray_data, self._controller_env = monitor, beside_ray_data, controller_env
        self._controller: Any = None

    def end(self) -> None:
        """End the controller, and with it the workers and :meth:`fit`, if they have not ended."""
        if self._controller is not None:
            ray.kill(self._controller)

    def fit(self) -> Any:
        os.environ.setdefault(PREEMPTION_WATCHER, "0")
        return super().fit()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [
            LastLook(),
            Avoiding(self._monitor),
            *(each for each in callbacks if type(each).__name__ not in UNUSED_CALLBACKS),
        ]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        config: Any = self.scaling_config
        run_config: Any = self.run_config
        arguments["scaling_policy"] = DecidedWorkers(config, self._monitor, announced=self._beside_ray_data)
        arguments["failure_policy"] = GoOn(run_config.failure_config, self._monitor)
        # As Ray Train does it, in the given environment; it has no handler of Ctrl-C, which the driver hears first.
        env_vars = {BLOCKING_GET_WARNING: "0", **get_env_vars_to_propagate()}
        controller: Any = ray.remote(
            num_cpus=0,
            label_selector={NODE_ID: ray.get_runtime_context().get_node_id()},
            runtime_env={**self._controller_env, "env_vars": env_vars},
        )(TrainController).remote(**arguments)
        self._controller = controller
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
