"""What a host of a SageMaker job brings into the Ray cluster, what the entry is told, and what it prints."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError, RunError
from offload.launch.sagemaker.container import ray_node
from offload.launch.sagemaker.container.progress_lines import ProgressLines, over_all, progress_line, read_progress
from offload.launch.sagemaker.container.ray_node import NodeSpec, gpus, store_bytes
from offload.launch.sagemaker.settings import Settings, arguments, read_settings

SPEC = NodeSpec(
    address="10.0.0.2", head="10.0.0.2", group="gpu", instance_type="ml.g5.xlarge", cores=4, gpus=1, store_bytes=1 << 30,
    interface="eth0", token_file=Path("/opt/ml/code/.offload-token"), folder=Path("/opt/ml/code"),
)  # fmt: skip


def test_ray_is_told_all_of_it() -> None:
    head, other = SPEC.command(), replace(SPEC, address="10.0.0.3").command()
    assert "--head" in head
    assert "--address=10.0.0.2:6379" in other
    assert "--node-ip-address=10.0.0.3" in other
    for command in (head, other):
        assert {"--num-cpus=4", "--num-gpus=1", "--object-store-memory=1073741824"} <= {*command}
        assert "--labels=instance-group=gpu,instance-type=ml.g5.xlarge" in command
    assert "--include-dashboard=false" in head  # nothing listens that need not
    ports = [int(port) for port in re.findall(r"-port=(\d+)", " ".join(head))]
    assert len(set(ports)) == len(ports)


def test_the_token_is_named_by_its_file_no_process_starts_ahead_and_workers_meet_on_the_jobs_interface() -> None:
    environment = replace(SPEC, interface="ens5").environment()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/opt/ml/code/.offload-token"
    assert "RAY_AUTH_TOKEN" not in environment
    assert environment["RAY_enable_worker_prestart"] == environment["RAY_prestart_worker_first_driver"] == "0"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "ens5"


@given(shm=st.integers(0, 1 << 40), memory=st.integers(0, 1 << 40))
def test_the_object_store_fits_into_shared_memory_and_leaves_some_to_the_processes(shm: int, memory: int) -> None:
    assert store_bytes(shm, memory) <= min(shm, memory / 2)


def test_gpus_are_the_toolkits_or_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus({"SM_NUM_GPUS": "4"}) == 4
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus({}) == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A10G (UUID: x)'\necho 'GPU 1: NVIDIA A10G (UUID: y)'\n")
    tool.chmod(0o755)
    assert gpus({}) == 2


def test_a_node_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["sh", "-c", "echo; echo port 6380 is taken; exit 3"]
    monkeypatch.setattr(NodeSpec, "command", lambda self: said)
    with pytest.raises(RunError, match="ray start ended with 3: port 6380 is taken"):
        ray_node.RayNode(SPEC).start()


def test_a_node_is_ended_also_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` waits for a head that is gone: whoever learns that must be able to end it."""
    monkeypatch.setattr(NodeSpec, "command", lambda self: ["sleep", "1000"])
    node = ray_node.RayNode(SPEC)

    def start() -> None:
        with contextlib.suppress(RunError):
            node.start()

    starting = threading.Thread(target=start)
    starting.start()
    deadline = time.monotonic() + 800
    while starting.is_alive():  # until then `sleep` may not have been started yet
        assert time.monotonic() < deadline
        node.stop()
        starting.join(0.1)


def test_what_the_launcher_tells_arrives(tmp_path: Path) -> None:
    told = Settings(script="train.py", args=("--flag", "x y"), storage="s3://b/c", hosts_deadline_s=5.0)
    parameters = {"lr": 0.1, "name": "x", "sizes": [1, 2], "n": 3, **told.hyperparameter(), "sagemaker_region": "r"}
    path = tmp_path / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({name: json.dumps(value) for name, value in parameters.items()}))
    settings, given_ = read_settings(tmp_path)
    assert settings == told
    assert arguments(given_) == ["--lr", "0.1", "-n", "3", "--name", "x", "--sizes", "[1, 2]"]


def test_values_that_the_console_or_version_3_of_the_sdk_stored_arrive_as_typed(tmp_path: Path) -> None:
    """Neither writes JSON: a text is stored as it is."""
    stored = {
        "a": "1.10",
        "b": "1e-4",
        "c": "True",
        "d": "",
        "e": "[1, 2",
        "f": '"',
        "g": "7e12345",
        "h": "x y",
        "i": "NaN",
    }
    path = tmp_path / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    told = json.dumps(Settings(script="train.py").hyperparameter()["offload_job"])
    path.write_text(json.dumps({**stored, "offload_job": told, "_tuning_objective_metric": "loss"}))
    _, given_ = read_settings(tmp_path)
    assert given_ == stored


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "{}", '{"offload_job": "{\\"odd\\": 1}"}', '{"offload_job": "7"}']
)
def test_a_job_that_another_launcher_started_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="does not hold the launcher's settings"):
        read_settings(tmp_path)


VALUES = {
    "epoch": 0, "step": 30, "samples_per_s": 84.51, "stall": 0.02, "metrics": {}, "workers": 2, "global_batch_size": 64,
    "goodput": 60.0,
}  # fmt: skip


def test_a_progress_line_holds_what_is_known() -> None:
    line = progress_line(VALUES)
    assert line == "offload: epoch=0 step=30 samples/s=84.51 stall=0.02 goodput=60 workers=2 batch=64"
    assert "goodput=60 loss=0.25" in progress_line({**VALUES, "metrics": {"loss": 0.25}})


def test_each_interval_is_printed_once_and_those_of_before_a_restart_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(VALUES) + "\n")
    with ProgressLines(tmp_path), path.open("a") as file:
        file.write(json.dumps({**VALUES, "step": 60}) + "\n")
    assert re.findall(r"step=(\d+)", capsys.readouterr().out) == ["60"]


def test_a_run_that_begins_anew_prints_its_intervals_from_the_first_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that was interrupted before its first whole checkpoint: its run replaces the files of the first attempt."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({**VALUES, "step": step}) + "\n" for step in (10, 20, 30)))
    with ProgressLines(tmp_path):
        path.unlink()
        path.write_text(json.dumps({**VALUES, "step": 5}) + "\n")
    assert re.findall(r"step=(\d+)", capsys.readouterr().out) == ["5"]


def test_a_progress_line_is_read_as_it_was_written() -> None:
    found = read_progress("[gpu algo-2] " + progress_line({**VALUES, "metrics": {"loss": 1e-7}}))
    assert found == {
        "epoch": 0, "step": 30, "samples/s": 84.51, "stall": 0.02, "goodput": 60, "loss": 1e-7, "workers": 2, "batch": 64,
    }  # fmt: skip
    for odd in ("", "epoch=0", "offload: 3 hosts", "offload: epoch=0 loss=...", "offload: epoch=zero"):
        assert read_progress(odd) is None


@given(rates=st.lists(st.floats(1, 1000), min_size=2, max_size=20))
def test_lines_come_to_all_samples_over_all_time(rates: list[float]) -> None:
    lines = [
        {"step": 3.0 * n, "batch": 64.0, "samples/s": rate, "stall": 1.0, "goodput": rate}
        for n, rate in enumerate(rates, start=1)
    ]
    found = over_all(lines)
    time_s = sum(3 * 64 / rate for rate in rates[1:])
    assert found["samples_per_s"] == pytest.approx(3 * 64 * (len(rates) - 1) / time_s)
    assert found["stall"] == pytest.approx(1.0)
    assert found["goodput"] == found["samples_per_s"]
    assert over_all([]) == {}
