"""One run from start to end with the interruptions of spot nodes, event by event. Between two events its rate is steady.

Reclaimed CPU nodes take their cores with them until others replace them. A reclaimed GPU node stops all workers for a restart; they go on
without it, and stop again when it is back. A notice comes in time for a checkpoint, so no sample is trained twice.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator.job import Fleet, Job
from benchmarks.simulator.steady import steady

START_S = 7.2
"""From ``fit()`` to the first step: the median of four in ``benchmarks/results/elastic.json``."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run took: seconds, dollars, useful samples trained, and interruptions of GPU and CPU nodes."""

    seconds: float
    usd: float
    trained: float
    host_losses: int
    helper_losses: int


def train(job: Job, fleet: Fleet, batch: float, samples: float, *, spot: str = "none", seed: int = 0) -> Outcome:
    """Train so many useful samples. Times between interruptions of a node are exponential.

    Raises ValueError if the fleet makes no samples at all.
    """
    rng = np.random.default_rng(seed)
    hosts, helpers = int(fleet.hosts), int(np.ravel(fleet.helpers)[0])
    per_s = {
        "host": job.interruptions_per_hour.get(fleet.host.name, 0.0) / 3600 if spot == "all" else 0.0,
        "helper": 0.0,
    }
    if fleet.helper is not None and spot != "none":
        per_s["helper"] = job.interruptions_per_hour.get(fleet.helper.name, 0.0) / 3600

    @functools.cache
    def pace(here: int, far: int) -> tuple[float, float]:
        """Useful samples/s and dollars/s with so many nodes."""
        if here == 0:
            return 0.0, float(replace(fleet, hosts=np.array(0), helpers=np.array(far)).usd_per_hour(spot)) / 3600
        now = replace(fleet, hosts=np.array(here), helpers=np.array(far))
        # The group keeps its global batch: fewer workers have larger local ones.
        at = steady(job, now, batch, spot="none")
        return float(at.goodput), float(now.usd_per_hour(spot)) / 3600

    if pace(hosts, helpers)[0] <= 0:
        raise ValueError("this fleet has no core that preprocesses")
    now = trained = usd = 0.0
    paused_until = START_S
    present = {"host": hosts, "helper": helpers}
    losses = {"host": 0, "helper": 0}
    order = itertools.count()
    back: list[tuple[float, int, str]] = []
    next_loss = {kind: _exponential(rng, per_s[kind] * present[kind]) for kind in present}
    while trained < samples * (1 - 1e-12):
        rate, price = pace(present["host"], present["helper"])
        if now < paused_until:
            rate, done = 0.0, math.inf
        else:
            done = now + (samples - trained) / rate if rate > 0 else math.inf
        ahead = [done, *next_loss.values(), paused_until if now < paused_until else math.inf]
        ahead.append(back[0][0] if back else math.inf)
        until = min(ahead)
        trained += rate * (until - now)
        usd += price * (until - now)
        now = until
        if back and back[0][0] <= now:
            _, _, kind = heapq.heappop(back)
            present[kind] += 1
            if kind == "host":
                paused_until = max(paused_until, now + job.restart_s)
            next_loss[kind] = now + _exponential(rng, per_s[kind] * present[kind])
            continue
        for kind in present:
            if next_loss[kind] <= now and now < done:
                present[kind] -= 1
                losses[kind] += 1
                heapq.heappush(back, (now + job.replacement_s, next(order), kind))
                if kind == "host":
                    paused_until = max(paused_until, now + job.restart_s)
                next_loss[kind] = now + _exponential(rng, per_s[kind] * present[kind])
    return Outcome(seconds=now, usd=usd, trained=trained, host_losses=losses["host"], helper_losses=losses["helper"])


def _exponential(rng: np.random.Generator, per_s: float) -> float:
    return float(rng.exponential(1 / per_s)) if per_s > 0 else math.inf
