"""The driver's side of a probe: a run of one or two workers that measure without training, and leave nothing behind."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offload.machine import usable_cores
from offload.measure.findings import Findings, findings_of
from offload.model.placement import NodeResources, WorkerResources
from offload.pipeline.index.rows import rows_at
from offload.pipeline.program.pickling import Carried
from offload.probe.work import RowWork, SampleWork
from offload.probe.worker import PhaseBegun, ProbeBudget, ProbeMeasured, run_probe
from offload.report.events.training import DataPrinted, WorkerPrinted
from offload.report.run_dir import RunDirectory
from offload.report.terminal.live_line import LiveLine, stderr_console
from offload.train.checkpoints.storage import Storage
from offload.train.cluster.connected import ConnectedCluster
from offload.train.driver.event_log import EventLog
from offload.train.driver.failure_texts import describe_failure
from offload.train.driver.platform.choice import platform_of
from offload.train.driver.run import Run
from offload.train.driver.trainer import Trainer
from offload.train.hub.client import HubClient
from offload.train.messages import TRAIN
from offload.train.worker.data.slice_fetcher import PREFETCH_BLOCKS


def bar(quiet: bool) -> Progress:
    """A progress bar on stderr, which disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr_console(quiet=quiet), transient=True)


STAGE_ROWS = 64


def probe(
    trainer: Trainer,
    *,
    address: str | None,
    quiet: bool,
    known: dict[str, Any],
    seconds: float | None = None,
    then: Callable[[SampleWork | None], None] | None = None,
) -> Findings | None:
    """Measure a script's trainer; None if the user interrupted it. ``known``: facts to store with the findings. ``seconds``: the time
    for measuring, besides the start of Ray and of the worker; None: as much as ``ProbeBudget`` says. ``then`` gets the work of some samples
    of the training data, which this process can repeat; None if only Ray Data can do it.

    Raises ConfigError or RunError as ``Trainer.fit`` does.
    """
    began = time.monotonic()
    single = copy.copy(trainer)  # only with the training data
    single.datasets = {TRAIN: trainer.datasets[TRAIN]}
    opener = platform_of(address, single)
    with tempfile.TemporaryDirectory(prefix="offload-probe-") as folder, LiveLine(quiet=True) as silent:
        directory = RunDirectory(Path(folder) / "probe")
        with LiveLine(quiet=quiet) as live:
            listed = single.listed(TRAIN, live.waiting)
        with closing(listed), opener.opened() as platform:
            cluster = platform.cluster
            workers = _workers(trainer, cluster)
            single.workers = (workers, workers)
            run = ProbeRun(single, directory, silent, {TRAIN: listed}, platform)
            asked, on_gpus = _asked_workers(trainer, cluster)
            training = would_train(asked, cluster.whole, run.worker.gpus, platform.here) if on_gpus else (workers, 1)
            if seconds is not None:
                run.budget = run.budget.within(seconds)
            directory.begin()
            with bar(quiet) as progress:
                run.shows(progress)
                run.go("probe", Storage(path=str(directory.path)))
    if run.measurements is None:
        return None
    if then is not None:
        rows = run.budget.rows
        then(None if rows is None else RowWork(listed.recipe(trainer.seed).ready(), rows))
    together, here = training
    cores = max(round(usable_cores() - here * run.reserved_cpus), 1)
    measured = {
        **known["measured"],
        "seconds": round(run.measurements["measuring_s"], 1),
        "seconds_with_start": round(time.monotonic() - began, 1),
    }
    return findings_of(
        run.measurements,
        workload=known["workload"],
        buffered_blocks=PREFETCH_BLOCKS,
        measured=measured,
        batch_size=trainer.batch_size.initial,
        local_batch_size=trainer.batch_size.split(together).local_batch_size,
        cores=cores,
        workers_here=here,
        reserved_cpus=_asked_cpus(trainer),
    )


