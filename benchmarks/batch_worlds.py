"""Batches that rules choose while a run goes on and its gradient noise changes, in simulated worlds.

Four workers train on one node until a given amount of useful work is done. Their step times and gradients are random. The noise scale
follows a course that depends on the progress. The oracle knows the course, and always trains with the best batch.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.adapt.decide import Keep, State, decide
from offload.adapt.noise_average import NoiseAverage
from offload.adapt.observe import LEAST_STEPS, Seen, StepInterval
from offload.adapt.situation import DecisionBounds, Option, Situation
from offload.model.batch_split import BatchSplit
from offload.model.goodput import JointGoodput
from offload.model.noise import GradientNoise
from offload.model.step_time import StepTime

INITIAL, MOST, WORKERS = 64, 16_384, 4
INTERVAL_S = 30.0
INTERVALS = 120  # that the oracle needs
EVERY, EAGER = 8, 32  # a run measures one step in EVERY, and each of the first EAGER
SMOOTHING = 0.999  # AdaptDL: decay of the noise per initial step
GAIN = 1.05  # AdaptDL: the goodput of a new batch over the present one's above which it changes
TAUGHT = 3  # intervals that teach the time of a size: it is steady here, and a fit takes long
KINDS = ("steady noise", "growing noise", "growing noise, slow steps", "noise that jumps", "input-bound")


@dataclass(frozen=True)
class World:
    """Four workers with a step of known time.

    Args:
        step: its true time.
        variation: relative standard deviation of one interval's mean times.
        first, last: the noise scale, in samples, at the beginning and at the end.
        jumps: whether it changes at half of the work, instead of steadily.
        dimension: directions of the noise.
        input_samples_per_s: the rate of the input.
    """

    step: StepTime
    variation: float
    first: float
    last: float
    jumps: bool
    dimension: int
    input_samples_per_s: float

    def noise(self, progress: float) -> GradientNoise:
        """The true noise at a share of the work. The signal fades while the variance stays."""
        share = float(progress >= 0.5) if self.jumps else progress
        scale = self.first * (self.last / self.first) ** share
        return GradientNoise(sqr=1 / scale, var=1 / INITIAL, batch_size=INITIAL)

    def joint(self, progress: float) -> JointGoodput:
        """The true goodput at a share of the work."""
        return JointGoodput(self.step, self.noise(progress), self.input_samples_per_s)

    def goodput(self, batch: BatchSplit, progress: float) -> float:
        """Useful samples/s of a batch."""
        return float(self.joint(progress).goodput(1, WORKERS, batch.local_batch_size, batch.accum_steps))

    def interval(self, batch: BatchSplit, rng: np.random.Generator) -> StepInterval:
        """What an interval with this batch shows."""
        at = (1, WORKERS, batch.local_batch_size)
        compute_s = float(self.step.compute_time_s(batch.local_batch_size)) * (batch.accum_steps + 1)
        step_s = float(self.step.predict(*at, batch.accum_steps))
        wait_s = max(float(self.joint(0).step_time_s(*at, batch.accum_steps)) - step_s, 0.0)
        steps = max(round(INTERVAL_S / (step_s + wait_s)), LEAST_STEPS) * WORKERS
        slower = math.exp(self.variation * rng.normal())
        return StepInterval(
            nodes=1,
            split=batch,
            steps=steps,
            samples=steps * batch.local_batch_size * (batch.accum_steps + 1),
            step_time_s=steps * (step_s + wait_s),
            data_wait_s=steps * wait_s,
            compute_s=steps * compute_s * slower,
            sync_s=steps * (step_s - compute_s) * slower,
            busy_ceiling_samples_per_s=self.input_samples_per_s,
        )

    def estimate(self, batch: BatchSplit, progress: float, rng: np.random.Generator) -> tuple[float, float]:
        """``(|G|², tr(Σ))`` as one step measures them, with the variance that normal gradients give."""
        true, count = self.noise(progress), WORKERS * (batch.accum_steps + 1)
        one = true.var * INITIAL / batch.local_batch_size  # variance of one compared gradient
        square = one**2 / self.dimension
        error = math.sqrt(4 * true.sqr * one / self.dimension / count + 2 * square / (count * (count - 1)))
        sqr = true.sqr + error * rng.normal()
        return sqr, true.var * (1 + math.sqrt(2 / (self.dimension * (count - 1))) * rng.normal())


def world(kind: str, seed: int) -> World:
    """A random world of a kind."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    beta = 10 ** (rng.uniform(-2, -1.3) if "slow" in kind else rng.uniform(-3, -2))
    alpha, sync = beta * rng.uniform(5, 100), beta * rng.uniform(5, 100)
    first = 10 ** rng.uniform(2, 3)
    grows = 10 ** rng.uniform(1, 2)
    step = StepTime(alpha, beta, sync, 0.0, sync, 0.0, gamma=rng.uniform(1, 4))
    rate = 0.5 * INITIAL / float(step.predict(1, WORKERS, INITIAL // WORKERS))
    return World(
        step=step,
        variation=0.02,
        first=first,
        last=first * (grows if "growing" in kind or "jumps" in kind else 1.0),
        jumps="jumps" in kind,
        dimension=int(10 ** rng.uniform(1.5, 4)),
        input_samples_per_s=rate if kind == "input-bound" else math.inf,
    )


@dataclass
class Smoothed:
    """AdaptDL's noise: bias-corrected exponential means over 1,000 initial steps."""

    sqr: float = 0.0
    var: float = 0.0
    weight: float = 0.0

    def add(self, sqr: float, var: float, steps: float) -> None:
        """Count one more estimate, after so many initial steps."""
        kept = SMOOTHING**steps
        for name, value in (("sqr", sqr), ("var", var), ("weight", 1.0)):
            setattr(self, name, kept * getattr(self, name) + (1 - kept) * value)

    @property
    def noise(self) -> GradientNoise:
        """The mean, cut at 0."""
        return GradientNoise(max(self.sqr / self.weight, 0.0), max(self.var / self.weight, 1e-6), INITIAL)


Rule = Callable[[BatchSplit, Seen, NoiseAverage, Smoothed], BatchSplit]
RULES_OF = DecisionBounds(initial_batch_size=INITIAL, max_batch_size=MOST, local_batch_size=(8, 2048))


def offload_rule(batch: BatchSplit, seen: Seen, noise: NoiseAverage, smoothed: Smoothed) -> BatchSplit:
    """This project's, with a fixed number of workers."""
    options = [Option(workers=WORKERS, nodes=1, cores=8.0)]
    _, decision = decide(State(), Situation(split=batch, seen=seen, noise=noise.whole, options=options), RULES_OF)
    return batch if isinstance(decision, Keep) else decision.split


def adaptdl_rule(batch: BatchSplit, seen: Seen, noise: NoiseAverage, smoothed: Smoothed) -> BatchSplit:
    """An approximation of AdaptDL's published rule: the best goodput without an input, by the smoothed noise, taken at once."""
    if seen.fit is None:
        return batch
    joint = JointGoodput(seen.fit.step_time, smoothed.noise)
    goodput, local, accum = joint.optimize(1, WORKERS, MOST, RULES_OF.local_batch_size, accumulate=True)
    if goodput <= GAIN * joint.goodput(1, WORKERS, batch.local_batch_size, batch.accum_steps):
        return batch
    return BatchSplit(workers=WORKERS, local_batch_size=int(local), accum_steps=int(accum))


RULES: dict[str, Rule] = {"offload": offload_rule, "adaptdl": adaptdl_rule}


def run(each: World, rule: Rule, seed: int) -> tuple[float, int]:
    """The run's time over the oracle's, and its changes of the batch."""
    rng = np.random.default_rng(seed)
    work = _work(each)
    done = spent_s = 0.0
    seen, noise, smoothed, changes, step = Seen(), NoiseAverage(batch_size=INITIAL), Smoothed(), 0, 0
    batch = BatchSplit(workers=WORKERS, local_batch_size=INITIAL // WORKERS, accum_steps=0)
    intervals: Counter[BatchSplit] = Counter()
    while done < work:
        shown = each.interval(batch, rng)
        goodput = each.goodput(batch, done / work)
        taken_s = min(INTERVAL_S, (work - done) / goodput)
        last, measured = step + shown.steps // WORKERS, step
        for at in range(step, last):
            if at < EAGER or at % EVERY == 0:
                sqr, var = each.estimate(batch, done / work, rng)
                scale = max(batch.global_batch_size / INITIAL, 1.0)
                noise = noise.updated([sqr], [var], scale=scale, steps=max(at - measured, 1))
                smoothed.add(sqr, var, scale * max(at - measured, 1))
                measured = at
        step, done, spent_s = last, done + goodput * taken_s, spent_s + taken_s
        intervals[batch] += 1
        if intervals[batch] <= TAUGHT:
            seen = seen.with_interval(shown, 8.0)
        chosen = rule(batch, seen, noise, smoothed)
        changes, batch = changes + (chosen != batch), chosen
    return spent_s / (INTERVALS * INTERVAL_S), changes


def _work(each: World) -> float:
    """The useful samples that the oracle trains in its intervals."""
    shares = [(number + 0.5) / INTERVALS for number in range(INTERVALS)]
    return INTERVALS * INTERVAL_S / statistics.fmean(1 / _best(each, share) for share in shares)


def _best(each: World, progress: float) -> float:
    goodput, _, _ = each.joint(progress).optimize(1, WORKERS, MOST, RULES_OF.local_batch_size, accumulate=True)
    return float(goodput)


def table(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each kind and rule, over the random worlds of these seeds."""
    rows = []
    for kind, name in itertools.product(KINDS, RULES):
        found = [run(world(kind, seed), RULES[name], seed) for seed in seeds]
        times, changes = zip(*found, strict=True)
        rows.append(
            {
                "kind": kind,
                "rule": name,
                "time_over_oracle": round(statistics.fmean(times), 3),
                "worst_time_over_oracle": round(max(times), 3),
                "mean_changes": round(statistics.fmean(changes), 1),
            }
        )
    return rows
