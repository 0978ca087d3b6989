"""Judge how an attempt ended, from what its ranks have reported so far. Pure.

A worker that died is replaced; an exception of the user's function would come again. When a host dies, its peers notice before anybody
else does: their connections to it break. A broken connection alone therefore waits a moment for a better explanation, and so does any
exception, since a death may have caused it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from offload.errors import causes
from offload.train.group.deaths import first_line
from offload.train.group.group import Died, Ended
from offload.train.hub.calls import FeedLostError
from offload.train.worker.steps.device_memory import DeviceMemoryError

BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset", "Broken pipe", "Connection refused")


@dataclass(frozen=True, kw_only=True)
class AllReturned:
    """Every rank has returned this outcome."""

    outcome: str


@dataclass(frozen=True)
class SmallerBatches:
    """A batch did not fit into a device's memory, and smaller ones come next."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Processes have died: those of ``ranks``, or if that is empty, one of which nobody knows the rank. ``reason``: what is known."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The function of a rank has raised an exception of its own."""

    rank: int


Verdict = AllReturned | SmallerBatches | Lost | Raised
Settling = Literal["", "exception", "connection"]
"""What a verdict waits for a better explanation of, if anything."""


def verdict_of(ends: Mapping[int, Ended | Died], workers: int, *, settled: bool) -> Verdict | Settling:
    """The verdict on an attempt of so many ``workers`` by the ends of ranks so far; a text if there is none yet. ``settled``: whether
    it has waited long enough for a better explanation."""
    raised = {rank: end.report.error for rank, end in ends.items() if isinstance(end, Ended) and end.report.error}
    died = tuple(rank for rank, end in ends.items() if isinstance(end, Died))
    # A worker raises this only if smaller batches come next. The other ranks wait for that worker.
    if any(isinstance(error, DeviceMemoryError) for error in raised.values()):
        return SmallerBatches()
    # A death explains everything else: exceptions of other ranks are its consequence.
    if died:
        end = ends[died[0]]
        assert isinstance(end, Died)
        return Lost(ranks=died, reason=end.reason)
    # Of a process that all ranks of the next group can do without. It ends as suddenly as a worker does.
    if lost := [error for error in raised.values() if any(isinstance(cause, FeedLostError) for cause in causes(error))]:
        return Lost(ranks=(), reason=first_line(lost[0]))
    # Once all ranks have ended, nothing can explain more.
    settled = settled or len(ends) == workers
    # A broken connection is never the cause by itself. Any other exception is, as long as no death turns up.
    telling = [rank for rank, error in raised.items() if not is_broken_connection(error)]
    if telling:
        return Raised(rank=telling[0]) if settled else "exception"
    if raised:
        error = next(iter(raised.values()))
        return Lost(ranks=(), reason=first_line(error)) if settled else "connection"
    if len(ends) < workers:
        return ""
    outcomes = [end.report.outcome for end in ends.values() if isinstance(end, Ended)]
    # Ranks agree on their end. If one has trained to the goal, so has the run.
    return AllReturned(outcome="finished" if "finished" in outcomes else outcomes[0])


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective operation failed because a peer is gone, by the messages of gloo and NCCL.

    The user's own code may lose connections, too. Gloo's messages name its source file.
    """
    if isinstance(error, dist.DistBackendError) or not isinstance(error, RuntimeError):
        return isinstance(error, dist.DistBackendError)
    text = str(error)
    of_torch = isinstance(error, dist.DistError) or "gloo" in text.lower()
    return of_torch and any(words in text for words in BROKEN_CONNECTION)
