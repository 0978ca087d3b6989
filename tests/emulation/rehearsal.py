"""A rehearsal of a run in threads, with nodes and workers that die, leave and join as a seeded random generator decides.

Everything that decides and counts is real: the driver's state machine, its conductor and its supervisor, the hub's board and feed, the
workers' loop with its stepper, agreement, state and checkpoint files. Only processes, Ray and its transport are stand-ins
(:mod:`tests.emulation.in_threads`), so that a schedule takes about a second and tests can try many. Tests on a real cluster cover the
effects of real processes.

The optimizer records the samples of its steps, and checkpoints keep the records. The last checkpoint holds the history to judge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch

from offload.errors import RunError
from offload.model.batch_split import BatchSplit
from offload.model.feeds import FeedRule
from offload.model.placement import Bundle, NodeResources, WorkerResources
from offload.pipeline.feed.datasets import Cores, FeedDataset
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import Storage
from offload.train.config import Adaptation, BatchSize, Checkpoints
from offload.train.driver.conductor import Conductor
from offload.train.driver.fleet.messages import ClusterSeen, Learned, ResizeDecided, SplitDecided, StopAsked
from offload.train.driver.fleet.room import Terms
from offload.train.driver.fleet.state import Fleet, Starting
from offload.train.driver.fleet.state_machine import step
from offload.train.driver.supervisor import Supervisor
from offload.train.group import group as group_events
from offload.train.group.group import Ended, GroupEvent, Joining, Plan
from offload.train.group.in_worker import Main, Member, Report
from offload.train.hub.calls import FeedLostError
from offload.train.messages import TRAIN
from offload.train.worker.assembly import training_loop
from offload.train.worker.context import Context
from offload.train.worker.ends import StopRun
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.checkpointer import FolderCheckpointer
from offload.train.worker.setup import DatasetSetup, WorkerSetup
from tests.emulation.in_threads import (
    Book,
    Bookkeeper,
    Died,
    LocalClient,
    LocalFeed,
    LocalHub,
    Peer,
    Ranks,
    Unjoined,
)

DEADLINE_S = 300.0  # deadline of one job, which takes a second on an idle machine: after it, something hangs
STORE_BYTES = 1e6
LOOK_S = 0.01
MOST_WORKERS = 4
WORKER = WorkerResources(cpus=1)
RUN = "run"
NODES = ("node 0", "node 1", "node 2")
CPU = torch.device("cpu")
End = Literal["finished", "stopped", "killed", "hung"]


@dataclass
class Outcome:
    """The outcome of a schedule. ``passes``: by pass, how often the last checkpoint's state learned from each id; ``happened`` counts
    the disturbances meanwhile."""

    samples: int
    passes: dict[int, Counter[int]]
    happened: Counter[str]
    hung: bool = False

    @property
    def lost(self) -> int:
        """The number of samples that a pass lacks."""
        return sum(self.samples - len(seen) for seen in self.passes.values())

    @property
    def repeated(self) -> int:
        """The number of samples that came again within a pass."""
        return sum(sum(seen.values()) - len(seen) for seen in self.passes.values())


class Rehearsal:
    """One seeded schedule, which ``go()`` plays to its end. ``feeds``: how many feed the workers, if there are as many."""

    def __init__(
        self, seed: int, *, samples: int = 240, passes: int = 3, disturbances: int = 6, feeds: int = 1
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.samples, self.passes = seed, samples, passes
        self.feeds = feeds
        self.sizes = BatchSize(initial=16, local=(2, 16))
        self.happened: Counter[str] = Counter()
        self._left = disturbances
        self._lock = threading.Lock()

    def go(self) -> Outcome:
        """Play the schedule. At its end every pass is complete, or the run is broken."""
        with tempfile.TemporaryDirectory(prefix="offload-rehearsal-") as folder:
            storage = Storage(path=folder)
            end: End = "killed"
            while end in ("stopped", "killed"):  # the same command resumes
                end = _Job(self, storage).run()
                self.happened[end] += 1
            passes: dict[int, Counter[int]] = {}
            run = RunFolder(storage, RUN)
            if names := run.whole():
                _, training = checkpoints.load(Path(run.path_of(names[-1])))
                for epoch, sample in training.optimizers[0]["learned"].tolist():
                    passes.setdefault(epoch, Counter())[sample] += 1
        return Outcome(self.samples, passes, self.happened, end == "hung")

    def befalls(self) -> str | None:
        """The disturbance before a step, if any."""
        with self._lock:
            if self._left <= 0 or self.random.random() > 0.06:
                return None
            self._left -= 1
            # A drained node never comes back, and one on which two workers died gets no others: too many of both leave no node at all.
            drain = "drain" if self.feeds == 1 else "feed"
            what = self.random.choice(("kill", "resize", "rebatch", "node", drain, "job", "stop"))
            self.happened[what] += 1
            return what


def _unused(member: Member) -> str:
    raise AssertionError("the threads of a rehearsal have their own function")


class _NoRequests:
    """A cluster that does not grow by itself."""

    def ask(self, missing: Mapping[Bundle, int], *, hold: bool = False) -> None: ...

    def close(self) -> None: ...


class _Job:
    """One start of the command, until it finishes or its driver ends."""

    def __init__(self, rehearsal: Rehearsal, storage: Storage) -> None:
        self.rehearsal = rehearsal
        self.lives = dict.fromkeys(NODES, 0)  # the number of starts of each node
        self.leaving: set[str] = set()
        self.ended: End | None = None
        self.lock = threading.RLock()
        rows = list_torch_dataset(range(rehearsal.samples)).rows
        recipe: Any = None
        stream = FeedDataset(recipe=recipe, rows=rows, shuffle=True, seed=rehearsal.seed)
        first = rehearsal.random.randint(1, MOST_WORKERS)
        terms = Terms(worker=WORKER, bounds=(1, MOST_WORKERS), first=(1, first), chosen=rehearsal.random.random() < 0.5)
        fleet, actions = step(Starting(terms=terms), ClusterSeen(now_s=time.monotonic(), nodes=self.nodes()))
        assert isinstance(fleet, Fleet)
        stores = fleet.room.stores()
        cores = Cores(nodes=tuple(fleet.used.elements()), task_cpus=fleet.core_cpus, stores=stores)
        self.hub = LocalHub({TRAIN: stream}, cores, FeedRule(least=rehearsal.feeds))
        self.client = LocalClient(self.hub, lambda: self.ended is not None)
        self.supervisor = Supervisor(self, self.hub)
        self.conductor = Conductor(
            fleet,
            actions,
            hub=self.client,
            obey=self.supervisor.obey,
            requests=_NoRequests(),
            tell=lambda kind, **values: None,
            free=dict,
        )
        self.setup = WorkerSetup(
            hub=self.client,
            split=rehearsal.sizes.split(fleet.placement.workers),
            batch_size=rehearsal.sizes,
            adaptation=Adaptation(),
            datasets={TRAIN: DatasetSetup(samples=rehearsal.samples, resumable=True, ordered=False)},
            checkpoints=Checkpoints(every_s=0.03),
            storage=storage,
            name=RUN,
            precision="fp32",
            seed=rehearsal.seed,
            hang_s=DEADLINE_S,
            deterministic=False,
        )

    def nodes(self) -> tuple[NodeResources, ...]:
        """The nodes that are alive."""
        return tuple(
            NodeResources(name=name, node_id=f"{name}.{life}", cpus=3, store_bytes=STORE_BYTES / len(NODES))
            for name, life in self.lives.items()
        )

    def run(self) -> End:
        """Act as the driver until the job ends."""
        driver = threading.Thread(target=self._drive, daemon=True)
        driver.start()
        self.supervisor.start(_unused)
        try:
            outcome = self.supervisor.training.result(DEADLINE_S)
            self.ended = self.ended or ("finished" if outcome == "finished" else "stopped")
        except (TimeoutError, RunError):
            self.ended = "hung"
        driver.join()
        self.supervisor.close(DEADLINE_S)
        self.hub.close()
        return self.ended

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> _Group:
        """Start a group of workers, as its supervisor wants."""
        return _Group(self, plan, tell)

    def _drive(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the job was killed meanwhile
            while self.ended is None:
                with self.lock:
                    nodes, leaving = self.nodes(), set(self.leaving)
                self.conductor.look(self.hub.read(0), nodes, leaving)
                time.sleep(LOOK_S)

    def disturb(self, what: str, group: _Group, rank: int) -> None:
        """Disturb the run while this rank is between two steps. Raises Died if that kills the rank."""
        name = self.rehearsal.random.choice(NODES)
        if what in ("kill", "job"):
            group.kill()  # at once: a killed process closes nothing in order
            if what == "job":
                self.ended = "killed"
                self.supervisor.close(0.0)
            else:
                group.tell(group_events.Died(attempt=group.plan.attempt, rank=rank, reason="died"))
            raise Died
        if what == "stop":
            self.conductor.handle(StopAsked())
        elif what == "resize":
            self.conductor.handle(ResizeDecided(split=self.rehearsal.sizes.split(self._some_workers())))
        elif what == "rebatch":
            local, accum = self.rehearsal.random.randint(2, 16), self.rehearsal.random.randint(0, 2)
            split = BatchSplit(workers=group.workers, local_batch_size=local, accum_steps=accum)
            self.conductor.handle(SplitDecided(split=split), Learned(state={"delivered": 0.5, "steps": []}))
        elif what == "feed":
            if self.hub.others:
                self.hub.others[-1].kill()
        elif what == "drain":
            with self.lock:
                self.leaving.add(f"{name}.{self.lives[name]}")
        else:
            self._lose(name)

    def _some_workers(self) -> int:
        return self.rehearsal.random.randint(1, MOST_WORKERS)

    def _lose(self, name: str) -> None:
        """Kill a node with everything that it holds; it comes back as another node."""
        with self.lock:
            node_id = f"{name}.{self.lives[name]}"
            self.lives[name] += 1
        self.hub.kill(node_id)


class _Group:
    """One worker group: a thread for each rank."""

    def __init__(self, job: _Job, plan: Plan, tell: Callable[[GroupEvent], None]) -> None:
        self.job, self.plan, self.tell, self.workers = job, plan, tell, plan.workers
        self._killed = False
        nodes = job.conductor.fleet.next_nodes()
        self._nodes = tuple(nodes[rank % len(nodes)] for rank in range(self.workers))
        self._book = Book()
        # Ranks of training threads, of batch-cutting threads, of checkpoints.
        self._ranks = [Ranks(self.workers) for _ in range(3)]
        tell(Joining(attempt=plan.attempt, nodes=self._nodes))
        for rank in range(self.workers):
            threading.Thread(target=self._work, args=(rank,), daemon=True).start()

    def how_ended(self, rank: int) -> str | None:
        """See :class:`offload.train.group.group.Group`."""
        return None

    def end(self) -> None:
        """See :class:`offload.train.group.group.Group`."""
        self.kill()

    def kill(self) -> None:
        """End all ranks wherever they are. Threads of killed ranks may linger, without effect on others."""
        self._killed = True
        for ranks in self._ranks:
            ranks.abort()

    def _work(self, rank: int) -> None:
        client = LocalClient(self.job.hub, lambda: self._killed or self.job.ended is not None)
        try:
            outcome = self._train(rank, client)
        except FeedLostError as error:
            self.tell(Ended(attempt=self.plan.attempt, rank=rank, report=Report(error=error)))
        except Exception as error:  # killed, or another rank was
            if not self._killed:
                self.kill()
                self.tell(group_events.Died(attempt=self.plan.attempt, rank=rank, reason=repr(error)))
        else:
            self.job.rehearsal.happened["replaced"] += outcome == "replaced" and rank == 0
            self.tell(Ended(attempt=self.plan.attempt, rank=rank, report=Report(outcome=outcome)))

    def _train(self, rank: int, client: LocalClient) -> str:
        job, (talk, batches, reports) = self.job, self._ranks
        several = self.workers > 1
        setup = job.setup
        place = RankPlace(
            attempt=self.plan.attempt,
            rank=rank,
            world_size=self.workers,
            device=CPU,
            node=self._nodes[rank],
            homes=self._nodes,
            talk=Peer(talk, rank) if several else NoPeers(),
            peers={TRAIN: Peer(batches, rank) if several else NoPeers()},
            checkpoints=FolderCheckpointer(setup.storage, setup.name, setup.checkpoints, Peer(reports, rank)),
            join=Unjoined(),
            share=lambda tensors: None,
            feed=LocalFeed,
            sleep=self._sleep,
            report_every_s=0.02,
        )
        loop = training_loop(dataclasses.replace(setup, hub=client), place)
        try:
            self._user_function(Context(loop), rank)
            loop.commit_rest()
            outcome = "finished"
        except StopRun as ordered:
            outcome = "replaced" if ordered.end == "resize" else "stopped"
        loop.finish()
        return outcome

    def _user_function(self, ctx: Context, rank: int) -> None:
        """The training function, as a user writes it."""
        model = torch.nn.Linear(1, 1)
        model, optimizer = ctx.prepare(model, Bookkeeper(model.parameters(), self._book))
        for epoch in ctx.epochs(self.job.rehearsal.passes):
            for batch in ctx.batches(TRAIN):
                if what := self.job.rehearsal.befalls():
                    self.job.disturb(what, self, rank)
                ids = batch["sample_id"]
                optimizer.pending += [(epoch, int(sample)) for sample in ids[: ctx.rows]]
                ctx.backward(model(torch.ones(len(ids), 1)).mean())
                ctx.step()

    def _sleep(self, seconds: float) -> None:
        if self._killed or self.job.ended is not None:
            raise Died
        time.sleep(min(seconds, 0.01))
