"""How much worse than the best of all a policy's choice is, over random jobs and price tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulator.policies import POLICIES, View, optimum, own_equations, value_of
from benchmarks.simulator.workloads import Question, random_question

GOAL_MEDIAN, GOAL_WORST = 0.03, 0.10
OURS = ("offload plan", "offload run")
OWN_EQUATIONS = "the simulator's equations"
CHOOSERS = {**POLICIES, OWN_EQUATIONS: own_equations}


def regrets(seeds: Sequence[int], *, hub: bool) -> list[dict[str, Any]]:
    """A row for each question: its objective, every policy's regret, and what was best and what this project planned.

    Where this project misses the goal, ``told`` has its regrets for the same question with a catalog that is right about interruptions,
    or about the speed of cores.
    """
    rows = []
    for seed in seeds:
        question = random_question(seed, hub=hub)
        view = View(question, seed)
        choices = {name: policy(view) for name, policy in CHOOSERS.items()}
        best, value = optimum(question, tuple(choices.values()))
        row: dict[str, Any] = {
            "seed": seed,
            "gpus": question.gpus,
            "objective": question.objective,
            "spot": question.spot,
            "adaptive_batch": question.job.noise is not None,
            "regret": {name: round(value_of(question, each) / value - 1, 5) for name, each in choices.items()},
            "best": best.name,
            "planned": choices["offload plan"].name,
        }
        if any(row["regret"][name] > GOAL_WORST for name in OURS):
            row["told"] = _told(question, seed)
        rows.append(row)
    return rows


def _told(question: Question, seed: int) -> dict[str, dict[str, float]]:
    """This project's regrets if the catalog were right about one thing."""
    right = {
        "interruptions": replace(question.job, interruptions_per_hour=question.catalog_interruptions),
        "core speeds": replace(question.job, speeds={}),
    }
    found = {}
    for about, job in right.items():
        asked = replace(question, job=job)
        view = View(asked, seed)
        choices = {name: POLICIES[name](view) for name in OURS}
        _, value = optimum(asked, tuple(choices.values()))
        found[about] = {name: round(value_of(asked, each) / value - 1, 5) for name, each in choices.items()}
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The distribution of each policy's regret."""
    found = {}
    for name in CHOOSERS:
        values = np.array([row["regret"][name] for row in rows])
        median, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
        found[name] = {
            "median": round(float(median), 5),
            "p90": round(float(p90), 5),
            "p99": round(float(p99), 5),
            "worst": round(float(values.max()), 5),
            "mean": round(float(values.mean()), 5),
            "above_10_percent": int((values > GOAL_WORST).sum()),
        }
    return found
