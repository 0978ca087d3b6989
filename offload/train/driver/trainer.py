"""``offload.Trainer``, which checks its arguments, lists the data, and hands over to a run. It mirrors Ray Train's ``TorchTrainer``
where the two overlap."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offload.errors import ConfigError, argument
from offload.model.checks import (
    MOST,
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_mapping,
    check_number,
    check_path,
    check_text,
    shown,
)
from offload.pipeline.aside import call_aside
from offload.pipeline.describe.from_loader import described
from offload.pipeline.describe.pipeline import Pipeline, missing_arguments
from offload.pipeline.describe.sources import ANY_SOURCE
from offload.pipeline.preprocessing.shared_samples import Sharing
from offload.pipeline.program.main_module import refuse_again
from offload.pipeline.program.remedies import warning
from offload.pipeline.raydata.dataset_source import units_of
from offload.pipeline.raydata.units import UnitIndex
from offload.report.run_dir import CHECKPOINTS, RunDirectory, locked
from offload.report.terminal.full_screen import live_view
from offload.report.terminal.summary import format_summary
from offload.train.callback import Callback
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import (
    Storage,
    check_storage,
    holds_checkpoints,
    in_time,
    remove_checkpoints,
    storage_of,
    telling_errors,
)
from offload.train.config import Adaptation, BatchSize, Checkpoints, Cluster, Precision, WorkerOverrides, workers_range
from offload.train.driver.listed import Listed
from offload.train.driver.platform.choice import platform_of
from offload.train.driver.run import Run
from offload.train.driver.torchrun import check_alone
from offload.train.messages import TRAIN
from offload.train.worker.context import Context

if TYPE_CHECKING:  # a run needs no Ray Train
    from ray.train import RunConfig, ScalingConfig

PATIENCE_S = 3.0  # time after which a listing shows its progress
CORES_LOOK_S = 10.0

_Config = TypeVar("_Config", Adaptation, Checkpoints, Cluster)
_Listing = TypeVar("_Listing")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. ``document`` is the content of ``summary.json``."""

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
    """A training whose data is preprocessed on every CPU of the cluster.

    Args:
        train: the function of each worker; it gets a :class:`offload.Context`.
        datasets: data sets by name: results of :func:`offload.image_folder` and its siblings, a ``ray.data.Dataset``, a map-style torch
            data set, a list of samples, or a torch ``DataLoader``, whose batches ``ctx.batches`` then yields. ``"train"`` is required;
            the others are for validation.
        workers: the number of workers, or (least, most): then as many as fit while preprocessing keeps a core. None: one per GPU,
            or one without GPUs.
        batch_size: the global batch, a number or a :class:`offload.BatchSize`. None: that of the DataLoader that describes ``"train"``.
        adaptation: how batches and workers with a range adapt, and learning rates with them.
        cluster: the capacity that the run may request from the cluster, and the nodes that it uses.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for code under ``ctx.autocast()``.
        checkpoints: the schedule of checkpoints, and how many to keep.
        seed: the seed of the data's order, its augmentation and the model's initial weights.
        deterministic: whether every global batch holds the same samples for any number of workers and any speed of
            preprocessing. The run then uses only worker counts that divide the batch. Samples travel in smaller slices, and a late
            or lost block delays the blocks after it. Where samples are skipped, made by a generator or limited by ``max_tokens``, batches
            differ with the number of workers.
        hang_s: seconds without a step, a report or a wait for data after which a worker counts as hung. The run restarts it.
        setup: a function without arguments. Each preprocessing process calls it once for each data set, before its first sample: the place
            for settings of libraries, openers, codecs and connections. The workers do not call it.
        train_loop_config: the user's own settings, available as ``ctx.config``.
        callbacks: what hears of the run while it trains, such as an experiment tracker: each an :class:`offload.Callback`.
        scaling_config, run_config: Ray Train's configurations. The run uses ``use_gpu`` and ``resources_per_worker`` of the former, and
            ``storage_path``, ``storage_filesystem``, ``name`` and ``failure_config`` of the latter.
        storage_path: the folder of checkpoints (any file system); the run directory by default.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        train: Callable[[Context], None],
        *,
        datasets: Mapping[str, Any],
        batch_size: int | BatchSize | None = None,
        workers: int | tuple[int, int] | None = None,
        adaptation: Adaptation | None = None,
        cluster: Cluster | None = None,
        precision: Precision = "fp32",
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        deterministic: bool = False,
        hang_s: float = 1800.0,
        setup: Callable[[], object] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        storage_path: str | None = None,
    ) -> None:
        self.train = check_callable("train", train, sane="a function of an offload.Context")
        by_name = check_mapping(
            "datasets", datasets, sane="data sets by name, such as {'train': offload.image_folder(...)}"
        )
        for name in by_name:
            check_text("the names in datasets", name, sane='such as "train"')
        if TRAIN not in by_name:
            raise ConfigError(f'datasets must name a "train" data set, found {", ".join(by_name) or "none"}.')
        self.datasets: dict[str, Pipeline] = {name: described(name, value) for name, value in by_name.items()}
        self.batch_size = _batch_size(self.datasets[TRAIN].batch_size if batch_size is None else batch_size)
        self.workers = None if workers is None else workers_range(workers)
        self.adaptation = _config_or_default("adaptation", adaptation, Adaptation)
        self.cluster = _config_or_default("cluster", cluster, Cluster)
        self._check_schedule()
        check_choice("precision", precision, ("fp32", "bf16", "fp16"))
        self.precision: Precision = precision
        self.checkpoints = _config_or_default("checkpoints", checkpoints, Checkpoints)
        self.seed = check_count("seed", seed, least=-MOST, sane="such as 0")
        self.deterministic = check_flag("deterministic", deterministic)
        if deterministic and self.batch_size.adaptive:
            raise ConfigError(
                "deterministic=True fixes which samples each global batch holds, and batch_size has a range to choose from: pass "
                f"batch_size={self.batch_size.initial}, or drop deterministic=True."
            )
        self.hang_s = check_number("hang_s", hang_s, above=0.0, sane="seconds, such as 1800")
        self.setup = _setup(setup)
        config = {} if train_loop_config is None else train_loop_config
        self.train_loop_config = check_mapping("train_loop_config", config, sane="settings by name")
        self.callbacks = _callbacks(callbacks)
        self.scaling_config, self.run_config = scaling_config, run_config
        _check_ray_trains(scaling_config, run_config)
        self.overrides = WorkerOverrides()
        self.sharing: Sharing | None = None
        self.other_options_at: int | None = None  # see offload.train.worker.setup.WorkerSetup
        self.storage_path = _storage_path(storage_path) or _unless_default(run_config, "storage_path")

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
        """The same training with other workers than in the script; arguments that are None change nothing.

        Args:
            max_workers: the most workers. The least number stays if it is not above this; without ``workers`` it is 1.
            cpus_per_worker, gpus_per_worker: CPUs and GPUs that each worker reserves, instead of the scaling_config's
                ``resources_per_worker``.

        Raises:
            ConfigError: for invalid numbers, or numbers that the schedule of worker counts forbids.
        """
        changed = copy.copy(self)
        changed.overrides = WorkerOverrides(
            max_workers=max_workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
        )
        changed.workers = changed.overrides.bounds(self.workers)
        changed._check_schedule()
        return changed

    def with_sharing(
        self, *, arbiter: bool = False, weight: float | None = None, priority: int | None = None
    ) -> Trainer:
        """The same training, whose workers and cores the cluster's arbiter chooses; arguments that are None change nothing.

        Args:
            arbiter: whether an arbiter chooses them; False leaves it to the script's ``offload.Cluster``.
            weight, priority: see :class:`offload.Cluster`.

        Raises:
            ConfigError: for invalid values, or for a weight or priority without an arbiter.
        """
        values = {"weight": weight, "priority": priority}
        chosen: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if chosen and not (arbiter or self.cluster.arbiter):
            name, value = next(iter(chosen.items()))
            raise ConfigError(
                f"{argument(name, value)} matters only with an arbiter: add {argument('arbiter', True, python='Cluster(arbiter=True)')}, "
                "or drop it."
            )
        changed = copy.copy(self)
        changed.cluster = dataclasses.replace(self.cluster, arbiter=arbiter or self.cluster.arbiter, **chosen)
        return changed

    def fit(
        self,
        *,
        run_dir: str | Path | None = None,
        overwrite: bool = False,
        address: str | None = None,
        storage_path: str | None = None,
        quiet: bool = False,
        watch: bool = False,
    ) -> Result:
        """Run the training and return its result. Resume the unfinished run in ``run_dir``, if there is one.

        Args:
            run_dir: the folder of the run's files; ``runs/<name of the script>`` by default.
            overwrite: whether to replace a run that the directory holds, and its checkpoints in ``storage_path``.
            address: a Ray cluster (``"auto"``, ``"host:port"``), or ``"local"`` for a Ray on this machine; by default ``RAY_ADDRESS``. A
                process that is already connected to a Ray uses that one. Without any of these, processes of this machine do everything,
                and no Ray is needed, unless a data set is a ``ray.data.Dataset`` or an argument asks for what only Ray has. The run
                refuses a wrong address, or one of another Ray, before it lists or starts anything.
            storage_path: the folder of checkpoints, instead of the Trainer's.
            quiet: whether to hide the live line and notes. What the user's code prints appears all the same.
            watch: whether to show a full-screen view instead of the live line, if standard error is a terminal. The view holds
                back what this process prints until it ends.

        Raises:
            ConfigError: for problems found before the first step.
            RunError: for later failures.
        """
        refuse_again("the training of an offload.Trainer")
        view = live_view(quiet=quiet, watch=watch)
        check_alone()
        opener = platform_of(address, self)
        run_dir = f"runs/{Path(sys.argv[0]).stem or 'run'}" if run_dir is None else run_dir
        directory = RunDirectory(
            Path(check_path("run_dir", run_dir, sane="a folder, such as runs/a")),
            overwrite=check_flag("overwrite", overwrite),
        )
        storage_path = _storage_path(storage_path) or self.storage_path
        name = self._folder_name(directory.path, storage_path)

        def storage_checked() -> tuple[Storage, bool]:
            storage = self._storage(directory.path, storage_path)
            check_storage(storage)
            with telling_errors(storage):
                if directory.resuming and not RunFolder(storage, name).whole():
                    _check_nothing_was_committed(directory, storage, name)
                outdated = holds_checkpoints(storage, name, resuming=directory.resuming, overwrite=overwrite)
            return storage, outdated

        with locked(directory.path), view as live, opener.preparing(), ExitStack() as listings:
            if storage_path is not None:
                live.status(f"checking the checkpoint storage {storage_path}")
            storage, outdated = in_time(storage_checked, storage_path or str(directory.path))
            live.status("listing the data")
            listed: dict[str, Listed] = {}
            for dataset in self.datasets:
                listed[dataset] = self.listed(dataset, live.waiting)
                listings.callback(listed[dataset].close)
            live.status(opener.starting)
            metrics_port = next((c.ray_metrics_port for c in self.callbacks if c.ray_metrics_port is not None), None)
            with opener.opened(metrics_port=metrics_port) as platform:
                if platform.note:
                    live.note(platform.note)
                if not platform.forks and self.setup is None and (missing := warning()):
                    live.note(missing)
                run = Run(self, directory, live, listed, platform)
                # Only after all checks: a mistyped path must not destroy an earlier run.
                if outdated:
                    with telling_errors(storage):
                        remove_checkpoints(storage, name)
                directory.begin()
                live.follow(directory.path)
                return Result(document=run.go(name, storage), run_dir=directory.path)

    def checkpoint_folder(self, run_dir: Path) -> RunFolder:
        """The folder of the checkpoints that :meth:`fit` writes for ``run_dir``."""
        return RunFolder(self._storage(run_dir, self.storage_path), self._folder_name(run_dir, self.storage_path))

    def _storage(self, run_dir: Path, storage_path: str | None) -> Storage:
        return storage_of(storage_path, self.run_config.storage_filesystem if self.run_config else None, run_dir)

    def _folder_name(self, run_dir: Path, storage_path: str | None) -> str:
        """Inside the run directory, the folder is named after its content; elsewhere, after its run."""
        return _unless_default(self.run_config, "name") or (run_dir.name if storage_path else CHECKPOINTS)

    def listed(self, name: str, waiting: Callable[[str], None]) -> Listed:
        """List the source of a data set; call ``waiting`` with the progress if that takes long. Raises ConfigError if the data set
        cannot be listed, or is smaller than a batch."""
        pipeline = self.datasets[name]
        if pipeline.dataset is not None:
            listed = replace(_listed_dataset(name, pipeline, waiting), setup=self.setup)
        else:
            index = _aside(name, pipeline, pipeline.list, waiting)
            shuffle = _shuffled(name, pipeline)
            listed = Listed(
                name=name, pipeline=pipeline, index=index, shuffle=shuffle, setup=self.setup, sharing=self.sharing
            )
        wanted = self.batch_size.initial
        counted = listed.samples is not None and not pipeline.yields  # a generator makes more of few inputs
        if name == TRAIN and counted and (listed.samples or 0) < wanted:
            source = pipeline.name if listed.index is None else listed.index.name
            raise ConfigError(
                f"the batch size is {wanted}, but {source} has only {listed.samples} samples. Pass batch_size={listed.samples} or "
                "less, or more data."
            )
        if name == TRAIN and listed.samples is None and self.deterministic:
            raise ConfigError(
                f"deterministic=True needs training samples whose number and order are known, and those of {pipeline.name} are not. Pass "
                f"files or a torch data set ({ANY_SOURCE}), or drop deterministic=True."
            )
        return listed


def _shuffled(name: str, pipeline: Pipeline) -> bool:
    return pipeline.shuffle if pipeline.shuffle is not None else name == TRAIN


def _listed_dataset(name: str, pipeline: Pipeline, waiting: Callable[[str], None]) -> Listed:
    dataset = pipeline.dataset
    assert dataset is not None
    shuffle = _shuffled(name, pipeline)
    has_ids = pipeline.id_column is not None
    listing: UnitIndex | str = _aside(
        name, pipeline, lambda tell: units_of(dataset, shuffle=shuffle, has_ids=has_ids), waiting
    )
    if isinstance(listing, UnitIndex):
        return Listed(name=name, pipeline=pipeline, index=None, units=listing, shuffle=shuffle, notes=listing.notes)
    if pipeline.shuffle:
        raise ConfigError(
            f"from_ray(shuffle=True) needs a Dataset that offload can execute itself, and {listing}. Drop shuffle=True, or "
            "materialize() the Dataset after the steps that Ray Data has to execute."
        )
    if pipeline.on_error == "skip":
        raise ConfigError(
            f'from_ray(on_error="skip") needs a Dataset that offload can execute itself, and {listing}. Leave unusable rows out in Ray '
            'Data (Dataset.filter()), or drop on_error="skip".'
        )
    order = "" if pipeline.id_column else "; without id_column, an interrupted epoch starts again from its beginning"
    notes = (f"Ray Data executes it, in its own order: {listing}{order}",)
    return Listed(name=name, pipeline=pipeline, index=None, shuffle=False, notes=notes)


def _aside(
    name: str, pipeline: Pipeline, lister: Callable[..., _Listing] | None, waiting: Callable[[str], None]
) -> _Listing:
    """The result of ``lister``. It may run on another thread, and ``waiting`` then receives its progress."""
    assert lister is not None
    if not pipeline.aside:
        return lister()
    progress, began = [""], time.monotonic()
    holders, looked_at = "", began

    def show() -> None:
        nonlocal holders, looked_at
        now = time.monotonic()
        if pipeline.dataset is not None and now - looked_at > CORES_LOOK_S:  # Ray Data may have to execute it
            from offload.pipeline.pool.ray_state import held_in_vain

            holders, looked_at = held_in_vain(), now
        if now - began > PATIENCE_S:
            beside = f", {progress[0]} so far" if progress[0] else ""
            waits = f"; its tasks wait for CPUs, and others hold them: {holders}" if holders else ""
            waiting(f"listing {name}: {pipeline.name}{beside}{waits}")

    return call_aside(lambda: lister(lambda text: progress.__setitem__(0, text)), meanwhile=show)


def _batch_size(value: Any) -> BatchSize:
    if isinstance(value, BatchSize):
        return value
    if value is None:
        raise ConfigError(
            "the Trainer needs batch_size, the global batch, unless a DataLoader describes the training data."
        )
    return BatchSize(initial=check_count("batch_size", value, least=1, sane="such as 64, or an offload.BatchSize"))


def _setup(value: Any) -> Callable[[], object] | None:
    if value is None:
        return None
    function: Callable[[], object] = check_callable("setup", value, sane="a function without arguments")
    if (needed := missing_arguments(function)) is not None:
        raise ConfigError(f"each preprocessing process calls setup without arguments, and it {needed}.")
    return function


def _config_or_default(name: str, value: Any, kind: type[_Config]) -> _Config:
    """The user's value, or the default of its kind."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be an offload.{kind.__name__}, found {shown(value)}.")
    return value


