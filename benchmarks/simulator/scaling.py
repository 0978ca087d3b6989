"""Time and dollars to train typical jobs on 8 to 1,024 GPUs, by policy: whole runs, with interruptions, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulator.job import HubCost
from benchmarks.simulator.policies import POLICIES, Choice, View, optimum
from benchmarks.simulator.run import Outcome, train
from benchmarks.simulator.workloads import Question, typical

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES_PER_GPU = 2e6
"""Useful samples: with the GPUs, so that a run takes an hour or more at every scale."""


def table(gpus: Sequence[int], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each job, scale and policy: medians and ranges over the seeds, of whose profile and interruptions each is a draw."""
    rows = []
    for count in gpus:
        for question in typical(count):
            asked = replace(question, job=replace(question.job, hub=HubCost()))
            outcomes: dict[str, list[tuple[Choice, Outcome]]] = {name: [] for name in (*POLICIES, "optimum")}
            for seed in seeds:
                view = View(asked, seed)
                choices = {name: policy(view) for name, policy in POLICIES.items()}
                choices["optimum"] = optimum(asked, tuple(choices.values()))[0]
                for name, choice in choices.items():
                    outcomes[name].append((choice, _trained(asked, choice, seed)))
            rows += [_row(asked, name, parts) for name, parts in outcomes.items()]
    return rows


def _trained(question: Question, choice: Choice, seed: int) -> Outcome:
    job = question.job
    if choice.host_cores is not None:
        # Cores of GPU nodes that do not preprocess are as good as kept by the workers.
        free = max(choice.host.vcpus - choice.host.gpus * job.host_cpus, 0.0)
        kept = (free - min(choice.host_cores, free)) / choice.host.gpus
        job = replace(job, host_cpus=job.host_cpus + kept)
    return train(job, choice.fleet, choice.batch, SAMPLES_PER_GPU * question.gpus, spot=question.spot, seed=seed)


def _row(question: Question, name: str, parts: Sequence[tuple[Choice, Outcome]]) -> dict[str, Any]:
    hours = [outcome.seconds / 3600 for _, outcome in parts]
    usd = [outcome.usd for _, outcome in parts]
    choice = parts[0][0]
    return {
        "job": question.name,
        "gpus": question.gpus,
        "policy": name,
        "hours": round(statistics.median(hours), 4),
        "hours_range": [round(min(hours), 4), round(max(hours), 4)],
        "usd": round(statistics.median(usd), 2),
        "usd_range": [round(min(usd), 2), round(max(usd), 2)],
        "host": f"{choice.hosts} × {choice.host.name}",
        "cpu_nodes": [int(each.helpers) for each, _ in parts],
        "cores": int(np.median([each.helpers * (each.helper.vcpus if each.helper else 0) for each, _ in parts])),
        "losses_of_cpu_nodes": int(np.median([outcome.helper_losses for _, outcome in parts])),
    }
