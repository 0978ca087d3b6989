"""Report a run to the arbiter of its cluster, and follow the leases that it answers with. Pure, apart from the tenancy.

The run sees its leased room as if it were the cluster: each node has the CPUs and GPUs of its leased workers and cores, and no more. While
its workers change, it also has what the present ones hold.

Where it stops: :mod:`offload.arbiter` decides who gets what, and :mod:`offload.train.driver.fleet` what a lease changes in the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload.adapt.observe import Seen
from offload.arbiter.values import LEASE_S, REPORT_S, Lease, Report
from offload.errors import ConfigError
from offload.model.allocation.values import NO_GPU, Holding, Job
from offload.model.noise import GradientNoise
from offload.model.overlap import LEAST_VARIATION, overlap_of_queue
from offload.model.placement import UNKNOWN_GPU, NodeResources, WorkerResources
from offload.train.config import BatchSize, Cluster
from offload.train.driver.fleet.messages import Event, LeaseSeen
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Committing, Fleet, MakingRoom, Paused, Stranded
from offload.train.driver.platform.platform import Tenancy
from offload.train.group.group import Plan
from offload.train.messages import TRAIN, News
from offload.train.worker.data.slice_fetcher import PREFETCH_BLOCKS

MOST_CORES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user wants of the arbiter, and what stays the same during a run.

    Args:
        name: the run's name on the cluster.
        terms: the user's terms.
        batch_size: the user's range of batch sizes.
        cluster: its weight, priority, and whether others may take its workers.
        deterministic: whether its number of workers must stay.
    """

    name: str
    terms: Terms
    batch_size: BatchSize
    cluster: Cluster
    deterministic: bool = False


