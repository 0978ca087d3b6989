"""How much worse than the best of all a policy's choice is, over random jobs and price tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.simulator.policies import POLICIES, View, optimum, value_of
from benchmarks.simulator.workloads import random_question

GOAL_MEDIAN, GOAL_WORST = 0.03, 0.10
OURS = ("offload plan", "offload run")


def regrets(seeds: Sequence[int], *, hub: bool) -> list[dict[str, Any]]:
    """A row for each question: its objective, every policy's regret, and what was best and what this project planned."""
    rows = []
    for seed in seeds:
        question = random_question(seed, hub=hub)
        view = View(question, seed)
        choices = {name: policy(view) for name, policy in POLICIES.items()}
        best, value = optimum(question, tuple(choices.values()))
        rows.append(
            {
                "seed": seed,
                "gpus": question.gpus,
                "objective": question.objective,
                "spot": question.spot,
                "adaptive_batch": question.job.noise is not None,
                "regret": {name: round(value_of(question, each) / value - 1, 5) for name, each in choices.items()},
                "best": best.name,
                "planned": choices["offload plan"].name,
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The distribution of each policy's regret."""
    found = {}
    for name in POLICIES:
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
