"""Workers, batches and cores that rules choose together while a run goes on, in simulated worlds.

A run trains until a given amount of useful work is done, on nodes of one GPU each, with cores beside them that it pays for one by one.
A change of the workers stops training. Cores are billed while they join and after they leave (:mod:`benchmarks.decision_worlds`).
The oracle knows the world. It always trains with the workers, batch and cores of the fewest dollars, or of the least time.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.decision_worlds import CORE_USD, GPU_USD, JOINS, LEAVES, Cores
from offload.adapt.cores import CorePrice, CoresLearned, InputSeen, count_cores
from offload.adapt.decide import Keep, State, cores_meanwhile, decide
from offload.adapt.observe import LEAST_STEPS, Seen, StepInterval
from offload.adapt.situation import DecisionBounds, Objective, Option, Situation
from offload.measure.steps import INPUT_BOUND
from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise
from offload.model.step_time import StepTime

INITIAL, MOST, MOST_WORKERS, MOST_CORES = 64, 4096, 8, 256
LOCAL = (8, 1024)
NEAR = 3  # cores of a GPU node that preprocess, at no more than the node's price
INTERVAL_S, INTERVALS, RESTART_S = 30.0, 120, 30.0
OVERLAP = 64.0
GAIN = 1.05  # AdaptDL: the goodput of a new size over the present one's above which it changes
TAUGHT = 3  # intervals that teach the time of a size: it is steady here, and a fit takes long
OF_INPUT = ("delivered", "ceiling_samples_per_s", "cores", "recent")
KINDS = ("GPU-bound", "input-bound", "capped", "drift", "growing noise")
SIZES = np.union1d(np.geomspace(LOCAL[0], LOCAL[1], 40).astype(int), -(-INITIAL // np.arange(1, MOST_WORKERS + 1)))


@dataclass(frozen=True)
class World:
    """``core``: samples/s of a core at first, ``slower``: times that it takes longer at the end; ``cap``: samples/s that more cores do not
    exceed; ``first``, ``last``: the noise scale in samples; ``variation``: of each interval's rates."""

    step: StepTime
    core: float
    slower: float
    cap: float
    first: float
    last: float
    variation: float = 0.02

    def rate_of_core(self, progress: float) -> float:
        """Samples/s of one core."""
        return self.core / (1 + (self.slower - 1) * progress)

    def noise(self, progress: float) -> GradientNoise:
        """The gradient noise at a share of the work."""
        scale = self.first * (self.last / self.first) ** progress
        return GradientNoise(sqr=1 / scale, var=1 / INITIAL, batch_size=INITIAL)

    def goodput(self, split: BatchSplit, cores: float, progress: float) -> float:
        """Useful samples/s."""
        rate = min(cores * self.rate_of_core(progress), self.cap)
        joint = JointGoodput(self.step, self.noise(progress), max(rate, 1e-9), OVERLAP)
        return float(joint.goodput(split.workers, split.workers, split.local_batch_size, split.accum_steps))


def world(kind: str, seed: int) -> World:
    """A random world of a kind."""
    rng = random.Random(f"{kind} {seed}")
    beta = 10 ** rng.uniform(-3, -2)
    alpha, sync = beta * rng.uniform(5, 50), beta * rng.uniform(5, 50)
    device = INITIAL / (alpha + beta * INITIAL)
    # Cores for one worker at the initial batch: few where the accelerators bind.
    cores = rng.uniform(1, 3) if kind == "GPU-bound" else rng.uniform(6, 20)
    return World(
        step=StepTime(alpha, beta, sync, 0.0, sync, 0.05 * sync, gamma=rng.uniform(1, 4)),
        core=device / cores,
        slower=2.0 if kind == "drift" else 1.0,
        cap=device * rng.uniform(0.5, 2) if kind == "capped" else math.inf,
        first=10 ** rng.uniform(2, 3),
        last=10 ** rng.uniform(3, 4) if kind == "growing noise" else 10**2.5,
    )


def usd_per_hour(workers: int, cores: float) -> float:
    """Of so many workers and cores."""
    return workers * GPU_USD + max(cores - NEAR * workers, 0) * CORE_USD


Joint = tuple[BatchSplit, int]


