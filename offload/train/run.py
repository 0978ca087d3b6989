"""One run, from a cluster to a result: places the workers, starts them and what feeds them, watches, and ends in order.

Where it stops: arguments were checked by :mod:`offload.train.trainer`; what is written down is
:mod:`offload.train.journal`'s.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import ray
import ray.train

from offload import preload
from offload.errors import ConfigError, OffloadError, RunError, causes, find_offload_error
from offload.interrupts import COMMITTED_END_S, Interrupts, handled
from offload.model.placement import NodeResources, Placement, WorkerResources, nodes_for, one_gpu_type, within_memory
from offload.pipeline.aside import Aside
from offload.pipeline.feed import Cores, Stream
from offload.pipeline.pool import PackedStage
from offload.pipeline.sources.base import Index
from offload.pipeline.spec import Pipeline
from offload.prices import built_in
from offload.report.live import LiveLine
from offload.report.run_dir import RunDirectory, to_json
from offload.train.adaptation import Adaptor
from offload.train.cluster import (
    GPU_TYPE,
    INSTANCE_TYPE,
    Cluster,
    ControlLostError,
    alive_nodes,
    nodes_to_end_with,
    on_this_node,
    ping,
)
from offload.train.config import BatchSplit
from offload.train.context import TRAIN, WorkerSetup, first_pass, run_worker
from offload.train.demand import Bundle, Demand, bundle_of
from offload.train.draining import draining_nodes
from offload.train.hub import Hub
from offload.train.journal import Journal
from offload.train.monitor import Orders
from offload.train.nodes import Nodes
from offload.train.notices import Watchers
from offload.train.ray_nodes import free_resources
from offload.train.ray_processes import ControlWatch
from offload.train.ray_train import TorchTrainer, is_broken_connection
from offload.train.resizing import Workers, place_most, task_cpus
from offload.train.storage import Marker, Storage
from offload.train.waiting import StartWatch, wait_for_nodes, wait_for_room

if TYPE_CHECKING:
    from offload.train.trainer import Trainer

POLL_S = 2.0  # each answer takes CPU from the preprocessing
POLL_BUSY_S = 0.5  # while the number of workers changes
INTERRUPT_S = 0.25
LOST_END_S = 8.0  # for Ray's shutdown without its control process, which takes 7 s
FITTING_END_S = 3.0  # for the thread that waits for Ray Train, once its controller has ended
PING_S = 30.0  # for a node to answer, or for Ray to find it gone
FEED_THREADS = 8
MOST_WORKERS = 1024
MOST_RANKS_AT_ONCE = 64  # that the run's actor answers at the same time
TOKEN_CPUS = 0.01  # of a worker that is to reserve nothing: Ray places nothing that asks for nothing


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A data set whose source was listed (``index`` is None for a ``ray.data.Dataset``)."""

    name: str
    pipeline: Pipeline
    index: Index | None
    shuffle: bool

    def stream(self, seed: int) -> Stream:
        """The data set as the feed gets it. Puts what its tasks run into the object store."""
        return Stream(
            stage=PackedStage.of(self.pipeline.stage(self.index, seed=seed, dataset=self.name)),
            table=self.index.table if self.index is not None else None,
            groups=self.index.groups if self.index is not None else None,
            dataset=self.pipeline.dataset,
            id_column=self.pipeline.id_column,
            shuffle=self.shuffle,
            seed=seed,
        )


