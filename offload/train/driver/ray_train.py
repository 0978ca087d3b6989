"""Ray Train's controller, with the policies of a run. Only this file touches Ray Train's private interface.

Where it stops: the policies here ask the hub how many workers should train.

Each of Ray Train's helper actors is one more process. It imports torch for some seconds while the run starts, and wakes a hundred
times a second while it runs. On a host with few cores, those cores should preprocess. A run therefore omits the actors for data sets
(it has its own feed), for removing placement groups (they end with the controller, and with the job), and for notices of preemption
(unless the environment asks for it). Without a Ray Data pipeline, it also omits the actor that coordinates Ray Data with the workers.
The controller, like the workers, starts with its imports done (:mod:`offload.preload`).

Ray Train would also move each worker to a folder of its own. A run moves them to the program's
(:mod:`offload.train.worker.process`), so that relative paths in the user's function name the same files as everywhere else in the script.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
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
from ray.train.v2._internal.execution import controller as ray_controller
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError

from offload.errors import RunError
from offload.train.cluster.deaths import how_worker_ended
from offload.train.cluster.holdings import NAMESPACE, Holdings, worker_title
from offload.train.cluster.ray_processes import how_it_ended
from offload.train.hub.client import HubClient
from offload.train.worker.links.reporter import HUNG
from offload.train.worker.steps.device_memory import DeviceMemoryError

NODE_ID = "ray.io/node-id"  # a label that every node has
BLOCKING_GET_WARNING = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
UNUSED_CALLBACKS = ("DatasetsCallback", "PlacementGroupCleanerCallback", "WorkingDirectorySetupCallback")
PRINT_PATCH = "RAY_TRAIN_ENABLE_PRINT_PATCH"  # would log each printed line as well
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# Ray Train polls its workers every 2 s, and they wait for that poll at the end of a run and between consecutive commits. A young worker
# group is polled more often, since a run of a few seconds would otherwise spend half of its time waiting.
YOUNG_S = 60.0
YOUNG_LOOK_S = 0.2
READY_WAIT_S = 0.75  # share of the polling interval that workers get to commit before others replace them
LOOK_S = 2.0  # Ray Train's own interval
ANSWER_S = 10.0
LAST_LOOK_S = 5.0
LAST_LOOK_PAUSE_S = 0.05
WORKER_LOST = (WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
NOT_STARTED = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused")


class DecidedWorkers(FixedScalingPolicy):
    """A scaling policy that follows the run's orders. ``announced``: whether Ray Data learns of the workers. ``run``: the run's name
    on the cluster."""

    def __init__(self, scaling_config: Any, hub: HubClient, *, announced: bool, run: str) -> None:
        super().__init__(scaling_config)
        self._hub, self._announced, self.run = hub, announced, run
        self._started_at = time.monotonic()

    def look_s(self, usual_s: float) -> float:
        """The seconds between two polls of the workers, usually ``usual_s``."""
        young = time.monotonic() - self._started_at < YOUNG_S
        return min(usual_s, YOUNG_LOOK_S) if young else usual_s

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        wanted = self._hub.workers_to_start(ANSWER_S)
        return self._resize(wanted) if wanted else NoopDecision()

    def make_decision_for_running_worker_group(self, *status: Any, **named: Any) -> ScalingDecision:
        self._maybe_send_resource_request()
        wanted = self._hub.workers_to_replace_with(READY_WAIT_S * self.look_s(LOOK_S))
        return self._resize(wanted) if wanted else NoopDecision()

    def _resize(self, workers: int) -> ScalingDecision:
        self._started_at = time.monotonic()
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


class TrainController(ray_controller.TrainController):
    """Ray Train's controller, which polls a young worker group more often. Ray's dashboard shows the run's name for it and its workers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._run: str = named["scaling_policy"].run
        self.worker_group_cls = _group_of(self._run)

    def __repr__(self) -> str:
        return f"{self._run} controller"

    @property
    def _health_check_interval_s(self) -> float:
        policy: Any = self._scaling_policy
        return float(policy.look_s(self._usual_interval_s))

    @_health_check_interval_s.setter
    def _health_check_interval_s(self, seconds: float) -> None:
        self._usual_interval_s = seconds


def _group_of(run: str) -> type[WorkerGroup]:
    """Ray Train's worker group, with workers that Ray's dashboard shows as those of this run."""

    class Worker(RayTrainWorker):
        def __repr__(self) -> str:
            return worker_title(run)

    class Group(WorkerGroup):
        _worker_cls = Worker

    Worker.__name__ = Worker.__qualname__ = RayTrainWorker.__name__  # the name that Ray's users know
    return Group