def _callbacks(value: Any) -> tuple[Callback, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"callbacks must be a list of offload.Callback objects, found {shown(value)}. Pass callbacks=[...]."
        )
    for place, callback in enumerate(value):
        if not isinstance(callback, Callback):
            remedy = (
                "pass an object of this class"
                if isinstance(callback, type)
                else "derive its class from offload.Callback"
            )
            raise ConfigError(f"callbacks[{place}] must be an offload.Callback, found {shown(callback)}: {remedy}.")
    return tuple(value)


def _storage_path(path: Any) -> str | None:
    return (
        None if path is None else check_path("storage_path", path, sane="a folder, or a URI such as s3://bucket/runs")
    )


def _check_ray_trains(scaling_config: Any, run_config: Any) -> None:
    """Raise ConfigError for arguments that are not Ray Train's configurations, and for invalid amounts of resources."""
    for name, config, field in (
        ("scaling_config", scaling_config, "resources_per_worker"),
        ("run_config", run_config, "storage_filesystem"),
    ):
        kind = name.title().replace("_", "")
        if config is not None and (isinstance(config, type) or not hasattr(config, field)):
            raise ConfigError(f"{name} must be a ray.train.{kind}, found {shown(config)}.")
    if scaling_config is not None and scaling_config.num_workers != 1:  # 1 is also Ray Train's default
        raise ConfigError(
            f"scaling_config: num_workers={scaling_config.num_workers} is not used. Pass workers={scaling_config.num_workers} to "
            "offload.Trainer."
        )
    if isinstance(getattr(scaling_config, "label_selector", None), list):
        raise ConfigError(
            "scaling_config: label_selector holds a selector for each worker, and a run's workers may change: pass one selector for all, "
            "such as label_selector={'market-type': 'on-demand'}."
        )
    amounts = None if scaling_config is None else scaling_config.resources_per_worker
    if amounts is not None:
        name = "scaling_config: resources_per_worker"
        for resource, amount in check_mapping(name, amounts, sane="such as {'CPU': 2}").items():
            check_number(f"{name}[{resource!r}]", amount, most=MOST, sane="an amount, such as 2")


def _check_nothing_was_committed(directory: RunDirectory, storage: Storage, name: str) -> None:
    """Raise ConfigError if an unfinished run has committed a checkpoint, but the storage holds none: a new start would silently
    discard it."""
    step = directory.committed_step()
    if step is not None:
        raise ConfigError(
            f"the run directory {directory.path} holds an unfinished run that committed a checkpoint at step {step:,}, and its "
            f"checkpoint storage {storage.path}/{name} holds none. Pass the "
            f"{argument('storage_path')} of that run, or {argument('overwrite', True)} to begin again."
        )


def _unless_default(run_config: RunConfig | None, field: str) -> str | None:
    """The user's value; None if Ray filled in its default, a dated name or a folder in the home directory."""
    if run_config is None:
        return None
    value: str | None = getattr(run_config, field)
    filled: str | None = getattr(type(run_config)(), field)
    dated = (
        value is not None and field == "name" and re.fullmatch(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", value)
    )
    return None if value == filled or dated else value
