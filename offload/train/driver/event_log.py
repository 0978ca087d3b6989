"""Write the run directory and the live line from the hub's news, and tell the callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import OffloadError, RunError
from offload.measure.steps import Totals
from offload.model.batch_split import BatchSplit
from offload.model.placement import NodeResources, Placement
from offload.report.events import (
    DRIVER,
    ClusterChanged,
    DataPrinted,
    FirstBatch,
    RunEvent,
    RunFinished,
    RunResumed,
    RunStarted,
    SampleSkipped,
    TrainingNodes,
    WorkerPrinted,
)
from offload.report.page.html import write_report
from offload.report.run_dir import SKIPPED, RunDirectory, read_lines
from offload.report.terminal.live_line import LiveLine
from offload.train.callback import Callback
from offload.train.driver.listeners import Listeners
from offload.train.messages import TRAIN, News, sum_of
from offload.versions import installed_ray

_INPUT = ("core_seconds_per_sample", "variation", "wire_bytes_per_sample", "input_pace_samples_per_s", "blocked")


class EventLog:
    """The event log of one run. ``on_gpus``: whether its workers have GPUs; ``goodput``: that of the newest interval."""

    def __init__(
        self,
        directory: RunDirectory,
        live: LiveLine,
        placement: Placement,
        split: BatchSplit,
        *,
        on_gpus: bool,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.directory, self.live, self.placement, self.split = directory, live, placement, split
        self.news = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=())
        self.goodput: float | None = None
        self._listeners = Listeners(callbacks)
        self._on_gpus = on_gpus
        self._began = time.monotonic()
        self._skipped: set[tuple[str, int]] = set()
        self._first_batch_s: float | None = None
        self._nodes: dict[str, NodeResources] = {}
        self._read_at = time.monotonic()
        self._under_way = False

    def know(self, nodes: Sequence[NodeResources]) -> None:
        """Note these nodes, to group preprocessing by kind of node."""
        self._nodes |= {node.node_id: node for node in nodes}

    def start(self, event: RunStarted) -> None:
        """Write the first event of this session: a start, or a resumption if an earlier session left its events."""
        if self.directory.resuming:
            event = RunResumed(**event.values())
        event = event.reported(time.time(), DRIVER)
        if self.directory.resuming:  # earlier sessions have already listed these samples
            known = [(line.get("dataset"), line.get("sample_id")) for line in read_lines(self.directory.path / SKIPPED)]
            self._skipped = {
                (name, sample) for name, sample in known if isinstance(name, str) and isinstance(sample, int)
            }
        self._under_way = True
        self.directory.event(event)
        self._listeners.started(self.directory.path, event)

    def take(self, news: News) -> None:
        """Record the news."""
        self._tell_failures()
        before, self.news = self.news, news
        read_at, self._read_at = self._read_at, time.monotonic()
        for event in news.events:
            self._take_event(event)
        if set(news.worker_nodes) != set(before.worker_nodes):
            self.directory.event(TrainingNodes(at=time.time(), nodes=sorted(news.worker_nodes)))
        # A new group counts from zero.
        then = sum_of(before.totals) if before.attempts == news.attempts else Totals()
        if sum_of(news.totals).steps > then.steps:
            values = self._interval(sum_of(news.totals).minus(then))
            self.goodput = values["goodput"]
            values["seconds"] = self._read_at - read_at
            values["preprocessing"] = self._preprocessing(before.spent)
            self.directory.metrics(values)
            self.live.update(values)
            self._listeners.interval(values)

    def _take_event(self, event: RunEvent) -> None:
        match event:
            case WorkerPrinted():
                self.live.printed(event.text, stream=event.stream, rank=event.by if isinstance(event.by, int) else None)
            case DataPrinted():
                self.live.printed(event.text, stream=event.stream)
                self.directory.printed({"at": event.at, "stream": event.stream, "text": event.text})
            case SampleSkipped():
                sample = (event.dataset, event.sample_id)
                # Every epoch skips it again, and so does every resumed run.
                if sample not in self._skipped:
                    self._skipped.add(sample)
                    self.directory.skipped({name: value for name, value in event.to_json().items() if name != "event"})
            case _:
                if isinstance(event, FirstBatch) and self._first_batch_s is None:
                    self._first_batch_s = event.seconds
                self.write(event)

    def tell(self, event: RunEvent) -> None:
        """Write an event that the driver reports."""
        self.write(event.reported(time.time(), DRIVER))

    def write(self, event: RunEvent) -> None:
        """Write an event, show it if it matters to users, and tell the callbacks."""
        if isinstance(event, ClusterChanged):
            self.know([NodeResources(**node) for node in event.joined_nodes])
        self.directory.event(event)
        for line in event.live_lines():
            self.live.note(line)
        self._listeners.event(event)

    def _tell_failures(self) -> None:
        for failure in self._listeners.failures():
            self.tell(failure)

    @property
    def _workers(self) -> int:
        return self.news.group.workers or self.placement.workers

    def _interval(self, since: Totals) -> dict[str, Any]:
        workers = self._workers
        busy_s = since.compute_s + since.sync_s
        rates = self.news.rates.get(TRAIN, {})
        return {
            "at": time.time(),
            "epoch": self.news.epoch,
            "step": self.news.step,
            **rates_of([(workers, since)]),
            "stall": since.stall,
            "input_ceiling_samples_per_s": rates.get("input_ceiling_samples_per_s"),
            **{name: rates[name] for name in _INPUT if name in rates},
            "device_ceiling_samples_per_s": since.samples / busy_s * workers if busy_s > 0 else None,
            "device": "GPU" if self._on_gpus else "worker",
            **{k: v for k, v in dataclasses.asdict(since).items() if k.endswith("_s")},
            "workers": workers,
            **self._batch(),
            "preprocessing_cores": self.news.cores[0] - self.news.cores[1],
            "useful": self.news.group.useful,
            "goal": self.news.group.goal,
            "metrics": self.news.metrics,
        }

    def _preprocessing(self, before: Mapping[str, tuple[int, float]]) -> dict[str, dict[str, float]]:
        """For each kind of node, its cores that should preprocess, and the CPU seconds of the tasks that finished since ``before``."""
        groups: dict[str, dict[str, float]] = {}
        for node_id, (cores, cpu_s) in self.news.spent.items():
            node = self._nodes.get(node_id)
            kind = "other nodes" if node is None else node.instance_type or ("GPU nodes" if node.gpus else "CPU nodes")
            group = groups.setdefault(kind, {"cores": 0, "busy_s": 0.0})
            group["cores"] += cores
            group["busy_s"] += cpu_s - before.get(node_id, (0, 0.0))[1]
        return groups

    def _batch(self) -> dict[str, int]:
        """The present split of global batches."""
        split = self.news.group.split or self.split
        return {
            "local_batch_size": split.local_batch_size,
            "accum_steps": split.accum_steps,
            "global_batch_size": split.global_batch_size,
        }

    def finish(self, status: str, checkpoint: str | None, error: str | None = None) -> dict[str, Any]:
        """Write the summary and the report; return the summary."""
        self._under_way = False
        # Rates weigh each group by its own number of workers, which changes with a resize.
        groups = [*self.news.past, (self._workers, sum_of(self.news.totals))]
        totals = sum_of(dict(enumerate(totals for _, totals in groups)))
        document = {
            "schema": "offload.summary/1",
            "status": status,
            "error": error,
            "samples": self.news.samples,
            "steps": self.news.step,
            "step_count_all_ranks": max(totals.steps, 1),
            "epochs": self.news.epoch + (1 if self.news.totals or self.news.past else 0),
            "wall_s": time.monotonic() - self._began,
            **rates_of(groups),
            **{k: v for k, v in dataclasses.asdict(totals).items() if k.endswith("_s")},
            "stall": totals.stall,
            "first_batch_s": self._first_batch_s,
            "workers": self._workers,
            "worker_groups": max(self.news.attempts, 1),
            **self._batch(),
            "useful": self.news.group.useful,
            "preprocessing_cores": self.placement.cores,
            "device": "GPU" if self._on_gpus else "CPU worker",
            "input": self.news.rates,
            "skipped": len(self._skipped),
            "metrics": self.news.metrics,
            "checkpoint": checkpoint,
            "run_dir": str(self.directory.path),
            "versions": {"python": sys.version.split()[0], "ray": installed_ray()},
        }
        self._tell_failures()
        ends = RunFinished(status=status, error=error, samples=self.news.samples, steps=self.news.step)
        self.directory.event(ends.reported(time.time(), DRIVER))
        self.directory.summary(document)
        try:
            write_report(self.directory)
        except Exception as error:  # a defect of the page must not cost the run its result
            self.live.note(
                f"report.html was not written ({type(error).__name__}: {error}): offload report {self.directory.path} writes it"
            )
        # After the files: a callback may read them, and one that hangs must not keep the run from writing them.
        self._listeners.ended(document)
        self._listeners.close()
        self._tell_failures()
        return document

    def break_off(self, error: BaseException) -> None:
        """Write the summary of a session that an error ends before :meth:`finish`, for example before its workers start."""
        if not self._under_way:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RunError):  # the error may come from the run directory itself
            self.finish("interrupted" if interrupted else "failed", None, error=None if interrupted else reason)


def rates_of(groups: Sequence[tuple[int, Totals]]) -> dict[str, float]:
    """The throughput and the goodput over consecutive worker groups. ``groups``: each group's number of workers and the totals of all
    its ranks.

    Both are per second that a rank spent stepping, over the same steps. Goodput is throughput × statistical efficiency, in samples of
    initial batches. At a fixed batch the two are equal.
    """
    stepping_s = sum(totals.step_time_s / workers for workers, totals in groups)
    samples, useful = (sum(values) for values in zip(*((t.samples, t.useful) for _, t in groups), strict=True))
    return {
        name: n / stepping_s if stepping_s > 0 else 0.0 for name, n in (("samples_per_s", samples), ("goodput", useful))
    }
