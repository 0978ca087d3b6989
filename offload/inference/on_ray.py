"""Model workers on a Ray cluster: an actor for each GPU, or one on each node of a cluster without GPUs.

Each iterates over blocks of its own, and all share the cluster's cores (:class:`offload.DataLoader`, as ranks of one job). They claim
tasks as they need them, so a slow one claims fewer. What a lost worker had claimed, others do in a next round.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload import machine, preload
from offload.errors import ConfigError, RunError, find_offload_error
from offload.inference.blocks import Task, Tasks, blocks
from offload.inference.model_worker import Answer, ModelJob, ModelWorker, workers_in_words
from offload.loader.job.ranks import Ranks
from offload.loader.job.session import end_shared_feed
from offload.model.placement import NodeResources
from offload.pipeline.preprocessing.processing import IndexRecipe
from offload.pipeline.program import pickling
from offload.train.cluster.connection import alive_nodes, connected, on_this_node
from offload.train.cluster.ray_nodes import free_resources

CLAIMED = 2  # tasks of a claim
ROUNDS = 3  # rounds in a row in which workers are lost and nothing is done, before the prediction fails
LOOK_S = 0.5
PLACEMENT = "all"  # of the loaders of :mod:`offload.inference.blocks`
FREED_S = 30.0  # time after which Ray has freed what the workers of a round held, or others have taken it
SLACK = 1e-3  # CPUs and GPUs: sums of Ray's amounts differ in the last decimals


class OnRay:
    """The cluster at an address, as :meth:`offload.Trainer.fit` takes it."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._lost = ""  # how the last lost worker ended
        self._before: Mapping[str, Mapping[str, float]] = {}  # what was free before the last round, by node id

    def run(
        self,
        job: ModelJob,
        recipe: IndexRecipe,
        tasks: Tasks,
        todo: Sequence[int],
        say: Callable[[str], None],
        add: Callable[[Answer], None],
    ) -> str:
        """Do the tasks with these numbers, and hand each one's results to ``add``. Return the workers in words.

        Raises ConfigError if the cluster cannot be used, RunError if a task fails, or if workers are lost again and again.
        """
        say("starting Ray" if self._address is None and not ray.is_initialized() else "joining the cluster")
        with connected(self._address, runs=False):
            packed = ray.put(pickling.dumps((job.program, job, recipe)))
            missing, idle = set(todo), 0
            while missing:
                say("starting model workers")
                before = len(missing)
                for answer in self._round(packed, tasks, sorted(missing)):
                    missing.remove(answer.number)
                    add(answer)
                idle = idle + 1 if len(missing) == before else 0
                if missing and idle == ROUNDS:
                    raise RunError(
                        f"the model workers ended {ROUNDS} times without a result: {self._lost}. The same command goes on where this one "
                        "ended."
                    )
            return _in_words(alive_nodes())

    def _round(self, packed: Any, tasks: Tasks, todo: Sequence[int]) -> Iterator[Answer]:
        """The results of one round of workers, which may do fewer than all tasks."""
        self._before = _free_again(self._before)
        nodes = alive_nodes()
        places = _places(nodes, self._before)
        claims = on_this_node(ray.remote(_Claims)).remote(tasks, list(todo))
        name = uuid.uuid4().hex
        environment = dict(ray.get_runtime_context().runtime_env)
        workers: list[Any] = []
        results: list[Any] = []  # generators of references
        for rank, options in enumerate(places):
            own = {"env_vars": {**environment.get("env_vars", {}), **_rank(name, rank, len(places))}}
            env = {**preload.runtime_env({**environment, **own}), **own}
            worker: Any = ray.remote(_Worker).options(**options, runtime_env=env).remote()
            workers.append(worker)
            results.append(worker.answers.options(num_returns="streaming").remote(packed, claims))
        left = len(todo)
        try:
            while results and left:  # a worker whose GPU another program has just taken may never begin
                ready, _ = ray.wait(results, num_returns=1, timeout=LOOK_S, fetch_local=False)
                result: Any
                for result in ready:
                    try:
                        yield ray.get(next(result))
                        left -= 1
                    except StopIteration:
                        results.remove(result)
                    except ray.exceptions.RayError as error:
                        if (known := find_offload_error(error)) is not None:
                            raise known from None
                        if isinstance(error, ray.exceptions.RayTaskError):
                            raise
                        self._lost = str(error).strip().splitlines()[0]
                        results.remove(result)
        finally:
            for actor in (*workers, claims):
                ray.kill(actor)
            if len(places) > 1:
                end_shared_feed(Ranks.of(_rank(name, 0, len(places))), PLACEMENT)


def _free_again(before: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """What is free on each node, once that is as much as ``before``, or others must have taken it. Lost nodes do not count."""
    until = time.monotonic() + FREED_S
    while True:
        free, alive = free_resources(), {node.node_id for node in alive_nodes()}
        missing = any(
            free.get(node, {}).get(name, 0.0) < amounts.get(name, 0.0) - SLACK
            for node, amounts in before.items()
            if node in alive
            for name in ("CPU", "GPU")
        )
        if not missing or time.monotonic() > until:
            return free
        time.sleep(LOOK_S)


def _places(nodes: Sequence[NodeResources], free: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The options of the actors of all model workers: one for each free GPU, or one on each node if the cluster has none. ``free``: what is
    free on each node."""
    whole = sum(int(node.gpus) for node in nodes)
    if not whole:
        return [
            {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}
            for node in nodes
            if node.cpus
        ]
    count = sum(int(free.get(node.node_id, {}).get("GPU", 0)) for node in nodes)
    if not count:
        raise ConfigError(
            f"other programs hold all {whole} GPUs of the cluster. Wait until one is free, or stop one of them."
        )
    return [{"num_cpus": 0, "num_gpus": 1}] * count


def _in_words(nodes: Sequence[NodeResources]) -> str:
    """Who did the work."""
    gpus = sum(int(node.gpus) for node in nodes)
    return workers_in_words(gpus, round(sum(node.cpus for node in nodes)))


def _rank(name: str, rank: int, world_size: int) -> dict[str, str]:
    """The variables by which the DataLoaders of model workers know that they share the cluster's cores."""
    if world_size == 1:
        return {}
    return {"MASTER_ADDR": "prediction", "MASTER_PORT": name, "RANK": str(rank), "WORLD_SIZE": str(world_size)}


class _Claims:
    """The tasks that no worker has claimed."""

    def __init__(self, tasks: Tasks, todo: list[int]) -> None:
        self._tasks, self._todo = tasks, iter(todo)

    def claim(self) -> list[Task]:
        """The next tasks; none if there are no more."""
        return [self._tasks.task(number) for _, number in zip(range(CLAIMED), self._todo, strict=False)]


class _Worker:
    """The actor of a model worker."""

    def answers(self, packed: bytes, claims: Any) -> Iterator[Answer]:
        """Yield the results of the tasks that this worker claims."""
        _, job, recipe = pickling.loads(packed)
        if torch.cuda.is_available():
            device = torch.device("cuda", 0)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(machine.usable_cores())  # Ray allows one for an actor that reserves no CPU
        os.environ.pop("RAY_ADDRESS", None)  # this process is connected already
        worker = ModelWorker(job, device)
        yield from worker.answers(blocks(recipe, _claimed(claims), None))


def _claimed(claims: Any) -> Iterator[Task]:
    while tasks := ray.get(claims.claim.remote()):
        yield from tasks
