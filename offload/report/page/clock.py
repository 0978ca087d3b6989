"""The sessions of a run, and its clock, which stands still between them.

A run that was interrupted and resumed has several sessions. Nobody trains and (as far as the directory tells) nobody pays in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from offload.report.events import RunEvent, RunFinished, RunStarted
from offload.report.page.records import Floats, Records


@dataclass(frozen=True, kw_only=True)
class Session:
    """One call of ``fit()``: from ``began`` to ``ended``, in seconds since 1970. ``status``: its end, None if it left no word."""

    began: float
    ended: float
    status: str | None


@dataclass(frozen=True)
class RunClock:
    """The seconds of a run. ``sessions`` are in their order."""

    sessions: tuple[Session, ...]

    @staticmethod
    def of(records: Records) -> RunClock:
        """The clock of a run; without sessions if the directory holds no time at all."""
        times = [event.at for event in records.events] + list(records.intervals["at"])
        if not times:
            return RunClock(())
        starts = sorted(event.at for event in records.events if isinstance(event, RunStarted)) or [min(times)]
        starts[0] = min(starts[0], min(times))
        ends = np.sort(np.asarray(times, dtype=np.float64))
        sessions = []
        for began, following in zip(starts, [*starts[1:], np.inf], strict=True):
            within = ends[(ends >= began) & (ends < following)]
            sessions.append(
                Session(
                    began=began,
                    ended=float(within[-1]) if len(within) else began,
                    status=_status(records, began, following),
                )
            )
        return RunClock(tuple(sessions))

    @property
    def length_s(self) -> float:
        """The length of all sessions."""
        return sum(session.ended - session.began for session in self.sessions)

    def seconds(self, at: ArrayLike) -> Floats:
        """Seconds of the run at these times (seconds since 1970). A time between two sessions is the end of the first."""
        times = np.asarray(at, dtype=np.float64)
        if not self.sessions:
            return np.zeros_like(times)
        began = np.array([session.began for session in self.sessions])
        length = np.array([session.ended - session.began for session in self.sessions])
        before = np.concatenate([[0.0], np.cumsum(length)[:-1]])
        which = np.clip(np.searchsorted(began, times, side="right") - 1, 0, None)
        within: Floats = before[which] + np.clip(times - began[which], 0.0, length[which])
        return within

    def seconds_of(self, events: Sequence[RunEvent]) -> list[float]:
        """Return the seconds of the run at which these events happened. One call for all is fast; a long run has many events."""
        seconds: list[float] = self.seconds([event.at for event in events]).tolist()
        return seconds

    def session_of(self, at: ArrayLike) -> Floats:
        """The number of the session of each time, from 0."""
        began = np.array([session.began for session in self.sessions])
        numbers: Floats = np.clip(np.searchsorted(began, np.asarray(at, dtype=np.float64), side="right") - 1, 0, None)
        return numbers

    @property
    def resumed_at_s(self) -> list[tuple[float, float]]:
        """For each later session, the second of the run at which it began, and the seconds that had passed in between."""
        resumptions = []
        for before, after in zip(self.sessions, self.sessions[1:], strict=False):
            resumptions.append((float(self.seconds(before.ended)), max(after.began - before.ended, 0.0)))
        return resumptions


def _status(records: Records, began: float, until: float) -> str | None:
    ends = [event for event in records.events if isinstance(event, RunFinished) and began <= event.at < until]
    status: object = ends[-1].status if ends else None
    return status if isinstance(status, str) else None
