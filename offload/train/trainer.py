"""The driver's side: a Trainer checks what it was given, starts the run, watches it, and leaves a run directory.

Mirrors Ray Train's ``TorchTrainer`` where the two overlap.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train

from offload.errors import ConfigError, OffloadError, RunError, causes, find_offload_error
from offload.measure.steps import Totals
from offload.model.placement import Placement, WorkerResources, place_workers
from offload.pipeline.feed import Cores, Stream
from offload.pipeline.pool import PackedStage
from offload.pipeline.sources.base import Index
from offload.pipeline.spec import Pipeline, as_pipeline
from offload.report.html import write_report
from offload.report.live import LiveLine
from offload.report.run_dir import CHECKPOINTS, RunDirectory, to_json
from offload.report.summary import format_summary
from offload.train.cluster import Cluster, connected, on_this_node
from offload.train.config import BatchSize, BatchSplit, Checkpoints, Precision, workers_range
from offload.train.context import TRAIN, Context, WorkerSetup, first_pass, run_worker, world_totals
from offload.train.hub import Hub
from offload.train.monitor import News
from offload.train.ray_train import TorchTrainer
from offload.train.storage import Storage, check_storage, holds_checkpoints, remove_checkpoints, storage_of

POLL_S = 2.0  # each answer takes CPU from the preprocessing
INTERRUPT_S = 0.25
FEED_THREADS = 8
MOST_WORKERS = 1024
TOKEN_CPUS = 0.01  # of a worker that is to reserve nothing: Ray places nothing that asks for nothing


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to. ``document`` is the content of ``summary.json``."""

    document: dict[str, Any]
    run_dir: Path

    @property
    def status(self) -> str:
        """``finished`` or ``interrupted``."""
        return str(self.document["status"])

    @property
    def metrics(self) -> dict[str, float]:
        """The last reported value of each metric."""
        return dict(self.document["metrics"])

    @property
    def checkpoint(self) -> str | None:
        """The path of the newest checkpoint: a folder with ``model.pt``, a plain state_dict."""
        path = self.document["checkpoint"]
        return None if path is None else str(path)

    def summary(self) -> str:
        """The summary table."""
        return format_summary(self.document)


