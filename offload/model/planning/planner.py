"""Choose nodes, workers, batch and accumulation before paying for them: every shape's rate and price, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offload.errors import ConfigError
from offload.formatting import usd
from offload.model.catalog import Catalog, NodeType, Shape
from offload.model.checks import check_count, check_number
from offload.model.overlap import Floats, mean_overlapped, normal_points, overlapped
from offload.model.planning.advice import (
    explain,
    network_warnings,
    noise_warnings,
    price_warnings,
    speed_warnings,
    spot_warnings,
)
from offload.model.planning.device_speeds import DeviceSpeeds
from offload.model.planning.plans import MOST_NODES, Candidate, Objective, Plan, Spot, misses
from offload.model.planning.search import BOTTLENECK_NAMES, Evaluated, Ints, Space, Workload, first_local_batch, search
from offload.model.profile import Profile
from offload.model.step_ranges import StepRange

MOST_LISTED = 10_000
AS_FAST = 0.005  # a shape slower than the fastest by less than this counts as equally fast: a plan buys no node that hardly helps
WORTH_SAYING = 0.02  # saving from which on the plan mentions an alternative
POINTS = 5  # core-seconds at which the mean over their uncertainty is taken
TO_95_PERCENT = 1.96  # standard deviations of a 95 % half-width

# The cost of a spot node's interruption. Restarting the workers took 12–28 s with Ray 2.60; a new node joins within minutes.
RESTART_S = 30.0
REPLACEMENT_S = 300.0
INTERRUPTIONS_PER_HOUR = 0.05  # the default if the catalog has no figure: rather more than one a day


def plan(
    profile: Profile,
    catalog: Catalog,
    *,
    gpu_types: Sequence[str],
    gpu_nodes: tuple[int, int] = (1, 1),
    cpu_types: Sequence[str] = (),
    cpu_nodes: tuple[int, int] = (0, 8),
    batch_size: int | None = None,
    max_batch_size: int | None = None,
    samples: int | None = None,
    objective: Objective = "cost",
    budget_usd: float | None = None,
    deadline_hours: float | None = None,
    spot: Spot = "none",
    gpu_speed: float | Mapping[str, float] | None = None,
    step: tuple[float, float] | None = None,
) -> Plan:
    """Evaluate every shape of the given types and ranges (both ends included), and recommend one.

    Args:
        profile, catalog: the workload, and the nodes that can be rented.
        gpu_types, gpu_nodes: types that hold the workers, and the range of node counts.
        cpu_types, cpu_nodes: types that only preprocess, at most one of them in a shape, and the range of node counts.
        batch_size: the global batch; the profile's by default.
        max_batch_size: choose the global batch by goodput, from the initial one to this. Needs gradient noise. Where that is
            uncertain, a lower bound of goodput counts.
        samples: the amount of work: samples of an epoch × epochs, at the initial batch.
        objective: "cost": the least dollars per unit of goodput; "time": the highest goodput, at the lowest price. Both as means over
            what the profile leaves open.
        budget_usd, deadline_hours: limits on the whole job; both need ``samples``.
        spot: which nodes are spot capacity; the plan accounts for their expected interruptions.
        gpu_speed: speed of the planned GPU relative to the profile's device, or a speed for each of some GPU types.
        step: the compute terms (alpha, beta) of the planned GPU, instead of ``gpu_speed``.

    Raises:
        ConfigError: for an unknown type (the message names the nearest), an empty range, a GPU of unknown speed, or limits that
            no shape meets (the message gives the price and time of the cheapest and the fastest).
    """
    _check_ranges(gpu_types, gpu_nodes, cpu_types, cpu_nodes)
    job = _Job(
        profile=profile,
        batch_range=_batch_range(profile, batch_size, max_batch_size),
        samples=None if samples is None else check_count("samples", samples, least=1),
        objective=_one_of("objective", objective, ("cost", "time")),
        budget_usd=_limit("budget", budget_usd, samples),
        deadline_hours=_limit("deadline", deadline_hours, samples),
        spot=_one_of("spot", spot, ("none", "cpu", "all")),
        speeds=DeviceSpeeds.of(profile, gpu_speed, step, gpu_types),
    )
    hosts = [catalog.gpu_type(name) for name in dict.fromkeys(gpu_types)]
    helpers = tuple(catalog.cpu_type(name) for name in dict.fromkeys(cpu_types))
    tables = [job.evaluate(host, gpu_nodes, helpers, cpu_nodes) for host in hosts]
    table, row = _choose(job, tables)
    best_nodes = int(table.rows.gpu_nodes[row])
    alone = job.evaluate(table.host, (best_nodes, best_nodes), (), (0, 0))
    best, single = table.ranked([row])[0], alone.ranked([0])[0]
    recommended, baseline = best.candidate, single.candidate
    ranked = [each for table in tables for each in table.ranked(_listed(table, tables))]
    listed = [each.candidate for each in ranked]
    ranked += [each for each in (best, single) if each.candidate not in listed]
    candidates = [each.candidate for each in sorted(ranked, key=job.rank)]
    kinds = {kind.name: kind for kind in (*hosts, *helpers)}
    on_spot = [*(hosts if spot == "all" else ()), *(helpers if spot != "none" else ())]
    alternative = _bigger_host(job, catalog, table, gpu_nodes, best, gpu_types)
    compared = [] if alternative is None else [catalog[name] for name in alternative.shape]
    return Plan(
        objective=job.objective,
        spot=job.spot,
        candidates=tuple(candidates),
        recommended=candidates.index(recommended),
        baseline=candidates.index(baseline),
        alternative=alternative,
        explanation=explain(
            recommended,
            baseline,
            alternative,
            candidates,
            rivals=[c for c in candidates if not job.misses(c)] if job.objective == "cost" else [],
            more_cores=sum(k.vcpus - table.host.vcpus for k in compared),
        ),
        warnings=(
            *network_warnings(candidates, kinds),
            *price_warnings([*kinds.values(), *compared]),
            *profile.synchronisation.said([(_gpu_nodes(c, hosts), c.workers) for c in candidates]),
            *(noise_warnings(profile.noise, profile.noise_samples) if max_batch_size is not None else ()),
            *speed_warnings(job.speeds.from_data_sheets(hosts), profile.device),
            *spot_warnings(on_spot, INTERRUPTIONS_PER_HOUR),
        ),
        budget_usd=job.budget_usd,
        deadline_hours=job.deadline_hours,
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The user's request."""

    profile: Profile
    batch_range: tuple[int, int]
    samples: int | None
    objective: Objective
    budget_usd: float | None
    deadline_hours: float | None
    spot: Spot
    speeds: DeviceSpeeds

    def evaluate(
        self,
        host: NodeType,
        gpu_nodes: tuple[int, int],
        helpers: tuple[NodeType, ...],
        cpu_nodes: tuple[int, int],
        *,
        most: int = MOST_LISTED,
        gpu_of: NodeType | None = None,
    ) -> _Table:
        """Evaluate every shape with ``host`` nodes, or only the best ones if there are more than ``most``. ``gpu_of``: the type whose
        GPU's speed is known, if it is another one with the same GPU."""
        profile = self.profile
        rented = _rented(host, self.spot == "all")
        others = tuple(_rented(helper, self.spot != "none") for helper in helpers)
        step = self.speeds.step_on(host, gpu_of or host)
        workload = Workload(
            input=profile.input,
            step_time=step.step_time,
            overlap=profile.overlap,
            noise=profile.noise and profile.noise.cautious,
            batch_range=self.batch_range,
            max_local_batch_size=profile.max_local_batch_size,
        )
        space = Space(gpu_type=rented, gpu_nodes=gpu_nodes, cpu_types=others, cpu_nodes=cpu_nodes)

        def table(rows: Evaluated) -> _Table:
            return _Table(
                job=self,
                host=host,
                helpers=helpers,
                rented=(rented, others),
                workload=workload,
                step=step,
                rows=rows,
                shapes=space.shapes,
            )

        scores = (lambda rows: table(rows).score(), lambda rows: table(rows).cost())
        return table(search(space, workload, scores, most))

    def rank(self, ranked: _Ranked) -> tuple[float, ...]:
        """A sort key: the best candidate first, those that miss a limit last."""
        by = (ranked.cost, -ranked.goodput) if self.objective == "cost" else (-ranked.goodput, ranked.cost)
        return (float(self.misses(ranked.candidate)), *by)

    def misses(self, candidate: Candidate) -> bool:
        """Return whether a candidate misses a limit."""
        return misses(candidate.usd, self.budget_usd) or misses(candidate.hours, self.deadline_hours)


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    """A candidate. ``longer``: its mean time over what the profile leaves open, relative to the estimate."""

    candidate: Candidate
    longer: float

    @property
    def goodput(self) -> float:
        """Useful samples per second of that mean time."""
        return self.candidate.goodput / self.longer

    @property
    def cost(self) -> float:
        """Dollars per hour for each of them."""
        return self.candidate.usd_per_hour / self.goodput if self.goodput > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The shapes with one GPU type, and their costs. ``rented`` are the types as rented: with spot prices and absences."""

    job: _Job
    host: NodeType
    helpers: tuple[NodeType, ...]
    rented: tuple[NodeType, tuple[NodeType, ...]]
    workload: Workload
    step: StepRange
    rows: Evaluated
    shapes: int

    def usd_per_hour(self) -> Floats:
        host, helpers = self.rented
        prices = np.array([*(helper.usd_per_hour for helper in helpers), 0.0])  # the last entry, -1: no CPU type
        return np.asarray(self.rows.gpu_nodes * host.usd_per_hour + self.rows.cpu_nodes * prices[self.rows.cpu_type])

    def goodput(self) -> Floats:
        """Goodput minus the cost of GPU node interruptions: a restart of all workers, and a missing node for a while."""
        if self.job.spot != "all":
            return self.rows.goodput
        lost_s = self.rows.gpu_nodes * RESTART_S + REPLACEMENT_S
        return np.asarray(self.rows.goodput / (1 + _interruptions(self.host) * lost_s / 3600))

    def cost(self) -> Floats:
        """Dollars per million useful samples; infinity for a shape that trains nothing."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.usd_per_hour() / 3600 * 1e6 / self.goodput())

    def hours(self) -> Floats | None:
        with np.errstate(divide="ignore"):
            return None if self.job.samples is None else np.asarray(self.job.samples / self.goodput() / 3600)

    def score(self) -> Floats:
        """The value that the objective minimises, as a mean over what the profile leaves open; infinity for a shape that misses a limit.

        Too few CPU nodes let accelerators wait, and too many cost little. So the best shape on average has some more of them than the
        best one for the estimates alone.
        """
        with np.errstate(divide="ignore"):
            score = self.longer() * (self.cost() if self.job.objective == "cost" else 1 / self.goodput())
        hours = self.hours()
        if hours is None:
            return np.asarray(score)
        missed = np.zeros(len(hours), dtype=bool)
        if self.job.deadline_hours is not None:
            missed |= hours > self.job.deadline_hours
        if self.job.budget_usd is not None:
            missed |= hours * self.usd_per_hour() > self.job.budget_usd
        return np.where(missed, np.inf, score)

    def longer(self) -> Floats:
        """The mean step time over what the profile leaves open, relative to the estimate.

        A step that may be longer than estimated asks for no other shape, one that may be shorter for more cores: the fast end of its
        range counts on both sides. 1 for a shape that trains nothing.
        """
        rows = self.rows
        fast, _ = self.step.factors(rows.gpu_nodes, rows.workers, rows.local_batch_size, rows.accum_steps)
        spread = -np.log(fast) / TO_95_PERCENT
        input_spread = math.log1p(self._input_half_width) / TO_95_PERCENT
        mean = np.zeros(len(rows.workers))
        for point, weight in normal_points(POINTS) if input_spread else [(0.0, 1.0)]:
            rate = self._input_rate(math.exp(input_spread * point))
            with np.errstate(divide="ignore"):
                wait = rows.batch_size / rate
            mean += weight * mean_overlapped(rows.gpu_time_s, wait, self.workload.overlap, spread)
        return np.divide(mean, rows.step_time_s, out=np.ones(len(mean)), where=np.isfinite(rows.step_time_s))

    @property
    def _input_half_width(self) -> float:
        unsure = self.job.profile.uncertainty
        return math.hypot(unsure.core_seconds_per_sample, unsure.day_to_day)

    def take(self, which: Sequence[int] | Ints) -> _Table:
        """The table of the selected shapes alone."""
        return replace(self, rows=self.rows.take(np.asarray(which, dtype=np.int64)))

    def ranked(self, which: Sequence[int] | Ints) -> list[_Ranked]:
        """The selected shapes as candidates, with what their order depends on."""
        table = self.take(which)
        pairs = zip(table.candidates(), table.longer().tolist(), strict=True)
        return [_Ranked(candidate=candidate, longer=longer) for candidate, longer in pairs]

    def candidates(self) -> list[Candidate]:
        """The shapes as candidates, with their figures."""
        rows = self.rows
        rate = rows.batch_size / rows.step_time_s
        low, high = self._range(rate)
        usable = self.goodput() / np.where(rows.goodput > 0, rows.goodput, 1.0)
        usd_per_hour, hours = self.usd_per_hour(), self.hours()
        with np.errstate(divide="ignore"):
            per_million = usd_per_hour / 3600 * 1e6 / (rate * usable)
        columns = zip(
            *(values.tolist() for values in (rows.gpu_nodes, rows.cpu_type, rows.cpu_nodes, rows.workers)),
            *(values.tolist() for values in (rows.batch_size, rows.local_batch_size, rows.accum_steps)),
            *(
                values.tolist()
                for values in (rate, low, high, rows.step_time_s, 1 - rows.gpu_time_s / rows.step_time_s)
            ),
            *(values.tolist() for values in (rows.bottleneck, self.goodput(), usd_per_hour, per_million)),
            hours.tolist() if hours is not None else [None] * len(rate),
            strict=True,
        )
        return [
            Candidate(
                shape={self.host.name: gpus} | ({self.helpers[kind].name: cpus} if kind >= 0 else {}),
                workers=workers,
                batch_size=batch,
                local_batch_size=local,
                accum_steps=accum,
                samples_per_s=at,
                samples_per_s_low=least,
                samples_per_s_high=most,
                step_time_s=step,
                stall=stall,
                bottleneck=BOTTLENECK_NAMES[limit],
                goodput=useful,
                usd_per_hour=price,
                usd_per_million_samples=million,
                hours=time,
                usd=None if time is None else time * price,
            )
            for (
                gpus,
                kind,
                cpus,
                workers,
                batch,
                local,
                accum,
                at,
                least,
                most,
                step,
                stall,
                limit,
                useful,
                price,
                million,
                time,
            ) in columns
        ]

    def _range(self, rate: Floats) -> tuple[Floats, Floats]:
        """The 95 % range of the rate. The uncertainties of the two sides are independent, so their effects add in squares."""
        rows = self.rows
        fast, slow = self.step.factors(rows.gpu_nodes, rows.workers, rows.local_batch_size, rows.accum_steps)
        ends = []
        for sign, step_factor in ((1, slow), (-1, fast)):
            changed_input = self._input_rate(1 + sign * self._input_half_width)
            with np.errstate(divide="ignore"):
                by_input = overlapped(rows.gpu_time_s, rows.batch_size / changed_input, self.workload.overlap)
                by_step = overlapped(
                    rows.gpu_time_s * step_factor, rows.batch_size / rows.input_samples_per_s, self.workload.overlap
                )
                # Without a core to preprocess, the rate and both ends of its range are 0.
                with np.errstate(invalid="ignore"):
                    off = np.hypot(np.log(by_input / rows.step_time_s), np.log(by_step / rows.step_time_s))
            ends.append(np.where(rate > 0, rate * np.exp(-sign * off), 0.0))
        return ends[0], ends[1]

    def _input_rate(self, factor: float) -> Floats:
        """The input rate if a sample cost ``factor`` times as many core-seconds."""
        rows = self.rows
        if factor == 1:
            return rows.input_samples_per_s
        model = replace(
            self.workload.input, core_seconds_per_sample=self.workload.input.core_seconds_per_sample * max(factor, 0.01)
        )
        host, helpers = self.rented
        rates = np.zeros(len(rows.workers))
        for kind in np.unique(rows.cpu_type):
            here = rows.cpu_type == kind
            counts: dict[NodeType, Any] = {host: rows.gpu_nodes[here]}
            if kind >= 0:
                counts[helpers[kind]] = rows.cpu_nodes[here]
            rates[here] = model.samples_per_s(
                Shape(counts), rows.workers[here], first_local_batch(rows.workers[here], self.workload)
            )
        return rates