class ProbeRun(Run):
    """A run whose worker measures. ``measurements``: the worker's, sent at the end. ``reserved_cpus``: the cores that a worker of the
    script would reserve here."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log = _NoLog(self.directory, self.live, self.placement, self.split, on_gpus=self.worker.gpus > 0)
        self.measurements: dict[str, Any] | None = None
        stream = self.listed[TRAIN].stream(self.trainer.seed, self.platform.put)
        self.budget = ProbeBudget(
            recipe=stream.recipe if stream.rows is not None else None,
            rows=None if stream.rows is None else rows_at(stream.rows, stream.order(0)[:STAGE_ROWS]),
        )

    def shows(self, progress: Progress) -> None:
        """Show this progress bar."""
        self._progress, self._task = progress, progress.add_task("starting", total=1.0)

    def _worker_resources(self) -> WorkerResources:
        worker = super()._worker_resources()
        self.reserved_cpus = worker.cpus
        # Measure the pool and the worker one after the other, each with the whole machine.
        return replace(worker, cpus=0.0)

    def worker_main(self, functions: Carried, setup: Any) -> Any:
        budget, setup = self.budget, replace(setup, hang_s=math.inf)  # a probe makes no steps of its own
        return partial(run_probe, functions, setup, budget)

    def _announce(self) -> None: ...

    def _failed(self, error: BaseException) -> NoReturn:
        remedy = "offload run shows the same error with its whole traceback."
        raise describe_failure(error, "the probed script failed", remedy) from None

    def _read(self, hub: HubClient) -> None:
        news = hub.read(self.log.news.cursor)
        self.log.news = replace(news, totals={})  # nothing is trained, so there is nothing to commit
        for event in news.events:
            match event:
                case PhaseBegun():
                    self._progress.update(self._task, description=event.phase, completed=event.share)
                case ProbeMeasured():
                    self.measurements = event.measurements
                case WorkerPrinted() | DataPrinted():
                    self._progress.console.print(event.text, soft_wrap=True, markup=False)


class _NoLog(EventLog):
    """An event log that writes nothing."""

    def finish(self, status: str, checkpoint: str | None, error: str | None = None) -> dict[str, Any]:
        return {}


def _workers(trainer: Trainer, cluster: ConnectedCluster) -> int:
    """The number of workers: two if the script asks for several and two fit, so that the probe sees their synchronisation; else
    one."""
    asked, on_gpus = _asked_workers(trainer, cluster)
    return 2 if asked >= 2 and (sum(node.gpus for node in cluster.whole) >= 2 or not on_gpus) else 1


def _asked_workers(trainer: Trainer, cluster: ConnectedCluster) -> tuple[int, bool]:
    """The most workers that the script asks for, and whether they train on GPUs."""
    gpus = sum(node.gpus for node in cluster.whole)
    config = trainer.scaling_config
    on_gpus = bool(config.use_gpu) if config is not None else gpus >= 1
    if trainer.workers is not None:
        return trainer.workers[1], on_gpus
    return (int(gpus) if on_gpus else 1), on_gpus


def would_train(asked: int, nodes: Sequence[NodeResources], gpus_each: float, this: str) -> tuple[int, int]:
    """How many workers would train on the GPUs of these nodes, of ``asked`` by the script, and how many of them on the node ``this``.

    Both are at least one. Workers that share a GPU count as one: together they compute no faster.
    """
    room = {node.node_id: int(node.gpus // max(gpus_each, 1.0)) for node in nodes}
    return max(min(asked, sum(room.values())), 1), max(min(asked, room.get(this, 0)), 1)


def _asked_cpus(trainer: Trainer) -> float:
    """The cores that the script asks for each worker, wherever it trains."""
    if trainer.overrides.cpus_per_worker is not None:
        return float(trainer.overrides.cpus_per_worker)
    reserved: Any = trainer.scaling_config.resources_per_worker if trainer.scaling_config is not None else None
    return float((reserved or {}).get("CPU", 0))
