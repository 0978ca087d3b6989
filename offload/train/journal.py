"""What the driver writes down of a run: news of the workers in, lines of the run directory and of the live line out.

Where it stops: it asks nobody for news, and decides nothing.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from offload.measure.steps import Totals
from offload.model.placement import Placement
from offload.report.html import write_report
from offload.report.live import LiveLine
from offload.report.run_dir import RunDirectory
from offload.train.config import BatchSplit
from offload.train.context import TRAIN
from offload.train.monitor import News, sum_of


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
        then = sum_of(before.totals) if before.attempts == news.attempts else Totals()
        if sum_of(news.totals).steps > then.steps:
            values = self._interval(sum_of(news.totals).minus(then))
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
            for damaged in event["damaged"]:
                self.live.note(f"an older checkpoint was taken: {damaged}")
            if event["epoch_starts_again"]:
                self.live.note(
                    f"the order of the samples is another than when the run began ({event['epoch_starts_again']}): this epoch "
                    "starts again, and what was trained of it is trained once more"
                )
        if kind == "report":
            values = "  ".join(f"{k} {v:.4g}" for k, v in event["metrics"].items())
            self.live.note(f"epoch {event['epoch'] + 1}  step {event['step']:,}  {values}")
        self.tell(kind, **event)

    def tell(self, kind: str, **values: Any) -> None:
        """Write an event, and say it where users would want to know."""
        self.directory.event(kind, **values)
        text = sentence(kind, values)
        if text is not None:
            self.live.note(text)

    @property
    def _workers(self) -> int:
        return self.news.adapted.workers or self.placement.workers

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
            "device_ceiling_samples_per_s": since.samples / busy_s * workers if busy_s > 0 else None,
            "device": "GPU" if self._on_gpus else "worker",
            **{k: v for k, v in dataclasses.asdict(since).items() if k.endswith("_s")},
            "workers": workers,
            **self._batch(),
            "useful": self.news.adapted.useful,
            "metrics": self.news.metrics,
        }

    def _batch(self) -> dict[str, int]:
        """How global batches are cut now."""
        local, accum = self.news.adapted.batch
        split = BatchSplit(local_batch_size=local, accum_steps=accum, workers=self._workers) if local else self.split
        return {
            "local_batch_size": split.local_batch_size,
            "accum_steps": split.accum_steps,
            "global_batch_size": split.global_batch_size,
        }

    def finish(self, status: str, checkpoint: str | None, error: str | None = None) -> dict[str, Any]:
        """Write the summary and the report; returns the summary."""
        groups = [*self.news.past, (self._workers, sum_of(self.news.totals))]
        totals = sum_of(dict(enumerate(each for _, each in groups)))
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
            "useful": self.news.adapted.useful,
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


def sentence(kind: str, event: Mapping[str, Any]) -> str | None:
    """An event in words, None for one that is only written down."""
    if kind == "rebatched":
        return f"step {event['step']:,}: the global batch is {event['global_batch_size']:,} from here on"
    if kind == "decided" and event["decision"] == "resize":
        return f"{event['workers']} workers are to train: {event['reason']}"
    if kind == "resized":
        if event["workers"] == event["workers_before"]:
            return f"{event['workers']} workers train on other nodes than before"
        return f"{event['workers']} workers train, {event['workers_before']} did before"
    if kind == "worker_lost":
        return f"a worker was lost ({event['reason']}): all start again from the last checkpoint"
    if kind == "worker_hung":
        return (
            f"worker {event['rank']} made no progress for {event['deadline_s']:g} s, at {event['where']}: it is ended"
        )
    if kind == "out_of_memory":
        return (
            f"local batches of {event['did_not_fit']:,} do not fit into the memory of worker {event['rank']}'s device: they are "
            f"{event['local_batch_size']:,} from here on, accumulated {event['accum_steps'] + 1} times"
        )
    if kind == "preprocessing_lost":
        return f"a preprocessing process was lost ({event['reason']}): its tasks are run again"
    if kind == "preprocessing_slow":
        return (
            f"{event['what']} has taken {event['seconds']} s so far on {event['node']}: training waits for it. Pass "
            "sample_timeout_s to give up samples that take too long"
        )
    if kind == "node_excluded":
        return f"the run goes on without {', '.join(event['nodes'])}: {event['reason']}"
    if kind == "cluster_changed":
        verbs = ("left", "leaving", "joined")
        if not any(event[verb] for verb in verbs):  # their memory is told of apart
            return None
        parts = [f"{verb} {', '.join(event[verb])}" for verb in verbs if event[verb]]
        return f"the cluster changed ({'; '.join(parts)}): {event['preprocessing_cores']} cores preprocess"
    if kind == "short_of_memory":
        each = ", ".join(f"{node} ({cores})" for node, cores in zip(event["nodes"], event["cores"], strict=True))
        mib = event["process_bytes"] / (1 << 20)
        return f"fewer cores preprocess than there are, for want of memory: {each}; each process takes {mib:,.0f} MiB"
    if kind == "spot_notice":
        left_s = max(event["deadline_at"] - event["at"], 0.0)
        return f"node {event['node']} will be taken back in {left_s:.0f} s ({event['action']}): it is drained"
    if kind == "spot_rebalance":
        return f"node {event['node']} is more likely than usual to be taken back soon: nothing is done yet"
    if kind == "spot_unwatched":
        return f"no spot notice for node {event['node']} would be seen ({event['reason']}): the run goes on, see docs/spot.md"
    if kind == "run_leaving":
        return (
            f"node {', '.join(event['nodes'])}, which this run cannot do without, is leaving: a checkpoint is committed, and the same "
            "command resumes the run on another"
        )
    if kind == "cores_wanted":
        return (
            f"{event['cores']} cores are to preprocess, {event['before']} do: fed well the workers would train "
            f"{event['device_samples_per_s']:,.0f} samples/s, and a core delivers {event['core_samples_per_s']:,.0f}"
        )
    if kind == "workers_wanted":
        return f"{event['workers']} workers are to train, and there is room for {event['before']}: nodes are asked for"
    if kind == "others_hold":
        return f"other programs hold {shares(event['held'])}: this run takes what they leave, and not what they give back later"
    if kind == "not_started":
        needs = " and ".join(f"{amount:g} {name}" for name, amount in event["needs"].items())
        free = " and ".join(f"{amount:g} {name}" for name, amount in event["free"].items())
        return (
            f"no worker has started for {event['after_s']:.0f} s: they need {event['workers']} × ({needs}), and {free} of the cluster are "
            "free. Either they have their room and are slow to start, or other programs hold it: then training begins when those end"
        )
    if kind == "not_granted":
        return (
            f"the nodes asked for did not come within {event['after_s']:.0f} s: the run goes on with {event['workers_now']} workers "
            f"and {event['cores_now']} preprocessing cores"
        )
    if kind == "pass_not_finished" and event["untrained"]:
        return f"the last pass ended with the epochs: {event['untrained']:,} samples of it were not trained"
    return None


def shares(held: Mapping[str, Sequence[float]]) -> str:
    """``held``: by resource, how much of it is held, and how much there is."""
    return ", ".join(f"{amount:g} of {there:g} {name}" for name, (amount, there) in held.items())


def rates_of(groups: Sequence[tuple[int, Totals]]) -> dict[str, float]:
    """The throughput and the goodput of worker groups (their number of workers, and all ranks' totals) one after the other.

    Both are per second that a rank spent stepping, over the same steps. Goodput is throughput × statistical efficiency: it counts each
    sample at what it was worth in a batch of its size, in samples of initial batches. At a fixed batch the two are equal.
    """
    stepping_s = sum(totals.step_time_s / workers for workers, totals in groups)
    samples, useful = (sum(values) for values in zip(*((t.samples, t.useful) for _, t in groups), strict=True))
    return {
        name: n / stepping_s if stepping_s > 0 else 0.0 for name, n in (("samples_per_s", samples), ("goodput", useful))
    }