class Trainer:
    """Train on workers whose data is preprocessed on every CPU of the cluster.

    Args:
        train: the function of each worker; it gets a :class:`offload.Context`.
        datasets: by name: what :func:`offload.image_folder` and its siblings return, a ``ray.data.Dataset``, or a map-style
            torch data set. ``"train"`` is required; the others are for validation.
        workers: how many, or (least, most): the most that fit while preprocessing keeps a core. None: one per GPU, or one
            where there is none.
        batch_size: the global batch, a number or a :class:`offload.BatchSize`.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for what runs under ``ctx.autocast()``.
        checkpoints: when they are committed and how many stay.
        seed: of the data's order, its augmentation and the model's start.
        train_loop_config: the user's own settings, as ``ctx.config``.
        scaling_config, run_config: Ray Train's, passed on: ``use_gpu`` and ``resources_per_worker`` of the one;
            ``storage_path``, ``storage_filesystem``, ``name`` and ``failure_config`` of the other.
        storage_path: where checkpoints go (any file system); the run directory by default.

    Raises:
        ConfigError: for what is wrong with the arguments.
    """

    def __init__(
        self,
        train: Callable[[Context], None],
        *,
        datasets: Mapping[str, Any],
        batch_size: int | BatchSize,
        workers: int | tuple[int, int] | None = None,
        precision: Precision = "fp32",
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        storage_path: str | None = None,
    ) -> None:
        if not callable(train):
            raise ConfigError(f"train must be a function of a Context, found {type(train).__name__}.")
        if TRAIN not in datasets:
            raise ConfigError(f'datasets must name a "train" data set, found {", ".join(datasets) or "none"}.')
        if precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f'precision must be "fp32", "bf16" or "fp16", found {precision!r}.')
        self.train = train
        self.datasets: dict[str, Pipeline] = {name: as_pipeline(name, value) for name, value in datasets.items()}
        self.batch_size = batch_size if isinstance(batch_size, BatchSize) else BatchSize(initial=batch_size)
        self.workers = None if workers is None else workers_range(workers)
        self.precision: Precision = precision
        self.checkpoints = checkpoints or Checkpoints()
        self.seed = seed
        self.train_loop_config = dict(train_loop_config or {})
        self.scaling_config = scaling_config
        self.run_config = run_config
        self.storage_path = storage_path or _given(run_config, "storage_path")

    def fit(
        self,
        *,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        address: str | None = None,
        quiet: bool = False,
    ) -> Result:
        """Run the training and return its result. Resumes the unfinished run that ``run_dir`` holds.

        Args:
            run_dir: where the run's files go; ``runs/<name of the script>`` by default.
            overwrite: whether to replace a run that the directory holds, and its checkpoints in ``storage_path``.
            address: a Ray cluster (``"auto"``, ``"host:port"``); by default ``RAY_ADDRESS``, or else one on this machine.
            quiet: whether to leave the live line away.

        Raises:
            ConfigError: for what is found before the first step.
            RunError: for what fails later.
        """
        directory = RunDirectory(Path(run_dir or f"runs/{Path(sys.argv[0]).stem or 'run'}"), overwrite=overwrite)
        # In the run directory the folder says what it holds; elsewhere, whose it is.
        name = _given(self.run_config, "name") or (directory.path.name if self.storage_path else CHECKPOINTS)
        storage = storage_of(
            self.storage_path, self.run_config.storage_filesystem if self.run_config else None, directory.path
        )
        check_storage(storage)
        outdated = holds_checkpoints(storage, name, resuming=directory.resuming, overwrite=overwrite)
        with LiveLine(quiet=quiet) as live:
            live.status("listing the data")
            listed = {name: self._listed(name, pipeline) for name, pipeline in self.datasets.items()}
            live.status("starting Ray")
            with connected(address) as cluster:
                run = _Run(self, directory, live, listed, cluster)
                # Only now, when all that can be checked is: a mistyped path must not cost the run before.
                if outdated:
                    remove_checkpoints(storage, name)
                directory.begin()
                return run.go(name, storage)

    def _listed(self, name: str, pipeline: Pipeline) -> _Listed:
        index = pipeline.list() if pipeline.list is not None else None
        wanted = self.batch_size.initial
        if name == TRAIN and index is not None and len(index) < wanted:
            raise ConfigError(
                f"the batch size is {wanted}, but {index.name} has only {len(index)} samples. Pass batch_size={len(index)} or "
                "less, or more data."
            )
        shuffle = pipeline.shuffle if pipeline.shuffle is not None else name == TRAIN
        return _Listed(pipeline=pipeline, index=index, shuffle=shuffle)


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """A data set whose source was listed (``index`` is None for a ``ray.data.Dataset``)."""

    pipeline: Pipeline
    index: Index | None
    shuffle: bool

    def stream(self, seed: int) -> Stream:
        """The data set as the feed gets it. Puts what its tasks run into the object store."""
        return Stream(
            stage=PackedStage.of(self.pipeline.stage(self.index, seed=seed)),
            table=self.index.table if self.index is not None else None,
            groups=self.index.groups if self.index is not None else None,
            dataset=self.pipeline.dataset,
            id_column=self.pipeline.id_column,
            shuffle=self.shuffle,
            seed=seed,
        )


