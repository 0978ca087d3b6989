"""The wanted number of cores, on simulated inputs whose cores, links and noise are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.decision_worlds import RULES, Cores, measured, run, world
from offload.adapt.cores import CoresLearned, InputSeen, count_cores

DEVICE, EACH, FIRST = 500.0, 20.0, 4
BOUNDS = (1, 512)


@dataclass
class Asked:
    """The counts that a run asked for, one an interval."""

    asked: list[int]

    def changes(self, since: int = 0) -> int:
        counts = [FIRST, *self.asked]
        return sum(one != other for one, other in zip(counts[since:], counts[since + 1 :], strict=False))


def simulate(
    cap: Callable[[int], float], *, noise: float, seed: int, intervals: int = 120, device: float = DEVICE
) -> Asked:
    """Cores deliver ``EACH`` samples/s each, and together no more than the cap."""
    rng, learned, cores, asked = random.Random(seed), CoresLearned(), FIRST, []
    for number in range(intervals):
        seen = measured(cores, device=device, core=EACH, cap=cap(number), noise=noise, rng=rng)
        learned, cores = count_cores(learned, seen, bounds=BOUNDS, before=cores)
        asked.append(cores)
    return Asked(asked)


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("cap", [60.0, 80.0, 200.0, 400.0])
@pytest.mark.parametrize("seed", range(5))
def test_cores_that_deliver_nothing_more_are_given_back_and_not_asked_for_again(
    cap: float, noise: float, seed: int
) -> None:
    run = simulate(lambda _: cap, noise=noise, seed=seed)
    assert run.asked[-1] <= max(math.ceil(1.2 * cap / EACH), FIRST)
    assert run.asked[-1] * EACH >= min(0.98 * cap, FIRST * EACH)
    assert max(run.asked) <= 2 * DEVICE / EACH
    assert run.changes() <= 3
    assert run.changes(since=30) == 0


@pytest.mark.parametrize("cap", [400.0, math.inf])
def test_noise_of_a_tenth_changes_the_count_seldom(cap: float) -> None:
    """Over an hour of intervals of 30 s, an hour after which the count has settled."""
    runs = [simulate(lambda _: cap, noise=0.1, seed=seed, intervals=240) for seed in range(20)]
    assert all(run.changes(since=120) <= 3 for run in runs)
    assert sum(run.changes() for run in runs) <= 4 * len(runs)


def test_a_cap_that_lifts_is_forgotten() -> None:
    run = simulate(lambda number: 200.0 if number < 60 else math.inf, noise=0.01, seed=0, intervals=180)
    assert run.asked[59] <= 12
    assert run.asked[-1] * EACH >= DEVICE


def test_under_other_conditions_the_cap_is_forgotten() -> None:
    learned = CoresLearned(enough=4, conditions="a batch")
    seen = InputSeen(
        cores=4, complete=True, samples_per_s=80.0, bound=True, device_samples_per_s=500.0, core_samples_per_s=20.0,
        core_pace_samples_per_s=20.0, conditions="another batch",
    )  # fmt: skip
    again, cores = count_cores(learned, seen, bounds=BOUNDS, before=4)
    assert again.enough is None
    assert DEVICE / EACH <= cores <= 1.2 * DEVICE / EACH


def test_without_a_cap_the_first_interval_is_enough_to_ask() -> None:
    run = simulate(lambda _: math.inf, noise=0.01, seed=1)
    assert DEVICE / EACH <= run.asked[0] <= 1.25 * DEVICE / EACH
    assert run.changes() == 1


def test_a_single_interval_that_differs_changes_nothing() -> None:
    learned, cores = CoresLearned(), 27
    for number in range(6):
        device = 1000.0 if number == 4 else DEVICE
        seen = InputSeen(
            cores=cores, complete=True, samples_per_s=DEVICE, bound=False, device_samples_per_s=device,
            core_samples_per_s=EACH, core_pace_samples_per_s=EACH,
        )  # fmt: skip
        learned, cores = count_cores(learned, seen, bounds=BOUNDS, before=cores)
    assert cores == 27


def test_a_need_that_creeps_up_is_followed_in_few_steps() -> None:
    learned, cores, counts = CoresLearned(), 27, []
    for number in range(240):
        device = DEVICE * (1 + number / 240)
        seen = InputSeen(
            cores=cores, complete=True, samples_per_s=min(device, cores * EACH), bound=cores * EACH < 0.95 * device,
            device_samples_per_s=device, core_samples_per_s=EACH, core_pace_samples_per_s=EACH,
        )  # fmt: skip
        learned, cores = count_cores(learned, seen, bounds=BOUNDS, before=cores)
        counts.append(cores)
    assert len(set(counts)) <= 9
    assert cores * EACH >= 0.95 * 2 * DEVICE


@pytest.mark.parametrize(
    ("kind", "priced"),
    [("input-bound", False), *((kind, True) for kind in ("input-bound", "drift", "noisy", "flapping", "capped"))],
)
def test_no_published_rule_costs_less_and_changes_are_few(kind: str, priced: bool) -> None:
    """Mean dollars over random worlds. In all of them but the first, a core is billed while it joins and after it leaves."""
    worlds = [(world(kind, seed), seed) for seed in range(8)]
    found = {name: [run(each, RULES[name](), seed, priced=priced) for each, seed in worlds] for name in RULES}
    dollars = {name: sum(usd for usd, _, _ in runs) / len(runs) for name, runs in found.items()}
    assert dollars["offload"] <= min(dollars.values()) + 0.003
    assert dollars["offload"] <= 1.10
    assert max(late for _, _, late in found["offload"]) <= 3


def test_a_priced_core_is_billed_before_and_after_it_works() -> None:
    cores = Cores(4, joins=2, leaves=3)
    cores.change_to(6)
    assert (cores.working, cores.billed) == (4, 6)
    cores.change_to(6)
    cores.change_to(6)
    assert (cores.working, cores.billed) == (6, 6)
    cores.change_to(5)
    assert (cores.working, cores.billed) == (5, 6)
    cores.change_to(6)  # the node that leaves comes back at once
    assert (cores.working, cores.billed) == (6, 6)
    cores.change_to(5)
    for _ in range(3):
        cores.change_to(5)
    assert (cores.working, cores.billed) == (5, 5)
