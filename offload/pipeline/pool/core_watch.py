"""Watch for CPUs that somebody waits for in vain while preprocessing processes or others hold them.

The decision is pure. A thread asks Ray and carries it out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import ray

from offload.pipeline.pool.ray_state import SLACK, Held, awaited_cpus, held, programs

LOOK_S = 5.0
SHARE_S = 10.0  # time in vain before preprocessing shares its cores: tasks come and go
SAY_S = 30.0
AGAIN_S = 300.0  # time before the message is repeated
NEVER_S = 300.0  # time in vain, while only the run's own workers hold CPUs: a cluster may grow meanwhile

Verdict = Literal["share", "say", "never"]


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """What a look has found.

    Args:
        now_s: the time.
        starving: what this program's own work waits for (``preprocessing of 'val'``); empty if it has what it needs.
        awaited: the CPUs for which tasks and actors of the cluster wait.
        held: who holds the CPUs.
        executed: whether Ray Data does that work.
        reserves: whether our preprocessing processes reserve CPUs, and all of them run.
        alone: whether this program is the only one on the cluster.
    """

    now_s: float
    starving: str = ""
    awaited: float = 0.0
    held: Held = field(default_factory=Held)
    executed: bool = False
    reserves: bool = False
    alone: bool = False


class Patience:
    """How long somebody has waited in vain, and what follows. ``stays``: what holds its CPUs until the end of the run."""

    def __init__(self, stays: Callable[[str], bool] = lambda what: False) -> None:
        self._stays = stays
        self._since: float | None = None
        self._starved_since: float | None = None
        self._said_at: float | None = None

    def waited_s(self, now_s: float) -> float:
        """The time for which our own work has waited in vain."""
        return 0.0 if self._starved_since is None else now_s - self._starved_since

    def verdict(self, seen: CoreUse) -> Verdict | None:
        """What to do now, if anything."""
        # Running tasks end and free their CPUs, so waiting beside them is not in vain.
        in_vain = seen.awaited > SLACK and seen.held.tasks < SLACK
        self._since = (seen.now_s if self._since is None else self._since) if in_vain else None
        starved = in_vain and bool(seen.starving)
        self._starved_since = (seen.now_s if self._starved_since is None else self._starved_since) if starved else None
        if self._since is not None and seen.reserves and seen.alone and seen.now_s - self._since >= SHARE_S:
            self._since = self._starved_since = None
            return "share"
        if self._starved_since is None:
            return None
        waited_s = seen.now_s - self._starved_since
        if waited_s >= NEVER_S and seen.executed and all(self._stays(holder.what) for holder in seen.held.holders):
            return "never"
        if waited_s >= SAY_S and (self._said_at is None or seen.now_s - self._said_at >= AGAIN_S):
            self._said_at = seen.now_s
            return "say"
        return None


class CpuUser(ABC):
    """The work of this program that needs CPUs, as the watch asks it and tells it."""

    @abstractmethod
    def starving(self) -> str:
        """What it waits for (``val``, a data set); empty if it has what it needs."""

    @abstractmethod
    def reserves_cores(self) -> bool:
        """Return whether its preprocessing processes reserve CPUs, and all of them run."""

    @abstractmethod
    def share_cores(self) -> None:
        """Reserve no CPUs from now on: others wait for them."""

    @abstractmethod
    def waits(self, what: str, seconds: float, held: str) -> None:
        """Say that ``what`` waits for CPUs, for how long, and who holds them."""

    def waits_in_vain(self, what: str, seconds: float, held: str) -> None:  # noqa: B027  # the pool alone waits
        """End the work, which Ray Data does: it waits for CPUs that stay held until the end."""

    def executed(self, what: str) -> bool:
        """Return whether Ray Data does this work, and not the pool."""
        return False

    def stays(self, holder: str) -> bool:
        """Return whether this holder keeps its CPUs until the end of the run."""
        return False


class CoreWatch(threading.Thread):
    """A thread that looks again and again for CPUs that somebody waits for in vain, on behalf of ``user``."""

    def __init__(self, user: CpuUser) -> None:
        super().__init__(daemon=True, name="core-watch")
        self._user = user
        self._patience = Patience(user.stays)

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            time.sleep(LOOK_S)
            # Ray may be shutting down, or its head may be busy: the next look will tell.
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                self._look()

    def _look(self) -> None:
        starving, reserves = self._user.starving(), self._user.reserves_cores()
        awaited = awaited_cpus() if starving or reserves else 0.0
        # Most looks end here. The other questions concern the whole cluster, and are asked only if somebody waits.
        seen = CoreUse(now_s=time.monotonic(), starving=starving, awaited=awaited)
        if awaited:
            seen = CoreUse(
                now_s=seen.now_s,
                starving=starving,
                awaited=awaited,
                held=held(),
                executed=bool(starving) and self._user.executed(starving),
                reserves=reserves,
                alone=programs() == 1,
            )
        match self._patience.verdict(seen):
            case "share":
                self._user.share_cores()
            case "say":
                self._user.waits(starving, self._patience.waited_s(seen.now_s), seen.held.in_words)
            case "never":
                self._user.waits_in_vain(starving, self._patience.waited_s(seen.now_s), seen.held.in_words)
            case None:
                pass
