"""From what a probe measured to a profile that can be planned with, and to a verdict that one can act on."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.measure.equivalents import Constant
from offload.measure.findings import Findings, findings_of, profile_document, verdict
from offload.measure.sizes import MEMORY_SHARE, MeasuredStep, at_whole_depth, largest_that_fits, next_size
from offload.model import Profile, StepTime
from offload.probe.profile_age import check_usable
from offload.report.terminal.probe_text import format_probe

STEP = StepTime(0.01, 0.0016)
FOUND = Findings(
    workload="train.py",
    buffered_blocks=2,
    core_seconds=[0.029, 0.030, 0.028, 0.029],
    wire_bytes=150528.0,
    raw_bytes=110_000.0,
    ingest_samples_per_s=9000.0,
    stages=[("GaussianBlur", 0.82, 150528.0), ("decode", 0.15, 562500.0), ("pack", 0.03, None)],
    exact_over_auto=None,
    constant=None,
    steps=[MeasuredStep(size=m, step_s=STEP.predict(1, 1, m), peak_bytes=1e9 + 2e7 * m) for m in (8, 16, 32, 64)],
    blocks=0,
    gradient_bytes=1e8,
    nodes=1,
    workers=1,
    gradients=[(6.0, 0.0), (8.0, 4.0), (7.0, 4.0), (7.0, 6.0)],
    samples_each=32,
    gradients_s=0.4,
    batch_size=64,
    local_batch_size=64,
    device="NVIDIA A10G",
    device_memory_bytes=24e9,
    cores=3,
    host_cpus_per_worker=1.0,
    measured={"cores": 4, "cpu_model": "x", "core_speed": 1.0},
)


def test_slow_steps_and_samples_make_a_profile_that_a_plan_takes() -> None:
    versions = {**FOUND.measured, "versions": {"torch": "2.9.0"}}
    slow = dataclasses.replace(
        FOUND,
        core_seconds=[12.0] * 4,  # a video
        steps=[MeasuredStep(size=m, step_s=6 + 20 * m) for m in (1, 2, 4)],  # a language model on one core
        measured=versions,
    )
    document = json.loads(json.dumps(profile_document(slow)))
    check_usable(document)
    profile = Profile.from_document(document)
    assert profile.input.core_seconds_per_sample == pytest.approx(12.0)
    assert profile.step_time.predict(1, 1, 2) == pytest.approx(46.0, rel=0.02)


def test_a_profile_that_no_plan_would_take_is_refused_where_it_is_made() -> None:
    check_usable(profile_document(FOUND))
    steps = [MeasuredStep(size=m, step_s=4000.0) for m in (1, 2)]
    versions = {**FOUND.measured, "versions": {"torch": "2.9.0"}}
    with pytest.raises(
        RunError, match=r"not plausible: step.alpha_compute is 39[\d.]* The step .* Probe on an idle"
    ) as caught:
        check_usable(profile_document(dataclasses.replace(FOUND, steps=steps, measured=versions)))
    assert caught.value.exit_code == 1


def test_a_profile_is_what_was_measured() -> None:
    document = json.loads(json.dumps(profile_document(FOUND), allow_nan=False))
    profile = Profile.from_document(document)
    assert profile.input.core_seconds_per_sample == pytest.approx(0.029)
    assert profile.input.raw_bytes_per_sample == 110_000
    assert profile.input.ingest_samples_per_s_per_worker == 9000
    assert profile.step_time.predict(1, 1, 64) == pytest.approx(STEP.predict(1, 1, 64), rel=0.01)
    assert profile.batch_size == 64
    assert profile.noise is not None
    # sqr = the products over the 6 pairs, var of a gradient of 32 = the mean square less sqr, halved at 64.
    assert profile.noise.sqr == pytest.approx(14 / 6)
    assert profile.noise.var == pytest.approx((7 - 14 / 6) / 2)
    assert 0 < profile.noise.sqr_error < 7
    assert profile.noise_samples == 4 * 32
    assert profile.max_local_batch_size == int((MEMORY_SHARE * 24e9 - 1e9) / 2e7)
    assert profile.uncertainty.core_seconds_per_sample >= 0.01
    assert sum(stage.core_seconds_per_sample for stage in profile.stages) == pytest.approx(0.029)


def test_an_input_bound_script_is_told_how_many_cores_would_help() -> None:
    ceiling, binds, cores, *rest = verdict(FOUND)
    assert "Input ceiling 103 samples/s on 3 cores" in ceiling
    assert "ceiling of the NVIDIA A10G 569 samples/s at a local batch of 64" in ceiling
    assert binds == "The input binds: a step will wait for data 82% of its time."
    assert cores.startswith("17 cores like these would keep the NVIDIA A10G busy, 14 more than preprocess here")
    assert rest[0].startswith("GaussianBlur: 82% of core-seconds; offload.transforms.GaussianBlur")
    assert rest[1] == "decode: 15% of core-seconds."
    assert not any(line.startswith("pack") for line in rest)  # what is next to nothing is not named


def test_ceilings_that_nearly_meet_ask_for_a_core_more_than_preprocess_here() -> None:
    mean = 2.9 / FOUND.gpu_ceiling  # on average, three cores make a little more than the GPU takes
    uneven = dataclasses.replace(FOUND, core_seconds=[0.2 * mean, 0.2 * mean, 0.2 * mean, 3.4 * mean], cores=3)
    _, binds, cores, *_ = verdict(uneven)
    assert binds.startswith("The input binds")
    assert cores.startswith("4 cores like these would keep the NVIDIA A10G busy, 1 more than preprocess here")


def test_the_mean_task_sets_the_rate_and_few_tasks_give_a_wide_range() -> None:
    def rate(*seconds: float) -> tuple[float, float]:
        document = profile_document(dataclasses.replace(FOUND, core_seconds=seconds))
        return document["input"]["core_seconds_per_sample"], document["uncertainty"]["core_seconds_per_sample"]

    assert rate(0.01, 0.01, 0.01, 0.05) == (pytest.approx(0.02), 1.0)
    # Student's t: 4.303 standard errors of three tasks, 2.262 of ten.
    assert rate(0.018, 0.02, 0.022)[1] == pytest.approx(4.303 * 0.002 / 0.02 / 3**0.5, rel=1e-3)
    few, many = rate(0.018, 0.022)[1], rate(*[0.018, 0.022] * 5)[1]
    assert many < few / 3
    assert rate(0.02)[1] == 0.4


def test_a_few_slow_tasks_widen_the_range_more_than_a_few_fast_ones() -> None:
    """Where few samples take long, few tasks hardly ever hold the slowest of them."""

    def half_width(*seconds: float) -> float:
        document = profile_document(dataclasses.replace(FOUND, core_seconds=seconds))
        return float(document["uncertainty"]["core_seconds_per_sample"] * np.mean(seconds))

    slow, fast = [0.09] * 9 + [0.13], [0.11] * 9 + [0.07]
    assert half_width(*slow) > 1.2 * half_width(*fast)
    assert half_width(*fast) == pytest.approx(2.262 * np.std(fast, ddof=1) / 10**0.5, rel=1e-3)


def test_a_gpu_bound_script_is_told_that_offloading_will_not_help() -> None:
    said = " ".join(verdict(dataclasses.replace(FOUND, core_seconds=[0.0005])))
    assert "The NVIDIA A10G binds (stall 0%): preprocessing on more CPUs will not speed this up." in said


def test_all_gpus_of_this_machine_are_compared_with_its_cores() -> None:
    one = dataclasses.replace(FOUND, core_seconds=[0.004])
    assert any(line.startswith("The NVIDIA A10G binds") for line in verdict(one))
    ceiling, binds, cores, *_ = verdict(dataclasses.replace(one, workers=2, workers_here=4))
    assert "ceiling of the group of 4 NVIDIA A10G 2,2" in ceiling
    assert binds == "The input binds: a step will wait for data 67% of its time."
    assert cores == "10 cores like these would keep the group of 4 NVIDIA A10G busy, 7 more than preprocess here."
    slow = verdict(dataclasses.replace(one, workers=2, workers_here=4, ingest_samples_per_s=300.0))
    assert "More cores lift it to 1,200 samples/s at most" in " ".join(slow)


def test_where_the_worker_itself_is_slow_cores_do_not_help() -> None:
    said = " ".join(verdict(dataclasses.replace(FOUND, ingest_samples_per_s=300.0)))
    assert "More cores lift it to 300 samples/s at most" in said


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.45, "Decoding only what crops need saves 31% of core-seconds."),
        (0.9, 'Decoding only what crops need costs 11% more core-seconds: pass decode="exact".'),
        (1.01, None),
        (None, None),
    ],
)
def test_what_decoding_regions_saves_is_said(ratio: float | None, said: str | None) -> None:
    lines = [line for line in verdict(dataclasses.replace(FOUND, exact_over_auto=ratio)) if "crops" in line]
    assert lines == ([said] if said else [])


@pytest.mark.parametrize(
    ("constant", "said"),
    [
        (
            Constant(until="RandomCrop", share=0.8, bytes_out=150_528),
            "Nothing before RandomCrop draws random numbers. If each node keeps that part on its disk (offload.cached), later epochs take "
            "79% fewer core-seconds, and a sample takes 150.5 kB there.",
        ),
        (Constant(until=None, share=1.0, bytes_out=1_000), "Nothing draws random numbers."),
        (Constant(until="RandomCrop", share=0.1, bytes_out=1_000), None),
        (Constant(until=None, share=1.0, bytes_out=100_000_000), None),  # to read it takes as long
        (None, None),
    ],
)
def test_what_need_not_be_made_anew_is_said_where_a_cache_pays(constant: Constant | None, said: str | None) -> None:
    found = dataclasses.replace(FOUND, constant=constant)
    lines = [line for line in verdict(found) if "offload.cached" in line]
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)
    assert Profile.from_document(profile_document(found))


def test_what_was_assumed_is_said() -> None:
    said = " ".join(verdict(dataclasses.replace(FOUND, device="cpu", steps=FOUND.steps[:2])))
    assert "There is no GPU here" in said
    assert "local batches of 8, 16 and extrapolated to 64" in said


def test_a_probe_as_people_read_it() -> None:
    text = format_probe(profile_document(FOUND))
    assert "GaussianBlur" in text
    assert "82%" in text
    assert "The input binds" in text
    assert max(len(line) for line in text.split("\n\n")[0].splitlines()) <= 110
    text = format_probe(profile_document(dataclasses.replace(FOUND, workload="runs/[v2]/train.py")))
    assert text.startswith("offload probe runs/[v2]/train.py\n")


def test_gradients_that_are_not_finite_give_no_noise() -> None:
    assert profile_document(dataclasses.replace(FOUND, gradients=[(float("inf"), 0.0), (1.0, 1.0)]))["noise"] is None
    assert profile_document(dataclasses.replace(FOUND, gradients=[]))["noise"] is None


def test_nothing_measured_is_said() -> None:
    with pytest.raises(RunError, match="no step was measured"):
        profile_document(dataclasses.replace(FOUND, steps=[]))
    event: dict[str, Any] = {"costs": []}
    with pytest.raises(ConfigError, match="no preprocessing task finished"):
        findings_of(event, reserved_cpus=1.0)


@pytest.mark.parametrize(
    ("device", "reserved", "host_s", "cores"),
    [
        ("a GPU", 0.0, 0.02, 0.9),
        ("a GPU", 0.0, 9.0, 1.5),
        ("a GPU", 0.0, 0.0, 0.5),
        ("a GPU", 1.0, 0.02, 1.0),
        ("cpu", 0.0, 0.0, 0.5),  # an accelerator that uses no CPU
        ("cpu", 0.0, 9.0, 1.0),
    ],
)
def test_what_queues_steps_takes_cores_from_preprocessing(
    device: str, reserved: float, host_s: float, cores: float
) -> None:
    """As much as while the GPU is busy, at most a whole core, beside what delivers the batches; unless the script reserves more. Where a
    CPU computes the steps, half of what that takes."""
    steps = [MeasuredStep(size=m, step_s=0.05, host_s=host_s if m == 64 else 0.001) for m in (8, 64)]
    event: dict[str, Any] = {
        "costs": [(0.01, 100.0)], "raylet_s_per_sample": 0.0, "stages": None, "ingest_samples_per_s": None,
        "steps": [dataclasses.asdict(each) for each in steps], "blocks": 0, "gradient_bytes": 0, "nodes": 1, "workers": 2,
        "gradients": [], "samples_each": 0, "beside_cpus": 1.0, "gradients_s": 0.0, "device": device, "device_memory_bytes": None,
    }  # fmt: skip
    more: dict[str, Any] = {
        "workload": "x", "buffered_blocks": 2, "batch_size": 128, "local_batch_size": 60, "cores": 4, "workers_here": 1,
        "measured": {},
    }  # fmt: skip
    found = findings_of(event, reserved_cpus=reserved, **more)
    assert found.host_cpus_per_worker == pytest.approx(cores)


def test_synchronisation_is_learned_from_two_workers_or_said_to_be_unknown() -> None:
    truth = StepTime(0.01, 0.0016, alpha_intra=0.03, gamma=2.0)
    steps = [
        MeasuredStep(size=m, step_s=truth.compute_time_s(m), synced_s=truth.predict(1, 2, m)) for m in (8, 16, 32, 64)
    ]
    found = dataclasses.replace(FOUND, steps=steps, workers=2)
    profile = Profile.from_document(profile_document(found))
    assert profile.step_time.predict(1, 2, 32) == pytest.approx(truth.predict(1, 2, 32), rel=0.02)
    assert "was not measured" not in " ".join(verdict(found))
    assert "Synchronisation between workers was not measured" in " ".join(verdict(FOUND))


def test_a_profile_keeps_what_the_fit_leaves_open_and_what_was_measured() -> None:
    steps = [dataclasses.replace(each, variation=v) for each, v in zip(FOUND.steps, (0.1, 0.1, 0.12, 0.9), strict=True)]
    found = dataclasses.replace(FOUND, steps=steps)
    profile = Profile.from_document(json.loads(json.dumps(profile_document(found), allow_nan=False)))
    assert profile.uncertainty.local_batch_sizes == (8, 64)
    assert profile.uncertainty.step_directions == tuple(map(tuple, found.fit.directions.tolist()))
    assert profile.synchronisation.gradient_bytes == 1e8
    assert not profile.synchronisation.intra
    assert not profile.synchronisation.inter
    assert profile.step_time.variation == pytest.approx(0.11)  # the median: one hiccup does not count


def test_the_wait_for_the_slowest_worker_does_not_count_as_synchronisation() -> None:
    truth = StepTime(0.01, 0.0016, alpha_intra=0.03, gamma=2.0, variation=0.2)
    steps = [
        MeasuredStep(size=m, step_s=truth.compute_time_s(m), synced_s=truth.predict(1, 2, m), variation=0.2)
        for m in (8, 16, 32, 64)
    ]
    profile = Profile.from_document(profile_document(dataclasses.replace(FOUND, steps=steps, workers=2)))
    assert profile.step_time.predict(1, 2, 32) == pytest.approx(truth.predict(1, 2, 32), rel=0.03)


def test_a_smaller_depth_tells_of_the_whole_model() -> None:
    # A step of 0.1 s a sample outside the blocks and 0.05 s within each.
    measured = [MeasuredStep(size=m, step_s=m * (0.1 + 0.05 * d), depth=d) for d in (2, 1) for m in (1, 2, 4)]
    whole = at_whole_depth(measured, 12)
    assert [each.size for each in whole] == [1, 2, 4]
    assert [each.step_s for each in whole] == pytest.approx([0.7, 1.4, 2.8])
    plain = [MeasuredStep(size=1, step_s=1.0)]
    assert at_whole_depth(plain, 0) == plain
    said = " ".join(verdict(dataclasses.replace(FOUND, blocks=12)))
    assert "one and with two of the model's 12 equal blocks" in said


# --- which sizes ------------------------------------------------------------------------------------------------------


def run(
    step: StepTime, *, wanted: int, left_s: float, memory: float | None, bytes_each: float = 2e7
) -> list[MeasuredStep]:
    measured: list[MeasuredStep] = []
    while (size := next_size(measured, wanted=wanted, left_s=left_s, memory_bytes=memory)) is not None:
        step_s = float(step.predict(1, 1, size))
        left_s -= 7 * step_s
        measured.append(MeasuredStep(size=size, step_s=step_s, peak_bytes=1e9 + bytes_each * size if memory else 0.0))
        assert len(measured) < 40
    return measured


@given(
    wanted=st.integers(1, 1024),
    memory=st.floats(3e9, 100e9),
    bytes_each=st.floats(1e4, 1e9),
)
def test_memory_is_never_overrun_and_found(wanted: int, memory: float, bytes_each: float) -> None:
    first = max(1, wanted // 8)
    if 1e9 + bytes_each * 2 * first > MEMORY_SHARE * memory:
        return  # already the first sizes are too large; that is the script's own trouble
    measured = run(StepTime(1e-3, 1e-5), wanted=wanted, left_s=1e6, memory=memory, bytes_each=bytes_each)
    assert all(each.peak_bytes <= memory for each in measured)
    largest = largest_that_fits(measured, memory)
    assert largest is not None
    assert 1e9 + bytes_each * largest <= memory * (1 + 1e-9)
    assert largest >= measured[-1].size


@given(wanted=st.integers(1, 512), seconds=st.floats(1e-4, 2.0))
def test_without_a_gpu_the_wanted_size_is_the_largest(wanted: int, seconds: float) -> None:
    measured = run(StepTime(1e-3, seconds), wanted=wanted, left_s=20.0, memory=None)
    sizes = [each.size for each in measured]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= max(wanted, 1)
    if 7 * seconds * 4 * wanted < 10:
        assert sizes[-1] == wanted
    if wanted > 1:
        assert len(sizes) >= 2  # one size tells nothing of another


def test_nothing_is_said_of_memory_that_was_not_measured() -> None:
    assert largest_that_fits([MeasuredStep(size=8, step_s=1.0)], 1e9) is None
    assert largest_that_fits([], 1e9) is None
    assert largest_that_fits(FOUND.steps, None) is None
