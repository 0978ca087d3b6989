"""A profile or plan with any value in any place ends in a plan, or in one sentence and exit code 2."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.cli.main import main

PROFILE = {
    "schema": "offload.profile/1",
    "workload": "train.py",
    "batch_size": 64,
    "overlap": 8,
    "host_cpus_per_worker": 1,
    "input": {
        "core_seconds_per_sample": 0.029,
        "contention": 0.0,
        "raw_bytes_per_sample": 110000,
        "wire_bytes_per_sample": 150528,
        "ingest_samples_per_s_per_worker": 9000,
        "storage_bytes_per_s": None,
        "remote_core_seconds_per_byte": 1.4e-9,
        "hub_block_s": 0.005,
        "stages": [{"name": "blur", "core_seconds_per_sample": 0.02, "bytes_out": 150528}],
    },
    "step": {
        "device": "NVIDIA A10G", "alpha_compute": 0.01, "beta_compute": 0.0016, "gamma": 1, "max_local_batch_size": 256, "variation": 0.05,
        "nodes": 1, "workers": 1, "gradient_bytes": 1e8,
    },
    "noise": {"sqr": 0.00136, "var": 0.000502, "batch_size": 64},
    "uncertainty": {
        "core_seconds_per_sample": 0.03, "step": 0.02, "day_to_day": 0.06, "step_directions": [[0.01] * 7], "local_batch_sizes": [8, 64],
    },
    "measured": {"core_speed": 1.0, "at": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.8"}},
    "verdict": ["The input binds."],
}  # fmt: skip
NODES = ["--gpu-type", "ml.g5.xlarge", "--cpu-type", "ml.c5.4xlarge", "--cpu-nodes", "0..2", "--max-batch-size", "256"]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: list[Any] = [
    "x", "", "\ud800", "9" * 5000, {"\ud800": 1}, None, True, False, [], {}, [[]], nested(400),
    10**400, -(10**400), 2**63, 1e308, 1e-320, float("nan"), float("inf"), -1, 0, 0.5,
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def mutated(document: Any, place: tuple[Any, ...], value: Any) -> str:
    changed = copy.deepcopy(document)
    within = changed
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    return json.dumps(changed)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    ran = CliRunner().invoke(
        main, ["plan", "--profile", str(folder / "profile.json"), *NODES, "-o", str(folder / "plan.json")]
    )
    assert ran.exit_code == 0, ran.output
    return json.loads((folder / "plan.json").read_text())


def end_of(*command: str) -> None:
    ran = CliRunner().invoke(main, command)
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    assert ran.exit_code in (0, 2), ran.output
    if ran.exit_code == 2:
        assert ran.stderr.startswith(("offload: ", "Usage: ")), ran.stderr


SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@SHARED
@given(place=st.sampled_from(list(places(PROFILE))), value=st.sampled_from(VALUES))
def test_a_profile(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(mutated(PROFILE, place, value))
    end_of("plan", "--profile", str(path), *NODES)


@SHARED
@given(data=st.data(), value=st.sampled_from(VALUES), to=st.sampled_from(["hosts", "kuberay", "ray-aws"]))
def test_a_plan(tmp_path: Path, plan: Any, data: st.DataObject, value: Any, to: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(mutated(plan, data.draw(st.sampled_from(list(places(plan)))), value))
    end_of("plan", "--plan", str(path), "--emit", to)


def test_what_once_ended_in_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for place, value, said in (
        (("input", "core_seconds_per_sample"), 10**400, "a number of 401 digits, 10000000000000000000…"),
        (("measured", "versions"), "2.8", "measured.versions must be an object of fields, found '2.8'"),
        (("workload",), "\ud800", "holds text that is not Unicode"),
    ):
        path.write_text(mutated(PROFILE, place, value))
        ran = CliRunner().invoke(main, ["plan", "--profile", str(path), *NODES])
        assert ran.exit_code == 2
        assert said in ran.stderr
