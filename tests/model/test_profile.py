"""A profile may be written by hand, and a mistake in it is named with what a sane value looks like."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.model import Profile

WHOLE: dict[str, Any] = {
    "schema": "offload.profile/1",
    "workload": "examples/vit_blur.py",
    "input": {
        "core_seconds_per_sample": 0.029,
        "contention": 0.0,
        "raw_bytes_per_sample": 110000,
        "wire_bytes_per_sample": 150528,
        "ingest_samples_per_s_per_worker": 9000.0,
        "storage_bytes_per_s": None,
        "stages": [{"name": "decode", "core_seconds_per_sample": 0.004, "bytes_out": 562500}],
    },
    "step": {
        "device": "NVIDIA A10G",
        "alpha_compute": 0.01,
        "beta_compute": 0.0016,
        "alpha_intra": 0.001,
        "beta_intra": 0.0,
        "alpha_inter": 0.004,
        "beta_inter": 0.0,
        "gamma": 1.5,
        "max_local_batch_size": 256,
    },
    "overlap": 8.0,
    "host_cpus_per_worker": 1.0,
    "batch_size": 64,
    "noise": {"sqr": 0.00136, "var": 0.000502, "batch_size": 64},
    "uncertainty": {"core_seconds_per_sample": 0.03, "step": 0.02},
    "measured": {"at": "2026-11-21T00:00:00Z", "cpu_model": "some", "cores": 2, "core_speed": 1.0},
}
LEAST: dict[str, Any] = {
    "schema": "offload.profile/1",
    "input": {"core_seconds_per_sample": 0.029, "wire_bytes_per_sample": 150528},
    "step": {"alpha_compute": 0.01, "beta_compute": 0.0016},
}


def changed(path: str, value: Any, base: dict[str, Any] = WHOLE) -> dict[str, Any]:
    document = json.loads(json.dumps(base))
    *parents, last = path.split(".")
    table = document
    for parent in parents:
        table = table[int(parent)] if isinstance(table, list) else table[parent]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return document  # type: ignore[no-any-return]


def test_the_whole_document_is_read() -> None:
    profile = Profile.from_document(WHOLE)
    assert profile.input.core_seconds_per_sample == 0.029
    assert profile.input.storage_bytes_per_s == math.inf
    assert profile.step_time.gamma == 1.5
    assert (profile.device, profile.max_local_batch_size, profile.batch_size) == ("NVIDIA A10G", 256, 64)
    assert profile.noise is not None
    assert profile.noise.batch_size == 64
    assert profile.stages[0].name == "decode"


def test_few_numbers_are_enough() -> None:
    profile = Profile.from_document(LEAST)
    assert profile.noise is None
    assert profile.batch_size is None
    assert profile.overlap == 8.0
    assert profile.max_local_batch_size == math.inf
    assert profile.input.ingest_samples_per_s_per_worker == math.inf
    assert profile.input.host_cpus_per_worker == 1.0


def test_a_slow_core_spends_more_seconds_than_a_reference_core_would() -> None:
    profile = Profile.from_document(changed("measured", {"core_speed": 0.5}))
    assert profile.input.core_seconds_per_sample == pytest.approx(0.0145)


def test_fields_of_others_are_let_be() -> None:
    assert Profile.from_document({**WHOLE, "verdict": "…", "ceilings": {}}) == Profile.from_document(WHOLE)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "input.core_seconds_per_sample",
            ...,
            r"has no input.core_seconds_per_sample: give it in seconds, such as 0.029",
        ),
        (
            "input.core_seconds_per_sample",
            -0.1,
            r"input.core_seconds_per_sample must be greater than 0 .*0.029.*found -0.1",
        ),
        ("input.core_seconds_per_sample", float("nan"), r"core_seconds_per_sample must be a number .*found NaN"),
        ("input.core_seconds_per_sample", float("inf"), r"core_seconds_per_sample"),
        (
            "input.core_seconds_per_sample",
            29,
            r"core_seconds_per_sample is 29, which looks like another unit: expected in seconds",
        ),
        ("input.core_seconds_per_sample", "0.029", r"core_seconds_per_sample must be a number .*found '0.029'"),
        ("input.core_seconds_per_sample", True, r"core_seconds_per_sample must be a number .*found True"),
        ("input.wire_bytes_per_sample", 0.15, r"wire_bytes_per_sample must be at least 1 \(in bytes, such as 150528"),
        ("input.wire_bytes_per_sample", None, r"has no input.wire_bytes_per_sample"),
        ("input.contention", 2, r"contention must be at most 1"),
        ("input.ingest_samples_per_s_per_worker", 0, r"ingest_samples_per_s_per_worker must be greater than 0"),
        (
            "input.core_second_per_sample",
            0.1,
            r"unknown field input.core_second_per_sample. Did you mean input.core_seconds_per_sample",
        ),
        ("input.stages", {}, r"input.stages must be a list"),
        ("input.stages.0.core_seconds_per_sample", -1, r"input.stages\[0\].core_seconds_per_sample must be at least 0"),
        (
            "step.alpha_compute",
            10,
            r"step.alpha_compute is 10, which looks like another unit: expected in seconds, such as 0.01",
        ),
        ("step.beta_compute", ..., r"has no step.beta_compute"),
        ("step.gamma", 0.5, r"step.gamma must be at least 1 \(between 1 and 10"),
        ("step.gamma", 20, r"step.gamma .*between 1 and 10"),
        ("step.max_local_batch_size", 2.5, r"max_local_batch_size must be a whole number"),
        ("step.device", 7, r"step.device must be text, found 7"),
        ("noise.var", ..., r"has no noise.var"),
        ("noise.sqr", -1, r"noise.sqr must be at least 0"),
        ("noise.sqr_error", -1, r"noise.sqr_error must be at least 0"),
        ("noise.sqr_error", "x", r"noise.sqr_error must be a number"),
        ("noise.samples", 0.5, r"noise.samples must be"),
        ("noise.sqr_eror", 1, r"unknown field noise.sqr_eror. Did you mean noise.sqr_error"),
        ("uncertainty.step", 2, r"uncertainty.step must be at most 1 \(a share, such as 0.02 for ± 2 %\), found 2"),
        ("overlap", 0.5, r"overlap must be at least 1"),
        ("batch_size", 0, r"batch_size must be at least 1"),
        ("measured.core_speed", 0, r"measured.core_speed must be greater than 0"),
        ("input", ..., r"has no section 'input'"),
        ("step", [], r"step must be an object of fields"),
        ("schema", "offload.profile/9", r"has the schema 'offload.profile/9', expected 'offload.profile/1'"),
        ("schema", ..., r"has the schema None"),
        ("nois", {}, r"unknown field nois. Did you mean noise"),
    ],
)
def test_a_mistake_is_named_with_what_is_sane(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Profile.from_document(changed(path, value), source="p.json")
    assert str(caught.value).startswith("p.json")
    assert "\n" not in str(caught.value)


def test_a_step_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="both 0"):
        Profile.from_document(changed("step", {"alpha_compute": 0, "beta_compute": 0}))


@pytest.mark.parametrize("document", [[], "text", None, 3])
def test_what_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        Profile.from_document(document)
