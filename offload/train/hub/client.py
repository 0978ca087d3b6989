"""The client of the hub for the driver and the workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.model.batch_split import BatchSplit
from offload.pipeline.blocks.receiver import Pending
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.report.events import RunEvent
from offload.report.run_tail import Tails
from offload.train.hub.actor import Hub
from offload.train.hub.calls import Opened, RankCalls
from offload.train.messages import GroupStart, News, Orders, Push


class HubClient(RankCalls):
    """A typed client of the hub: mypy checks every call against the method that answers it.

    Calls raise one of :func:`offload.actors.errors.lost_errors` if the hub is gone. The client can be sent to other processes.

    Args:
        actor: the handle of Ray's actor, or of an object that the driver serves.
    """

    # -- the driver ------------------------------------------------------------------------------------------------

    def publish(self, orders: Orders) -> None:
        """See :meth:`Board.publish`. Does not wait."""
        self._start(Hub.publish, orders)

    def read(self, cursor: int) -> News:
        """See :meth:`Board.read`."""
        return self._ask(Hub.read, cursor)

    def reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int | None = None
    ) -> Pending[bool]:
        """See :meth:`Feeds.reshape`."""
        return self._start(Hub.reshape, nodes, stores, timeout_s, number)

    def start_ahead(self, request: PassRequest, name: str, homes: Collection[str]) -> None:
        """See :meth:`Feeds.start_ahead`. Does not wait."""
        self._start(Hub.start_ahead, request, name, homes)

    def costs(self, name: str) -> list[tuple[float, float]]:
        """See :meth:`Feeds.costs`."""
        return self._ask(Hub.costs, name)

    def note(self, event: RunEvent) -> None:
        """See :meth:`Board.note`. Does not wait."""
        self._start(Hub.note, event)

    def await_calls(self, seen: int, timeout_s: float) -> int:
        """See :meth:`Board.await_calls`."""
        return self._ask(Hub.await_calls, seen, timeout_s)

    def end_printing(self) -> None:
        """See :meth:`Hub.end_printing`."""
        self._ask(Hub.end_printing)

    # -- a view ----------------------------------------------------------------------------------------------------

    def run_dir(self) -> Path:
        """See :meth:`Hub.run_dir`."""
        return self._ask(Hub.run_dir)

    def tails(self, offsets: Mapping[str, int]) -> Tails:
        """See :meth:`Hub.tails`."""
        return self._ask(Hub.tails, offsets)

    # -- the workers -----------------------------------------------------------------------------------------------

    def begin_group(self, attempt: int, homes: Sequence[str]) -> GroupStart:
        """See :meth:`Hub.begin_group`."""
        return self._ask(Hub.begin_group, attempt, homes)

    def push(self, push: Push) -> Orders:
        """See :meth:`Board.push`."""
        return self._ask(Hub.push, push)

    def call_driver(self) -> None:
        """See :meth:`Board.call_driver`. Does not wait."""
        self._start(Hub.call_driver)

    def out_of_memory(self, rank: int, split: BatchSplit) -> bool:
        """See :meth:`Board.out_of_memory`."""
        return self._ask(Hub.out_of_memory, rank, split)

    def open(self, key: PassKey, request: PassRequest, rank: int, node: str) -> Opened:
        """See :meth:`Feeds.open`. The other calls about the pass go to the feed that it names."""
        return self._ask(Hub.open, key, request, rank, node)

    def sender(self, node: str) -> Pending[Any]:
        """See :meth:`Feeds.sender`."""
        return self._start(Hub.sender, node)

    def blocks_through_ray(self, node: str, reason: str) -> None:
        """See :meth:`Hub.blocks_through_ray`. Does not wait."""
        self._start(Hub.blocks_through_ray, node, reason)

    # -- the supervisor of the workers -----------------------------------------------------------------------------

    def worker_failed(self, reason: str, nodes: Sequence[str], suspects: Sequence[str]) -> bool:
        """See :meth:`Board.worker_failed`."""
        return self._ask(Hub.worker_failed, reason, nodes, suspects)
