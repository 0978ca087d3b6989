"""The preprocessing pool of one actor per core, with two tasks in flight, so that a core goes straight to its next task.

Why not a Ray Data execution per epoch? Its scheduler looks at finished tasks ten times a second, so a core idles 0.15 s between
two tasks. It spends 10 to 20 ms of CPU on each task. It restarts its processes (5 to 10 s of imports per core) whenever they
were idle for a second or an epoch ends. Here, a task costs about a millisecond and may be short, and each core sets up a
transform once per run. ``ray.data.Dataset`` sources still run as Ray Data pipelines (:mod:`offload.pipeline.raydata.execution`).

Where it stops: the :class:`TaskSource` decides which rows a task gets, and how many. A run has one in
:mod:`offload.pipeline.feed.pool_engine`, DataLoaders have :mod:`offload.loader.job.loader_feed`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import offload.process.ray_forks  # noqa: F401  # a transform may fork
from offload.pipeline.pool.free_cores import FreeCores, Refusals
from offload.pipeline.pool.losses import is_dead, node_is_gone
from offload.pipeline.pool.packed_recipe import PackedRecipe
from offload.pipeline.pool.processes import Processes, RayProcesses
from offload.pipeline.pool.task import Assignment, Block, Cost, Task, TaskSource
from offload.pipeline.preprocessing.environment import Ordinal, lowest_free

IN_FLIGHT = 2  # tasks per actor: the running one and the next
REPLACEMENTS = 3  # replacements of one core's process if it keeps dying
START_S = 60.0  # time for a process to start, with imports and set-up, before its core counts as slow
RETRIES = 3  # retries of one task whose process died: the task itself may kill processes


@dataclass(eq=False, kw_only=True)
class _InFlight:
    """A task that a core has, or that waits to run again. ``tries``: the number of processes that died while it ran. ``abandoned``: nobody
    wants its block any more."""

    assignment: Assignment
    tries: int = 0
    abandoned: bool = False


@dataclass(eq=False, kw_only=True)
class _Core:
    """The actor of one core. ``ready``: it runs and has finished its set-up; ``leaving``: it gets no more tasks; ``reserves``: whether it
    reserves CPUs of Ray; ``instead_of``: the actor that leaves once this one is ready."""

    node: str
    actor: Any
    number: int
    replaced: int = 0
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    leaving: bool = False
    dead: bool = False
    reserves: bool = True
    instead_of: _Core | None = None
    in_flight: set[_InFlight] = field(default_factory=set)


PoolMaker = Callable[[Sequence[str], float, TaskSource, Mapping[str, Any]], Any]
"""Makes a :class:`Pool`, or what stands for one in a test: from the node of each core, the CPUs of a core, the source of tasks, and the
runtime environment."""


class Pool:
    """An actor per core, and the thread that feeds them with tasks from ``source``.

    ``nodes``: the node of each core. If Ray chose the node, it could place one actor too many there, and a training worker would
    wait for its CPU forever. ``task_cpus``: the CPUs of each actor; ``runtime_env``: its runtime environment; ``processes``: starts the
    actors where no Ray does; ``first``: the number of the first process.

    The pool replaces a process that dies, and other processes run its tasks. All state belongs to the pool's thread; other
    threads send it messages.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        task_cpus: float,
        source: TaskSource,
        runtime_env: Mapping[str, Any],
        processes: Processes | None = None,
        first: int = 0,
    ) -> None:
        self._source, self._first = source, first
        self._processes = processes or RayProcesses(task_cpus, runtime_env, reports=source.handle is not None)
        self._recipes: list[PackedRecipe] = []
        self._cores: list[_Core] = []
        self._free = FreeCores[_Core](IN_FLIGHT)
        self._refusals = Refusals()
        for node in nodes:
            # The planned number goes along: each process learns how many there will be, as the workers of a
            # DataLoader do.
            self._cores.append(self._new_core(node, planned=len(nodes)))
        self._again: deque[_InFlight] = deque()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[threading.Event] = []
        self._sharing: list[threading.Event] = []
        # Written by two threads without a lock. At worst, one look too many waits in the queue.
        self._looks = False  # whether the thread's next look is still to come
        self._working: set[str] = set()  # nodes that have made a block
        self._closed = False
        self._asked = self._begun = 0  # reshapes; each counter has one writing thread
        # Last: the thread uses everything above.
        threading.Thread(target=self._run, daemon=True, name="pool").start()

    def warm(self, recipe: PackedRecipe) -> None:
        """Make every core import and set up a recipe now."""
        self._news.put(lambda: self._warm_all(recipe))

    def look(self) -> None:
        """Look for work again: there may be new tasks."""
        if not self._looks:  # workers ask hundreds of times a second: one look serves all that waits
            self._looks = True
            self._news.put(None)

    def reshape(self, nodes: Sequence[str]) -> threading.Event:
        """Run on these nodes from now on, one core for each mention. Return an event that is set once the surplus cores have
        finished their tasks."""
        # The caller waits for the event on its own thread: the pool's thread goes on with tasks meanwhile.
        left = threading.Event()
        self._asked += 1
        self._news.put(lambda: self._reshape(Counter(nodes), left))
        return left

    def close(self) -> None:
        """Start nothing any more. Whoever runs the processes ends them."""
        self._closed = True
        self._news.put(None)

    @property
    def reserves(self) -> bool:
        """Whether its processes reserve CPUs of Ray."""
        return self._processes.reserves

    @property
    def runs(self) -> bool:
        """Whether any process can take a task."""
        # A copy: the pool's thread may change the list meanwhile.
        return any(core.ready for core in tuple(self._cores))

    def share(self) -> threading.Event:
        """Reserve no CPUs of Ray from now on, so that others who wait for some can run on the same cores. Return an event that is set once
        none is reserved. Each process works until another, which reserves nothing, can take its place."""
        shared = threading.Event()
        self._news.put(lambda: self._share(shared))
        return shared

    def abandon(self, tasks: Sequence[Task]) -> None:
        """Replace the processes that still work on these tasks, which nobody wants any more: they may be stuck."""
        self._news.put(lambda: self._abandon(tasks))

    def starting(self) -> int:
        """The number of cores without a process that could take a task. A core that others hold counts only for a limited time."""
        earliest = time.monotonic() - START_S
        # A reshape that the thread has not begun may start processes, so it counts as one.
        return self._asked - self._begun + sum(not core.ready and core.began > earliest for core in tuple(self._cores))

    def _run(self) -> None:
        try:
            while not self._closed:
                self._refusals.renew(time.monotonic())
                while (match := self._match()) is not None:
                    self._start(*match)
                self._heed(self._refusals.due_in(time.monotonic()))
        except BaseException as error:  # otherwise, callers that wait for blocks would wait forever
            self._source.failed(error)
            raise

    def _heed(self, timeout_s: float | None) -> None:
        """Wait for news, and act on them."""
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return
        if news is None:
            self._looks = False
            self._refusals.look()
        else:
            news()

    def _new_core(self, node: str, replaced: int = 0, planned: int = 0) -> _Core:
        me = lowest_free({core.number for core in self._cores}, max(planned, len(self._cores) + 1), self._first)
        actor = self._new_actor(node, me)
        core = _Core(node=node, actor=actor, number=me.number, replaced=replaced, reserves=self.reserves)
        for recipe in self._recipes:
            self._warm(core, recipe)
        return core

    def _new_actor(self, node: str, me: Ordinal) -> Any:
        return self._processes.start(node, self._source.handle, me)

    def _forget(self, core: _Core) -> None:
        core.dead = True
        self._cores.remove(core)
        self._place(core)

    def _kill(self, core: _Core) -> None:
        self._processes.end(core.actor)

    def _warm_all(self, recipe: PackedRecipe) -> None:
        self._recipes.append(recipe)
        for core in self._cores:
            self._warm(core, recipe)

    def _warm(self, core: _Core, recipe: PackedRecipe) -> None:
        warmed: Future[None] = core.actor.warm.remote(recipe).future()
        warmed.add_done_callback(lambda outcome: self._news.put(lambda: self._warmed(core, outcome)))

    def _warmed(self, core: _Core, warmed: Future[None]) -> None:
        error = warmed.exception()
        if is_dead(error):
            self._died(core, error)
        else:
            # A failing set-up of a transform raises here, and again in the first task, which reports it to the user.
            core.ready = True
            self._place(core)
            self._replace(core)

    def _replace(self, core: _Core) -> None:
        """Let the actor go in whose place this one works from now on."""
        old, core.instead_of = core.instead_of, None
        if old is not None and not old.dead:
            old.leaving = True
            self._place(old)
            self._let_go(old)

    def _match(self) -> tuple[_Core, _InFlight] | None:
        """A core and the task that it should run; None without a task, or if all cores have enough to do.

        Cores without a process get no tasks: others might wait for the blocks.
        """
        while (core := self._free.first(self._refusals.nodes)) is not None:
            began = time.thread_time()
            if (in_flight := self._next_task(core.node)) is not None:
                return core, in_flight
            self._refusals.add(core.node, time.thread_time() - began)  # it has no room, but another may have some
        return None

    def _place(self, core: _Core) -> None:
        """Note whether a core may take a task, and how many it has. Its node may have room now."""
        self._refusals.drop(core.node)
        if core.ready and not core.leaving and not core.dead:
            self._free.put(core, core.node, len(core.in_flight))
        else:
            self._free.remove(core)

    def _next_task(self, node: str) -> _InFlight | None:
        # Tasks that have failed before come first: the pass may be waiting for just their blocks.
        if self._again:
            return self._again.popleft()
        assignment = self._source.next_task(node)
        return None if assignment is None else _InFlight(assignment=assignment)

    def _start(self, core: _Core, in_flight: _InFlight) -> None:
        core.in_flight.add(in_flight)
        self._place(core)
        task = in_flight.assignment.task
        ref, cost = core.actor.process.options(num_returns=2).remote(task.rows, task.recipe, task.epoch)
        # Not ray.wait in a loop: it would wake ten times a second for nothing, on a core that has samples to make.
        cost.future().add_done_callback(
            lambda outcome: self._news.put(lambda: self._finished(core, in_flight, ref, outcome))
        )

    def _finished(self, core: _Core, in_flight: _InFlight, ref: Any, cost: Future[Cost]) -> None:
        # The core has room again, whatever the outcome, and even if nobody wants the block.
        core.in_flight.discard(in_flight)
        self._place(core)
        if in_flight.abandoned:
            return
        error = cost.exception()
        if is_dead(error):
            self._died(core, error)
            # An actor that Ray could not place has run nothing, so its task is not suspect.
            in_flight.tries += not node_is_gone(error)
            if in_flight.tries <= RETRIES:
                self._again.append(in_flight)
                self._refusals.look()  # any node may run it
            else:
                in_flight.assignment.failed(error)
        elif error is not None:
            in_flight.assignment.failed(error)
        else:
            in_flight.assignment.finished(Block(ref=ref, cost=cost.result(), node=core.node))
            if core.node not in self._working:
                self._working.add(core.node)
                self._source.works(core.node)
        self._let_go(core)

    def _died(self, core: _Core, error: BaseException) -> None:
        # Each task in flight reports the same death.
        if core.dead:
            return
        self._forget(core)
        self._source.lost(core.node, error)
        gone = node_is_gone(error)
        # No successor for a core that was to leave anyway, or that has one on its way. A process that dies again and
        # again (a library that crashes at its import) must not be restarted forever.
        if not core.leaving and not gone and core.replaced < REPLACEMENTS and not self._follows(core):
            again = self._new_core(core.node, core.replaced + 1)
            again.instead_of = core.instead_of
            self._cores.append(again)
        self._tell_free()
        # The driver replaces a node that is gone, or ends the run if no node remains.
        if not self._cores and not gone:
            self._source.failed(error)

    def _abandon(self, tasks: Sequence[Task]) -> None:
        for core in list(self._cores):
            stuck = [late for late in core.in_flight if any(late.assignment.task is task for task in tasks)]
            if not stuck:
                continue
            for late in stuck:
                late.abandoned = True
            self._forget(core)
            self._kill(core)  # its other task fails, and another process runs it again
            if not core.leaving and not self._follows(core):
                self._cores.append(self._new_core(core.node, core.replaced))
            self._tell_free()

    def _reshape(self, wanted: Counter[str], left: threading.Event) -> None:
        for core in list(self._cores):
            self._replace(core)
        staying = [core for core in self._cores if not core.leaving]
        for node in {*wanted, *(core.node for core in staying)}:
            # Those that still start leave first, then those with the fewest tasks: they are free soonest.
            here = sorted((c for c in staying if c.node == node), key=lambda core: (core.ready, len(core.in_flight)))
            surplus = max(len(here) - wanted[node], 0)
            for core in here[:surplus]:
                core.leaving = True
                self._place(core)
                self._let_go(core)
            for _ in range(wanted[node] - len(here)):
                self._cores.append(self._new_core(node, planned=wanted.total()))
        self._working &= wanted.keys()
        self._waiting.append(left)
        # Only after the new cores are in the list: `starting` would otherwise count neither the reshape nor its cores.
        self._begun += 1
        self._refusals.look()
        self._tell_free()

    def _share(self, shared: threading.Event) -> None:
        # From now on also for replacements and for cores that a reshape adds.
        self._processes.reserves = False
        for old in [core for core in self._cores if core.reserves and not core.leaving and not self._follows(core)]:
            core = self._new_core(old.node, old.replaced)
            core.instead_of = old
            self._cores.append(core)
        self._sharing.append(shared)
        self._tell_free()

    def _follows(self, core: _Core) -> bool:
        """Return whether another actor starts in the place of this one."""
        return any(other.instead_of is core for other in self._cores)

    def _let_go(self, core: _Core) -> None:
        if core.leaving and not core.in_flight and not core.dead:
            self._forget(core)
            self._kill(core)
            self._tell_free()

    def _tell_free(self) -> None:
        if not any(core.reserves for core in self._cores):
            for shared in self._sharing:
                shared.set()
            self._sharing.clear()
        if not any(core.leaving for core in self._cores):
            for waiting in self._waiting:
                waiting.set()
            self._waiting.clear()
