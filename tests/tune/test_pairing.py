"""Reports and checkpoints of a run become results: each report once and in order, with the checkpoint of its step if there is one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.train.callback import Checkpoint, Metrics
from offload.tune.pairing import Pairing, Reported


def metrics(step: int, number: int) -> Metrics:
    return Metrics(at=0.0, epoch=0, step=step, values={"number": float(number)})


def checkpoint(step: int, *, waited: bool = True) -> Checkpoint:
    return Checkpoint(at=0.0, epoch=0, step=step, reason="epoch", seconds=0.0, waited=waited)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["metrics", "checkpoint", "unfinished", "interval"]))))
def test_each_report_comes_once_and_in_order(moves: list[tuple[int, str]]) -> None:
    pairing, step, number, stored = Pairing(), 0, 0, set[int]()
    ready: list[Reported] = []
    for steps, kind in moves:
        step += steps
        match kind:
            case "metrics":
                ready += pairing.metrics(metrics(step, number))
                number += 1
            case "checkpoint":
                stored.add(step)
                ready += pairing.checkpoint(checkpoint(step))
            case "unfinished":
                ready += pairing.checkpoint(checkpoint(step, waited=False))
            case "interval":
                ready += pairing.reached(step)
    ready += pairing.flush()
    assert [reported.values["number"] for reported in ready] == list(range(number))
    assert all(reported.step in stored for reported in ready if reported.stored)
    assert not pairing.waits


def test_a_report_has_the_checkpoint_of_its_step_whichever_comes_first() -> None:
    pairing = Pairing()
    assert pairing.metrics(metrics(4, 0)) == []
    assert pairing.reached(4) == []
    assert [reported.stored for reported in pairing.checkpoint(checkpoint(4))] == [True]
    assert [reported.stored for reported in pairing.metrics(metrics(4, 1))] == [True]
    assert pairing.metrics(metrics(8, 2)) == []
    assert [reported.stored for reported in pairing.reached(9)] == [False]
