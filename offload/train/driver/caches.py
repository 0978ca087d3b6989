"""Check the caches of a run's data sets on the nodes that preprocess, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.errors import ConfigError
from offload.pipeline.cache.spec import CacheSpec, obstacle_here

ANSWER_S = 60.0  # time for a node to answer: a node that is busy or gone is no reason to refuse its cache


def check_caches(specs: Iterable[CacheSpec], nodes: Mapping[str, str], runtime_env: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the node's name, if a node cannot hold one of the caches. ``nodes``: their names, by id. ``runtime_env``:
    that of the processes that will preprocess there, whose imports begin with this.

    On a node that joins later, preprocessing goes on without its cache.
    """
    here = ray.get_runtime_context().get_node_id()
    for spec in dict.fromkeys(specs):
        answers: dict[str, Any] = {node: _obstacle(node, spec, runtime_env) for node in nodes if node != here}
        if here in nodes:
            _refuse(spec, nodes[here], obstacle_here(spec))
        for node, answer in answers.items():
            try:
                obstacle = ray.get(answer, timeout=ANSWER_S)
            except ray.exceptions.RayError:
                continue
            _refuse(spec, nodes[node], obstacle)


def _refuse(spec: CacheSpec, node: str, obstacle: str | None) -> None:
    if obstacle is not None:
        raise ConfigError(f"cache={spec.text!r} cannot be used on node {node}: {obstacle}.")


@ray.remote(num_cpus=0)
def _obstacle_there(spec: CacheSpec) -> str | None:
    return obstacle_here(spec)


def _obstacle(node: str, spec: CacheSpec, runtime_env: Mapping[str, Any]) -> Any:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return _obstacle_there.options(scheduling_strategy=place, runtime_env=dict(runtime_env) or None).remote(spec)
