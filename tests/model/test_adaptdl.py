"""Without an input side the goodput is AdaptDL's, and so is the batch it chooses; with one, AdaptDL is an order off."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.model import GradientNoise, JointGoodput, StepTime


@pytest.fixture(scope="module")
def adaptdl() -> Any:
    """``adaptdl.goodput`` of AdaptDL 0.2.11, an independent implementation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "int", int, raising=False)  # it predates numpy 1.24
        yield importlib.import_module("adaptdl.goodput")


def theirs(adaptdl: Any, step: StepTime, noise: GradientNoise) -> Any:
    perf = adaptdl.PerfParams(
        step.alpha_compute,
        step.beta_compute,
        step.alpha_inter,
        step.beta_inter,
        step.alpha_intra,
        step.beta_intra,
        step.gamma,
    )
    return adaptdl.GoodputFunction(perf, adaptdl.GradParams(noise.sqr, noise.var), int(noise.batch_size))


def positive(least: float, most: float) -> Any:
    return st.floats(least, most)


# T_grad ≥ 0.1 s: AdaptDL gives one worker a sync of 1e-8 s.
steps = st.builds(
    StepTime,
    positive(0.1, 1),
    positive(1e-5, 0.1),
    positive(1e-3, 1),
    positive(1e-4, 0.1),
    positive(1e-3, 1),
    positive(1e-4, 0.1),
    positive(1, 10),
)
noises = st.builds(GradientNoise, positive(1e-6, 10), positive(1e-6, 10), st.integers(1, 256))


@settings(max_examples=300, deadline=None)
@given(
    step=steps,
    noise=noises,
    nodes=st.integers(1, 16),
    per_node=st.integers(1, 8),
    more=st.integers(1, 40),
    accum=st.integers(0, 8),
)
def test_goodput_is_adaptdls(
    adaptdl: Any, step: StepTime, noise: GradientNoise, nodes: int, per_node: int, more: int, accum: int
) -> None:
    workers = nodes * per_node
    local = -(-int(noise.batch_size) // workers) * more
    reference = theirs(adaptdl, step, noise)
    ours = JointGoodput(step, noise)
    at = (nodes, workers, local, accum)
    assert ours.goodput(*at) == pytest.approx(float(reference.evaluate(*map(np.asarray, at))), rel=1e-6)
    assert ours.throughput(*at) == pytest.approx(float(reference.throughput(*map(np.asarray, at))), rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    step=steps,
    noise=noises,
    nodes=st.integers(1, 8),
    per_node=st.integers(1, 8),
    growth=st.integers(1, 64),
    limits=st.tuples(st.integers(1, 32), st.integers(32, 512)),
    accumulate=st.booleans(),
)
def test_the_choice_is_adaptdls_or_a_better_one_and_never_above_the_largest_batch(
    adaptdl: Any,
    step: StepTime,
    noise: GradientNoise,
    nodes: int,
    per_node: int,
    growth: int,
    limits: tuple[int, int],
    accumulate: bool,
) -> None:
    workers, largest = nodes * per_node, int(noise.batch_size) * growth
    limits = (limits[0], min(limits[1], max(largest, limits[0])))
    reference = theirs(adaptdl, step, noise).optimize(
        nodes, workers, max_batch_size=largest, atomic_bsz_range=limits, accumulation=accumulate
    )
    chosen = JointGoodput(step, noise).optimize(nodes, workers, largest, limits, accumulate)
    goodput, local, accum = (float(each) for each in chosen)
    theirs_exceeds = workers * float(reference[1]) * (float(reference[2]) + 1) > largest
    if goodput > 0:
        # Whole local batches may not fill the initial batch alone.
        assert workers * local * (accum + 1) <= max(largest, noise.batch_size + workers * (accum + 1))
        assert goodput == pytest.approx(JointGoodput(step, noise).goodput(nodes, workers, int(local), int(accum)))
    if not theirs_exceeds:  # rounding up takes it beyond the largest batch in half of the cases
        assert goodput >= float(reference[0]) * (1 - 1e-6) - 1e-12
    if goodput > 0 and not theirs_exceeds and (local, accum) == tuple(map(float, reference[1:])):
        assert goodput == pytest.approx(float(reference[0]), rel=1e-6, abs=1e-12)


def test_on_an_input_bound_job_adaptdl_predicts_an_order_too_much(adaptdl: Any) -> None:
    # Its timer starts after the fetch, so that it learns the step alone: on four nodes 16 samples each in 55 ms, fed by
    # twelve cores at 290 ms a sample.
    step = StepTime(0.01, 0.0003, alpha_inter=0.04)
    noise = GradientNoise(sqr=0.00136, var=0.00502, batch_size=64)
    fed = JointGoodput(step, noise, input_samples_per_s=12 / 0.29)
    reference = theirs(adaptdl, step, noise)
    _, local, accum = reference.optimize(4, 4, max_batch_size=4096, atomic_bsz_range=(16, 256), accumulation=True)
    at = (4, 4, int(local), int(accum))
    assert float(reference.throughput(*map(np.asarray, at))) > 11 * fed.throughput(*at)
    # And it grows the batch for nothing: the joint optimum stays at the initial one.
    assert 4 * int(local) * (int(accum) + 1) > 64
    assert fed.optimize(4, 4, 4096, (16, 256), True)[1:] == (16, 0)
    assert fed.goodput(4, 4, 16, 0) > fed.goodput(*at)
