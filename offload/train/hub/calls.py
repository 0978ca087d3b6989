"""The calls that a feed answers, whether it is the hub's own or one in an actor beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from offload.actors.values import Answer
from offload.pipeline.blocks.receiver import Pending
from offload.pipeline.feed.feed import Feed, Supply
from offload.pipeline.feed.passes import PassKey, PassRequest, Reach, Slice
from offload.pipeline.pool.losses import was_killed

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FeedLostError(Exception):
    """A feed beside the hub has ended. The ranks that it served cannot go on; another worker group can."""


@dataclass(frozen=True)
class Opened:
    """A pass that a rank has joined.

    Args:
        samples: the number of samples that it delivers to all ranks together; None if unknown.
        first: the first rank that the rank's feed serves. The feed counts its ranks from there.
        feed: the handle of the feed; None: the hub.
    """

    samples: int | None
    first: int = 0
    feed: Any = None


class RankCalls:
    """The calls of ranks about a pass that they have joined. mypy checks each against the method that answers it.

    Args:
        actor: the handle of an actor, or of an object that another process serves.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def next_slices(
        self, key: PassKey, rank: int, want: int, reach: Reach, arrived: int, timeout_s: float | None = None
    ) -> Pending[tuple[list[Slice], bool]]:
        """See :meth:`Feed.next_slices`."""
        return self._start(Feed.next_slices, key, rank, want, reach, arrived, timeout_s)

    def arrived(self, key: PassKey, rank: int, reach: Reach, arrived: int) -> None:
        """See :meth:`Feed.arrived`. Does not wait."""
        self._start(Feed.arrived, key, rank, reach, arrived)

    def again(self, key: PassKey, rank: int, piece: Slice) -> None:
        """See :meth:`Feed.again`."""
        self._ask(Feed.again, key, rank, piece)

    def leave(self, key: PassKey, rank: int) -> None:
        """See :meth:`Feed.leave`. Does not wait."""
        self._start(Feed.leave, key, rank)

    # -- how a call travels ----------------------------------------------------------------------------------------

    def _ask(self, method: Callable[Concatenate[Any, _P], _T], *args: _P.args, **named: _P.kwargs) -> _T:
        """Call a method of the actor and wait for its answer."""
        return self._start(method, *args, **named).result()

    def _start(self, method: Callable[Concatenate[Any, _P], _T], *args: _P.args, **named: _P.kwargs) -> Pending[_T]:
        """Call a method of the actor without waiting."""
        # By the method's name: an actor's handle has no types, while the method itself gives mypy the arguments and
        # the answer.
        answer = getattr(self.actor, method.__name__).remote(*args, **named)
        if isinstance(answer, Answer):
            return answer
        from offload.train.cluster.answers import PendingAnswer  # it imports Ray

        return PendingAnswer(answer)


class OtherFeed(RankCalls):
    """The calls of ranks and of the hub to a feed in an actor of its own. They raise FeedLostError if it is gone."""

    def begin(self, attempt: int) -> Pending[None]:
        """See :meth:`Feed.begin`."""
        return self._start(Feed.begin, attempt)

    def start_ahead(self, request: PassRequest, name: str, homes: Collection[str]) -> None:
        """See :meth:`Feed.start_ahead`. Does not wait."""
        self._start(Feed.start_ahead, request, name, homes)

    def open(self, key: PassKey, request: PassRequest, rank: int, node: str) -> int | None:
        """See :meth:`Feed.open`."""
        return self._ask(Feed.open, key, request, rank, node)

    def reshape(
        self, nodes: tuple[str, ...], stores: Mapping[str, float], timeout_s: float, number: int
    ) -> Pending[bool]:
        """See :meth:`Feed.reshape`."""
        return self._start(Feed.reshape, nodes, stores, timeout_s, number)

    def supply(self) -> Pending[Supply]:
        """See :meth:`Feed.supply`."""
        return self._start(Feed.supply)

    def costs(self, name: str) -> list[tuple[float, float]]:
        """See :meth:`Feed.costs`."""
        return self._ask(Feed.costs, name)

    def sender(self, node: str) -> Any:
        """See :meth:`Feed.sender`."""
        return self._ask(Feed.sender, node)

    def given_up(self, node: str, what: str, seconds: float) -> None:
        """See :meth:`Feed.given_up`. Does not wait."""
        self._start(Feed.given_up, node, what, seconds)

    def _start(self, method: Callable[Concatenate[Any, _P], _T], *args: _P.args, **named: _P.kwargs) -> Pending[_T]:
        return _OfOtherFeed(super()._start(method, *args, **named))


class _OfOtherFeed(Pending[_T]):
    """An answer that may never come."""

    def __init__(self, answer: Pending[_T]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return self._answer.done()

    def result(self) -> _T:
        try:
            return self._answer.result()
        except Exception as error:
            if was_killed(error):
                raise FeedLostError(f"the process of a feed has ended: {str(error).strip().splitlines()[0]}") from error
            raise