def oracle(each: World, progress: float, objective: Objective) -> tuple[float, float]:
    """Goodput and dollars per hour of the best size and cores, of the whole grid."""
    core, noise = each.rate_of_core(progress), each.noise(progress)
    workers, local = (a.ravel() for a in np.meshgrid(np.arange(1, MOST_WORKERS + 1), SIZES))
    fits = (workers * local >= INITIAL) & (workers * local <= MOST)
    workers, local = workers[fits], local[fits]
    batch = workers * local
    # A single worker with more than the initial batch accumulates, in AdaptDL too: its gradient noise could not be measured otherwise.
    accum = ((workers == 1) & (batch > INITIAL)).astype(int)
    device = batch / each.step.predict(workers, workers, local / (accum + 1), accum)
    needed = np.minimum(device, each.cap) / core
    best = (0.0, math.inf)
    worth = -math.inf
    for cores in (np.floor(needed), np.ceil(needed), np.full(needed.shape, float(MOST_CORES))):
        count = np.clip(np.maximum(cores, NEAR * workers), 1, MOST_CORES)
        rate = np.minimum(np.minimum(count * core, each.cap), device)
        goodput = rate * np.asarray(noise.efficiency(batch))
        usd = workers * GPU_USD + (count - NEAR * workers).clip(0) * CORE_USD
        value = goodput / usd if objective == "cost" else goodput - 1e-9 * usd
        at = int(np.argmax(value))
        if value[at] > worth:
            worth, best = float(value[at]), (float(goodput[at]), float(usd[at]))
    return best


@dataclass
class Run:
    """What a rule knows of a run under way."""

    rules: DecisionBounds
    noise: GradientNoise
    seen: Seen
    work_left: float
    input: InputSeen
    now: Joint


Rule = Callable[[Run], Joint]


def offload_rule() -> Rule:
    """This project's decisions, as a run takes them in every interval: the cores by what was measured, then workers and batch."""
    learned, state = CoresLearned(), State()

    def rule(run: Run) -> Joint:
        nonlocal learned, state
        split, before = run.now
        price = CorePrice(core=CORE_USD, rest=split.workers * GPU_USD, free=NEAR * split.workers)
        learned, cores = count_cores(
            learned, run.input, bounds=(1, MOST_CORES), before=before, overlap=run.rules.overlap,
            price=price if run.rules.objective == "cost" else None,
        )  # fmt: skip
        options = []
        most = float(min(learned.enough or MOST_CORES, MOST_CORES))
        for workers in range(1, MOST_WORKERS + 1):
            options.append(
                Option(
                    workers=workers, nodes=workers, cores=most, usd_per_hour=workers * GPU_USD, elastic=True,
                    usd_per_core=CORE_USD, free_cores=NEAR * workers,
                )
            )  # fmt: skip
        situation = Situation(
            split=split, seen=run.seen, noise=run.noise, options=options, work_left=run.work_left, restart_s=RESTART_S
        )
        state, decision = decide(state, situation, run.rules)
        cores = cores_meanwhile(cores, before, state, decision, run.rules)
        return (split if isinstance(decision, Keep) else decision.split), cores

    return rule


def naive_rule() -> Rule:
    """AdaptDL's goodput without an input for workers and batch, and tf.data service's rule for the cores.

    With ``cost``, it takes the most goodput per dollar of GPU nodes.
    """

    def rule(run: Run) -> Joint:
        split, _ = run.now
        cores = min(math.ceil(run.input.device_samples_per_s / run.input.core_pace_samples_per_s), MOST_CORES)
        if run.seen.fit is None:
            return split, cores
        joint = JointGoodput(run.seen.fit.step_time, run.noise)
        workers = np.arange(1, MOST_WORKERS + 1)
        goodput, local, accum = joint.optimize(workers, workers, MOST, LOCAL, accumulate=True)
        price = workers if run.rules.objective == "cost" else np.ones(workers.shape)
        at = int(np.argmax(goodput / price))
        now = float(joint.goodput(split.workers, split.workers, split.local_batch_size, split.accum_steps))
        if goodput[at] / price[at] <= GAIN * now / price[split.workers - 1]:
            return split, cores
        best = BatchSplit(workers=int(workers[at]), local_batch_size=int(local[at]), accum_steps=int(accum[at]))
        return best, cores

    return rule


RULES: dict[str, Callable[[], Rule]] = {"offload": offload_rule, "AdaptDL + tf.data": naive_rule}


