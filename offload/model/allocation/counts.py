"""One choice for each job such that all fit the cluster and the power mean of what they are worth is largest: a mixed-integer programme.

Where it stops: capacities of the whole cluster; which node holds what is :mod:`placing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads scipy.optimize at first use
from numpy.typing import NDArray

from offload.model.allocation.choices import Choices
from offload.model.overlap import Floats

Places = NDArray[np.integer[Any]]

STARVED = 1e-2  # the worth of nothing, so that a power below 0 is finite
GAP = 1e-4  # relative distance from the optimum that is good enough
NODES = 2000  # of the search tree: a limit that depends on no clock
# Cost of all the cluster's GPUs or cores, relative to a job of worth 1 and of the same weight: what changes nothing is not taken.
IDLE_GPUS, IDLE_CORES = 1e-3, 1e-4
ROUNDING = 1e-7


@dataclass(frozen=True, eq=False)
class Counted:
    """A choice for each job, the cost of all of them, and a bound below which no allocation's cost lies."""

    chosen: tuple[int, ...]
    cost: float
    bound: float


@dataclass(frozen=True, eq=False)
class Programme:
    """The choices of all jobs side by side: their costs, what they use of each resource, and whose they are. ``share``: the factor of the
    weight in each cost."""

    cost: Floats
    share: Floats
    use: Floats  # (resources, choices)
    capacity: Floats
    owner: Places
    first: Places  # the first choice of each job

    @staticmethod
    def of(
        choices: Sequence[Choices],
        weights: Sequence[float],
        fairness: float,
        gpus: Mapping[str, float],
        cpus: float,
        others: Mapping[str, float],
        usd_per_hour: float | None,
        order: Sequence[int],
    ) -> Programme:
        """The programme. ``others``: the custom resources of all nodes. ``order``: the rank of each job if not all can have something, the
        first being 0."""
        kinds, customs = sorted(gpus), sorted(others)
        number = {kind: i for i, kind in enumerate(kinds)}
        # Only ratios of weights count. The largest is 1, so that costs are of one size, whatever the weights.
        shares = [share_of(weight / max(weights), fairness) for weight in weights]
        cost, rows, owner = [], [], []
        for j, table in enumerate(choices):
            mine = cost_of(table.worth, fairness)
            mine[0] *= 1 + 1e-3 * (1 - order[j] / max(len(choices), 1))
            mine = (
                mine + IDLE_CORES * table.cpus / max(cpus, 1.0) + IDLE_GPUS * table.gpus / max(sum(gpus.values()), 1.0)
            )
            mine *= shares[j]
            use = np.zeros((len(kinds) + len(customs) + 2, len(mine)))
            for c, kind in enumerate(table.kinds):
                if kind in number:
                    use[number[kind], c] = table.gpus[c]
            for row, name in enumerate(customs, start=len(kinds)):
                use[row] = table.workers * table.others.get(name, 0.0)
            use[-2], use[-1] = table.cpus, table.usd_per_hour
            cost.append(mine)
            rows.append(use)
            owner.append(np.full(len(mine), j))
        budget = np.inf if usd_per_hour is None else usd_per_hour
        capacity = np.array([*(gpus[kind] for kind in kinds), *(others[name] for name in customs), cpus, budget])
        first = np.cumsum([0, *(len(mine) for mine in cost[:-1])])
        whole = np.concatenate(rows, axis=1)
        bounded = np.isfinite(capacity)
        owners = np.concatenate(owner)
        return Programme(
            np.concatenate(cost), np.array(shares)[owners], whole[bounded], capacity[bounded], owners, first
        )

    @property
    def jobs(self) -> int:
        """How many jobs choose."""
        return len(self.first)

    def total(self, chosen: Places) -> float:
        """The cost of one choice of each job, by its place in the arrays."""
        return float(np.sum(self.cost[chosen]))

    def fits(self, chosen: Places) -> bool:
        """Return whether these choices fit together."""
        return bool(np.all(np.sum(self.use[:, chosen], axis=1) <= self.capacity + ROUNDING))


def cost_of(worth: Floats, fairness: float) -> Floats:
    """The cost whose sum is least where the power mean of ``worth`` is largest."""
    value = worth + STARVED
    if abs(fairness) < 1e-9:
        return np.asarray(-np.log(value))
    return np.asarray(value**fairness if fairness < 0 else -(value**fairness))


def share_of(weight: float, fairness: float) -> float:
    """The factor of a job's cost with which jobs share in the ratio of their weights.

    What counts is ``w·(worth/w)^p``: worth relative to the weight. Where worth is proportional to what a job holds, x, the derivative of
    ``w^(1−p)·x^p`` is the same for all jobs if x is proportional to w. With p = 1, the plain sum, weights do not count.
    """
    return float(weight ** (1.0 - fairness))


