"""The hub as an actor of Ray, which does all at once: each further process that workers wait for would take seconds to start.

This module does not import torch: on a host with few cores, the hub starts beside the workers, which do.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.pool.core_watch import CoreWatch
from offload.train.cluster.holdings import HUB
from offload.train.hub.actor import Hub, collect_seldom, take_turns
from offload.train.hub.division import FeedTerms
from offload.train.hub.ray_feed import Preprocessing, RayFeed


class RayHub(Hub):
    """See :class:`Hub`."""

    def __init__(
        self,
        streams: dict[str, FeedDataset],
        cores: Cores,
        nodes: int,
        run_dir: Path,
        terms: FeedTerms | None = None,
    ) -> None:
        take_turns()
        collect_seldom()
        context = ray.get_runtime_context()
        title = context.get_actor_name() or "hub"
        self._run = title.removesuffix(HUB)
        self._handle, self._here = context.current_actor, context.get_node_id()
        self._streams = streams
        self._stored: Any = None
        self._started = 0  # feeds beside its own
        self._threads = (terms or FeedTerms()).threads
        super().__init__(streams, cores, nodes, run_dir, title=title, handle=self._handle, terms=terms)
        CoreWatch(Preprocessing(self.feed, self.board.note, self._run)).start()

    def address(self, node: str) -> str:
        """See :meth:`Hub.address`."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return next((str(n["NodeManagerAddress"]) for n in nodes if n["NodeID"] == node), node)

    def _start_feed(self, cores: Cores) -> Any:
        if self._stored is None:
            self._stored = ray.put(self._streams)
        self._started += 1
        feed: Any = ray.remote(RayFeed)
        return feed.options(
            # Unlike any of an earlier run of this name, whose feeds may still be ending.
            name=f"{self._run} feed {secrets.token_hex(4)}",
            num_cpus=0,
            # On this host: the run ends with it anyway.
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._here, soft=False),
            max_concurrency=self._threads,
            enable_task_events=False,
            runtime_env=dict(cores.runtime_env) or None,
        ).remote(self._run, self._stored, cores, self._handle, self._started)

    def _end_feed(self, feed: Any) -> None:
        ray.kill(feed)