def _choose(job: _Job, tables: Sequence[_Table]) -> tuple[_Table, int]:
    """The best table and its row. Raises ConfigError if no shape meets the limits."""
    scores = [table.score() for table in tables]
    least = min(float(np.min(score)) for score in scores)
    if not math.isfinite(least):
        raise ConfigError(_nothing_meets(job, tables))
    if job.objective == "cost":
        at = next(i for i, score in enumerate(scores) if float(np.min(score)) == least)
        return tables[at], int(np.argmin(scores[at]))
    # The cheapest of the shapes that are as fast as the fastest.
    fast = [
        np.where(score <= least * (1 + AS_FAST), table.usd_per_hour(), np.inf)
        for score, table in zip(scores, tables, strict=True)
    ]
    at = int(np.argmin([float(np.min(price)) for price in fast]))
    return tables[at], int(np.argmin(fast[at]))


def _nothing_meets(job: _Job, tables: Sequence[_Table]) -> str:
    rows = [
        candidate
        for table in tables
        for candidate in table.take(_listed(table, tables)).candidates()
        if candidate.goodput > 0
    ]
    if not rows:
        kept = job.profile.input.host_cpus_per_worker
        return (
            f"no shape in these ranges has a core left to preprocess: each worker keeps {kept:g} of its node's cores. Allow CPU "
            "nodes, a larger GPU node, or fewer cores per worker."
        )
    asked = [usd(job.budget_usd)] if job.budget_usd is not None else []
    asked += [f"{job.deadline_hours:g} hours"] if job.deadline_hours is not None else []
    cheapest = min(rows, key=lambda c: c.usd or 0.0)
    fastest = min(rows, key=lambda c: c.hours or 0.0)
    return (
        f"no shape in these ranges trains {job.samples:,} samples within {' and '.join(asked)}. The cheapest, {cheapest.name}, "
        f"costs {usd(cheapest.usd or 0.0)} and takes {cheapest.hours:,.2f} hours; the fastest, {fastest.name}, costs "
        f"{usd(fastest.usd or 0.0)} and takes {fastest.hours:,.2f} hours. Raise the limit, or allow other types or more nodes."
    )


