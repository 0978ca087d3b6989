"""``offload.predict``: list the data, find what an earlier prediction left to do, and have model workers do it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload import machine
from offload.engine import uses_ray
from offload.errors import ConfigError, argument
from offload.formatting import rate_shown
from offload.inference.blocks import Block, Tasks, blocks, in_order
from offload.inference.model_worker import Answer, ModelJob, ModelWorker, own_columns, workers_in_words
from offload.inference.parts import Parts, check_output, output_path
from offload.inference.predictor import Predictor
from offload.inference.weights import read_weights
from offload.model.checks import check_count, check_flag, check_path, check_text, shown
from offload.pipeline.aside import call_aside
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.index.rows import close_rows, open_rows
from offload.pipeline.index.source import Index
from offload.pipeline.program.main_module import refuse_again
from offload.report.terminal.live_line import LiveLine

SCHEMA = "offload.prediction/1"
LISTED_SKIPPED = 100  # skipped samples that the summary names
LOOK_S = 0.2
PATIENCE_S = 3.0  # time after which a listing shows its progress
AHEAD = 2  # results of a device that wait to be written


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The result of a prediction. ``document`` is what ``offload predict --json`` prints."""

    document: dict[str, Any]

    @property
    def output(self) -> Path:
        """The Parquet file."""
        return Path(self.document["output"])

    @property
    def rows(self) -> int:
        """The rows of the file."""
        return int(self.document["rows"])

    def summary(self) -> str:
        """What the command prints."""
        values = self.document
        lines = [f"{values['rows']:,} rows in {values['output']}: {', '.join(values['columns'])}"]
        if values["resumed_samples"]:
            lines.append(
                f"{values['resumed_samples']:,} of {values['samples']:,} samples come from an interrupted prediction"
            )
        if values["skipped"]:
            first = values["skipped_samples"][0]
            lines.append(f"{values['skipped']:,} samples were skipped, the first for this reason: {first['reason']}")
        if values["samples_per_s"] is not None:
            lines.append(
                f"{rate_shown(values['samples_per_s'])} samples/s in {values['seconds']:.1f} s on {values['workers']}"
            )
        return "\n".join(lines)


