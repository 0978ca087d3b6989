"""Callbacks that pass a run's measurements on to other tools.

Each needs its library on the driver alone, and says at its construction how to install it. All record the same numbers: throughput,
goodput, stall, both ceilings, workers, preprocessing cores and the global batch under ``offload/``, and your own metrics under their names.
A number that is unknown, or not finite, is left out.

Where it stops: the tools' own settings, such as addresses and credentials, are the tools' business.
"""

from __future__ import annotations

import importlib
import importlib.resources
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.model.checks import check_count, check_path, check_text
from offload.report.run_dir import TENSORBOARD
from offload.train.callback import Callback, Checkpoint, Decision, Ended, Interval, Metrics, Started

_RATES = (
    "samples_per_s",
    "goodput",
    "stall",
    "input_ceiling_samples_per_s",
    "device_ceiling_samples_per_s",
    "workers",
    "preprocessing_cores",
    "global_batch_size",
)
GAUGES = (*_RATES, "epoch", "step")
COUNTERS = ("decisions", "checkpoints")
DASHBOARD = "grafana_dashboard.json"
MOST_PORT = 65_535


def grafana_dashboard() -> str:
    """A dashboard of the metrics of :class:`Prometheus`, as JSON for Grafana's *Import dashboard*. It asks for a Prometheus data source."""
    return importlib.resources.files("offload").joinpath(DASHBOARD).read_text(encoding="utf-8")


def rates_of(interval: Interval) -> dict[str, float]:
    """The known numbers of an interval, by name: ``offload/samples_per_s`` and so on."""
    return finite({f"offload/{name}": getattr(interval, name) for name in _RATES})


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _library(name: str, user: str, package: str) -> Any:
    """A module. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"offload.callbacks.{user} needs the package {package}, which cannot be imported here ({error}): pip install {package}."
        ) from None


class TensorBoard(Callback):
    """Write events for TensorBoard. Steps are optimizer steps; decisions appear as text.

    Args:
        log_dir: the folder of the events; ``tensorboard`` in the run directory by default.

    Raises:
        ConfigError: if tensorboardX is missing, or ``log_dir`` is no path.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._tensorboard = _library("tensorboardX", "TensorBoard", "tensorboardX")
        self._log_dir = (
            None if log_dir is None else check_path("log_dir", log_dir, sane="a folder, such as runs/events")
        )
        self._step = 0

    def started(self, started: Started) -> None:
        self._writer = self._tensorboard.SummaryWriter(self._log_dir or str(started.run_dir / TENSORBOARD))

    def interval(self, interval: Interval) -> None:
        self._step = interval.step
        self._add(rates_of(interval), interval.step, interval.at)

    def metrics(self, metrics: Metrics) -> None:
        self._add(finite(metrics.values), metrics.step, metrics.at)

    def decision(self, decision: Decision) -> None:
        text = f"{decision.kind}: {decision.reason}"
        self._writer.add_text("offload/decisions", text, self._step, walltime=decision.at)

    def ended(self, ended: Ended) -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int, at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()


class MLflow(Callback):
    """Record a run in MLflow: parameters, metrics by optimizer step, the status, and at the end ``summary.json`` and ``report.html``.

    MLflow does not take every name: ``acc@1`` becomes ``acc_1``.

    Args:
        experiment: the name of the experiment, which is created if there is none.
        tracking_uri: the tracking server, such as ``http://host:5000``; None: MLflow's own setting (``MLFLOW_TRACKING_URI``).
        params: parameters to record, such as those of your ``train_loop_config`` that hold no secrets.

    Raises:
        ConfigError: if neither mlflow-skinny nor mlflow is installed, or an argument is no text.
    """

    def __init__(
        self,
        experiment: str = "offload",
        *,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        _library("mlflow", "MLflow", "mlflow-skinny")
        self._experiment = check_text("experiment", experiment, sane="a name, such as 'offload'")
        uri = (
            None if tracking_uri is None else check_text("tracking_uri", tracking_uri, sane="such as http://host:5000")
        )
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._params = dict(params or {})
        self._run_dir = Path()

    def started(self, started: Started) -> None:
        self._run_dir = started.run_dir
        self._run = self._client.create_run(self._experiment_id(), run_name=started.run_dir.name).info.run_id
        for name, value in self._params.items():
            self._client.log_param(self._run, _mlflow_name(name), value)
        self._client.set_tag(self._run, "offload.run_dir", str(started.run_dir))

    def interval(self, interval: Interval) -> None:
        self._log(rates_of(interval), interval.step, interval.at)

    def metrics(self, metrics: Metrics) -> None:
        self._log(finite(metrics.values), metrics.step, metrics.at)

    def ended(self, ended: Ended) -> None:
        try:
            for name in ("summary.json", "report.html"):
                if (self._run_dir / name).exists():
                    self._client.log_artifact(self._run, str(self._run_dir / name))
        finally:
            status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(ended.status, "FAILED")
            self._client.set_terminated(self._run, status)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except Exception:
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:  # otherwise, another run has made it meanwhile
                    raise
        return str(experiment.experiment_id)

    def _log(self, values: Mapping[str, float], step: int, at: float) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, _mlflow_name(name), value, timestamp=round(at * 1000), step=step)


