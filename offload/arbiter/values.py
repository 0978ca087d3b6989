"""What a run reports to the arbiter, and what it gets: a lease. Plain values that can be pickled.

Where it stops: the run decides how it takes up and gives back workers and cores. It promises three things:

* Its reports arrive in the order in which it wrote them, one every ``REPORT_S``, and at once when it has let go of something.
* It takes nothing that the newest lease it knows does not allow, and gives back what that lease does not allow.
* Once a lease has expired, it keeps what it holds and takes nothing more until it gets a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.formatting import count as amount
from offload.model.allocation.values import Allotment, Holding, Job
from offload.model.checks import check_number

REPORT_S = 10.0
"""Seconds between two reports of a run."""
LEASE_S = 60.0
"""Seconds that a lease lasts after a report. It outlives a few lost reports."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a run may hold now, and what it is to hold.

    Args:
        number: counts the changes of ``holding``; a lease that is only prolonged keeps it.
        holding: what the run may hold now.
        allotment: what it is to hold as soon as others have let go of it.
        expires_at: when it ends unless the run reports, in seconds since 1970, by the arbiter's clock. The run's own may be another.
    """

    number: int
    holding: Holding
    allotment: Allotment
    expires_at: float

    @property
    def reason(self) -> str:
        """The reason of the allotment, and what is still to come."""
        workers = self.allotment.holding.worker_count
        if not workers or same(self.holding, self.allotment.holding):
            return self.allotment.reason
        now = f"{amount(self.holding.worker_count, 'worker')} and {amount(self.holding.core_count, 'core')}"
        return f"{self.allotment.reason}; until others let go of the rest, it has {now}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run as it describes itself.

    Args:
        job: what was measured, what its user allows, and, as ``present``, everything that it still holds. Its ``age_s`` does not matter.
        since: when it was submitted, in seconds since 1970.
        lease: the newest lease that it knows; None before the first.

    Raises:
        ConfigError: for a value out of its range.
    """

    job: Job
    since: float
    lease: Lease | None = None

    def __post_init__(self) -> None:
        check_number(f"since of run {self.job.name}", self.since)


def same(one: Holding, other: Holding) -> bool:
    """Return whether both hold the same workers and cores."""
    return one.same_workers(other) and _cores(one) == _cores(other)


def _cores(holding: Holding) -> dict[str, int]:
    return {node: count for node, count in holding.cores.items() if count}