def choose(
    programme: Programme, must: Sequence[bool], exact_up_to: int, before: Sequence[int] | None = None
) -> Counted:
    """The best choice of each job, as its place among the job's own choices. A job that ``must`` does not choose nothing.

    ``before``: choices that fit together, such that those that must choose something do. The relaxation without whole numbers gives a
    bound. Its rounding, filled up greedily, gives a first solution, and shows which choices no better one can hold. The choices that
    remain are solved within ``GAP`` of the optimum, if there are at most ``exact_up_to`` of them.
    """
    # One that must, and can, may not choose nothing. One without any other choice has no alternative.
    sizes = np.diff([*programme.first, len(programme.cost)])
    upper = np.ones(len(programme.cost))
    for j, first in enumerate(programme.first):
        if must[j] and sizes[j] > 1:
            upper[first] = 0.0
    start = programme.first + np.asarray(before if before is not None else np.zeros(programme.jobs, dtype=int))
    relaxed = _relaxed(programme, upper)
    chosen = _filled(programme, _rounded(programme, relaxed.shares, start, upper), upper)
    cost, bound = programme.total(chosen), relaxed.bound
    if cost - bound > GAP * abs(cost):
        # A solution costs at least the bound and what each of its choices costs above the relaxation's prices.
        kept = (upper > 0) & (relaxed.above <= cost - bound + ROUNDING)
        kept[chosen] = True
        places = np.flatnonzero(kept)
        if len(places) <= exact_up_to:
            exact, bound = _exact(programme, places, chosen, max_bound=cost, least=bound)
            exact = _filled(programme, exact, upper)
            chosen = min(chosen, exact, key=programme.total)
    cost = programme.total(chosen)
    return Counted(tuple(int(c) for c in chosen - programme.first), cost, min(bound, cost))


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """The solution without whole numbers: the share of each choice (None: there is no solution), the bound, and what each choice costs
    above the prices of what it uses (its reduced cost)."""

    shares: Floats | None
    bound: float
    above: Floats


def _relaxed(programme: Programme, upper: Floats) -> _Relaxed:
    result = scipy.optimize.linprog(
        programme.cost,
        A_ub=scipy.sparse.csr_array(programme.use),
        b_ub=programme.capacity,
        A_eq=_one_of_each(programme),
        b_eq=np.ones(programme.jobs),
        # One choice of each job: no share exceeds 1 anyway.
        bounds=np.stack([np.zeros(len(upper)), np.where(upper > 0, np.inf, 0.0)], axis=1),
        method="highs",
    )
    if result.x is None:
        return _Relaxed(None, -np.inf, np.zeros(len(upper)))
    prices = result.eqlin.marginals[programme.owner] + result.ineqlin.marginals @ programme.use
    return _Relaxed(np.asarray(result.x), float(result.fun), np.maximum(programme.cost - prices, 0.0))


def _one_of_each(programme: Programme) -> Any:
    size = len(programme.cost)
    return scipy.sparse.csr_array((np.ones(size), (programme.owner, np.arange(size))), shape=(programme.jobs, size))


def _exact(programme: Programme, places: Places, start: Places, max_bound: float, least: float) -> tuple[Places, float]:
    """The best of the choices at ``places`` or ``start``, and a bound of all choices: others cost more than ``max_bound``."""
    first = np.searchsorted(programme.owner[places], np.arange(programme.jobs))
    part = Programme(
        programme.cost[places],
        programme.share[places],
        programme.use[:, places],
        programme.capacity,
        programme.owner[places],
        first,
    )
    size = len(places)
    result = scipy.optimize.milp(
        part.cost,
        integrality=np.ones(size),
        bounds=scipy.optimize.Bounds(0.0, 1.0),
        constraints=[
            scipy.optimize.LinearConstraint(_one_of_each(part), 1.0, 1.0),
            scipy.optimize.LinearConstraint(scipy.sparse.csr_array(part.use), -np.inf, part.capacity),
        ],
        options={"mip_rel_gap": GAP, "node_limit": NODES},
    )
    if result.x is None:
        return start, least
    chosen = places[_rounded(part, np.asarray(result.x), np.searchsorted(places, start), np.ones(size))]
    return chosen, max(least, min(float(result.mip_dual_bound), max_bound))


def _rounded(programme: Programme, shares: Floats | None, start: Places, upper: Floats) -> Places:
    """The choices that a solution makes entirely. A job of which it makes parts gets the least of those parts that fits, or its start."""
    if shares is None:
        return start.copy()
    ends = [*programme.first[1:], len(programme.cost)]
    chosen, undecided = start.copy(), []
    left = programme.capacity.copy()
    scale = np.maximum(programme.capacity, 1e-12)[:, None]
    for j, (low, high) in enumerate(zip(programme.first, ends, strict=True)):
        top = low + int(np.argmax(shares[low:high]))
        if shares[top] > 1 - 1e-4:
            chosen[j] = top
            left -= programme.use[:, top]
        else:
            undecided.append((j, low, high))
    for j, low, high in undecided:
        here = np.arange(low, high)[upper[low:high] > 0]
        fitting = here[np.all(programme.use[:, here] <= left[:, None] + ROUNDING, axis=0)]
        if not len(fitting):
            return start.copy()  # what fits together is known to do so
        made = fitting[shares[fitting] > 1e-6]
        pool = made if len(made) else fitting
        pick = pool[np.argmin(np.max(programme.use[:, pool] / scale, axis=0))]
        chosen[j] = pick
        left -= programme.use[:, pick]
    return chosen if programme.fits(chosen) else start.copy()


def _filled(programme: Programme, chosen: Places, upper: Floats) -> Places:
    """The choices improved one at a time, the one that gains the most for what it takes first, while anything fits and gains.

    A gain too small for the solver, that of a job of small weight beside a large one, still counts where there is room.
    """
    chosen = chosen.copy()
    left = programme.capacity - np.sum(programme.use[:, chosen], axis=1)
    scale = np.maximum(programme.capacity, 1e-12)[:, None]
    while True:
        mine = chosen[programme.owner]
        gain = np.where(upper > 0, programme.cost[mine] - programme.cost, 0.0)
        more = programme.use - programme.use[:, mine]
        fits = np.all(more <= left[:, None] + ROUNDING, axis=0)
        gain = np.where(fits, gain, 0.0)
        gains = gain > 1e-9 * programme.share
        if not np.any(gains):
            return chosen
        taken = np.maximum(np.max(more / scale, axis=0), 1e-6)
        best = int(np.argmax(np.where(gains, gain / taken, 0.0)))
        left -= more[:, best]
        chosen[programme.owner[best]] = best
