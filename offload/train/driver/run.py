"""One run, from a cluster to a result: place the workers, start them and their feed, watch them, and end in order.

Where it stops: :mod:`offload.train.driver.trainer` checks the arguments, and :mod:`offload.train.driver.event_log` writes the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from offload.actors.errors import lost_errors
from offload.errors import ConfigError
from offload.model.batch_split import BatchSplit
from offload.model.feeds import ONE_FEED, FeedRule
from offload.model.others import Others, summed
from offload.model.placement import GPU_TYPE, NodeResources, WorkerResources
from offload.pipeline.aside import SideThread
from offload.pipeline.describe.cached import check_names
from offload.pipeline.describe.sources import ANY_SOURCE
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.preprocessing.unpicklable import obstacle, used
from offload.pipeline.program.pickling import Carried
from offload.pipeline.program.surroundings import Program
from offload.prices import built_in
from offload.process.interrupts import COMMITTED_END_S, Interrupts, handled, of_this_thread
from offload.report.events.faults import CoresShared, OthersHold
from offload.report.events.membership import RunLeaving
from offload.report.events.training import RunStarted
from offload.report.run_dir import RunDirectory
from offload.report.terminal.live_line import LiveLine
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import Marker, Storage, in_time, reason_of
from offload.train.cluster.connected import INSTANCE_TYPE, ControlLostError
from offload.train.driver.conductor import Conductor, wait_for_start
from offload.train.driver.event_log import EventLog
from offload.train.driver.failure_texts import describe_failure, whole_story
from offload.train.driver.fleet.messages import StopAsked, WorkersEnded
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Paused, Steady, Stranded
from offload.train.driver.fleet.state_machine import leased_event
from offload.train.driver.leasing import Leasing, Wishes, check_sharing, held_by_others
from offload.train.driver.listed import Listed, classes_that_differ
from offload.train.driver.others import cores_of, others_hold
from offload.train.driver.platform.platform import Platform, Watch
from offload.train.driver.run_arguments import Arguments
from offload.train.driver.steering import Steering
from offload.train.driver.supervisor import Supervisor
from offload.train.driver.torchrun import worker_variables
from offload.train.driver.tuner import Tuner
from offload.train.group.group import Reservation
from offload.train.group.in_worker import Main
from offload.train.hub.client import HubClient
from offload.train.hub.division import FeedTerms
from offload.train.messages import TRAIN
from offload.train.worker.process import run_worker
from offload.train.worker.setup import DatasetSetup, UserFunctions, WorkerSetup, first_pass

POLL_S = 2.0  # each answer takes CPU time from preprocessing
POLL_BUSY_S = 0.5  # interval while workers change, or cores that others lend
INTERRUPT_S = 0.25
ANSWER_S = 5.0  # for the hub to answer at the end of a run
CALL_S = 60.0  # the hub answers after this long, whether or not a worker has called
LOST_END_S = 8.0  # time for Ray's shutdown without its control process, which takes 7 s
WORKERS_END_S = 3.0  # time for the supervisor to end the workers
FEED_THREADS = 9
FEED_RULE = FeedRule()
MOST_WORKERS = 1024
MOST_RANKS_AT_ONCE = 64  # ranks that the hub answers at the same time
GPU_TYPE_SHARE = 0.001  # as Ray asks for a type of GPU
TOKEN_BYTES = 1 << 20  # reservation of a worker that needs no CPUs: Ray does not place a group without resources


class Run:
    """One call of fit().

    Raises ConfigError if the workers do not fit in the cluster, or a data set or the training function cannot be pickled.
    """

    def __init__(
        self,
        trainer: Arguments,
        directory: RunDirectory,
        live: LiveLine,
        listed: dict[str, Listed],
        platform: Platform,
    ) -> None:
        self.trainer, self.directory, self.live, self.listed = trainer, directory, live, listed
        self.platform, self.cluster = platform, platform.cluster
        self.worker = self._worker_resources()
        if trainer.cluster.preprocessing_cores and not all(dataset.pooled for dataset in listed.values()):
            raise ConfigError(
                "preprocessing_cores asks the cluster for cores, and so does Ray Data if a source is a ray.data.Dataset: drop "
                f"preprocessing_cores, or read the data with one of offload's own sources ({ANY_SOURCE})."
            )
        if trainer.adaptation.by_progress and (listed[TRAIN].samples is None or trainer.datasets[TRAIN].yields):
            raise ConfigError(
                f"the schedule uses shares of the training, and the number of samples of {TRAIN!r} is unknown: pass epochs, "
                "such as schedule={0: 2, 30: 4}."
            )
        self._changed = threading.Event()  # the workers have, or somebody steers the run: look at the news now
        self.steering = Steering(platform.open_desk(directory), self._changed.set, live.note)
        leasing = self._leased() if trainer.cluster.arbiter else None
        self.cluster, self.fleet, self._first_actions = wait_for_start(
            self._terms(),
            platform,
            status=self._waits,
            heed=self._heed_before_start,
            leasing=leasing,
            pause=self._pause,
        )
        # What Ray Data's tasks hold of the cluster looks as if others held it.
        certain = all(dataset.pooled for dataset in listed.values())
        self._sharing = leasing or Others(self.cluster.held, certain=certain)
        # These checks need the nodes of the run, and come before anything is started on them.
        self._check_prices()
        self._check_caches()
        self.placement = self.fleet.placement
        self.split: BatchSplit = trainer.batch_size.split(self.placement.workers)
        self.log = EventLog(
            directory,
            live,
            self.placement,
            self.split,
            on_gpus=self.worker.gpus > 0,
            callbacks=trainer.callbacks,
        )
        self._failures, self._silent_nodes = 0, frozenset[str]()
        self._with_imports: set[str] = set()  # ids of nodes on which the workers' imports have begun
        self.streams = self._packed()
        self._carried = self._functions()

    def go(self, name: str, storage: Storage) -> dict[str, Any]:
        """Train, with checkpoints at ``name`` of the storage; return the content of ``summary.json``.

        Raises RunError, or the offload error that caused it, if the run failed.
        """
        try:
            return self._go(name, storage)
        except BaseException as error:
            self.log.break_off(error)
            raise

    def _go(self, name: str, storage: Storage) -> dict[str, Any]:
        cores = Cores(
            nodes=tuple(self.fleet.used.elements()),
            task_cpus=self.fleet.core_cpus,
            stores={node.node_id: node.store_bytes for node in self.cluster.nodes},
            runtime_env=self.platform.process_env(),
        )
        self._announce()
        if self.fleet.lease is not None:
            self.log.tell(leased_event(self.fleet.lease))
        elif others := self.cluster.held_of_all():
            self.log.tell(OthersHold(held=others))
        for mismatch in classes_that_differ(self.listed):
            self.log.tell(mismatch)
        self._import_for_workers(self.fleet)
        self.platform.import_ahead(set(cores.nodes) - self._with_imports, cores.runtime_env)
        marker = Marker.of(storage, name)
        try:
            if marker is not None:
                marker.put()
            # While actors exist, signals are only counted, so that none interrupts their cleanup.
            with handled() as interrupts, interrupts.shielded(patient=True):
                stopped, answered = self._train(cores, name, storage, marker, interrupts)
        finally:
            self.steering.end()
            if isinstance(self._sharing, Leasing):
                self._sharing.close()
            if marker is not None:
                marker.remove()
        summary = self.log.finish("interrupted" if stopped else "finished", self._newest(RunFolder(storage, name)))
        if interrupts.presses > answered:  # while the run ended
            raise KeyboardInterrupt
        return summary

    def _train(
        self, cores: Cores, name: str, storage: Storage, marker: Marker | None, interrupts: Interrupts
    ) -> tuple[bool, int]:
        """Start the run's processes, follow the run to its end, and end them. Return whether the run was stopped, and how many signals
        that answered."""
        threads = FEED_THREADS + 6 * min(self.fleet.bounds[1], MOST_RANKS_AT_ONCE)
        platform = self.platform
        terms = FeedTerms(rule=self._feed_rule(), homes=self.fleet.next_nodes(), threads=threads)
        hub = platform.start_hub(self.directory, self.streams, cores, terms=terms)
        groups = platform.groups(self._reservation())
        supervisor = Supervisor(groups, hub, max_failures=self._max_failures, changed=self._changed.set)
        conductor = Conductor(
            self.fleet,
            self._first_actions,
            hub=hub,
            obey=supervisor.obey,
            requests=platform.requests(),
            tell=self.log.tell,
            free=platform.free,
            held=platform.holders,
        )
        watchers = platform.watch(hub, self.log.tell)
        training = supervisor.training
        over = threading.Event()
        calls = threading.Thread(target=self._hear_calls, args=(hub, over), daemon=True, name="calls of workers")
        calls.start()
        error: BaseException | None = None
        try:
            # Only the checkpoint says where a resumed run begins.
            if not self.directory.resuming:
                request = first_pass(self.split, deterministic=self.trainer.deterministic)
                hub.start_ahead(request, TRAIN, self.fleet.next_nodes())
            supervisor.start(self.worker_main(self._carried, self._setup(hub, name, storage, marker)))
            stopped = self._watch(supervisor, hub, interrupts, conductor, watchers)
            answered = interrupts.presses if stopped else 0
            if answered and training.done():
                interrupts.end_within(COMMITTED_END_S)
            hub.end_printing()
            self._read(hub)
            conductor.read(self.log.news)  # a change may have ended since the last look
            error = training.exception() if training.done() else None
        except lost_errors() as lost_hub:
            if (lost := platform.lost()) is not None:
                self._lost(lost)
            # The hub died, for example because its host ran out of memory. An error of the workers, if any, explains more.
            self._failed((training.exception() if training.done() else None) or lost_hub)
        finally:
            over.set()
            if platform.lost() is None:  # otherwise, Ray would not answer these calls
                hub.call_driver()  # wakes the thread that hears calls: it must not be at work when the connection ends
                calls.join(ANSWER_S)
                watchers.close()
                supervisor.close(WORKERS_END_S)
                conductor.close()
                fleet = conductor.fleet
                platform.release({node: cores * fleet.core_cpus for node, cores in fleet.used.items()})
            else:
                platform.forget()
        if error is not None:
            if (lost := platform.lost()) is not None:
                self._lost(lost)
            self._failed(error)
        return stopped, answered

    def _feed_rule(self) -> FeedRule:
        """The rule for the number of feeds. One alone keeps an order that all ranks share, and hands out what has no positions until it is
        made."""
        shared_order = self.trainer.deterministic or not self.listed[TRAIN].shuffle
        divisible = all(stream.rows is not None for stream in self.streams.values())
        return FEED_RULE if divisible and not shared_order else ONE_FEED

    def _newest(self, folder: RunFolder) -> str | None:
        """The address of the newest checkpoint; None if there is none."""
        try:
            names = in_time(folder.whole, folder.path)
        except Exception as error:  # training has ended well; fsspec's file systems pass on their clients' own errors
            self.live.note(f"the checkpoints in {folder.path} could not be listed: {reason_of(error)}")
            return None
        return folder.address_of(names[-1]) if names else None

    def worker_main(self, functions: Carried, setup: WorkerSetup) -> Main:
        """The function that each worker runs. ``functions``: a :class:`UserFunctions`."""
        return partial(run_worker, functions, setup)

    def _waits(self, reason: str) -> None:
        """Show what the run waits for before it starts."""
        self.live.status(reason)
        self.steering.waits(reason)

    def _heed_before_start(self) -> bool:
        """Obey others while the run waits to start; return whether it must not start yet. Raises KeyboardInterrupt on a thread that is to
        end: on the main thread, signals raise it."""
        of_this_thread().check()
        return self.steering.heed_before_start()

    def _pause(self, seconds: float) -> None:
        """Wait for so long, or until somebody steers the run, or until it has another lease."""
        if self._changed.wait(seconds):
            self._changed.clear()

    @property
    def _requested_gpu_type(self) -> str | None:
        config: Any = self.trainer.scaling_config
        return None if config is None else getattr(config, "accelerator_type", None)

    def _leased(self) -> Leasing:
        """The run's leases. Raises ConfigError if there is no arbiter, or the run cannot be left to one."""
        trainer = self.trainer
        check_sharing(
            trainer.cluster,
            scheduled=bool(trainer.adaptation.schedule),
            executed=[name for name, dataset in self.listed.items() if not dataset.pooled],
        )
        tenancy = self.platform.open_tenancy()
        tenancy.start(self._changed.set)
        wishes = Wishes(
            name=self.steering.name,
            terms=self._terms(),
            batch_size=trainer.batch_size,
            cluster=trainer.cluster,
            deterministic=trainer.deterministic,
        )
        return Leasing(tenancy, wishes)

    def _terms(self) -> Terms:
        """The user's terms."""
        trainer, adaptation = self.trainer, self.trainer.adaptation
        bounds = trainer.workers or ((1, MOST_WORKERS) if self.worker.gpus else (1, 1))
        scheduled = adaptation.scheduled(0, 0.0)
        return Terms(
            worker=self.worker,
            bounds=bounds,
            first=bounds if scheduled is None else (bounds[0], scheduled),
            allowed=self._allowed,
            chosen=trainer.workers is not None or trainer.cluster.arbiter,
            grows=trainer.cluster.autoscale_workers,
            cores=trainer.cluster.preprocessing_cores,
            mixed_gpus=trainer.cluster.mixed_gpus,
            gpu_type=self._requested_gpu_type,
            usd_per_hour=self._prices(),
            nodes_deadline_s=trainer.cluster.nodes_deadline_s,
        )

    def _packed(self) -> dict[str, FeedDataset]:
        """The data sets for the feed. Raises ConfigError if one cannot be pickled."""
        streams: dict[str, FeedDataset] = {}
        for name, listed in self.listed.items():
            try:
                streams[name] = listed.stream(self.trainer.seed, self.platform.put)
            except Exception as error:
                recipe = listed.recipe(self.trainer.seed)
                raise ConfigError(
                    f"datasets[{name!r}] cannot be sent to the preprocessing processes: {obstacle(recipe, error)}"
                ) from None
        return streams

    def _functions(self) -> Carried:
        """Pickle the functions and settings that the workers call. Raises ConfigError if that fails."""
        trainer = self.trainer
        functions = UserFunctions(
            train=trainer.train,
            on_device={name: p.on_device for name, p in trainer.datasets.items()},
            collate_fn={name: p.collate_fn for name, p in trainer.datasets.items() if p.collate_fn is not None},
            config=trainer.train_loop_config,
        )
        try:
            return Carried(functions)
        except Exception as error:  # the user's classes may raise anything
            reason = used(functions, error) or (
                f"{type(error).__name__}: {error}. The functions and train_loop_config must hold no open files, connections and locks: "
                "make them within the functions."
            )
            raise ConfigError(f"the training function cannot be sent to the workers: {reason}") from None

    def _worker_resources(self) -> WorkerResources:
        config, overrides = self.trainer.scaling_config, self.trainer.overrides
        has_gpus = any(n.gpus >= 1 for n in self.cluster.whole)
        use_gpu = bool(config.use_gpu) if config is not None else has_gpus
        per_worker: Any = config.resources_per_worker if config is not None else None
        requested: dict[str, float] = dict(per_worker or {})
        others = {name: float(amount) for name, amount in requested.items() if name not in ("CPU", "GPU", "memory")}
        gpus = float(
            requested.get("GPU", 1 if use_gpu else 0)
            if overrides.gpus_per_worker is None
            else overrides.gpus_per_worker
        )
        # As with Ray Train, a worker with a GPU reserves no core: while it waits for data, preprocessing needs that core most.
        alone = 0 if gpus else 1
        cpus = float(requested.get("CPU", alone) if overrides.cpus_per_worker is None else overrides.cpus_per_worker)
        return WorkerResources(cpus=cpus, gpus=gpus, others=others)

    def _setup(self, hub: HubClient, name: str, storage: Storage, marker: Marker | None) -> WorkerSetup:
        trainer = self.trainer
        return WorkerSetup(
            hub=hub,
            split=self.split,
            batch_size=trainer.batch_size,
            adaptation=trainer.adaptation,
            drop_last=trainer.datasets[TRAIN].drop_last,
            datasets={
                name: DatasetSetup(
                    samples=listed.samples,
                    class_names=listed.classes or None,
                    resumable=listed.resumable,
                    ordered=not listed.shuffle,
                    yielded=trainer.datasets[name].yields,
                    varied=listed.varied,
                )
                for name, listed in self.listed.items()
            },
            source=self.listed[TRAIN].identity,
            other_options_at=trainer.other_options_at,
            checkpoints=trainer.checkpoints,
            storage=storage,
            name=name,
            precision=trainer.precision,
            seed=trainer.seed,
            hang_s=trainer.hang_s,
            deterministic=trainer.deterministic,
            program=Program.here().without(self._worker_env().get("env_vars", ())),
            marker=marker,
        )

    def _reservation(self) -> Reservation:
        """What each worker reserves."""
        config: Any = self.trainer.scaling_config
        per_worker = dict((config.resources_per_worker if config is not None else None) or {})
        bundle = {**per_worker, "CPU": self.worker.cpus, "GPU": self.worker.gpus}
        if self._requested_gpu_type:
            bundle[f"{GPU_TYPE}{self._requested_gpu_type}"] = GPU_TYPE_SHARE
        bundle = {name: float(amount) for name, amount in bundle.items() if amount}
        return Reservation(
            # Not a share of a CPU: a task may need the whole one.
            bundle=bundle or {"memory": TOKEN_BYTES},
            strategy=getattr(config, "placement_strategy", None) or "PACK",
            labels=dict(getattr(config, "label_selector", None) or {}),
            runtime_env=self._worker_env(),
        )

    @property
    def _max_failures(self) -> int:
        """How often an exception of the user's function may start the workers again."""
        config: Any = self.trainer.run_config
        failures = getattr(config, "failure_config", None)
        return int(getattr(failures, "max_failures", 0) or 0)

    def _prices(self) -> dict[str, float]:
        """The known prices in dollars per hour, by instance type."""
        known = {name: node.usd_per_hour for name, node in built_in().nodes.items()}
        return known | dict(self.trainer.cluster.usd_per_hour or {})

    def _check_prices(self) -> None:
        """Raise ConfigError if the objective is cost and the price of a node is unknown."""
        prices = self._prices()
        for node in self.cluster.nodes if self.trainer.adaptation.objective == "cost" else ():
            if node.instance_type not in prices:
                raise ConfigError(
                    f'objective="cost" needs the price of every node, and node {node.name} '
                    + (
                        f"has no label {INSTANCE_TYPE}: start Ray there with, for example, --labels {INSTANCE_TYPE}=ml.g5.xlarge."
                        if node.instance_type is None
                        else f"has type {node.instance_type}, which the catalog lacks: pass "
                        f"usd_per_hour={{{node.instance_type!r}: ...}} to offload.Cluster."
                    )
                )

    def _check_caches(self) -> None:
        """Raise ConfigError if a node that preprocesses cannot hold the cache of a data set, or two data sets would share samples."""
        check_names({name: listed.pipeline for name, listed in self.listed.items()})
        specs = [spec for listed in self.listed.values() for spec in listed.pipeline.caches]
        specs += [
            listed.sharing.spec for listed in self.listed.values() if listed.shared and listed.sharing is not None
        ]
        names = {node.node_id: node.name for node in self.cluster.nodes}
        self.platform.check_caches(specs, {node: names.get(node, node) for node in self.fleet.used})

    def _allowed(self, workers: int) -> bool:
        """Return whether this many workers may train."""
        sizes = self.trainer.batch_size
        return not self.trainer.deterministic or sizes.split(workers).global_batch_size == sizes.initial

    def _worker_env(self) -> dict[str, Any]:
        config: Any = self.trainer.run_config
        user_env = dict(config.worker_runtime_env or {}) if config is not None else {}
        if variables := worker_variables():
            user_env["env_vars"] = {**variables, **user_env.get("env_vars", {})}
        return self.platform.process_env(user_env)

    def _announce(self) -> None:
        prices = self._prices()
        there = {node.instance_type for node in self.cluster.nodes} | set(self.trainer.cluster.usd_per_hour or ())
        self.log.know(self.cluster.nodes)
        self.log.start(
            RunStarted(
                workers=self.placement.workers,
                preprocessing_cores=self.placement.cores,
                local_batch_size=self.split.local_batch_size,
                accum_steps=self.split.accum_steps,
                global_batch_size=self.split.global_batch_size,
                nodes=[dataclasses.asdict(n) for n in self.cluster.nodes],
                usd_per_hour={name: usd for name, usd in prices.items() if name in there},
                datasets={n: {"source": s.pipeline.name, "samples": s.samples} for n, s in self.listed.items()},
            )
        )
        if self.directory.resuming:
            self.live.note(f"resuming the run in {self.directory.path}")
        for name, listed in self.listed.items():
            size = f"{listed.samples:,} samples" if listed.samples is not None else "of unknown size"
            self.live.note(f"{name}: {listed.pipeline.name}, {size}")
            for text in (*listed.pipeline.notes, *listed.notes):
                self.live.note(f"{name}: {text}")
        if self.split.global_batch_size != self.trainer.batch_size.initial:
            self.live.note(
                f"the global batch is {self.split.global_batch_size}, not {self.trainer.batch_size.initial}: "
                f"{self.split.workers} workers take local batches of {self.split.local_batch_size}"
            )
        self.live.status(
            f"starting {self.placement.workers} worker(s); {self.placement.cores} core(s) preprocess on {len(self.cluster.nodes)} node(s)"
        )

    def _tuner(self) -> Tuner | None:
        """The tuner of batches, workers and cores, if any of them may change."""
        least, most = self.fleet.bounds
        fixed = not self.trainer.batch_size.adaptive and (self.trainer.workers is None or least == most)
        adaptation, cores = self.trainer.adaptation, self.trainer.cluster.preprocessing_cores
        # An arbiter decides by what the tuner measures.
        if fixed and cores is None and not adaptation.schedule and isinstance(self._sharing, Others):
            return None
        return Tuner(self.trainer.batch_size, adaptation, cores)

    def _watch(
        self,
        supervisor: Supervisor,
        hub: HubClient,
        interrupts: Interrupts,
        conductor: Conductor,
        watchers: Watch,
    ) -> bool:
        """Follow the run to its end. Return whether it was stopped before its end.

        Raises KeyboardInterrupt if it must end at once, and ControlLostError if Ray has ended.
        """
        tuner, training = self._tuner(), supervisor.training
        ends_with = self.platform.ends_with()
        stop_asked = leaving = stopped_from_outside = soon = False
        read_at = time.monotonic()

        def look() -> None:
            """Read the news and follow the cluster. Only this thread waits for Ray's answers."""
            nonlocal leaving, stopped_from_outside
            self._read(hub)
            if not stop_asked:
                stopped_from_outside = self._steer(conductor, supervisor)
                if isinstance(self._sharing, Others):
                    self._follow_others(self._sharing, conductor.fleet, supervisor)
                elif tuner is not None:
                    self._follow_lease(self._sharing, conductor, tuner, supervisor)
                # In this order: a drained node that ends in between would look like a new node.
                draining, alive = set(self.platform.leaving()), self.cluster.left(self.platform.nodes())
                silent = self._silent(alive)
                alive = tuple(node for node in alive if node.node_id not in silent)
                watchers.look([node for node in alive if node.node_id in conductor.fleet.in_use], draining)
                leaving = not ends_with.isdisjoint(draining)
                if leaving:
                    self.log.tell(RunLeaving(nodes=[n.name for n in alive if n.node_id in ends_with & draining]))
                    return
                conductor.look(self.log.news, alive, draining, silent)
                if tuner is not None:
                    conductor.handle(*tuner.look(self.log.news, conductor.fleet, read_at))
                self._import_for_workers(conductor.fleet)
            self.steering.show(conductor.fleet, self.log.news, self.log.goodput)

        with SideThread() as aside:
            while not training.done():
                changed = self._changed.wait(INTERRUPT_S)
                self._changed.clear()
                if (lost := self.platform.lost()) is not None:
                    self._lost(lost)
                if interrupts.presses > 1:
                    aside.wait(INTERRUPT_S)
                    self.log.finish("interrupted", None)
                    raise KeyboardInterrupt
                if (interrupts.presses or leaving or stopped_from_outside) and not stop_asked:
                    stop_asked = True
                    if not leaving:
                        self.live.note("stopping: committing a checkpoint first (Ctrl-C again ends at once)")
                    conductor.handle(StopAsked())
                soon = soon or changed
                if aside.busy:
                    continue
                aside.result()
                if stop_asked and self._nothing_to_commit(conductor.fleet):
                    return True
                # Another run may wait for cores that this one is giving up.
                moves = isinstance(self._sharing, Leasing) and self.log.news.let_go != conductor.fleet.reshapes
                if soon or time.monotonic() - read_at >= (POLL_BUSY_S if conductor.fleet.busy or moves else POLL_S):
                    soon = False
                    read_at = time.monotonic()
                    aside.start(look)
            while aside.busy and self.platform.lost() is None:
                aside.wait(INTERRUPT_S)
            aside.result()
        return stop_asked

    def _steer(self, conductor: Conductor, supervisor: Supervisor) -> bool:
        """Obey what others ask of the run. Return whether it must stop."""
        if isinstance(conductor.fleet.phase, Paused) and supervisor.rests is not None:
            conductor.handle(WorkersEnded(serial=supervisor.rests))
        events, stop = self.steering.heed(
            conductor.fleet, self.log.news.group.split or self.split, self.trainer.batch_size
        )
        conductor.handle(*events)
        return stop

    def _follow_others(self, others: Others, fleet: Fleet, supervisor: Supervisor) -> None:
        """Note what other programs hold now, where what this run itself holds is certain."""
        news = self.log.news
        workers = news.running and isinstance(fleet.phase, Steady) and supervisor.rests is None
        if not (workers or supervisor.rests is not None) or news.cores != (fleet.cores, 0) or not others.certain:
            return
        in_use, groups = self.platform.in_use()
        ours = summed(groups, {node: {"CPU": cpus} for node, cpus in cores_of(fleet).items()})
        held = others_hold(in_use, ours, fleet, self.platform.nodes())
        # A run at rest may be resumed in the next moment: it must know who has taken its room.
        if others.see(held, time.monotonic(), at_once=supervisor.rests is not None):
            self.cluster = dataclasses.replace(self.cluster, held=others.held)
            self.log.tell(OthersHold(held=self.cluster.held_of_all()))

    def _follow_lease(self, leasing: Leasing, conductor: Conductor, tuner: Tuner, supervisor: Supervisor) -> None:
        """Report the run to the arbiter, and note what it may use now."""
        nodes = self.platform.nodes()
        conductor.handle(*leasing.look(conductor.fleet, self.log.news, tuner.seen, supervisor.newest))
        fleet = conductor.fleet
        workers = {} if isinstance(fleet.phase, Stranded) else Counter(fleet.room.node_ids(fleet.placement.held))
        held = held_by_others(fleet.lease, nodes, fleet.terms.worker, workers)
        self.cluster = dataclasses.replace(self.cluster, held=held)

    def _nothing_to_commit(self, fleet: Fleet) -> bool:
        """Return whether nothing is trained yet, or no worker runs or is about to run that could commit it."""
        news = self.log.news
        # After a failure, workers start only once the driver has looked at the cluster, which it no longer does while the run ends.
        none_follow = news.failures > fleet.failures_seen
        return none_follow or not (news.totals or news.past) or (not fleet.workers and not news.running)

    def _import_for_workers(self, fleet: Fleet) -> None:
        """Begin the workers' imports on the nodes of the next group, and once training is under way, on those that the most workers would
        take: a resize then need not wait for them."""
        nodes = set(fleet.next_nodes())
        if fleet.group.running and (most := fleet.room.most(fleet.bounds[1])) is not None:
            nodes.update(fleet.room.node_ids(most.held))
        nodes -= self._with_imports
        if nodes:
            self._with_imports |= nodes
            self.platform.import_ahead(nodes, self._worker_env())

    def _hear_calls(self, hub: HubClient, over: threading.Event) -> None:
        """Look at the news as soon as a worker waits for orders, until the run is ``over``."""
        calls = 0
        with contextlib.suppress(*lost_errors()):  # the hub has ended, and so has the run
            while not over.is_set():
                calls = hub.await_calls(calls, CALL_S)
                self._changed.set()

    def _silent(self, alive: Sequence[NodeResources]) -> frozenset[str]:
        """Those of these nodes that do not answer. Ray takes half a minute to find out. Until then, it would let workers wait for room on
        a dead node. Nodes are asked after a worker died, and again until they answer or Ray drops them."""
        news = self.log.news
        asked = set(self._silent_nodes)
        if news.failures > self._failures:
            self._failures = news.failures
            asked.update(news.suspects)
        self._silent_nodes = self.platform.silent(asked & {node.node_id for node in alive})
        return self._silent_nodes

    def _read(self, hub: HubClient) -> None:
        self.log.take(hub.read(self.log.news.cursor))
        if any(isinstance(event, CoresShared) for event in self.log.news.events) and isinstance(self._sharing, Others):
            self._sharing.certain = False

    def _lost(self, what: str) -> NoReturn:
        """End the run: Ray has ended."""
        text = f"{what}. The same command resumes from the last checkpoint."
        error = ControlLostError(text)
        with handled() as interrupts:
            interrupts.end_within(LOST_END_S, f"offload: {text}", error.exit_code)
        self.directory.write("error.txt", text + "\n")
        self.log.finish("failed", None, error=text)
        if interrupts.last_resort is not None:  # a command
            # Ray's other processes end now, too, and Ray may end this one before its connection is closed.
            sys.stderr.write(f"offload: {text}\n")
            sys.stderr.flush()
            error.told = True
            interrupts.end_within(LOST_END_S, "", error.exit_code)
        raise error

    def _failed(self, error: BaseException) -> None:
        self.directory.write("error.txt", whole_story(error))
        where = f"The whole traceback is in {self.directory.path / 'error.txt'}."
        failure = describe_failure(error, "training failed", where)
        self.log.finish("failed", None, error=str(failure))
        raise failure from None