def run(each: World, rule: Rule, objective: Objective, seed: int) -> tuple[float, int, int, int]:
    """Dollars (or time) over the oracle's; changes of the workers, of the batch alone, and of the cores."""
    rng = random.Random(seed)
    rules = DecisionBounds(
        initial_batch_size=INITIAL, max_batch_size=MOST, local_batch_size=LOCAL, objective=objective, overlap=OVERLAP
    )
    shares = [(number + 0.5) / INTERVALS for number in range(INTERVALS)]
    best = [oracle(each, share, objective) for share in shares]
    work = INTERVALS * INTERVAL_S / statistics.fmean(1 / goodput for goodput, _ in best)
    oracles = (
        statistics.fmean(usd / goodput for goodput, usd in best) * work / 3600
        if objective == "cost"
        else INTERVALS * INTERVAL_S
    )
    split, cores = BatchSplit.of(INITIAL, 2, LOCAL[1]), Cores(2 * NEAR, JOINS, LEAVES)
    seen, done, spent, usd, resizes, batches, counts = Seen(), 0.0, 0.0, 0.0, 0, 0, 0
    taught: Counter[BatchSplit] = Counter()
    while done < work and spent < 10 * INTERVALS * INTERVAL_S:
        progress = done / work
        shown, goodput = _interval(each, split, cores.working, progress, rng)
        taken = min(INTERVAL_S, (work - done) / goodput)
        done, spent = done + goodput * taken, spent + taken
        usd += taken / 3600 * usd_per_hour(split.workers, cores.billed)
        seen = _taught(seen, shown, split, taught, cores)
        pace = each.rate_of_core(progress)
        bound = shown.stall >= INPUT_BOUND
        known = InputSeen(
            cores=cores.working, complete=not cores.joining, samples_per_s=shown.samples_per_s, bound=bound,
            device_samples_per_s=shown.device_samples_per_s or 1.0,
            core_samples_per_s=min(seen.input_samples_per_s(1.0), pace), core_pace_samples_per_s=pace,
            busy_core_samples_per_s=pace, conditions=split,
        )  # fmt: skip
        about = Run(rules, each.noise(progress), seen, work - done, known, (split, cores.wanted))
        wanted, count = rule(about)
        counts += count != cores.wanted
        resizes += wanted.workers != split.workers
        batches += wanted != split and wanted.workers == split.workers
        if wanted.workers != split.workers:
            spent += RESTART_S
            usd += RESTART_S / 3600 * usd_per_hour(wanted.workers, cores.billed)
        split = wanted
        cores.change_to(count)
    return (usd if objective == "cost" else spent) / oracles, resizes, batches, counts


def _taught(seen: Seen, shown: StepInterval, split: BatchSplit, taught: Counter[BatchSplit], cores: Cores) -> Seen:
    """What a run knows after an interval. The first ones teach the step time of a size, since a fit takes long; all teach the input."""
    known = replace(shown, busy_ceiling_samples_per_s=None) if cores.joining else shown
    taught[split] += 1
    after = seen.with_interval(known, cores.working)
    if taught[split] <= TAUGHT:
        return after
    same = replace(seen, **{name: getattr(after, name) for name in OF_INPUT})
    same.__dict__["fit"] = seen.fit  # the same steps have the same fit
    return same


def _interval(
    each: World, split: BatchSplit, cores: int, progress: float, rng: random.Random
) -> tuple[StepInterval, float]:
    """What an interval shows, and its goodput."""
    at = split.workers, split.workers, split.local_batch_size
    slower, faster = (math.exp(each.variation * rng.gauss(0, 1)) for _ in range(2))
    compute_s = float(each.step.compute_time_s(split.local_batch_size)) * (split.accum_steps + 1) * slower
    step_s = float(each.step.predict(*at, split.accum_steps)) * slower
    made = min(cores * each.rate_of_core(progress), each.cap) * faster
    took_s = max(step_s, split.global_batch_size / made)
    steps = max(round(INTERVAL_S / took_s), LEAST_STEPS) * split.workers
    shown = StepInterval(
        nodes=split.workers, split=split, steps=steps,
        samples=steps * split.local_batch_size * (split.accum_steps + 1),
        step_time_s=steps * took_s, data_wait_s=steps * (took_s - step_s), compute_s=steps * compute_s,
        sync_s=steps * (step_s - compute_s), busy_ceiling_samples_per_s=cores * each.rate_of_core(progress),
    )  # fmt: skip
    efficiency = float(each.noise(progress).efficiency(max(split.global_batch_size, INITIAL)))
    return shown, shown.samples_per_s * efficiency


def table(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each objective, kind and rule, over the random worlds of these seeds."""
    rows = []
    objectives: tuple[Objective, ...] = ("cost", "time")
    for objective, kind, name in itertools.product(objectives, KINDS, RULES):
        found = [run(world(kind, seed), RULES[name](), objective, seed) for seed in seeds]
        over, resizes, batches, cores = zip(*found, strict=True)
        rows.append(
            {
                "objective": objective,
                "kind": kind,
                "rule": name,
                "over_oracle": round(statistics.fmean(over), 3),
                "worst_over_oracle": round(max(over), 3),
                "mean_changes_of_workers": round(statistics.fmean(resizes), 1),
                "mean_changes_of_batch": round(statistics.fmean(batches), 1),
                "mean_changes_of_cores": round(statistics.fmean(cores), 1),
            }
        )
    return rows
