"""Where one feed ends, and what several would bring: by the product's rule for blocks and the hub's measured CPU time of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulator.flow import flow
from benchmarks.simulator.job import Fleet, HubCost, Job
from offload.model import NodeType, StepTime
from offload.prices import built_in

# Core-seconds and bytes of a sample: text and jpeg as measured (benchmarks/results), the others between them and beyond.
SAMPLES = {
    "tokens of text": (0.00001, 2_000.0),
    "jpeg, uint8 224²": (0.00113, 150_552.0),
    "jpeg, float32 224²": (0.0014, 602_136.0),
    "augmented jpeg, uint8": (0.008, 150_552.0),
    "ten blurs, uint8": (0.030, 150_552.0),
    "ten blurs, float32": (0.034, 602_136.0),
    "video clip, 16 × 112²": (0.15, 602_112.0),
}
RANKS = (8, 64, 512)
MOST_CORES = 10_000
NODE = "ml.c5.4xlarge"
FEEDS = (1, 2, 4, 8)


def table() -> list[dict[str, Any]]:
    """For each kind of sample and number of ranks: the cores at which the hub is busy all the time, and its share with more feeds."""
    rows = []
    kind = built_in()[NODE]
    host = built_in()["ml.g5.xlarge"]
    for (name, (core_seconds, wire)), ranks in ((each, ranks) for each in SAMPLES.items() for ranks in RANKS):
        job = _job(core_seconds, wire, ranks)
        limits = {feeds: ends_at(replace(job, feeds=feeds), host, kind, ranks) for feeds in FEEDS}
        first = limits[1]
        fleet = Fleet(host=host, hosts=np.array(ranks), helper=kind, helpers=np.array(max(first // kind.vcpus, 1)))
        at = flow(job, fleet, local_batch=256.0, host_cores=0.0)
        rows.append(
            {
                "sample": name,
                "ranks": ranks,
                "core_ms": 1e3 * core_seconds,
                "kb": wire / 1e3,
                "rows_per_block": int(np.ravel(at.rows_per_block)[0]),
                "blocks_per_s": round(1 / HubCost().block_s(ranks), 1),
                "ends_at_cores": first,
                "ends_at_samples_per_s": round(float(np.ravel(at.hub)[0])),
                **{f"with_{feeds}_feeds_cores": limits[feeds] for feeds in FEEDS[1:]},
            }
        )
    return rows


def ends_at(job: Job, host: NodeType, helper: NodeType, ranks: int) -> int:
    """The cores of CPU nodes from which on the hub lets fewer samples through than they make; ``MOST_CORES`` if there are none."""
    counts = np.arange(1, MOST_CORES // helper.vcpus + 1)
    fleet = Fleet(host=host, hosts=np.array(ranks), helper=helper, helpers=counts)
    at = flow(job, fleet, local_batch=256.0, host_cores=0.0)
    made = counts * helper.vcpus / job.core_seconds
    over = np.flatnonzero(made > at.hub)
    return int(counts[over[0]] * helper.vcpus) if len(over) else MOST_CORES


def _job(core_seconds: float, wire: float, ranks: int) -> Job:
    return Job(
        core_seconds=core_seconds,
        wire_bytes=wire,
        step=StepTime(0.01, 1e-4),
        batches=(256 * ranks, 256 * ranks),
        hub=HubCost(),
    )
