"""``offload plan`` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.probe import profile_age
from offload.report.page.charts.plan_chart import knee
from tests.helpers import offload_here
from tests.model.test_profile import WHOLE, changed


def plan(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return offload_here("plan", *arguments, cwd=cwd)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(WHOLE))
    return path


ASKED = ("--gpu-type", "ml.g5.xlarge", "--cpu-type", "ml.c5.4xlarge", "--cpu-nodes", "0..4")


def test_a_plan_for_people(profile: Path) -> None:
    done = plan("--profile", profile, *ASKED, "--samples", "1000000", cwd=profile.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (recommended,) = [line for line in lines if line.startswith("→  1 ×")]
    (baseline,) = [line for line in lines if line.startswith("=  1 ×")]
    assert "1 × ml.g5.xlarge + " in recommended
    assert "ml.c5" not in baseline
    assert "× the rate of 1 × ml.g5.xlarge alone" in done.stdout
    assert "hours" in done.stdout
    assert max(map(len, (recommended, baseline))) <= 120


def test_a_plan_for_machines(profile: Path, tmp_path: Path) -> None:
    chart, written = tmp_path / "plan.png", tmp_path / "plan.json"
    done = plan("--profile", profile, *ASKED, "--json", "-o", written, "--chart", chart, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout, parse_constant=pytest.fail)
    assert json.loads(written.read_text()) == document
    assert document["schema"] == "offload.plan/1"
    assert document["objective"] == "cost"
    assert [*document["candidates"][document["recommended"]]] == [
        "shape", "workers", "batch_size", "local_batch_size", "accum_steps", "samples_per_s", "samples_per_s_low",
        "samples_per_s_high", "step_time_s", "stall", "bottleneck", "goodput", "usd_per_hour", "usd_per_million_samples",
        "hours", "usd",
    ]  # fmt: skip
    assert document["candidates"][document["baseline"]]["shape"] == {"ml.g5.xlarge": 1}
    assert len(document["candidates"]) == 5
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = "import sys, offload.cli.plan; print(sorted({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=800)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu-type", "ml.g5.xlrage"), "Nearest: ml.g5.xlarge"),
        (("--gpu-type", "ml.c5.4xlarge"), "has no GPU"),
        (("--cpu-nodes", "4..2"), "is empty"),
        (("--cpu-type", "ml.p3.2xlarge"), "would idle in preprocessing"),
        (("--samples", "1000000", "--budget", "0.01"), "The cheapest, 1 × ml.g5.xlarge"),
        (("--gpu-speed", "2", "--gpu-speed", "ml.g5.xlarge=3"), "one number for all types, or TYPE=X for each"),
        (("--gpu-speed", "ml.g5.xlarge=2", "--gpu-speed", "ml.g5.xlarge=3"), "--gpu-speed gives a type two speeds"),
        (("--gpu-speed", "2", "--step", "0.01,0.001"), "--gpu-speed and --step both say how fast the planned GPU is"),
        (("--gpu-speed", "ml.p3.2xlarge=2"), "--gpu-speed names ml.p3.2xlarge, which is none of the GPU types"),
        (("--catalog", "none.toml"), "the catalog none.toml cannot be read"),
        (("--profile", "none.json"), "the profile none.json cannot be read: No such file"),
        (("--chart", "plan.bmp"), "must end in .png"),
        (("-o", "no/such/folder.json"), "no/such/folder.json cannot be written"),
        (("--spot", "cpu"), "no spot price of ml.c5.4xlarge"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_sentence_and_exit_2(
    profile: Path, arguments: tuple[str, ...], said: str, as_json: bool
) -> None:
    more = ("--json",) if as_json else ()
    done = plan("--profile", profile, *ASKED, *more, *arguments, cwd=profile.parent)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("offload: ")]
    assert said in line
    assert "Traceback" not in done.stderr
    if as_json:
        assert json.loads(done.stdout)["exit_code"] == 2
    else:
        assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments", [("--cpu-nodes", "two"), ("--cpu-nodes", "1..b"), ("--step", "1"), ("--objective", "fun")]
)
def test_usage_is_explained(profile: Path, arguments: tuple[str, ...]) -> None:
    done = plan("--profile", profile, *ASKED, *arguments, cwd=profile.parent)
    assert done.returncode == 2
    assert "Error: Invalid value for" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "offload.profile/1", "inp', "is not JSON"),
        (json.dumps(changed("schema", "x")), "has the schema 'x'"),
        (json.dumps(changed("input.core_seconds_per_sample", float("nan"))), "found NaN"),
        (json.dumps(changed("step.alpha_compute", 10)), "looks like another unit"),
    ],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    done = plan("--profile", "p.json", *ASKED, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "p.json" in done.stderr


# --- stale profiles ---------------------------------------------------------------------------------------------------


def test_a_profile_of_other_versions_another_machine_or_script_is_stale(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("transform = 1")
    now = profile_age.facts(script)
    measured: dict[str, Any] = json.loads(json.dumps(now))
    assert profile_age.changes(measured, now, workload="train.py") == []
    assert profile_age.changes({}, now, workload="train.py") == []  # written by hand
    measured["versions"]["torch"] = "1.0"
    (said,) = profile_age.changes(measured, now, workload="train.py")
    assert said.startswith("it was measured with torch 1.0, and ")
    script.write_text("transform = 2")
    measured = {**now, "cpu_model": "i386", "cores": 1}
    transform, machine = profile_age.changes(measured, profile_age.facts(script), workload="train.py")
    assert transform == "train.py has changed since, perhaps its transform or its model"
    assert machine.startswith("it was measured on another machine (i386, 1 cores) than this one")
    assert profile_age.changes({"cpu_model": now["cpu_model"]}, now, workload="train.py") == []
    (machine,) = profile_age.changes({"cpu_model": "i386"}, now, workload="train.py")
    assert machine.startswith("it was measured on another machine (i386) than this one")


def test_a_script_that_cannot_be_read_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile may name the script of another user."""
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))  # root may read everything

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert profile_age.facts(script)["script_sha256"] is None
    assert profile_age.facts(tmp_path / "none.py")["script_sha256"] is None


def test_a_stale_profile_is_warned_of(tmp_path: Path) -> None:
    document = {**WHOLE, "measured": {"versions": {"ray": "2.0.0"}, "cores": os.cpu_count(), "core_speed": 1.0}}
    (tmp_path / "p.json").write_text(json.dumps(document))
    done = plan("--profile", "p.json", *ASKED, cwd=tmp_path)
    assert done.returncode == 0
    assert "Warning: the profile may be stale: it was measured with ray 2.0.0" in done.stdout


def test_the_knee_is_the_fewest_nodes_that_bring_nearly_all() -> None:
    assert knee([0, 1, 2, 3, 4], [10, 60, 98, 99, 100]) == 2
    assert knee([0], [10]) == 0