def _listed(table: _Table, tables: Sequence[_Table]) -> Ints:
    """All shapes; if they are too many to read, only those that no other shape beats in both price and goodput."""
    if sum(other.shapes for other in tables) <= MOST_LISTED:
        return np.arange(len(table.rows.workers))
    prices = np.concatenate([other.usd_per_hour() for other in tables])
    rates = np.concatenate([other.goodput() for other in tables])
    order = np.lexsort((-rates, prices))
    ahead = np.maximum.accumulate(rates[order])
    front = np.ones(len(order), dtype=bool)
    front[1:] = rates[order][1:] > ahead[:-1]
    before = next(
        sum(len(other.rows.workers) for other in tables[:at]) for at, other in enumerate(tables) if other is table
    )
    chosen = order[front] - before
    return np.sort(chosen[(chosen >= 0) & (chosen < len(table.rows.workers))])


def _bigger_host(
    job: _Job,
    catalog: Catalog,
    table: _Table,
    gpu_nodes: tuple[int, int],
    best: _Ranked,
    asked: Sequence[str],
) -> Candidate | None:
    """A host with the same GPU, outside the requested types, that does better without any CPU node."""
    others: list[_Ranked] = []
    for kind in catalog.nodes.values():
        # Only hosts with as many GPUs: the model does not cover how more GPUs on one host affect each other.
        if (
            kind.gpu_model is None
            or (kind.gpu_model, kind.gpus) != (table.host.gpu_model, table.host.gpus)
            or kind.name in asked
        ):
            continue
        if job.spot == "all" and kind.spot_usd_per_hour is None:
            continue
        alone = job.evaluate(kind, gpu_nodes, (), (0, 0), most=0, gpu_of=table.host)
        score = alone.score()
        if np.isfinite(score).any():
            others += alone.ranked([int(np.argmin(score))])
    if not others:
        return None
    first = min(others, key=job.rank)
    if job.objective == "time":
        better = first.goodput > best.goodput * (1 + WORTH_SAYING)
    else:
        better = first.cost < best.cost * (1 - WORTH_SAYING)
    return first.candidate if better else None