class _Run:
    """One call of fit(): from a connected cluster to a result."""

    def __init__(
        self, trainer: Trainer, directory: RunDirectory, live: LiveLine, listed: dict[str, _Listed], cluster: Cluster
    ) -> None:
        self.trainer, self.directory, self.live, self.listed, self.cluster = trainer, directory, live, listed, cluster
        self.began = time.monotonic()
        self.worker = self._worker_resources()
        wanted = trainer.workers or ((1, MOST_WORKERS) if self.worker.gpus else (1, 1))
        self.placement: Placement = place_workers(cluster.nodes, self.worker, wanted)
        self.split: BatchSplit = trainer.batch_size.split(self.placement.workers)
        self.news = News(cursor=0, totals={}, epoch=0, step=0, samples=0, metrics={}, events=())
        self.skipped: set[tuple[str, int]] = set()
        self.first_batch_s: float | None = None
        self.streams = self._packed()

    def go(self, name: str, storage: Storage) -> Result:
        by_node = zip(self.cluster.nodes, self.placement.cores_by_node, strict=True)
        cores = Cores(
            nodes=tuple(node.node_id for node, cores in by_node for _ in range(cores)),
            task_cpus=self.placement.task_cpus,
            store_bytes=self.cluster.store_bytes,
        )
        self._announce()
        threads = FEED_THREADS + 4 * self.placement.workers
        hub = on_this_node(ray.remote(Hub), max_concurrency=threads, enable_task_events=False).remote(
            self.streams, cores
        )
        if not self.directory.resuming:
            hub.start_ahead.remote(first_pass(self.split), TRAIN)
        torch_trainer = self._torch_trainer(self._setup(hub), name, storage)
        outcome: list[Any] = []
        fitting = threading.Thread(target=_fit, args=(torch_trainer, outcome), daemon=True)
        try:
            with _interrupts() as pressed:
                fitting.start()
                self._watch(fitting, hub, pressed)
            self._read(hub)
        except ray.exceptions.RayError as error:
            # The run's actor died (its host ran out of memory, say). What fit() raised tells more, if it did.
            self._failed(outcome[0] if outcome and isinstance(outcome[0], BaseException) else error)
        finally:
            ray.kill(hub)  # and with it the pool: its cores are free again at once
        result = outcome[0] if outcome else None
        stopped = pressed[0] > 0
        if isinstance(result, BaseException):
            self._failed(result)
        return self._finished("interrupted" if stopped else "finished", result)

    def _packed(self) -> Any:
        """The data sets in the object store. Raises ConfigError for one that cannot travel."""
        streams: dict[str, Stream] = {}
        for name, listed in self.listed.items():
            try:
                streams[name] = listed.stream(self.trainer.seed)
            except Exception as error:
                raise ConfigError(
                    f"datasets[{name!r}] cannot be sent to the preprocessing processes: {type(error).__name__}: {error}. What "
                    "is open (a file, a connection, a lock) does not travel: open it in __getitem__, or pass the transform "
                    "as a class, which is constructed where it runs."
                ) from None
        return ray.put(streams)

    def _worker_resources(self) -> WorkerResources:
        config = self.trainer.scaling_config
        has_gpus = any(n.gpus >= 1 for n in self.cluster.nodes)
        use_gpu = bool(config.use_gpu) if config is not None else has_gpus
        given: Any = config.resources_per_worker if config is not None else None
        asked: dict[str, float] = dict(given or {})
        others = {name: float(amount) for name, amount in asked.items() if name not in ("CPU", "GPU", "memory")}
        cpus, gpus = float(asked.get("CPU", 1)), float(asked.get("GPU", 1 if use_gpu else 0))
        if not (cpus or gpus or any(others.values())):
            cpus = TOKEN_CPUS
        return WorkerResources(cpus=cpus, gpus=gpus, others=others)

    def _setup(self, hub: Any) -> WorkerSetup:
        trainer = self.trainer
        return WorkerSetup(
            hub=hub,
            split=self.split,
            on_device={name: p.on_device for name, p in trainer.datasets.items()},
            sized={name: None if s.index is None else len(s.index) for name, s in self.listed.items()},
            resumable={
                name: s.index is not None or s.pipeline.id_column is not None for name, s in self.listed.items()
            },
            checkpoints=trainer.checkpoints,
            precision=trainer.precision,
            seed=trainer.seed,
            config=trainer.train_loop_config,
        )

    def _torch_trainer(self, setup: WorkerSetup, name: str, storage: Storage) -> TorchTrainer:
        given = self.trainer.scaling_config or ray.train.ScalingConfig()
        per_worker: Any = given.resources_per_worker
        resources: dict[str, float] = {**(per_worker or {}), "CPU": self.worker.cpus}
        if self.worker.gpus:
            resources["GPU"] = self.worker.gpus
        scaling = dataclasses.replace(
            given, num_workers=self.placement.workers, use_gpu=self.worker.gpus > 0, resources_per_worker=resources
        )
        kept = self.trainer.checkpoints
        run_config = dataclasses.replace(  # type: ignore[call-arg]  # typed as version 1's RunConfig
            self.trainer.run_config or ray.train.RunConfig(),
            name=name,
            storage_path=storage.path,
            storage_filesystem=storage.filesystem,
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=kept.keep, checkpoint_score_attribute=kept.best, checkpoint_score_order=kept.mode
            ),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        )
        user_function = self.trainer.train
        return TorchTrainer(
            lambda: run_worker(user_function, setup),
            beside_ray_data=any(each.index is None for each in self.listed.values()),
            scaling_config=scaling,
            run_config=run_config,
        )

    def _announce(self) -> None:
        verb = "run_resumed" if self.directory.resuming else "run_started"
        self.directory.event(
            verb,
            workers=self.placement.workers,
            preprocessing_cores=self.placement.cores,
            local_batch_size=self.split.local_batch_size,
            accum_steps=self.split.accum_steps,
            global_batch_size=self.split.global_batch_size,
            nodes=[dataclasses.asdict(n) for n in self.cluster.nodes],
            datasets={
                n: {"source": s.pipeline.name, "samples": None if s.index is None else len(s.index)}
                for n, s in self.listed.items()
            },
        )
        if self.directory.resuming:
            self.live.note(f"resuming the run in {self.directory.path}")
        for name, listed in self.listed.items():
            size = f"{len(listed.index):,} samples" if listed.index is not None else "of unknown size"
            self.live.note(f"{name}: {listed.pipeline.name}, {size}")
            for text in listed.pipeline.notes:
                self.live.note(f"{name}: {text}")
        if self.split.global_batch_size != self.trainer.batch_size.initial:
            self.live.note(
                f"the global batch is {self.split.global_batch_size}, not {self.trainer.batch_size.initial}: "
                f"{self.split.workers} workers take local batches of {self.split.local_batch_size}"
            )
        self.live.status(
            f"starting {self.placement.workers} worker(s); {self.placement.cores} core(s) preprocess on {len(self.cluster.nodes)} node(s)"
        )

    def _watch(self, fitting: threading.Thread, hub: Any, pressed: list[int]) -> None:
        told = False
        read_at = time.monotonic()
        while fitting.is_alive():
            fitting.join(timeout=INTERRUPT_S)
            if pressed[0] and not told:
                told = True
                self.live.note("stopping: a checkpoint is committed first (Ctrl-C again ends at once)")
                hub.stop.remote()
                if not self.news.totals:
                    return  # nothing is trained yet, nothing to commit
            if pressed[0] > 1:
                self._finished("interrupted", None)
                raise KeyboardInterrupt
            if time.monotonic() - read_at >= POLL_S:
                self._read(hub)
                read_at = time.monotonic()

    def _read(self, hub: Any) -> None:
        before = self.news
        self.news = ray.get(hub.read.remote(before.cursor))
        for event in self.news.events:
            self._take_event(dict(event))
        if world_totals(self.news.totals).steps > world_totals(before.totals).steps:
            values = self._interval(before)
            self.directory.metrics(values)
            self.live.update(values)

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "first_batch" and self.first_batch_s is None:
            self.first_batch_s = event["seconds"]
        if kind == "print":
            self.live.printed(event["text"], rank=event["rank"])
            return
        if kind == "skipped":
            sample = (event["dataset"], event["sample_id"])
            if sample not in self.skipped:
                self.skipped.add(sample)
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
            "device": "GPU" if self.worker.gpus else "worker",
            **{k: v for k, v in dataclasses.asdict(since).items() if k.endswith("_s")},
            "workers": workers,
            "local_batch_size": self.split.local_batch_size,
            "accum_steps": self.split.accum_steps,
            "metrics": self.news.metrics,
        }

    def _failed(self, error: BaseException) -> None:
        self.directory.write("error.txt", _whole_story(error))
        text, kind = _describe_failure(error, self.directory.path)
        self._finished("failed", None, error=text)
        raise kind(text) from None

    def _finished(self, status: str, result: Any, error: str | None = None) -> Result:
        totals = world_totals(self.news.totals)
        checkpoint = getattr(result, "checkpoint", None)
        document = {
            "schema": "offload.summary/1",
            "status": status,
            "error": error,
            "samples": self.news.samples,
            "steps": self.news.step,
            "step_count_all_ranks": max(totals.steps, 1),
            "epochs": self.news.epoch + (1 if self.news.totals else 0),
            "wall_s": time.monotonic() - self.began,
            "samples_per_s": _per_second(totals, self.placement.workers),
            **{k: v for k, v in dataclasses.asdict(totals).items() if k.endswith("_s")},
            "stall": totals.stall,
            "first_batch_s": self.first_batch_s,
            "workers": self.placement.workers,
            "local_batch_size": self.split.local_batch_size,
            "accum_steps": self.split.accum_steps,
            "global_batch_size": self.split.global_batch_size,
            "preprocessing_cores": self.placement.cores,
            "device": "GPU" if self.worker.gpus else "CPU worker",
            "input": self.news.rates,
            "skipped": len(self.skipped),
            "metrics": self.news.metrics,
            "checkpoint": _address_of(checkpoint) if checkpoint is not None else None,
            "run_dir": str(self.directory.path),
            "versions": {"python": sys.version.split()[0], "ray": ray.__version__},
        }
        self.directory.event(
            "run_finished", status=status, error=error, samples=self.news.samples, steps=self.news.step
        )
        self.directory.summary(document)
        write_report(self.directory)
        return Result(document=document, run_dir=self.directory.path)


