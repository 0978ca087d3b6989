"""The feed cuts an epoch into tasks that are neither too short nor too long, from the loader's first batch on."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offload.loader.batch_recipe import BatchOrder
from offload.loader.job.loader_feed import _MapStream
from offload.pipeline.feed.sizing import BATCH_TASK_S, FIRST_BATCH_TASK_S, LEAST_BATCH_TASK_S, MOST_BATCHES
from offload.pipeline.program.printed import Outlet

UNUSED: Any = None


def stream(batch_s: list[float], wanted: int) -> _MapStream:
    made = _MapStream(client="", outlet=Outlet(), meter=UNUSED, recipe=UNUSED, batch_s=deque(batch_s))
    made.line.order([BatchOrder(number=i, batch=i, indices=[i], first=i, seed=0) for i in range(wanted)])
    return made


@given(st.floats(1e-5, 1.0), st.integers(1, 300), st.integers(1, 64))
def test_a_task_is_long_enough_and_the_program_does_not_wait_for_a_long_one(
    batch_s: float, wanted: int, cores: int
) -> None:
    epoch = stream([batch_s] * 3, wanted)
    first = epoch.batches_of_task(cores)
    assert first == 1 or first * batch_s < 1.001 * FIRST_BATCH_TASK_S
    sizes = []
    while epoch.line.wanted:
        left = epoch.line.wanted
        size = epoch.batches_of_task(cores)
        sizes.append(len(epoch.line.begin(size)))
        assert 1 <= size <= MOST_BATCHES
        assert size == 1 or size * batch_s < 1.001 * BATCH_TASK_S
        assert size <= max(left // cores, LEAST_BATCH_TASK_S / batch_s, 1)  # the other cores get their share
    assert sum(sizes) == wanted
    # What one core makes in a moment is one task.
    assert wanted * batch_s > 0.999 * LEAST_BATCH_TASK_S or wanted > MOST_BATCHES or len(sizes) == 1


@given(st.integers(1, 300), st.integers(1, 64))
def test_the_first_tasks_of_a_loader_are_single_batches(wanted: int, cores: int) -> None:
    assert stream([], wanted).batches_of_task(cores) == 1