def _gpu_nodes(candidate: Candidate, hosts: Sequence[NodeType]) -> int:
    return sum(candidate.shape.get(host.name, 0) for host in hosts)


# --- the user's limits ----------------------------------------------------------------------------------------------------


def _check_ranges(
    gpu_types: Sequence[str], gpu_nodes: tuple[int, int], cpu_types: Sequence[str], cpu_nodes: tuple[int, int]
) -> None:
    if not gpu_types:
        raise ConfigError("a plan needs a GPU type for the workers, such as ml.g5.xlarge.")
    for name, (least, most), floor in (("GPU nodes", gpu_nodes, 1), ("CPU nodes", cpu_nodes, 0)):
        check_count(f"the number of {name}", least, least=floor, most=MOST_NODES)
        check_count(f"the number of {name}", most, least=floor, most=MOST_NODES)
        if most < least:
            raise ConfigError(f"the range of {name}, {least}..{most}, is empty: give it as {most}..{least}.")
    if not cpu_types and cpu_nodes[0] > 0:
        raise ConfigError(
            f"cpu_nodes asks for at least {cpu_nodes[0]} CPU nodes, and cpu_types names no CPU type, such as ml.c5.4xlarge."
        )


def _batch_range(profile: Profile, batch_size: int | None, max_batch_size: int | None) -> tuple[int, int]:
    initial = profile.batch_size or (profile.noise and int(profile.noise.batch_size))
    if batch_size is not None and max_batch_size is not None:
        raise ConfigError("give a batch size to plan with or a maximum to choose up to, not both.")
    if max_batch_size is not None:
        most = check_count("max_batch_size", max_batch_size, least=1)
        if profile.noise is None:
            raise ConfigError(
                "a maximum batch size needs the profile's gradient noise (noise.sqr, noise.var, noise.batch_size): without it "
                "a larger batch would seem free. Give a fixed batch size, or probe again."
            )
        least = math.ceil(profile.noise.batch_size)
        if most < least:
            raise ConfigError(f"max_batch_size must be at least the initial batch {least}, found {most}.")
        return least, most
    fixed = initial if batch_size is None else check_count("batch_size", batch_size, least=1)
    if not fixed:
        raise ConfigError("the profile names no batch_size: give the global batch to plan with, such as 64.")
    if profile.noise is not None and fixed < profile.noise.batch_size:
        raise ConfigError(
            f"the batch size {fixed} is below the {profile.noise.batch_size:g} at which the gradient noise was measured: its "
            "efficiency is not defined there. Give a larger one, or remove noise from the profile."
        )
    return fixed, fixed


def _limit(name: str, value: float | None, samples: int | None) -> float | None:
    if value is None:
        return None
    if samples is None:
        raise ConfigError(f"a {name} needs the amount of work: give the samples to train, those of an epoch × epochs.")
    return check_number(name, value, above=0.0)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, found {value!r}.")
    return value


def _interruptions(kind: NodeType) -> float:
    known = kind.interruptions_per_hour
    return INTERRUPTIONS_PER_HOUR if known is None else known


def _rented(kind: NodeType, on_spot: bool) -> NodeType:
    """The type as rented: a spot node costs its spot price, and a spot CPU node is absent now and then."""
    if not on_spot:
        return kind
    if kind.spot_usd_per_hour is None:
        raise ConfigError(
            f"the catalog holds no spot price of {kind.name}: give it one (spot_usd_per_hour) with a catalog file, or plan "
            "on-demand nodes."
        )
    away = 0.0 if kind.gpus else _interruptions(kind) * REPLACEMENT_S / 3600
    return replace(kind, usd_per_hour=kind.spot_usd_per_hour, core_speed=kind.core_speed / (1 + away))