def _given(run_config: ray.train.RunConfig | None, field: str) -> str | None:
    """What the user set; Ray fills in a dated name and a folder in the home directory where they set nothing."""
    if run_config is None:
        return None
    value: str | None = getattr(run_config, field)
    filled: str | None = getattr(ray.train.RunConfig(), field)
    dated = (
        value is not None and field == "name" and re.fullmatch(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", value)
    )
    return None if value == filled or dated else value


def _address_of(checkpoint: Any) -> str:
    """The path of a checkpoint with its scheme, where it is not local."""
    kind = str(checkpoint.filesystem.type_name)
    return f"{kind}://{checkpoint.path}" if kind in ("s3", "gcs", "abfs", "hdfs") else str(checkpoint.path)


def _per_second(totals: Totals, workers: int) -> float:
    """All ranks' samples over the time that a rank spent stepping."""
    return totals.samples * workers / totals.step_time_s if totals.step_time_s > 0 else 0.0


def _fit(trainer: TorchTrainer, outcome: list[Any]) -> None:
    try:
        outcome.append(trainer.fit())
    except BaseException as error:
        outcome.append(error)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Counts Ctrl-C and SIGTERM instead of dying of them; elsewhere than on the main thread it counts nothing."""
    pressed = [0]

    def count(signum: int, frame: object) -> None:
        pressed[0] += 1

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    old = {s: signal.signal(s, count) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pressed
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


def _describe_failure(error: BaseException, run_dir: Path) -> tuple[str, type[OffloadError]]:
    found = find_offload_error(error)
    if found is not None:
        return str(found), type(found)
    inner = [e for e in causes(error) if not type(e).__module__.startswith("ray.")]
    cause = inner[-1] if inner else error
    base = getattr(cause, "_base_exc", cause)
    lines = str(base).strip().splitlines()
    text = f"{type(base).__name__}: {lines[-1] if lines else 'no message'}"
    return f"training failed: {text}. The whole traceback is in {run_dir / 'error.txt'}.", RunError


def _whole_story(error: BaseException) -> str:
    parts = ["".join(traceback.format_exception(error))]
    parts += [str(e) for e in causes(error) if hasattr(e, "_base_exc")]
    return "\n\n".join(parts) + "\n\n" + to_json({"type": type(error).__name__})
