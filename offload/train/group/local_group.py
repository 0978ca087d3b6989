"""A group of processes on this machine, without a cluster.

One thread of the group watches its processes: the kernel tells of their reports and of their ends.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from offload.train.group.deaths import sentence
from offload.train.group.group import Died, Ended, GroupEvent, Joining, NotStarted, Plan
from offload.train.group.in_worker import Main, Member, Report, report_of
from offload.train.group.joined import free_port, joined, members

IMPORTED_AHEAD = ("offload.train.group.local_group",)  # with torch
END_S = 10.0  # time for the status of a process that is known to have ended

StartMethod = Literal["fork", "forkserver", "spawn"]


class LocalGroups:
    """Starts groups of processes on this machine.

    Args:
        method: how Python starts them. Unlike ``fork``, the others begin without the threads and locks of this process;
            ``forkserver`` imports torch once for all processes.
        gpus: the ids of the GPUs to share out, one for each process; none: the CPU.
    """

    def __init__(self, method: StartMethod = "forkserver", gpus: Sequence[str] = ()) -> None:
        self._method, self._gpus = method, tuple(gpus)

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> LocalGroup:
        """See :meth:`offload.train.group.group.Groups.start`."""
        return LocalGroup(main, plan, tell, self._method, self._gpus)


class LocalGroup:
    """See :class:`offload.train.group.group.Group`."""

    def __init__(
        self,
        main: Main,
        plan: Plan,
        tell: Callable[[GroupEvent], None],
        method: StartMethod,
        gpus: Sequence[str],
    ) -> None:
        self._plan, self._tell = plan, tell
        self._processes: dict[int, BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="offload-group-"))
        self._ending = threading.Lock()
        self._ended = False
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(IMPORTED_AHEAD))
        self._watch = threading.Thread(target=self._run, args=(main, gpus), daemon=True, name="training processes")
        self._watch.start()

    def how_ended(self, rank: int) -> str | None:
        """See :meth:`offload.train.group.group.Group.how_ended`."""
        process = self._processes.get(rank)
        if process is None:
            return None
        process.join(END_S)
        return sentence(rank, socket.gethostname(), process.pid or 0, process.exitcode, None)

    def end(self) -> None:
        """See :meth:`offload.train.group.group.Group.end`."""
        with self._ending:
            self._ended = True
            for process in self._processes.values():
                # Not terminate: the user's function may handle SIGTERM, or be stuck in C++.
                process.kill()
        if threading.current_thread() is not self._watch:
            self._watch.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, main: Main, gpus: Sequence[str]) -> None:
        attempt, workers = self._plan.attempt, self._plan.workers
        own = [gpus[at : at + 1] for at in range(workers)] if gpus else [()] * workers
        node = socket.gethostname()
        port = free_port()
        try:
            work = cloudpickle.dumps(main)
            for member in members(attempt, [node] * workers, own):
                self._start(work, member, port)
        except Exception as error:
            self._tell(NotStarted(attempt=attempt, reason=f"{type(error).__name__}: {error}"))
            return
        if not self._ended:
            self._tell(Joining(attempt=attempt, nodes=(node,) * workers))
        self._follow()

    def _start(self, work: bytes, member: Member, port: int) -> None:
        mine, its = self._context.Pipe(duplex=False)
        placed = dataclasses.replace(member, port=port, store=str(self._folder / "store"))
        process = self._context.Process(target=_work, args=(its, work, placed), daemon=False)
        with self._ending:  # a process that starts after the end would stay
            if not self._ended:
                process.start()
                self._processes[member.rank], self._reports[member.rank] = process, mine
        # Only the process itself keeps its end open, so the pipe closes when it dies.
        its.close()

    def _follow(self) -> None:
        """Tell of each report, or of the end of a process without one, until all have told."""
        waiting: dict[Any, int] = {self._reports[rank]: rank for rank in self._reports}
        # A process that the user's function has started may keep the pipe open: the end of the worker itself counts.
        waiting |= {process.sentinel: rank for rank, process in self._processes.items()}
        told: set[int] = set()
        while len(told) < len(self._processes) and not self._ended:
            for ready in wait(list(waiting)):
                rank = waiting.pop(ready)
                # Its report and its end may both be ready.
                if rank not in told and not self._ended:
                    told.add(rank)
                    self._tell(self._heard(rank))
        for process in self._processes.values():
            process.join()
        for connection in self._reports.values():
            connection.close()

    def _heard(self, rank: int) -> GroupEvent:
        attempt, connection = self._plan.attempt, self._reports[rank]
        try:
            if connection.poll():
                report: Report = pickle.loads(connection.recv_bytes())
                return Ended(attempt=attempt, rank=rank, report=report)
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        return Died(attempt=attempt, rank=rank, reason=f"the process of worker {rank} ended")


def _work(connection: Connection, work: bytes, member: Member) -> None:
    """The main function of each process."""

    def run() -> str:
        main: Main = pickle.loads(work)
        with joined(member) as device:
            return main(dataclasses.replace(member, device=str(device)))

    report = report_of(run)
    connection.send_bytes(cloudpickle.dumps(report))
    connection.close()
