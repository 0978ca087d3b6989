"""Numbers of preprocessing cores that rules choose while a run goes on, in simulated worlds.

A world has cores of a known speed, a cap that more cores cannot raise, an accelerator, and noise. An interval is 30 s, and a decision takes
effect after one. Dollars are those of a run of so many intervals, over its samples. The oracle knows the world without its noise.

Changes are free, or they have the price of nodes: one that joins is billed while it starts, and one that leaves until it is idle for long.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offload.adapt.cores import CorePrice, CoresLearned, InputSeen, count_cores

FIRST, MOST = 4, 512
INTERVALS = 240
GPU_USD, CORE_USD = 1.2, 0.0425  # dollars per hour: about those of an ml.g5.xlarge and of a vCPU of an ml.c5
PRICE = CorePrice(core=CORE_USD, rest=GPU_USD)
JOINS, LEAVES = (
    2,
    10,
)  # intervals that a core is billed before and after it works: a start, and the idle timeout of cluster files
KINDS = ("input-bound", "drift", "noisy", "flapping", "capped")
HELPED = 0.07  # Cachew: one more worker must cut the batch time by more than this
HURT = 0.03  # Cachew: one worker fewer may lengthen the batch time by this
SLOWER = 1.5  # Cachew: times the settled batch time at which it looks again
STABLE = 20  # intervals between two such looks
WORKER = 4  # cores of one worker of Cachew and Pecan
OFFLOADS = 1.3  # FastFlow: the accelerator's rate over the input's above which it offloads


@dataclass(frozen=True)
class World:
    """Rates in samples/s by interval; ``noise``: relative standard deviation of one interval's."""

    device: float
    core: float
    cap: float
    noise: float
    drift: float
    flaps: int

    def rates(self, interval: int) -> tuple[float, float, float]:
        """Of the accelerator, of a core, and of the cap."""
        slower = 1 + self.drift * interval / INTERVALS
        low = self.flaps and (interval // self.flaps) % 2
        return self.device * (0.5 if low else 1.0), self.core / slower, self.cap


def world(kind: str, seed: int) -> World:
    """A random world of a kind."""
    rng = random.Random(f"{kind} {seed}")
    device, core = rng.uniform(200, 1000), rng.uniform(15, 40)
    return World(
        device=device,
        core=core,
        cap=rng.uniform(0.3, 0.95) * device if kind == "capped" else math.inf,
        noise=0.1 if kind == "noisy" else 0.02,
        drift=1.0 if kind == "drift" else 0.0,
        flaps=40 if kind == "flapping" else 0,
    )


Rule = Callable[[InputSeen, int], int]


def offload_rule() -> Rule:
    """This project's."""
    learned = CoresLearned()

    def rule(seen: InputSeen, before: int) -> int:
        nonlocal learned
        learned, cores = count_cores(learned, seen, bounds=(1, MOST), before=before, price=PRICE)
        return cores

    return rule


def fastflow_rule() -> Rule:
    """Once, from the first interval: as many cores as the accelerator needs, if it is 1.3 times as fast as the input."""
    first = True

    def rule(seen: InputSeen, before: int) -> int:
        nonlocal first
        if not first:
            return before
        first = False
        short = seen.device_samples_per_s / seen.samples_per_s
        return min(math.ceil(before * short), MOST) if short > OFFLOADS else before

    return rule


def tfdata_rule() -> Rule:
    """tf.data service's auto-scaler: what consumers take, over what one worker makes, rounded up, in every interval."""

    def rule(seen: InputSeen, before: int) -> int:
        return min(math.ceil(seen.device_samples_per_s / seen.core_pace_samples_per_s), MOST)

    return rule


def cachew_rule(*, sheds: bool = False) -> Rule:
    """Cachew's: one worker more while the last one cut the batch time by more than 7 %, else back to the one before.

    After that it looks every 20 intervals, and grows again at 1.5 times the settled batch time. Its test of the queue's size is left out.
    ``sheds``: once settled, it also gives back workers while that lengthens the batch time by at most 3 %.
    """
    state: dict[str, Any] = {"way": "up", "last": 0.0, "settled": 0.0, "since": 0}

    def rule(seen: InputSeen, before: int) -> int:
        if not seen.complete:  # a worker that still starts has not been tried
            return before
        last, state["last"] = state["last"], seen.samples_per_s
        if state["way"] == "up":
            if not last or 1 - last / seen.samples_per_s > HELPED:
                return min(before + WORKER, MOST)
            state.update(way="down" if sheds else "settled", settled=last, since=0, last=0.0)
            return max(before - WORKER, 1)
        if state["way"] == "down":
            if last and last / seen.samples_per_s - 1 > HURT:
                state.update(way="settled", settled=last, since=0)
                return before + WORKER
            if before > WORKER:
                return before - WORKER
            state.update(way="settled", settled=seen.samples_per_s, since=0)
        state["since"] += 1
        if state["since"] > STABLE:
            state["since"] = 0
            if state["settled"] > SLOWER * seen.samples_per_s:
                state.update(way="up", last=seen.samples_per_s)
                return min(before + WORKER, MOST)
        return before

    return rule


def pecan_rule() -> Rule:
    """Pecan's AutoPlacement by the aim of its paper: the peak rate, found as Cachew does, with the fewest paid workers."""
    return cachew_rule(sheds=True)


# Approximations of the published rules, beside this project's.
RULES: dict[str, Callable[[], Rule]] = {
    "offload": offload_rule,
    "fastflow": fastflow_rule,
    "tf.data": tfdata_rule,
    "cachew": cachew_rule,
    "pecan": pecan_rule,
}


@dataclass
class Cores:
    """The cores of a run: those that work, those that join (intervals until they work) and those that leave (intervals billed)."""

    working: int
    joins: int
    leaves: int
    joining: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """The cores that work or will work."""
        return self.working + len(self.joining)

    @property
    def billed(self) -> int:
        """All cores that cost money."""
        return self.wanted + len(self.leaving)

    def change_to(self, cores: int) -> None:
        """Ask for so many cores, from the next interval on. Cores that still leave come back at once."""
        self.joining = [left - 1 for left in self.joining]
        self.leaving = [left - 1 for left in self.leaving if left > 1]
        while self.wanted < cores:
            if self.leaving:
                self.leaving.pop()
                self.working += 1
            else:
                self.joining.append(self.joins)
        while self.wanted > cores:
            if self.joining:
                self.joining.pop()
            else:
                self.working -= 1
            if self.leaves:
                self.leaving.append(self.leaves)
        self.working += sum(left <= 0 for left in self.joining)
        self.joining = [left for left in self.joining if left > 0]


def usd_per_sample(chosen: list[int], rates: list[float]) -> float:
    """Dollars over samples, of a whole run."""
    return sum(GPU_USD + CORE_USD * cores for cores in chosen) / sum(rates)


def run(each: World, rule: Rule, seed: int, *, priced: bool) -> tuple[float, int, int]:
    """Dollars per sample relative to the oracle's, all changes, and those in the second half."""
    cores = Cores(FIRST, JOINS if priced else 0, LEAVES if priced else 0)
    rng, chosen, billed, rates = random.Random(seed), [], [], []
    for interval in range(INTERVALS):
        device, core, cap = each.rates(interval)
        seen = measured(cores.working, device=device, core=core, cap=cap, noise=each.noise, rng=rng)
        seen = replace(seen, complete=not cores.joining)
        chosen.append(cores.wanted)
        billed.append(cores.billed)
        rates.append(seen.samples_per_s)
        cores.change_to(rule(seen, cores.wanted))
    best = [_oracle(*each.rates(interval)) for interval in range(INTERVALS)]
    oracle = usd_per_sample(*(list(column) for column in zip(*best, strict=True)))
    changes = [one != other for one, other in itertools.pairwise(chosen)]
    return usd_per_sample(billed, rates) / oracle, sum(changes), sum(changes[INTERVALS // 2 :])


def measured(cores: int, *, device: float, core: float, cap: float, noise: float, rng: random.Random) -> InputSeen:
    """An interval's measurements, all rates in samples/s: cores of ``core`` each, together no more than ``cap``, feed accelerators of
    ``device``. ``noise``: the standard deviation of the logarithm of what is made and of what is trained."""
    made = min(cores * core, cap) * math.exp(rng.gauss(0, noise))
    trained = device * math.exp(rng.gauss(0, noise))
    rate, bound = min(made, trained), made < 0.95 * trained
    return InputSeen(
        cores=cores,
        complete=True,
        samples_per_s=rate,
        bound=bound,
        device_samples_per_s=trained,
        core_samples_per_s=rate / cores if bound else core,
        core_pace_samples_per_s=core,
        busy_core_samples_per_s=core,
    )


def _oracle(device: float, core: float, cap: float) -> tuple[int, float]:
    """The cores of the fewest dollars per sample, and their rate."""
    options = [(cores, min(cores * core, cap, device)) for cores in range(1, MOST + 1)]
    return min(options, key=lambda option: (GPU_USD + CORE_USD * option[0]) / option[1])


def foreseen(each: World, changes: int) -> float:
    """Dollars per sample over the oracle's, of the best plan with so many changes at most, made by one who knows all rates beforehand.

    Changes are free, and there is no noise: no rule with as few changes costs less. The dollars of a sample are right if, at this price
    for samples, the best plan earns nothing.
    """
    cores = np.arange(1, MOST + 1)
    rates = np.array([each.rates(interval) for interval in range(INTERVALS)])
    made = np.minimum(np.minimum(cores * rates[:, 1:2], rates[:, 2:3]), rates[:, 0:1])
    low, high = 0.0, float((GPU_USD + CORE_USD) / made[:, 0].min())
    while high / max(low, 1e-12) > 1 + 1e-6:
        price = (low + high) / 2
        costs = GPU_USD + CORE_USD * cores - price * made
        plans = np.full((changes + 1, MOST), np.inf)  # the least cost so far, by changes made and present cores
        plans[0] = 0.0
        for cost in costs:
            plans[1:] = np.minimum(plans[1:], plans[:-1].min(axis=1, keepdims=True))
            plans += cost
        low, high = (low, price) if plans.min() < 0 else (price, high)
    best = [_oracle(*each.rates(interval)) for interval in range(INTERVALS)]
    return float(high) / usd_per_sample(*(list(column) for column in zip(*best, strict=True)))


def table(seeds: Sequence[int], *, priced: bool) -> list[dict[str, Any]]:
    """A row for each kind and rule, over the random worlds of these seeds."""
    rows = []
    for kind, name in itertools.product(KINDS, RULES):
        found = [run(world(kind, seed), RULES[name](), seed, priced=priced) for seed in seeds]
        usd, changes, late = zip(*found, strict=True)
        rows.append(
            {
                "kind": kind,
                "rule": name,
                "usd_over_oracle": round(statistics.fmean(usd), 3),
                "worst_usd_over_oracle": round(max(usd), 3),
                "mean_changes": round(statistics.fmean(changes), 2),
                "most_changes_in_second_half": max(late),
            }
        )
        if name == "offload" and not priced:
            most = round(statistics.fmean(changes))
            rows[-1]["foreseen_usd_over_oracle"] = round(
                statistics.fmean(foreseen(world(kind, s), most) for s in seeds), 4
            )
    return rows
