"""The ready callbacks with the real libraries: what a user finds there afterwards."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offload
from offload import callbacks
from offload.report.run_dir import RunDirectory
from offload.train.callback import Checkpoint, Decision, Ended, Interval, Metrics, Started
from offload.train.cluster import connection
from tests.helpers import ROOT, eventually
from tests.prometheus import dashboard, expressions, free_port, scraping

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


def test_runs_that_begin_together_share_a_new_experiment_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import tracking

    uri = (tmp_path / "mlflow").as_uri()
    first, second = (callbacks.MLflow("vit", tracking_uri=uri) for _ in range(2))
    play(first, tmp_path / "first")
    find, asked = second._client.get_experiment_by_name, iter([True])

    def found(name: str) -> Any:  # it asks just before the first run makes the experiment
        return None if next(asked, False) else find(name)

    monkeypatch.setattr(second._client, "get_experiment_by_name", found)
    play(second, tmp_path / "second")
    client = tracking.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
    assert {run.info.run_name for run in runs} == {"first", "second"}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("acc@1", "acc_1"),
        ("val/f1 (macro)", "val/f1 _macro_"),
        ("//val//loss/", "val/loss"),
        ("a/../b", "a/__/b"),
        ("..rest", "__rest"),
        ("./.", "_"),
        ("größe", "größe"),
        ("two\n", "two_"),
    ],
)
def test_mlflow_gets_names_that_it_takes(name: str, known: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    logged: list[tuple[str, float]] = []
    callback = object.__new__(callbacks.MLflow)
    callback._run = "run"
    callback._client = SimpleNamespace(log_metric=lambda run, key, value, **more: logged.append((key, value)))
    callback.metrics(Metrics(at=AT, epoch=0, step=1, values={name: 0.5, "loss": 1.0}))
    assert logged == [(known, 0.5), ("loss", 1.0)]
    _validate_metric_name(known)


def test_weights_and_biases_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb replaces it for the rest of the process
    play(callbacks.WandB(project="vit", mode="offline"), tmp_path / "run")
    (stored,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    wanted = (b"offload/samples_per_s", b"loss", b"offload/status")
    eventually(lambda: all(name in stored.read_bytes() for name in wanted))  # a process of wandb's own writes them


EXPORTED = """
import os, sys, urllib.request
os.environ["RAY_metrics_report_interval_ms"] = "500"
from pathlib import Path
import psutil
from offload.callbacks import Prometheus
from offload.train.cluster.connection import connected, metrics_address
from tests.helpers import eventually
from tests.prometheus import free_port
from tests.test_callbacks import play

callback = Prometheus(free_port())
lines = []

def exported():
    try:
        with urllib.request.urlopen(metrics_address(ours=True), timeout=10) as answer:
            lines[:] = [each for each in answer.read().decode().splitlines() if each.startswith("ray_offload_")]
    except OSError:  # not there yet
        return False
    return len(lines) > 1

with connected(None, metrics_port=callback.ray_metrics_port):
    assert metrics_address(ours=True) == f"http://127.0.0.1:{callback.ray_metrics_port}/metrics"
    play(callback, Path(sys.argv[1]))
    eventually(exported)
    (agent,) = (each for each in psutil.Process().children(recursive=True) if each.name() == "ray::DashboardAgent")
    listens = {each.laddr.ip.removeprefix("::ffff:") for each in agent.net_connections() if each.status == "LISTEN"}
    print(*listens)
print(*lines, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_prometheus_finds_the_rates_on_the_ray_that_a_run_starts_and_only_from_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED, str(tmp_path / "vit")], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    listens, *lines = done.stdout.splitlines()
    assert listens == "127.0.0.1"
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
        ("Prometheus", "aiohttp_cors", r"ray\[default\]"),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(offload.ConfigError, match=rf"callbacks\.{name} needs .*: pip install {package}\."):
        getattr(callbacks, name)()


def test_the_dashboard_shows_every_exported_metric_and_no_other() -> None:
    exported = {
        f"ray_offload_{name}" for name in (*callbacks.GAUGES, *(f"{name}_total" for name in callbacks.COUNTERS))
    }
    shown = {name: set(re.findall(r"ray_offload_\w+", expr)) for name, expr in expressions().items()}
    assert set().union(*shown.values()) == exported
    panels = {name for panel, names in shown.items() if "/" in panel for name in names}
    assert panels == exported, "each has a panel, not only an annotation"
    assert all(names for names in shown.values())
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", callbacks.grafana_dashboard())) == variables


def test_the_dashboard_is_one_that_grafana_s_published_schema_knows() -> None:
    """Grafana's Foundation SDK, generated from that schema, reads every field and writes it again: it drops those that it does not know."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import prometheus, timeseries

    plugins.register_default_plugins()
    read = models.Dashboard.from_json(dashboard())
    assert lost(dashboard(), json.loads(json.dumps(read, cls=JSONEncoder))) == []
    for panel in read.panels or ():
        assert isinstance(panel, models.Panel)
        assert isinstance(panel.options, timeseries.Options)
        assert all(isinstance(each, prometheus.Dataquery) for each in panel.targets or ())


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """The places at which a document differs from what another kept of it."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [each for name in given for each in lost(given[name], kept.get(name), f"{where}/{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = zip(given, kept, strict=True)
        return [each for number, (one, other) in enumerate(pairs) for each in lost(one, other, f"{where}/{number}")]
    return [] if given == kept else [where]


@pytest.mark.soak
def test_every_panel_shows_data_that_a_real_prometheus_scrapes_of_a_real_run(tmp_path: Path) -> None:
    port, began = free_port(), time.time()
    command = [sys.executable, "-m", "offload", "run", "tests/programs/live_run.py", "--run-dir", tmp_path / "vit"]
    with scraping(f"127.0.0.1:{port}", tmp_path) as prometheus:
        done = subprocess.run([*command, "--", str(port), "3"], cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics" in done.stderr
        empty = [name for name, expr in expressions().items() if not prometheus.series(expr, began, time.time())]
    assert empty == []


def test_a_port_that_is_none_or_taken_is_refused() -> None:
    with pytest.raises(offload.ConfigError, match=r"port must be at least 1 \(a port from 1 to 65535, .*found 0"):
        callbacks.Prometheus(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            offload.ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use\. Pass another port"
        ):
            connection._start_local(metrics_port=port)


def test_settings_that_are_no_text_are_refused() -> None:
    with pytest.raises(offload.ConfigError, match=r"log_dir must be .*found 3"):
        callbacks.TensorBoard(3)  # type: ignore[arg-type]