class Leasing:
    """The leases of one run. One thread uses it.

    Args:
        tenancy: what connects the run with the arbiter.
        wishes: what the user wants.
        clock: a clock, in seconds since 1970. Somebody may set it.
        now: a clock that nobody can set, in seconds.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        wishes: Wishes,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenancy, self._wishes, self._clock, self._now = tenancy, wishes, clock, now
        self._sent: tuple[float, Report] | None = None
        self._since: float | None = None  # when it came to the arbiter, by the clock; None after a departure
        self._looked = now()
        # The end of the newest lease, and the time of the last look before it was renewed.
        self._renewed: tuple[float, float] | None = None
        self._leaving: Counter[str] = Counter()  # cores that preprocessing gives up, by node
        self._restarts = 0
        self._kind: str | None = None  # the GPUs of its newest workers: it may wait for others now
        self._attempt = 0

    # -- before the start ------------------------------------------------------------------------------------------

    def wait(self) -> Lease | None:
        """Report that the run waits to start; return the newest lease."""
        self._report(job_of(self._wishes, Holding(), Seen(), None))
        self._note_renewal()
        return self._tenancy.lease

    def depart(self) -> None:
        """The run holds nothing, and wants nothing for now: it is paused."""
        self._sent = self._since = None
        self._looked = self._now()
        self._tenancy.depart()

    def close(self) -> None:
        """The run is over."""
        self._tenancy.close()

    # -- under way -------------------------------------------------------------------------------------------------

    def look(self, fleet: Fleet, news: News, seen: Seen, newest: Plan | None) -> list[Event]:
        """Report the run, and return the events that follow from its newest lease. ``newest``: the plan of its newest group."""
        if isinstance(fleet.phase, Paused) and not fleet.phase.for_others:
            if fleet.phase.released:
                self.depart()
            return []
        if news.attempts > self._attempt:
            self._restarts += bool(self._attempt)
            self._attempt = news.attempts
        if news.let_go == fleet.reshapes:
            self._leaving.clear()
        present = holding_of(fleet, self._leaving, newest)
        self._kind = present.kind or self._kind
        job = job_of(self._wishes, present, seen, news, fleet=fleet, kind=self._kind, restarts=self._restarts)
        self._report(job)
        self._leaving |= fleet.used  # until preprocessing is known to use fewer
        lease, age_s = self._tenancy.lease, self._note_renewal()
        # What an expired lease allows beyond what the run holds may be another's by now.
        if lease is None or lease == fleet.lease or age_s >= LEASE_S:
            return []
        return [LeaseSeen(lease=lease)]

    def _note_renewal(self) -> float:
        """Note whether the arbiter has renewed the lease since the last look; return the seconds for which it may not have done so.

        The run's own time counts: the clock of the arbiter's host may be another.
        """
        lease, now = self._tenancy.lease, self._now()
        if lease is not None and (self._renewed is None or self._renewed[0] != lease.expires_at):
            self._renewed = lease.expires_at, self._looked
        self._looked = now
        return 0.0 if self._renewed is None else now - self._renewed[1]

    def _report(self, job: Job) -> None:
        now = self._now()
        self._since = self._clock() if self._since is None else self._since
        report = Report(job=job, since=self._since, lease=self._tenancy.lease)
        if self._sent is not None:
            at, before = self._sent
            if now - at < REPORT_S and _news_of(before) == _news_of(report):
                return
        self._sent = now, report
        self._tenancy.report(report)


def _news_of(report: Report) -> tuple[object, ...]:
    """What the arbiter should know at once."""
    job = report.job
    return job.present, job.measured, job.measured_workers, -1 if report.lease is None else report.lease.number


def holding_of(fleet: Fleet, leaving: Mapping[str, int], newest: Plan | None) -> Holding:
    """Everything that a run may hold now: during a change its present workers and the next ones, and cores that it is giving up. Its
    present workers hold nothing any more as soon as the next ones start, since they have ended then."""
    cores = dict(fleet.used | Counter(leaving))
    phase = fleet.phase
    if isinstance(phase, Stranded):
        return Holding(cores=cores)  # its workers are lost, and preprocessing goes on elsewhere
    held = [fleet.placement.held]
    if isinstance(phase, MakingRoom | Committing):
        next_start = (
            isinstance(phase, Committing)
            and newest is not None
            and newest.attempt > fleet.ends_group
            and (newest.workers, newest.homes) == (fleet.workers, fleet.homes)
        )
        held = [phase.next.held] if next_start else [*held, phase.next.held]
    nodes = fleet.nodes.usable
    # A node that has just left holds nothing; the state machine places the workers anew in the same turn.
    held = [of_nodes for of_nodes in held if len(of_nodes) == len(nodes)]
    workers = {node.node_id: max(counts) for node, *counts in zip(nodes, *held, strict=True) if held and max(counts)}
    return Holding(kind=kind_of(fleet.terms.worker, nodes, workers), workers=workers, cores=cores)


def kind_of(worker: WorkerResources, nodes: Sequence[NodeResources], workers: Mapping[str, int]) -> str | None:
    """The kind of GPU on which workers train; None without workers."""
    homes = [node for node in nodes if workers.get(node.node_id)]
    if not homes:
        return None
    return (homes[0].gpu_type or UNKNOWN_GPU) if worker.gpus else NO_GPU


def job_of(
    wishes: Wishes,
    present: Holding,
    seen: Seen,
    news: News | None,
    *,
    fleet: Fleet | None = None,
    kind: str | None = None,
    restarts: int = 0,
) -> Job:
    """The run as the allocation sees it. ``news``: of its workers and input; None before it starts. ``kind``: the GPUs on which it was
    measured."""
    terms, sizes = wishes.terms, wishes.batch_size
    rates = {} if news is None else news.rates.get(TRAIN, {})
    per_core = _per_core(seen, news)
    # Both sides, or the allocation would believe that one of them costs nothing.
    measured = seen.fit is not None and 0 < per_core < float("inf") and kind is not None
    noise = news.group.noise if news is not None else None
    least, most = terms.bounds
    if wishes.deterministic:
        least = most = terms.least_allowed or least
    return Job(
        name=wishes.name,
        # Only a run that gets more workers can measure them: a pessimist would keep its first few for ever.
        step_times={kind: seen.fit.best_case} if measured and seen.fit is not None and kind is not None else {},
        noise=None if noise is None else GradientNoise(noise[0], noise[1], sizes.initial, sqr_error=noise[2]),
        batch_size=sizes.initial,
        max_batch_size=sizes.max,
        local_batch_sizes=sizes.local,
        core_seconds_per_sample=1.0 / per_core if measured else 0.0,
        wire_bytes_per_sample=rates.get("wire_bytes_per_sample", 0.0),
        overlap=overlap_of_queue(PREFETCH_BLOCKS, max(rates.get("variation", 0.0), LEAST_VARIATION)),
        worker=terms.worker,
        workers=(least, most),
        cores=(1, MOST_CORES),
        measured_workers=max((workers for _, workers, _ in seen.steps), default=None) if measured else None,
        weight=wishes.cluster.weight,
        priority=wishes.cluster.priority,
        preemptible=wishes.cluster.preemptible,
        present=present,
        restarts=restarts,
        **({} if fleet is None else {"restart_s": fleet.restart.cost_s}),
        work_left=None if news is None or news.group.goal is None else max(news.group.goal - news.group.useful, 0.0),
    )


def _per_core(seen: Seen, news: News | None) -> float:
    """Samples/s of one preprocessing core; infinite while unknown."""
    per_core, cores = seen.input_samples_per_s(1.0), 0 if news is None else news.cores[0]
    pace = 0.0 if news is None else news.rates.get(TRAIN, {}).get("input_pace_samples_per_s", 0.0)
    # Tasks that wait for storage deliver less than their CPU time suggests. Their pace by the clock shows it.
    return min(per_core, pace / cores) if pace and cores else per_core


def held_by_others(
    lease: Lease | None, nodes: Sequence[NodeResources], worker: WorkerResources, present: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Everything of these whole nodes that a run may not use. ``present``: its workers by node, which keep their room until they end."""
    holding = Holding() if lease is None else lease.holding
    held = {}
    for node in nodes:
        workers = max(holding.workers.get(node.node_id, 0), present.get(node.node_id, 0))
        whole = {"CPU": node.cpus, "GPU": node.gpus, **node.others}
        mine = Counter({"CPU": workers * worker.cpus, "GPU": workers * worker.gpus})
        mine.update({name: workers * amount for name, amount in worker.others.items() if name not in mine})
        mine["CPU"] += holding.cores.get(node.node_id, 0)
        held[node.node_id] = {name: max(amount - mine[name], 0.0) for name, amount in whole.items()}
    return held


def check_sharing(cluster: Cluster, *, scheduled: bool, executed: Sequence[str]) -> None:
    """Raise ConfigError if something of the run cannot be left to an arbiter. ``executed``: data sets that Ray Data executes."""
    if cluster.autoscale_workers or cluster.preprocessing_cores is not None:
        raise ConfigError(
            "an arbiter shares the cluster as it is, and the run asks for further nodes: drop arbiter, or autoscale_workers and "
            "preprocessing_cores."
        )
    if scheduled:
        raise ConfigError("the arbiter chooses the number of workers, and so does the schedule: drop one of them.")
    if executed:
        raise ConfigError(
            f"Ray Data executes {', '.join(executed)} on cores of its own choice, which no arbiter can lend: drop arbiter, or read the "
            "data with one of offload's own sources."
        )
