"""What a job would do with more than it holds, by its joint model. Pure.

Where it stops: whether there is room for more, and who else could use it, is for :mod:`allocate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.model.allocation.choices import Cluster, goodput_at
from offload.model.allocation.values import Holding, Job
from offload.model.placement import NodeResources

MORE_CORES = 4


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predicted goodputs, in initial-batch-equivalent samples/s.

    Args:
        now: with what the job holds.
        one_more_worker: with one worker more and the same cores; None if its bounds allow none.
        more_cores: with ``MORE_CORES`` cores more; None if its bounds allow none, or its input is never the limit.
    """

    now: float
    one_more_worker: float | None
    more_cores: float | None


def what_if(job: Job, nodes: Sequence[NodeResources]) -> WhatIf | None:
    """What the job would do with more than its ``present``; None without workers, or on a kind of GPU that was not measured."""
    held = job.present
    if not held.worker_count or held.kind is None or held.kind not in job.step_times:
        return None
    widest, _ = Cluster(tuple(nodes), 1).room(job).get(held.kind, (1, 0))
    return WhatIf(
        now=_goodput(job, held, held.worker_count, held.core_count, widest),
        one_more_worker=(
            _goodput(job, held, held.worker_count + 1, held.core_count, widest)
            if held.worker_count < job.workers[1]
            else None
        ),
        more_cores=(
            _goodput(job, held, held.worker_count, held.core_count + MORE_CORES, widest)
            if job.core_seconds_per_sample and held.core_count + MORE_CORES <= job.cores[1]
            else None
        ),
    )


def _goodput(job: Job, held: Holding, workers: int, cores: int, widest: int) -> float:
    spread = sum(1 for count in held.workers.values() if count)
    least = math.ceil(workers / max(widest, 1))
    if job.core_seconds_per_sample and not cores:
        return 0.0
    return goodput_at(job, held.kind, cores, workers, min(max(spread, least), workers))
