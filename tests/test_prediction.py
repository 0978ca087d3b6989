"""The short form of the benchmark of predictions: what it calls an error, and how its plain loops take orders."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import prediction
from benchmarks.rows import protocol, speed
from benchmarks.rows.predicted import Arrivals
from tests.helpers import eventually

CORES, CORE_S = 2, 0.03
DOCUMENT = {
    "schema": "offload.profile/1",
    "input": {"core_seconds_per_sample": CORE_S, "wire_bytes_per_sample": 150_528.0, "hub_block_s": 0.0},
    "step": {"alpha_compute": prediction.ALPHA_S, "beta_compute": 0.25 * CORE_S / CORES, "nodes": 1, "workers": 1},
    "host_cpus_per_worker": 0.0,
    "batch_size": prediction.HERE_BATCH,
    "uncertainty": {"core_seconds_per_sample": 0.01},
}


def errors(left: Sequence[float], speeds: Sequence[float], delivered: float) -> list[float]:
    """The errors of some runs, during which other programs leave so many cores. The cores have one of these speeds whenever the plain loops
    run, and the mean of two in between. A run delivers this part of what the cores make that it has."""
    rates = iter([(CORES * speed / CORE_S * 0.8, CORES * speed / CORE_S) for speed in speeds])
    during = [(before + after) / 2 for before, after in itertools.pairwise(speeds)]
    leaves, makes = iter(left), iter([cores * speed for cores, speed in zip(left, during[1:], strict=True)])

    @contextlib.contextmanager
    def loops(*_: Any) -> Iterator[Callable[[], tuple[float, float]]]:
        yield lambda: next(rates)

    def probe(*_: Any, **__: Any) -> Any:
        costs = {**DOCUMENT["input"], "core_seconds_per_sample": CORE_S / during[0]}
        return SimpleNamespace(document={**DOCUMENT, "input": costs})

    def run(task: protocol.Task) -> Arrivals:
        rate = delivered * next(makes) / CORE_S
        accelerator = task.batch_size / (task.alpha_s + task.beta_s * task.batch_size)
        counts = list(range(task.batch_size, task.samples + 1, task.batch_size))
        return Arrivals(counts=counts, at_s=[count / min(rate, accelerator) for count in counts])

    class Others:
        def left(self, cores: int, began_s: float, ended_s: float) -> float:
            return next(leaves)

        def close(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "usable_cores", lambda: CORES)
        patch.setattr(prediction, "_Others", Others)
        patch.setattr(prediction, "_loops", loops)
        patch.setattr(prediction, "trainer", lambda task: task)
        patch.setattr(prediction, "probe", probe)
        patch.setattr(prediction, "_run_here", run)
        patch.setattr(prediction, "_adaptdl", lambda *_: 1.0)  # it changes numpy for the whole process
        _, rows = prediction._here("blur-uint8", None, len(left), 20.0, 5.0)
    return [row["error"] for row in rows]


@given(
    st.lists(st.floats(0.3, float(CORES)), min_size=2, max_size=2),
    st.lists(st.floats(0.8, 1.2), min_size=4, max_size=4),
    st.floats(0.5, 1.0),
)
def test_other_programs_and_faster_cores_are_no_error_and_what_a_run_loses_is(
    left: Sequence[float], speeds: Sequence[float], delivered: float
) -> None:
    assert errors(left, speeds, delivered) == pytest.approx([1 / delivered - 1] * 2, abs=1e-3)


def test_others_leave_what_neither_they_nor_this_process_use(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    now = 0

    def times(*, percpu: bool) -> list[Any]:
        nonlocal now
        now = next(looks)
        spent = dict.fromkeys(prediction.BUSY, 0.0) | {"user": 0.5 * now, "steal": 0.25 * now}
        return [SimpleNamespace(**spent) for _ in range(CORES)]

    own = SimpleNamespace(cpu_s=lambda: 0.9 * now, close=lambda: None)
    monkeypatch.setattr(prediction, "LOOK_S", 0.001)
    monkeypatch.setattr(prediction, "cpu_minutes", SimpleNamespace(meter=lambda: own))
    monkeypatch.setattr(prediction, "os", SimpleNamespace(sched_getaffinity=lambda _: set(range(CORES))))
    monkeypatch.setattr(prediction, "psutil", SimpleNamespace(cpu_times=times))
    monkeypatch.setattr(prediction, "time", SimpleNamespace(monotonic=lambda: float(now)))
    with contextlib.closing(prediction._Others()) as others:
        eventually(lambda: len(others.looks) > 10)
        # In a second, both cores spend 1.5 s, 0.9 of them on this process.
        assert others.left(CORES, 2.25, 8.5) == pytest.approx(2 - 0.6)
        assert others.left(1, 2.25, 8.5) == 1


def test_a_loop_measures_once_for_each_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["speed.py", "--workload=blur-uint8", "--seconds=0.01", "--lead=0"])
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    speed.main()
    ready, *measured = capsys.readouterr().out.splitlines()
    assert ready == "ready"
    assert len(measured) == 2
    for line in measured:
        by_clock, by_cpu = map(float, line.split())
        assert by_clock > 0
        assert by_cpu > 0
