"""A group of processes on this machine, without a cluster."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import cloudpickle

from offload.actors.processes import Actor, start_actor
from offload.actors.starter import Starter
from offload.train.group.deaths import first_line, sentence
from offload.train.group.group import Died, Ended, GroupEvent, Joining, NotStarted, Plan
from offload.train.group.in_worker import Main, Member, Report, report_of
from offload.train.group.joined import free_port, joined, members


class TrainingProcess:
    """The object of one worker's process. ``variables``: for its environment."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def ready(self) -> None:
        """Answer: the process runs."""

    def run(self, packed: bytes, member: Member) -> Report:
        """Join the group, and call the pickled function."""

        def run() -> str:
            main: Main = cloudpickle.loads(packed)
            with joined(member) as device:
                return main(dataclasses.replace(member, device=str(device)))

        return report_of(run)


class LocalGroups:
    """Starts groups of processes on this machine.

    Args:
        starter: starts the processes.
        node: the id of this machine.
        gpus: the ids of the GPUs to share out; none: the CPU.
        gpus_each: how many of them a process gets; below 1: several processes share one.
        variables: for the environment of the processes.
    """

    def __init__(
        self,
        starter: Starter,
        *,
        node: str = "",
        gpus: Sequence[str] = (),
        gpus_each: float = 1.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.starter, self.node, self.gpus, self.gpus_each = (
            starter,
            node or socket.gethostname(),
            tuple(gpus),
            gpus_each,
        )
        self.variables = dict(variables or {})

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> LocalGroup:
        """See :meth:`offload.train.group.group.Groups.start`."""
        return LocalGroup(main, plan, tell, self)

    def gpus_of(self, process: int) -> tuple[str, ...]:
        """The ids of the GPUs of a process of a group."""
        first = int(process * self.gpus_each + 1e-9)
        return self.gpus[first : first + max(int(self.gpus_each), 1)]


class LocalGroup:
    """See :class:`offload.train.group.group.Group`."""

    def __init__(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None], groups: LocalGroups) -> None:
        self._plan, self._tell, self._node = plan, tell, groups.node
        self._folder = Path(tempfile.mkdtemp(prefix="offload-group-"))
        self._starting, self._awaited = threading.Lock(), plan.workers
        self._ended = False
        self._actors: list[Actor] = []
        try:
            self._work = cloudpickle.dumps(main)
            self._actors = [
                start_actor(groups.starter, TrainingProcess, groups.variables, title=f"the process of worker {rank}")
                for rank in range(plan.workers)
            ]
        except Exception as error:  # the user's objects may raise anything, and there may be no more open files
            tell(NotStarted(attempt=plan.attempt, reason=first_line(error)))
            return
        own = [groups.gpus_of(at) for at in range(plan.workers)]
        for actor in self._actors:
            actor.ready.remote().future().add_done_callback(partial(self._is_ready, own))

    def how_ended(self, rank: int) -> str | None:
        """See :meth:`offload.train.group.group.Group.how_ended`."""
        if rank >= len(self._actors):
            return None
        actor = self._actors[rank]
        return sentence(rank, socket.gethostname(), actor.pid, actor.status, None)

    def end(self) -> None:
        """See :meth:`offload.train.group.group.Group.end`."""
        self._ended = True
        for actor in self._actors:
            # Not terminate: the user's function may handle SIGTERM, or be stuck in C++.
            actor.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self, gpus: Sequence[Sequence[str]], ready: Future[None]) -> None:
        """A process runs, or has ended. Once all run, they join."""
        with self._starting:
            first_failure = ready.exception() is not None and self._awaited > 0
            self._awaited = -1 if ready.exception() is not None else self._awaited - 1
            all_run = self._awaited == 0
        if self._ended:
            return
        if first_failure:
            self._tell(NotStarted(attempt=self._plan.attempt, reason=str(ready.exception())))
        if all_run:
            self._join(gpus)

    def _join(self, gpus: Sequence[Sequence[str]]) -> None:
        nodes = [self._node] * self._plan.workers
        port = free_port()
        self._tell(Joining(attempt=self._plan.attempt, nodes=tuple(nodes)))
        for actor, member in zip(self._actors, members(self._plan.attempt, nodes, gpus), strict=True):
            placed = dataclasses.replace(member, port=port, store=str(self._folder / "store"))
            answer = actor.run.remote(self._work, placed).future()
            answer.add_done_callback(partial(self._heard, member.rank))

    def _heard(self, rank: int, answer: Future[Report]) -> None:
        if self._ended:
            return
        attempt, error = self._plan.attempt, answer.exception()
        if error is None:
            self._tell(Ended(attempt=attempt, rank=rank, report=answer.result()))
        else:
            self._tell(Died(attempt=attempt, rank=rank, reason=first_line(error)))
