"""The driver's side: a Trainer checks what it was given, lists the data, and hands over to a run.

Mirrors Ray Train's ``TorchTrainer`` where the two overlap.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train

from offload.errors import ConfigError
from offload.pipeline.spec import Pipeline, as_pipeline
from offload.report.live import LiveLine
from offload.report.run_dir import CHECKPOINTS, RunDirectory
from offload.report.summary import format_summary
from offload.train.cluster import connected
from offload.train.config import Adaptation, BatchSize, Checkpoints, Precision, WorkerOverrides, workers_range
from offload.train.context import TRAIN, Context
from offload.train.run import Listed, Run
from offload.train.snapshot import mend_snapshot
from offload.train.storage import Storage, check_storage, holds_checkpoints, remove_checkpoints, storage_of


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
        adaptation: how batches with a range of sizes adapt, and learning rates with them.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for what runs under ``ctx.autocast()``.
        checkpoints: when they are committed and how many stay.
        seed: of the data's order, its augmentation and the model's start.
        deterministic: every global batch holds the same samples, whatever the number of workers and the speed of
            preprocessing. Only worker counts that divide the batch are then used, samples travel in smaller slices, and a
            block that is late or lost holds up those behind it.
        hang_s: a worker that neither steps, reports nor waits for data for so long is taken to hang, and started again.
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
        adaptation: Adaptation | None = None,
        precision: Precision = "fp32",
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        deterministic: bool = False,
        hang_s: float = 1800.0,
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
        self.adaptation = adaptation or Adaptation()
        self._check_schedule()
        self.precision: Precision = precision
        self.checkpoints = checkpoints or Checkpoints()
        self.seed = seed
        self.deterministic = deterministic
        if deterministic and self.batch_size.adaptive:
            raise ConfigError(
                "deterministic=True fixes which samples each global batch holds, and batch_size has a range to choose from: pass "
                f"batch_size={self.batch_size.initial}, or leave deterministic away."
            )
        if not hang_s > 0:
            raise ConfigError(f"hang_s must be > 0 seconds, found {hang_s}.")
        self.hang_s = hang_s
        self.train_loop_config = dict(train_loop_config or {})
        self.scaling_config = scaling_config
        self.overrides = WorkerOverrides()
        self.run_config = run_config
        self.storage_path = storage_path or _given(run_config, "storage_path")

    def _check_schedule(self) -> None:
        least, most = self.workers or (1, 1)
        for at, workers in (self.adaptation.schedule or {}).items():
            when = f"at {at:.0%} of the training" if self.adaptation.by_progress else f"in epoch {at + 1}"
            if not least <= workers <= most:
                raise ConfigError(
                    f"the schedule asks for {workers} workers {when}, and workers={self.workers} allows {least} to "
                    f"{most}: pass workers=({min(least, workers)}, {max(most, workers)})."
                )

    def with_workers(
        self,
        *,
        max_workers: int | None = None,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
    ) -> Trainer:
        """The same training with other workers, whatever the script says; what is None stays as it is.

        Args:
            max_workers: at most so many. The least stays, where it is not more; with no ``workers`` given it is one.
            cpus_per_worker, gpus_per_worker: what each reserves, in place of the scaling_config's ``resources_per_worker``.

        Raises:
            ConfigError: for numbers that cannot be, or that the schedule of worker counts forbids.
        """
        changed = copy.copy(self)
        changed.overrides = WorkerOverrides(
            max_workers=max_workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
        )
        changed.workers = changed.overrides.bounds(self.workers)
        changed._check_schedule()
        return changed

    def fit(
        self,
        *,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        address: str | None = None,
        storage_path: str | None = None,
        quiet: bool = False,
    ) -> Result:
        """Run the training and return its result. Resumes the unfinished run that ``run_dir`` holds.

        Args:
            run_dir: where the run's files go; ``runs/<name of the script>`` by default.
            overwrite: whether to replace a run that the directory holds, and its checkpoints in ``storage_path``.
            address: a Ray cluster (``"auto"``, ``"host:port"``); by default ``RAY_ADDRESS``, or else one on this machine.
            storage_path: where checkpoints go, instead of what the Trainer says.
            quiet: whether to leave the live line away.

        Raises:
            ConfigError: for what is found before the first step.
            RunError: for what fails later.
        """
        directory = RunDirectory(Path(run_dir or f"runs/{Path(sys.argv[0]).stem or 'run'}"), overwrite=overwrite)
        # In the run directory the folder says what it holds; elsewhere, whose it is.
        storage_path = storage_path or self.storage_path
        name = _given(self.run_config, "name") or (directory.path.name if storage_path else CHECKPOINTS)
        storage = storage_of(
            storage_path, self.run_config.storage_filesystem if self.run_config else None, directory.path
        )
        check_storage(storage)
        outdated = holds_checkpoints(storage, name, resuming=directory.resuming, overwrite=overwrite)
        if directory.resuming and not mend_snapshot(storage, name):
            _check_nothing_was_committed(directory, storage, name)
        with LiveLine(quiet=quiet) as live:
            live.status("listing the data")
            listed = {name: self.listed(name) for name in self.datasets}
            live.status("starting Ray")
            with connected(address) as cluster:
                run = Run(self, directory, live, listed, cluster)
                # Only now, when all that can be checked is: a mistyped path must not cost the run before.
                if outdated:
                    remove_checkpoints(storage, name)
                directory.begin()
                return Result(document=run.go(name, storage), run_dir=directory.path)

    def listed(self, name: str) -> Listed:
        """A data set whose source was listed. Raises ConfigError for one that cannot be, or is smaller than a batch."""
        pipeline = self.datasets[name]
        index = pipeline.list() if pipeline.list is not None else None
        wanted = self.batch_size.initial
        if name == TRAIN and index is not None and len(index) < wanted:
            raise ConfigError(
                f"the batch size is {wanted}, but {index.name} has only {len(index)} samples. Pass batch_size={len(index)} or "
                "less, or more data."
            )
        if name == TRAIN and index is None and self.deterministic:
            raise ConfigError(
                f"deterministic=True needs training samples whose order is known; {pipeline.name} has none. Pass files, a "
                "torch data set or Parquet (offload.image_folder, from_torch, parquet), or leave deterministic away."
            )
        shuffle = pipeline.shuffle if pipeline.shuffle is not None else name == TRAIN
        return Listed(name=name, pipeline=pipeline, index=index, shuffle=shuffle)


def _check_nothing_was_committed(directory: RunDirectory, storage: Storage, name: str) -> None:
    """Raise ConfigError where an unfinished run has committed a checkpoint, and the storage holds none: to begin again would
    silently discard it."""
    step = directory.committed_step()
    if step is not None:
        raise ConfigError(
            f"the run directory {directory.path} holds an unfinished run that committed a checkpoint at step {step:,}, and its "
            f"checkpoint storage {storage.path}/{name} holds none. Pass the --storage-path that the run had "
            "(fit(storage_path=...)), or --overwrite to begin again."
        )


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
