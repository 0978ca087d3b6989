"""The ready callbacks with the real libraries: what a user finds there afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import callbacks
from offload.report.run_dir import RunDirectory
from offload.train.callback import Checkpoint, Decision, Ended, Interval, Metrics, Started
from tests.helpers import ROOT

AT = 1_790_000_000.0


def interval(step: int, **changes: Any) -> Interval:
    values: dict[str, Any] = {
        "at": AT + step, "epoch": 0, "step": step, "samples_per_s": 95.5, "goodput": 90.0, "stall": 0.25,
        "input_ceiling_samples_per_s": 110.0, "device_ceiling_samples_per_s": None, "workers": 2, "preprocessing_cores": 14,
        "global_batch_size": 64, "document": {},
    }  # fmt: skip
    return Interval(**{**values, **changes})


def play(callback: offload.Callback, run_dir: Path, *, status: str = "finished") -> None:
    """A short run, as a driver tells it."""
    directory = RunDirectory(run_dir)
    callback.started(
        Started(
            at=AT, run_dir=run_dir, resumed=False, workers=2, preprocessing_cores=14, global_batch_size=64, local_batch_size=32,
            accum_steps=0, nodes=(),
        )
    )  # fmt: skip
    callback.interval(interval(10))
    callback.interval(interval(20, samples_per_s=120.0, goodput=float("nan")))
    callback.metrics(Metrics(at=AT + 21, epoch=0, step=20, values={"loss": 0.5, "broken": float("nan")}))
    callback.decision(Decision(at=AT + 22, kind="resize", reason="two more workers feed", document={}))
    callback.checkpoint(Checkpoint(at=AT + 23, epoch=0, step=20, reason="epoch", seconds=0.1, waited=True))
    summary = {"status": status, "error": None, "samples": 1280}
    directory.summary(summary)
    callback.ended(Ended(at=AT + 24, status=status, error=None, summary=summary))


def test_tensorboard_shows_rates_metrics_and_decisions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    play(callbacks.TensorBoard(), tmp_path / "run")
    found = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rates = [(each.step, each.value, each.wall_time) for each in found.Scalars("offload/samples_per_s")]
    assert rates == [(10, 95.5, AT + 10), (20, 120.0, AT + 20)]
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(20, 0.5)]
    assert [each.step for each in found.Scalars("offload/goodput")] == [10]
    assert not {"broken", "offload/device_ceiling_samples_per_s"} & set(found.Tags()["scalars"])
    (text,) = found.Tensors("offload/decisions/text_summary")
    assert text.tensor_proto.string_val == [b"resize: two more workers feed"]


@pytest.mark.parametrize(
    ("status", "known"), [("finished", "FINISHED"), ("interrupted", "KILLED"), ("failed", "FAILED")]
)
def test_mlflow_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, known: str) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store of mlflow-skinny that needs no server
    from mlflow import tracking

    uri = (tmp_path / "mlflow").as_uri()
    play(callbacks.MLflow("vit", tracking_uri=uri, params={"lr": 0.1}), tmp_path / "run", status=status)
    client = tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", known)
    assert run.data.params == {"lr": "0.1"}
    assert run.data.metrics["loss"] == 0.5
    assert "broken" not in run.data.metrics
    history = client.get_metric_history(run.info.run_id, "offload/samples_per_s")
    assert [(each.step, each.value, each.timestamp / 1000) for each in history] == [
        (10, 95.5, AT + 10),
        (20, 120.0, AT + 20),
    ]
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["summary.json"]


def test_weights_and_biases_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb replaces it for the rest of the process
    play(callbacks.WandB(project="vit", mode="offline"), tmp_path / "run")
    (stored,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    held = stored.read_bytes()
    assert all(name in held for name in (b"offload/samples_per_s", b"loss", b"offload/status"))


EXPORTED = """
import os, sys, urllib.request
from pathlib import Path
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_metrics_report_interval_ms"] = "500"
import ray
from offload.callbacks import Prometheus
from tests.helpers import eventually
from tests.test_callbacks import play

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
play(Prometheus(), Path(sys.argv[1]))
(node,) = ray.nodes()
lines = []

def exported():
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            lines[:] = [each for each in answer.read().decode().splitlines() if each.startswith("ray_offload_")]
    except OSError:  # not there yet
        return False
    return len(lines) > 1

eventually(exported)
print(*lines, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_prometheus_finds_the_rates_at_ray_s_own_address(tmp_path: Path) -> None:
    """In a Ray of its own: the one that a run starts serves no metrics."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED, str(tmp_path / "vit")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    values = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("ray_offload_")}
    assert values["ray_offload_samples_per_s"] == 120.0
    assert values["ray_offload_step"] == 20.0
    assert (values["ray_offload_decisions_total"], values["ray_offload_checkpoints_total"]) == (1.0, 1.0)
    assert "ray_offload_device_ceiling_samples_per_s" not in values
    assert all('run="vit"' in line for line in lines if line.startswith("ray_offload_"))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("TensorBoard", "tensorboardX", "tensorboardX"),
        ("MLflow", "mlflow", "mlflow-skinny"),
        ("WandB", "wandb", "wandb"),
        ("Prometheus", "ray.util.metrics", r"ray\[default\]"),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(offload.ConfigError, match=rf"callbacks\.{name} needs .*: pip install {package}\."):
        getattr(callbacks, name)()


def test_settings_that_are_no_text_are_refused() -> None:
    with pytest.raises(offload.ConfigError, match=r"log_dir must be .*found 3"):
        callbacks.TensorBoard(3)  # type: ignore[arg-type]