class GoOn(FailurePolicy):
    """A failure policy that restarts the workers after a process or a host died, unless several attempts in a row made no step.

    An exception of the user's function would come again, so it ends the run after ``max_failures`` times. If workers do not fit yet,
    the policy tries again ``controller_failure_limit`` times.
    """

    def __init__(self, failure_config: Any, hub: HubClient) -> None:
        super().__init__(failure_config)
        self._hub = hub
        self._raised = self._not_started = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        error = training_failed_error
        if isinstance(error, PreemptionError):
            return self._lost(_first_line(error))
        if isinstance(error, WorkerGroupError):
            failures = {rank: getattr(failure, "_base_exc", failure) for rank, failure in error.worker_failures.items()}
            too_large = [failure for failure in failures.values() if isinstance(failure, DeviceMemoryError)]
            if too_large:  # a worker raises it only if smaller batches come next; the other ranks wait for that worker
                return FailureDecision.RETRY
            lost = {rank: failure for rank, failure in failures.items() if isinstance(failure, WORKER_LOST)}
            # When a host dies, its peers notice before Ray does: their connections to it break.
            if lost or all(map(is_broken_connection, failures.values())):
                rank, cause = next(iter((lost or failures).items()))
                how = how_worker_ended(rank, cause) or _first_line(cause)
                if lost:  # shown instead of Ray's message if this ends the run
                    again = "the same command tries again from the last checkpoint"
                    if how_it_ended(HUNG) in how:
                        again = (
                            "it made no progress for hang_s. If it waits for another worker, the loops differ: all workers must call "
                            "ctx.report, ctx.sum, ctx.gather and ctx.backward equally often"
                        )
                    error.worker_failures[rank] = RunError(f"training failed several times in a row: {how}; {again}.")
                return self._lost(how, tuple(lost))
            self._raised += 1
            return _within(self._raised, self.failure_config.max_failures)
        if isinstance(error, ControllerError) and isinstance(error.controller_failure, NOT_STARTED):
            self._not_started += 1
            return _within(self._not_started, self.failure_config.controller_failure_limit)
        return FailureDecision.RAISE

    def _lost(self, reason: str, ranks: Sequence[int] = ()) -> FailureDecision:
        again = self._hub.worker_failed(reason, tuple(ranks))
        return FailureDecision.RETRY if again else FailureDecision.RAISE


def _within(count: int, limit: int) -> FailureDecision:
    return FailureDecision.RETRY if limit < 0 or count <= limit else FailureDecision.RAISE


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective operation failed because a peer is gone, by the messages of gloo and NCCL.

    The user's own code may lose connections, too. Gloo's messages name its source file.
    """
    if isinstance(error, dist.DistBackendError) or not isinstance(error, RuntimeError):
        return isinstance(error, dist.DistBackendError)
    text = str(error)
    of_torch = isinstance(error, dist.DistError) or "gloo" in text.lower()
    return of_torch and any(words in text for words in BROKEN_CONNECTION)


class Avoiding(ControllerCallback):
    """A callback that keeps workers off the nodes that the run's orders avoid."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        avoided = self._hub.nodes_to_avoid()
        selector = scaling_config.label_selector
        if not avoided or isinstance(selector, list):
            return None
        return {**(selector or {}), NODE_ID: f"!in({','.join(avoided)})"}


class LastLook(WorkerGroupCallback):
    """A callback that reads the workers' last reports before they end: the next workers begin from the checkpoint in them.

    Ray Train knows a checkpoint once every rank has reported it. One rank may report a moment after the others.
    """

    def __init__(self) -> None:
        self._worker_group: Any = None
        self._reports: Counter[int] = Counter()

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._worker_group, self._reports = worker_group, Counter()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        for rank, status in worker_group_status.worker_statuses.items():
            self._reports[rank] += status.training_report is not None

    @contextlib.contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        # Called before any callback dismantles the receiver of reports.
        group, self._worker_group = self._worker_group, None
        if group is not None:
            with contextlib.suppress(RayError, RuntimeError):  # dead workers report nothing
                self._take_in(group)
        yield

    def _take_in(self, group: Any) -> None:
        """Poll until all ranks have answered and have reported equally often, or the time is up."""
        until = time.monotonic() + LAST_LOOK_S
        while (left_s := until - time.monotonic()) > 0:
            status = group.poll_status(timeout=left_s)
            if status.errors or len(set(self._reports.values())) <= 1:
                return
            time.sleep(LAST_LOOK_PAUSE_S)


# To a type checker, ray.train.torch.TorchTrainer is version 1's, which lacks methods of version 2's.
class TorchTrainer(ray.train.torch.TorchTrainer):
    """Ray Train's trainer with fewer processes. ``beside_ray_data``: whether Ray Data pipelines run beside the workers;
    ``hub``: the source of the wanted number of workers; ``run``: the run's name on the cluster; ``holdings``: where the controller is
    noted; ``controller_env``: the controller's runtime environment."""

    def __init__(
        self,
        train: Any,
        *,
        hub: HubClient,
        run: str,
        holdings: Holdings,
        beside_ray_data: bool,
        controller_env: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(train, **options)
        self._hub, self._run, self._holdings, self._controller_env = hub, run, holdings, controller_env
        self._beside_ray_data = beside_ray_data
        self._ended = False
        self._starting = threading.Lock()

    def start_none(self) -> None:
        """Let no controller start from now on."""
        with self._starting:
            self._ended = True

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [
            LastLook(),
            Avoiding(self._hub),
            *(callback for callback in callbacks if type(callback).__name__ not in UNUSED_CALLBACKS),
        ]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        config: Any = self.scaling_config
        run_config: Any = self.run_config
        arguments["scaling_policy"] = DecidedWorkers(config, self._hub, announced=self._beside_ray_data, run=self._run)
        arguments["failure_policy"] = GoOn(run_config.failure_config, self._hub)
        # As Ray Train does it, but in the given environment, and without a handler of Ctrl-C: the driver handles that.
        env_vars = {BLOCKING_GET_WARNING: "0", PREEMPTION_WATCHER: "0", PRINT_PATCH: "0", **get_env_vars_to_propagate()}
        controller_class: Any = ray.remote(
            num_cpus=0,
            label_selector={NODE_ID: ray.get_runtime_context().get_node_id()},
            runtime_env={**self._controller_env, "env_vars": env_vars},
        )(TrainController)
        with self._starting:
            if self._ended:
                raise RunError("the run ended before its workers could start.")
            name = f"{self._run} controller {secrets.token_hex(4)}"
            self._holdings.note_actor(name)
            controller = controller_class.options(name=name, namespace=NAMESPACE).remote(**arguments)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