def _mlflow_name(name: str) -> str:
    """The name as MLflow takes it: of letters, digits and a few others, and the shortest path to itself."""
    parts = re.sub(r"[^/\w.\- :]", "_", str(name)).split("/")
    return "/".join(re.sub(r"^\.\.", "__", part) for part in parts if part not in ("", ".")) or "_"


class WandB(Callback):
    """Record a run in Weights & Biases. Metrics are drawn over ``offload/step``, the optimizer steps.

    Args:
        settings: arguments of ``wandb.init``, such as ``project``, ``config`` and ``mode="offline"``.

    Raises:
        ConfigError: if wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._wandb = _library("wandb", "WandB", "wandb")
        self._settings = settings

    def started(self, started: Started) -> None:
        settings = {"name": started.run_dir.name, "dir": str(started.run_dir), **self._settings}
        self._run = self._wandb.init(**settings)
        self._run.define_metric("*", step_metric="offload/step")

    def interval(self, interval: Interval) -> None:
        self._run.log({**rates_of(interval), "offload/step": interval.step})

    def metrics(self, metrics: Metrics) -> None:
        self._run.log({**finite(metrics.values), "offload/step": metrics.step})

    def ended(self, ended: Ended) -> None:
        self._run.summary["offload/status"] = ended.status
        self._run.finish(exit_code=1 if ended.status == "failed" else 0)


class Prometheus(Callback):
    """Export the rates as metrics of Ray, which Prometheus reads from each Ray node: ``ray_offload_samples_per_s`` and so on.

    Beside the rates there are gauges ``ray_offload_epoch`` and ``ray_offload_step``, and counters ``ray_offload_decisions_total`` and
    ``ray_offload_checkpoints_total``. The tag ``run`` is the name of the run directory. :func:`grafana_dashboard` shows all of them.
    The run says where the driver's node serves them.

    Args:
        port: the port on this machine, reachable from it alone, if the run starts its own Ray; None: a free one. A Ray that the run
            joins has a port already.

    Raises:
        ConfigError: if ``ray[default]`` is missing, or the port is none.
    """

    def __init__(self, port: int | None = None) -> None:
        _library("aiohttp_cors", "Prometheus", "ray[default]")  # without it, Ray serves no metrics
        self._ray = _library("ray.util.metrics", "Prometheus", "ray[default]")
        sane = f"a port from 1 to {MOST_PORT}, such as 8090"
        self.ray_metrics_port = 0 if port is None else check_count("port", port, least=1, most=MOST_PORT, sane=sane)

    def started(self, started: Started) -> None:
        self._tags = {"run": started.run_dir.name}
        self._gauges = {name: self._gauge(name) for name in GAUGES}
        self._counters = {
            name: self._ray.Counter(f"offload_{name}_total", f"The run's {name}.", tag_keys=("run",))
            for name in COUNTERS
        }

    def interval(self, interval: Interval) -> None:
        known = finite({name: getattr(interval, name) for name in self._gauges})
        for name, value in known.items():
            self._gauges[name].set(value, tags=self._tags)

    def decision(self, decision: Decision) -> None:
        self._counters["decisions"].inc(tags=self._tags)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self._counters["checkpoints"].inc(tags=self._tags)

    def _gauge(self, name: str) -> Any:
        said = f"{name.replace('_per_s', ' per second').replace('_', ' ')} of the newest interval."
        return self._ray.Gauge(f"offload_{name}", said.capitalize(), tag_keys=("run",))