class Run:
    """One call of fit().

    Raises ConfigError where the workers do not fit into the cluster, or a data set cannot travel.
    """

    def __init__(
        self, trainer: Trainer, directory: RunDirectory, live: LiveLine, listed: dict[str, Listed], cluster: Cluster
    ) -> None:
        self.trainer, self.directory, self.live, self.listed, self.cluster = trainer, directory, live, listed, cluster
        self.worker = self._worker_resources()
        if trainer.adaptation.preprocessing_cores and any(each.index is None for each in listed.values()):
            raise ConfigError(
                "preprocessing_cores asks the cluster for cores, and so does Ray Data where a ray.data.Dataset is a source: leave "
                "preprocessing_cores away, or read the data with one of offload's own sources (image_folder, parquet, webdataset, "
                "from_torch)."
            )
        if trainer.adaptation.by_progress and listed[TRAIN].index is None:
            raise ConfigError(
                f"the schedule goes by shares of the training, and how many samples {TRAIN!r} has is not known: pass epochs, "
                "such as schedule={0: 2, 30: 4}."
            )
        wanted = trainer.workers or ((1, MOST_WORKERS) if self.worker.gpus else (1, 1))
        scheduled = trainer.adaptation.scheduled(0, 0.0)
        first = wanted if scheduled is None else (wanted[0], scheduled)
        possible = [count for count in range(first[0], first[1] + 1) if self._allowed(count)]
        if trainer.adaptation.autoscale_workers and possible:
            self.cluster = wait_for_nodes(
                cluster,
                lambda nodes: self._placed(nodes, first),
                lambda nodes: self._missing(nodes, possible[0]),
                deadline_s=trainer.adaptation.nodes_deadline_s,
                status=live.status,
            )
        elif cluster.held and possible:
            self.cluster = wait_for_room(cluster, lambda nodes: self._placed(nodes, first), status=live.status)
        self.placement = self._placed(self.cluster.nodes, first)
        # Without a range the workers are as many as fit at the start, and fewer only if nodes are lost.
        self.bounds = wanted if trainer.workers is not None else (1, self.placement.workers)
        self.split: BatchSplit = trainer.batch_size.split(self.placement.workers)
        self.journal = Journal(directory, live, self.placement, self.split, on_gpus=self.worker.gpus > 0)
        self.prices = self._prices()
        self._failures, self._asked_at = 0, 0.0
        self._pings: list[Any] = []
        self.streams = self._packed()
        self.job_env: dict[str, Any] = dict(ray.get_runtime_context().runtime_env)

    def go(self, name: str, storage: Storage) -> dict[str, Any]:
        """Train, with checkpoints at ``name`` of the storage; returns the content of ``summary.json``.

        Raises RunError (or what else of offload's errors is behind it) for a run that failed.
        """
        adaptation = self.trainer.adaptation
        nodes = Nodes(
            self.cluster.nodes,
            self.worker,
            self._most_workers,
            mixed=adaptation.mixed_gpus,
            asked=self._gpu_type_asked,
            tell=self.journal.tell,
            enough=self._enough,
        )
        by_node = zip(nodes.usable, self.placement.cores_by_node, strict=True)
        core_cpus = task_cpus(nodes.usable, self.worker, self.bounds)
        cores = Cores(
            nodes=tuple(node.node_id for node, cores in by_node for _ in range(cores)),
            task_cpus=core_cpus,
            stores={node.node_id: node.store_bytes for node in self.cluster.nodes},
            runtime_env=preload.runtime_env(self.job_env),
        )
        self._announce()
        if held := self.cluster.held_of_all():
            self.journal.tell("others_hold", held=held)
        threads = FEED_THREADS + 4 * min(self.bounds[1], MOST_RANKS_AT_ONCE)
        hub = on_this_node(ray.remote(Hub), max_concurrency=threads, enable_task_events=False).remote(
            self.streams, cores, self.placement.workers, len(self.cluster.nodes)
        )
        if not self.directory.resuming:
            hub.start_ahead.remote(first_pass(self.split, deterministic=self.trainer.deterministic), TRAIN)
        marker = Marker.of(storage, name)
        torch_trainer = self._torch_trainer(hub, name, storage, marker)
        workers = Workers(
            nodes,
            self.worker,
            self.bounds,
            self.placement,
            hub=hub,
            demand=Demand(),
            tell=self.journal.tell,
            chosen=self.trainer.workers is not None,
            grows=adaptation.autoscale_workers,
            allowed=self._allowed,
            usd_per_hour=self.prices,
            core_cpus=core_cpus,
            cores=adaptation.preprocessing_cores,
        )
        watchers = Watchers(hub, self.journal.tell)
        outcome: list[Any] = []
        fitting = threading.Thread(target=_fit, args=(torch_trainer, outcome), daemon=True)
        control = ControlWatch()
        try:
            if marker is not None:
                marker.put()
            with handled() as interrupts:
                with interrupts.shielded(patient=True):
                    fitting.start()
                    stopped = self._watch(fitting, hub, interrupts, control, workers, watchers)
                if interrupts.presses:
                    interrupts.end_within(COMMITTED_END_S)
            self._read(hub)
            result = outcome[0] if outcome else None
        except ray.exceptions.RayError as error:
            if (lost := control.lost()) is not None:
                self._lost(lost)
            # The run's actor died (its host ran out of memory, say). What fit() raised tells more, if it did.
            self._failed(outcome[0] if outcome and isinstance(outcome[0], BaseException) else error)
        finally:
            if marker is not None:
                marker.remove()
            if control.lost() is None:  # otherwise nobody would answer
                watchers.close()
                torch_trainer.end()
                ray.kill(hub)  # and with it the pool: its cores are free again at once
                workers.close()
                fitting.join(timeout=FITTING_END_S)
        if isinstance(result, BaseException):
            if (lost := control.lost()) is not None:
                self._lost(lost)
            self._failed(result)
        checkpoint = getattr(result, "checkpoint", None)
        where = None if checkpoint is None else _address_of(checkpoint)
        return self.journal.finish("interrupted" if stopped else "finished", where)

    def worker_main(self, user_function: Any, setup: WorkerSetup) -> Callable[[], None]:
        """What each worker runs."""
        return lambda: run_worker(user_function, setup)

    @property
    def _gpu_type_asked(self) -> str | None:
        config: Any = self.trainer.scaling_config
        return None if config is None else getattr(config, "accelerator_type", None)

    @property
    def _most_workers(self) -> int:
        return (self.trainer.workers or (1, MOST_WORKERS))[1]

    def _usable(self, nodes: Sequence[NodeResources]) -> tuple[NodeResources, ...]:
        """The nodes as this run sees them: with GPUs of one kind, and processes that their memory holds. Raises ConfigError where
        the kind asked for is not there."""
        asked = self._gpu_type_asked
        kinds = sorted({node.gpu_type or "unknown" for node in nodes if node.gpus})
        if asked is not None and asked not in kinds:
            raise ConfigError(
                f"scaling_config asks for accelerator_type={asked!r}, and the cluster's GPUs are {', '.join(kinds) or 'none'}: "
                "pass one of these, or add nodes with that one."
            )
        if not self.trainer.adaptation.mixed_gpus:
            nodes = nodes_for(nodes, asked or one_gpu_type(nodes, self.worker, self._most_workers))
        return within_memory(nodes)

    def _placed(self, nodes: Sequence[NodeResources], counts: tuple[int, int]) -> Placement:
        return place_most(self._usable(nodes), self.worker, counts, self._allowed)

    def _enough(self, nodes: Sequence[NodeResources]) -> bool:
        """Whether training can go on with these nodes alone."""
        try:
            self._placed(nodes, self.bounds)
        except ConfigError:
            return False
        return True

    def _missing(self, nodes: Sequence[NodeResources], workers: int) -> dict[Bundle, int]:
        """What so many workers, and the least number of cores beside them, need beyond these nodes."""
        kind = {} if self._gpu_type_asked is None else {f"{GPU_TYPE}{self._gpu_type_asked}": 0.001}
        each = {"CPU": self.worker.cpus, "GPU": self.worker.gpus, **self.worker.others, **kind}
        least = (self.trainer.adaptation.preprocessing_cores or (1, 1))[0]
        there = [(n, p) for n in range(1, workers + 1) if (p := self._fitting(nodes, n)) is not None]
        count, cores = (there[-1][0], there[-1][1].cores) if there else (0, 0)
        missing = {bundle_of(each): workers - count, bundle_of({"CPU": 1.0}): max(least - cores, 0)}
        return {bundle: number for bundle, number in missing.items() if number}

    def _fitting(self, nodes: Sequence[NodeResources], workers: int) -> Placement | None:
        try:
            return self._placed(nodes, (workers, workers))
        except ConfigError:
            return None

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
        config, overrides = self.trainer.scaling_config, self.trainer.overrides
        has_gpus = any(n.gpus >= 1 for n in self.cluster.whole)
        use_gpu = bool(config.use_gpu) if config is not None else has_gpus
        given: Any = config.resources_per_worker if config is not None else None
        asked: dict[str, float] = dict(given or {})
        others = {name: float(amount) for name, amount in asked.items() if name not in ("CPU", "GPU", "memory")}
        cpus = float(asked.get("CPU", 1) if overrides.cpus_per_worker is None else overrides.cpus_per_worker)
        gpus = float(
            asked.get("GPU", 1 if use_gpu else 0) if overrides.gpus_per_worker is None else overrides.gpus_per_worker
        )
        if not (cpus or gpus or any(others.values())):
            cpus = TOKEN_CPUS
        return WorkerResources(cpus=cpus, gpus=gpus, others=others)

    def _setup(self, hub: Any, marker: Marker | None) -> WorkerSetup:
        trainer = self.trainer
        return WorkerSetup(
            hub=hub,
            split=self.split,
            batch_size=trainer.batch_size,
            adaptation=trainer.adaptation,
            on_device={name: p.on_device for name, p in trainer.datasets.items()},
            sized={name: None if s.index is None else len(s.index) for name, s in self.listed.items()},
            resumable={
                name: s.index is not None or s.pipeline.id_column is not None for name, s in self.listed.items()
            },
            checkpoints=trainer.checkpoints,
            precision=trainer.precision,
            seed=trainer.seed,
            hang_s=trainer.hang_s,
            deterministic=trainer.deterministic,
            config=trainer.train_loop_config,
            marker=marker,
        )

    def _torch_trainer(self, hub: Any, name: str, storage: Storage, marker: Marker | None) -> TorchTrainer:
        given = self.trainer.scaling_config or ray.train.ScalingConfig()
        per_worker: Any = given.resources_per_worker
        resources: dict[str, float] = {**(per_worker or {}), "CPU": self.worker.cpus, "GPU": self.worker.gpus}
        if not self.worker.gpus:
            del resources["GPU"]
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
            worker_runtime_env=self._worker_env(),
        )
        return TorchTrainer(
            self.worker_main(self.trainer.train, self._setup(hub, marker)),
            monitor=hub,
            controller_env=preload.runtime_env(self.job_env),
            beside_ray_data=any(each.index is None for each in self.listed.values()),
            scaling_config=scaling,
            run_config=run_config,
        )

    def _prices(self) -> dict[str, float]:
        """Dollars per hour by instance type. Raises ConfigError where one is wanted that is not known."""
        adaptation = self.trainer.adaptation
        prices = {name: node.usd_per_hour for name, node in built_in().nodes.items()}
        prices |= dict(adaptation.usd_per_hour or {})
        for node in self.cluster.nodes if adaptation.objective == "cost" else ():
            if node.instance_type not in prices:
                raise ConfigError(
                    f'objective="cost" needs the price of every node, and node {node.name} '
                    + (
                        f"has no label {INSTANCE_TYPE}: start Ray there with --labels {INSTANCE_TYPE}=ml.g5.xlarge, say."
                        if node.instance_type is None
                        else f"is of type {node.instance_type}, which the catalog lacks: pass "
                        f"usd_per_hour={{{node.instance_type!r}: ...}} to offload.Adaptation."
                    )
                )
        return prices

    def _allowed(self, workers: int) -> bool:
        """Whether so many may train."""
        sizes = self.trainer.batch_size
        return not self.trainer.deterministic or sizes.split(workers).global_batch_size == sizes.initial

    def _worker_env(self) -> dict[str, Any]:
        config: Any = self.trainer.run_config
        given = dict(config.worker_runtime_env or {}) if config is not None else {}
        return {**preload.runtime_env({**self.job_env, **given}), **given}

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

    def _adaptor(self, hub: Any, workers: Workers) -> Adaptor | None:
        """What adapts batches and workers, where either may change."""
        least, most = self.bounds
        fixed = not self.trainer.batch_size.adaptive and (self.trainer.workers is None or least == most)
        adaptation = self.trainer.adaptation
        if fixed and adaptation.preprocessing_cores is None and not adaptation.schedule:
            return None
        return Adaptor(
            self.trainer.batch_size,
            self.trainer.adaptation,
            workers=workers,
            order=lambda orders: hub.order.remote(orders),
            tell=self.journal.tell,
        )

    def _watch(
        self,
        fitting: threading.Thread,
        hub: Any,
        interrupts: Interrupts,
        control: ControlWatch,
        workers: Workers,
        watchers: Watchers,
    ) -> bool:
        """Follow the run to its end. Returns whether it was stopped before that.

        Raises KeyboardInterrupt where it is to end at once, and ControlLostError where Ray has ended.
        """
        adaptor = self._adaptor(hub, workers)
        start = StartWatch(self.worker, self.journal.tell, free=free_resources, now_s=time.monotonic())
        ends_with = nodes_to_end_with()
        told = leaving = False
        read_at = time.monotonic()

        def look() -> None:
            """Read the news, and follow the cluster. Ray's answers are waited for here."""
            nonlocal leaving
            self._read(hub)
            if not self._answered(read_at):
                return
            if not told:
                # In this order: a drained node that ends in between would look like one that has just joined.
                draining, alive = draining_nodes(), self.cluster.left(alive_nodes())
                watchers.look([node for node in alive if node.node_id in workers.in_use], draining)
                leaving = not ends_with.isdisjoint(draining)
                if leaving:
                    self.journal.tell("run_leaving", nodes=[n.name for n in alive if n.node_id in ends_with & draining])
                    return
                workers.look(self.journal.news, alive, draining)
                start.look(self.journal.news, wanted=workers.wanted, now_s=read_at)
            hub.looked.remote(workers.wanted, self.journal.news.failures)
            if adaptor is not None and not told:
                adaptor.look(self.journal.news, read_at)

        with Aside() as aside:
            while fitting.is_alive():
                fitting.join(timeout=INTERRUPT_S)
                if (lost := control.lost()) is not None:
                    self._lost(lost)
                if interrupts.presses > 1:
                    aside.wait(INTERRUPT_S)
                    self.journal.finish("interrupted", None)
                    raise KeyboardInterrupt
                if (interrupts.presses or leaving) and not told:
                    told = True
                    if interrupts.presses:
                        self.live.note("stopping: a checkpoint is committed first (Ctrl-C again ends at once)")
                    last = adaptor.orders if adaptor is not None else Orders()
                    hub.order.remote(dataclasses.replace(last, stop=True))
                if aside.busy:
                    continue
                aside.result()
                if told and self._nothing_to_commit(workers):
                    return True
                if time.monotonic() - read_at >= (POLL_BUSY_S if workers.busy else POLL_S):
                    read_at = time.monotonic()
                    aside.start(look)
            while aside.busy and control.lost() is None:
                aside.wait(INTERRUPT_S)
            aside.result()
        return told

    def _nothing_to_commit(self, workers: Workers) -> bool:
        """Whether nothing is trained yet, or no worker is there to commit it and none is about to be."""
        news = self.journal.news
        return not (news.totals or news.past) or (not workers.wanted and not news.running)

    def _answered(self, now_s: float) -> bool:
        """Whether it is known if the nodes of workers that died are still there. Ray takes some seconds to find out; until
        then it would wait for room on a node that is gone."""
        news = self.journal.news
        if news.failures > self._failures:
            self._failures, self._asked_at = news.failures, now_s
            self._pings = [ping(node) for node in news.suspects]
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        return len(answered) == len(self._pings) or now_s - self._asked_at > PING_S

    def _read(self, hub: Any) -> None:
        self.journal.take(ray.get(hub.read.remote(self.journal.news.cursor)))

    def _lost(self, what: str) -> NoReturn:
        """Ray has ended."""
        text = f"{what}. The same command resumes from the last checkpoint."
        with handled() as interrupts:
            interrupts.end_within(LOST_END_S, f"offload: {text}", ControlLostError.exit_code)
        self.directory.write("error.txt", text + "\n")
        self.journal.finish("failed", None, error=text)
        raise ControlLostError(text)

    def _failed(self, error: BaseException) -> None:
        self.directory.write("error.txt", _whole_story(error))
        where = f"The whole traceback is in {self.directory.path / 'error.txt'}."
        text, kind = describe_failure(error, "training failed", where)
        self.journal.finish("failed", None, error=text)
        raise kind(text) from None