def predict(
    predictor: Predictor,
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    batch_size: int = 64,
    argmax: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    address: str | None = None,
    quiet: bool = False,
) -> Prediction:
    """Write the outputs of a model for every sample of a data set to a Parquet file.

    All CPUs preprocess, and the model runs on each accelerator, or on the CPUs if there is none. The file has a row for each sample, in the
    order of the data set, and appears when it is complete. A prediction that was interrupted, also by ``kill -9``, goes on where it ended.

    The columns are ``sample_id`` (the sample's place in the data set), ``key`` (its path, or its place in a file), those of ``keep``, and
    the outputs: ``output``, or the names that ``outputs`` gives.

    Args:
        predictor: the model, and its data with their preprocessing.
        checkpoint: a run directory (its newest checkpoint), a folder ``checkpoint_TIME``, or a file with a ``state_dict``.
        output: the file, ``….parquet``. A folder ``….parquet.parts`` beside it holds what is done until then.
        batch_size: the samples of a batch of the model.
        argmax: whether to add the column ``prediction``, the number of each sample's largest output.
        seed: the seed of random transforms.
        overwrite: whether to replace an output, and an interrupted prediction.
        address: a Ray cluster, as for :meth:`offload.Trainer.fit`; by default this machine, without Ray.
        quiet: whether to hide the progress.

    Raises:
        ConfigError: for problems found before the first sample.
        RunError: for later failures, such as a sample that cannot be read.
    """
    refuse_again("offload.predict")
    if not isinstance(predictor, Predictor):
        raise ConfigError(f"predict takes an offload.Predictor, found {shown(predictor)}.")
    settings = _Settings(
        checkpoint=check_path("checkpoint", checkpoint, sane="a run directory or a checkpoint"),
        output=output_path(check_path("output", output, sane="a file, such as out.parquet")),
        batch_size=check_count(argument("batch_size"), batch_size, least=1, most=1 << 20, sane="such as 64"),
        argmax=check_flag("argmax", argmax),
        seed=check_count(argument("seed"), seed, sane="such as 0"),
        overwrite=check_flag("overwrite", overwrite),
        address=None if address is None else check_text("address", address, sane='"auto" or host:port'),
    )
    taken = own_columns(argmax=settings.argmax)
    if (name := next((name for name in predictor.keep if name in taken), None)) is not None:
        raise ConfigError(
            f"keep names the column {name!r}, which the results use themselves. Rename it in the transform, or leave it out of keep."
        )
    check_output(settings.output, overwrite=settings.overwrite)
    with LiveLine(quiet=quiet) as live:
        return _predict(predictor, settings, live)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The arguments of :func:`predict`, checked."""

    checkpoint: str
    output: Path
    batch_size: int
    argmax: bool
    seed: int
    overwrite: bool
    address: str | None


def _predict(predictor: Predictor, settings: _Settings, live: LiveLine) -> Prediction:
    weights = read_weights(settings.checkpoint)
    weights.fill(predictor.built())  # before the listing, which may take long
    job = ModelJob(predictor=predictor, weights=weights, batch_size=settings.batch_size, argmax=settings.argmax)
    index = _listed(predictor.data, live)
    try:
        open_rows(index.rows)
        tasks = Tasks(rows=index.rows, batch_size=settings.batch_size)
        manifest = {
            "the checkpoint": weights.identity,
            "the data": f"{index.name}, {len(index):,} samples, {index.identity}",
            "batch_size": settings.batch_size,
            "argmax": settings.argmax,
            "keep": list(predictor.keep),
            "seed": settings.seed,
        }
        if tasks.cuts_chunks:  # the parts of an older version held larger tasks
            manifest["the size of a task"] = tasks.size
        with Parts(settings.output, manifest, overwrite=settings.overwrite).opened() as parts:
            return _completed(job, index, tasks, parts, settings, live)
    finally:
        close_rows(index.rows)


def _completed(
    job: ModelJob, index: Index, tasks: Tasks, parts: Parts, settings: _Settings, live: LiveLine
) -> Prediction:
    """Do the tasks that no part holds, and write the output."""
    before = parts.done
    resumed = sum(map(tasks.samples, before))
    todo = [number for number in range(len(tasks)) if number not in before]
    if resumed:
        live.note(f"{resumed:,} of {len(index):,} samples are done: going on with the rest")
    recipe = job.predictor.data.recipe(index, seed=settings.seed, dataset="")
    progress = _Progress(live, total=len(index), done=resumed)
    workers, began = "", time.monotonic()
    if todo:
        if uses_ray(settings.address) or job.predictor.needs_ray:
            from offload.inference.on_ray import OnRay  # it imports Ray

            workers = OnRay(settings.address).run(
                job, recipe, tasks, todo, live.status, lambda answer: progress.add(parts, answer)
            )
        else:
            workers = _on_this_machine(
                job, lambda: blocks(recipe, in_order(tasks, todo), None), lambda answer: progress.add(parts, answer)
            )
    seconds = time.monotonic() - began
    live.status("writing the output")
    parts.finish()
    columns = parts.columns
    made = len(index) - resumed
    return Prediction(
        document={
            "schema": SCHEMA,
            "output": str(settings.output),
            "checkpoint": job.weights.path,
            "samples": len(index),
            "rows": parts.rows,
            "columns": columns,
            "resumed_samples": resumed,
            "skipped": len(parts.skipped),
            "skipped_samples": [{"sample_id": s.sample_id, "reason": s.reason} for s in parts.skipped[:LISTED_SKIPPED]],
            "batch_size": settings.batch_size,
            "workers": workers or None,
            "seconds": seconds,
            "samples_per_s": made / seconds if todo else None,
        }
    )


class _Progress:
    """What of the prediction is done, as a line."""

    def __init__(self, live: LiveLine, *, total: int, done: int) -> None:
        self._live, self._total, self._done = live, total, done
        self._new, self._began = 0, time.monotonic()

    def add(self, parts: Parts, answer: Answer) -> None:
        """Note the results of a task, and store them."""
        parts.add(answer)
        self._done += answer.samples
        self._new += answer.samples
        rate = self._new / max(time.monotonic() - self._began, 1e-9)
        left_s = (self._total - self._done) / rate
        self._live.progress(
            f"{self._done:,} of {self._total:,} samples ({self._done / self._total:.0%}) | {rate_shown(rate)} samples/s | "
            f"{_time(left_s)} left"
        )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _listed(pipeline: Pipeline, live: LiveLine) -> Index:
    """The index of the data. Raises ConfigError if there are none."""
    lister, progress, began = pipeline.list, [""], time.monotonic()
    assert lister is not None  # of all data with an index
    live.status("listing the data")

    def show() -> None:
        if time.monotonic() - began > PATIENCE_S:
            live.waiting(f"listing {pipeline.name}" + (f", {progress[0]} so far" if progress[0] else ""))

    index = (
        call_aside(lambda: lister(lambda text: progress.__setitem__(0, text)), meanwhile=show)
        if pipeline.aside
        else lister()
    )
    if not len(index):
        raise ConfigError(f"{index.name} holds no samples: there is nothing to predict.")
    return index


def _on_this_machine(job: ModelJob, begin: Callable[[], Iterator[Block]], add: Callable[[Answer], None]) -> str:
    """Do the tasks with a model worker for each device of this machine. Return the workers in words."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    results: queue.Queue[Answer | BaseException | None] = queue.Queue(maxsize=AHEAD * len(devices))
    source = _Shared(begin())
    over = threading.Event()

    def put(item: Answer | BaseException | None) -> None:
        while not over.is_set():
            try:
                return results.put(item, timeout=LOOK_S)
            except queue.Full:
                continue

    def work(device: torch.device) -> None:
        try:
            for answer in ModelWorker(job, device).answers(source):
                put(answer)
                if over.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    for device in devices:
        threading.Thread(target=work, args=(device,), daemon=True, name=f"model-{device}").start()
    working = len(devices)
    try:
        while working:
            try:
                item = results.get(timeout=LOOK_S)  # with a timeout, so that Ctrl-C is heard
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                working -= 1
            else:
                add(item)
    finally:
        over.set()
    return workers_in_words(torch.cuda.device_count(), machine.usable_cores())


class _Shared:
    """An iterator for several threads. ``begin`` ran on the program's thread."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks, self._lock = blocks, threading.Lock()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Block:
        with self._lock:
            return next(self._blocks)
