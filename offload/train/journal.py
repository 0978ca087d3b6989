"""What the driver writes down of a run: news of the workers in, lines of the run directory and of the live line out.

Where it stops: it asks nobody for news, and decides nothing.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import ray

from offload.measure.steps import Totals
from offload.model.placement import Placement
from offload.report.html import write_report
from offload.report.live import LiveLine
from offload.report.run_dir import RunDirectory
from offload.train.config import BatchSplit
from offload.train.context import TRAIN, world_totals
from offload.train.monitor import News


class Journal:
    """Of one run. ``on_gpus``: whether its workers have GPUs."""

    def __init__(
        self, directory: RunDirectory, live: LiveLine, placement: Placement, split: BatchSplit, *, on_gpus: bool
    ) -> None:
        self.directory, self.live, self.placement, self.split = directory, live, placement, split
        self.news = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=())
        self._on_gpus = on_gpus
        self._began = time.monotonic()
        self._skipped: set[tuple[str, int]] = set()
        self._first_batch_s: float | None = None

    def take(self, news: News) -> None:
        """Write down what is new."""
        before, self.news = self.news, news
        for event in news.events:
            self._take_event(dict(event))
        if world_totals(news.totals).steps > world_totals(before.totals).steps:
            values = self._interval(before)
            self.directory.metrics(values)
            self.live.update(values)

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "first_batch" and self._first_batch_s is None:
            self._first_batch_s = event["seconds"]
        if kind == "print":
            self.live.printed(event["text"], rank=event["rank"])
            return
        if kind == "skipped":
            sample = (event["dataset"], event["sample_id"])
            if sample not in self._skipped:
                self._skipped.add(sample)
                self.directory.skipped(event)
            return
        if kind == "resumed":
            self.live.note(
                f"resumed at epoch {event['epoch'] + 1}, step {event['step']:,} ({event['trained']:,} samples of it done)"
            )
            if event["epoch_starts_again"]:
                self.live.note(
                    f"the order of the samples is another than when the run began ({event['epoch_starts_again']}): this epoch "
                    "starts again, and what was trained of it is trained once more"
                )
        if kind == "report":
            values = "  ".join(f"{k} {v:.4g}" for k, v in event["metrics"].items())
            self.live.note(f"epoch {event['epoch'] + 1}  step {event['step']:,}  {values}")
        self.directory.event(kind, **event)

    def _interval(self, before: News) -> dict[str, Any]:
        now, then = world_totals(self.news.totals), world_totals(before.totals)
        since = now.minus(then)
        workers = self.placement.workers
        busy_s = since.compute_s + since.sync_s
        rates = self.news.rates.get(TRAIN, {})
        return {
            "at": time.time(),
            "epoch": self.news.epoch,
            "step": self.news.step,
            "samples_per_s": _per_second(since, workers),
            "stall": since.stall,
            "input_ceiling_samples_per_s": rates.get("input_ceiling_samples_per_s"),
            "device_ceiling_samples_per_s": since.samples / busy_s * workers if busy_s > 0 else None,
            "device": "GPU" if self._on_gpus else "worker",
            **{k: v for k, v in dataclasses.asdict(since).items() if k.endswith("_s")},
            "workers": workers,
            "local_batch_size": self.split.local_batch_size,
            "accum_steps": self.split.accum_steps,
            "metrics": self.news.metrics,
        }

    def finish(self, status: str, checkpoint: str | None, error: str | None = None) -> dict[str, Any]:
        """Write the summary and the report; returns the summary."""
        totals = world_totals(self.news.totals)
        document = {
            "schema": "offload.summary/1",
            "status": status,
            "error": error,
            "samples": self.news.samples,
            "steps": self.news.step,
            "step_count_all_ranks": max(totals.steps, 1),
            "epochs": self.news.epoch + (1 if self.news.totals else 0),
            "wall_s": time.monotonic() - self._began,
            "samples_per_s": _per_second(totals, self.placement.workers),
            **{k: v for k, v in dataclasses.asdict(totals).items() if k.endswith("_s")},
            "stall": totals.stall,
            "first_batch_s": self._first_batch_s,
            "workers": self.placement.workers,
            "local_batch_size": self.split.local_batch_size,
            "accum_steps": self.split.accum_steps,
            "global_batch_size": self.split.global_batch_size,
            "preprocessing_cores": self.placement.cores,
            "device": "GPU" if self._on_gpus else "CPU worker",
            "input": self.news.rates,
            "skipped": len(self._skipped),
            "metrics": self.news.metrics,
            "checkpoint": checkpoint,
            "run_dir": str(self.directory.path),
            "versions": {"python": sys.version.split()[0], "ray": ray.__version__},
        }
        self.directory.event(
            "run_finished", status=status, error=error, samples=self.news.samples, steps=self.news.step
        )
        self.directory.summary(document)
        write_report(self.directory)
        return document


def _per_second(totals: Totals, workers: int) -> float:
    """All ranks' samples over the time that a rank spent stepping."""
    return totals.samples * workers / totals.step_time_s if totals.step_time_s > 0 else 0.0