def _address_of(checkpoint: Any) -> str:
    """The path of a checkpoint with its scheme, where it is not local."""
    kind = str(checkpoint.filesystem.type_name)
    return f"{kind}://{checkpoint.path}" if kind in ("s3", "gcs", "abfs", "hdfs") else str(checkpoint.path)


def _fit(trainer: TorchTrainer, outcome: list[Any]) -> None:
    try:
        outcome.append(trainer.fit())
    except BaseException as error:
        outcome.append(error)


def describe_failure(error: BaseException, what: str, remedy: str) -> tuple[str, type[OffloadError]]:
    """What to tell the user of an error that came out of Ray, and the type of error it is: one of offload's own that is
    behind it, or ``what`` with the innermost cause and the remedy."""
    found = find_offload_error(error)
    if found is not None:
        return str(found), type(found)
    bases = [getattr(e, "_base_exc", e) for e in causes(error)]
    # That a connection to a worker broke tells nothing where another error tells why.
    telling = [e for e in bases if not is_broken_connection(e)]
    inner = [e for e in telling if not type(e).__module__.startswith("ray.")]
    base = (inner or telling[1:] or bases)[-1]
    lines = str(base).strip().splitlines()
    text = f"{type(base).__name__}: {lines[-1] if lines else 'no message'}"
    return f"{what}: {text}. {remedy}", RunError


def _whole_story(error: BaseException) -> str:
    parts = ["".join(traceback.format_exception(error))]
    parts += [str(e) for e in causes(error) if hasattr(e, "_base_exc")]
    return "\n\n".join(parts) + "\n\n" + to_json({"type": type(error).__name__})
