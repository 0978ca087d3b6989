"""A group of actors on a Ray cluster, through Ray's public interface.

The actors of a group hold one placement group. Its name is all that a run must remember to end them: Ray ends the actors with it, and
both with the driver. Answers and deaths arrive as futures. Ray calls back from threads of its own, which must not wait, so one thread of
the group takes the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from offload.pipeline.program import pickling
from offload.preload.ended import exit_status
from offload.ray_private.actor_ends import ran_out_of_memory
from offload.train.cluster.holdings import Holdings
from offload.train.cluster.reachable import silent_nodes
from offload.train.group.deaths import first_line, sentence
from offload.train.group.group import Died, Ended, GroupEvent, Joining, NotStarted, Plan, Reservation
from offload.train.group.in_worker import Main, Member, Report, report_of
from offload.train.group.joined import joined, members, open_store

STATUS_S = 1.0  # time for an exit status to be written
ANSWER_S = 8.0  # time for a node to answer; it may be gone
STANDARD_ERROR = "/proc/self/fd/2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where a process runs: its node's id, its host, its process id, its log, and the ids of its GPUs."""

    node: str
    host: str
    address: str
    pid: int
    log: str | None
    gpus: tuple[str, ...]


class TrainingWorker:
    """The actor of one worker. Ray's tables call it ``title``."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._store: Any = None

    def __repr__(self) -> str:
        return self._title

    def whereabouts(self) -> Whereabouts:
        """Where this process runs."""
        context = ray.get_runtime_context()
        return Whereabouts(
            node=context.get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            pid=os.getpid(),
            log=_log(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def open(self, host: str) -> int:
        """Open the group's store at this host, as rank 0; return its port."""
        self._store = open_store(host)
        port: int = self._store.port
        return port

    def run(self, packed: bytes, member: Member) -> Report:
        """Join the group, and call the pickled function."""

        def run() -> str:
            main: Main = pickling.loads(packed)
            with joined(member, self._store) as device:
                return main(dataclasses.replace(member, device=str(device)))

        return report_of(run)


def _log() -> str | None:
    """The file of this process's standard error, to which Ray has turned it."""
    with contextlib.suppress(OSError):
        log = os.readlink(STANDARD_ERROR)
        return log if os.path.isfile(log) else None
    return None


class RayGroups:
    """Starts the groups of a run. ``title``: what Ray's tables call a worker; ``holdings``: where placement groups are noted."""

    def __init__(self, reservation: Reservation, *, title: str, holdings: Holdings) -> None:
        self._reservation, self._title, self._holdings = reservation, title, holdings

    def start(self, main: Main, plan: Plan, tell: Callable[[GroupEvent], None]) -> RayGroup:
        """See :meth:`offload.train.group.group.Groups.start`."""
        return RayGroup(main, plan, tell, self._reservation, self._title, self._holdings)


class RayGroup:
    """See :class:`offload.train.group.group.Group`."""

    def __init__(
        self,
        main: Main,
        plan: Plan,
        tell: Callable[[GroupEvent], None],
        reservation: Reservation,
        title: str,
        holdings: Holdings,
    ) -> None:
        self._main, self._plan, self._tell, self._holdings = main, plan, tell, holdings
        # One thread: steps follow one another, so the group's own state needs no lock.
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="training group")
        self._ended = False
        self._by_rank: list[Whereabouts] = []
        self._members: list[Member] = []
        self._died_of: dict[int, BaseException] = {}
        self._room = holdings.new_group(
            [reservation.bundle] * plan.workers, strategy=reservation.strategy, selectors=reservation.selectors(plan)
        )
        amounts = dict(reservation.bundle)
        options: dict[str, Any] = {
            # Ray takes these three by names of their own, and refuses them among the others.
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "memory": amounts.pop("memory", None),
            "resources": amounts,
            "runtime_env": dict(reservation.runtime_env) or None,
            # A restarted actor would be alone: its peers' connections to the old process are broken. The supervisor
            # starts a whole group instead.
            "max_restarts": 0,
        }
        worker: Any = ray.remote(TrainingWorker)
        self._actors = [
            worker.options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=at),
            ).remote(title)
            for at in range(plan.workers)
        ]
        self._after([actor.whereabouts.remote() for actor in self._actors], self._placed)

    def how_ended(self, rank: int) -> str | None:
        """See :meth:`offload.train.group.group.Group.how_ended`. The node of the process knows its exit status."""
        if rank >= len(self._by_rank):
            return None
        process = self._by_rank[rank]
        place = NodeAffinitySchedulingStrategy(process.node, soft=False)
        gone = f"worker {rank} ended with its node {process.address}"
        if silent_nodes([process.node]):
            return gone
        try:
            status = ray.get(_exit_status.options(scheduling_strategy=place).remote(process.pid), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            return gone
        error = self._died_of.get(rank)
        actor_id = error.actor_id if isinstance(error, ray.exceptions.RayActorError) else None
        ray_killed = actor_id is not None and ran_out_of_memory(actor_id)
        return sentence(rank, process.host, process.pid, status, process.log, ray_killed=ray_killed)

    def end(self) -> None:
        """See :meth:`offload.train.group.group.Group.end`."""
        self._ended = True
        self._steps.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ray.exceptions.RayError, ValueError, RuntimeError):  # the cluster may be gone
            for actor in self._actors:
                ray.kill(actor)
            self._holdings.remove_group(self._room)

    # -- the steps of a start ------------------------------------------------------------------------------------------

    def _placed(self, answers: Sequence[Whereabouts]) -> None:
        """All processes run: rank 0 opens the store."""
        places = members(self._plan.attempt, [answer.node for answer in answers], [answer.gpus for answer in answers])
        # Ranks follow from where the processes run, which is known only now.
        in_order = sorted(range(len(places)), key=lambda at: places[at].rank)
        self._members = [places[at] for at in in_order]
        self._by_rank = [answers[at] for at in in_order]
        self._actors = [self._actors[at] for at in in_order]
        if len(places) == 1:
            self._opened([0])
        else:
            self._after([self._actors[0].open.remote(self._by_rank[0].address)], self._opened)

    def _opened(self, ports: Sequence[int]) -> None:
        """The store is open: all processes join, and call their function."""
        # Told before the processes join: from here on, a death is a failure of training, not of the start.
        self._tell(Joining(attempt=self._plan.attempt, nodes=tuple(process.node for process in self._by_rank)))
        # In the object store, once for all: the driver's node has it, whichever node died with the last group.
        packed = ray.put(pickling.dumps(self._main))
        for rank, actor in enumerate(self._actors):
            member = dataclasses.replace(self._members[rank], master=self._by_rank[0].address, port=ports[0])
            ended = actor.run.remote(packed, member).future()
            ended.add_done_callback(partial(self._soon, self._heard, rank))

    def _heard(self, rank: int, answer: Future[Report]) -> None:
        attempt, error = self._plan.attempt, answer.exception()
        if error is None:
            self._tell(Ended(attempt=attempt, rank=rank, report=answer.result()))
        else:
            self._died_of[rank] = error
            self._tell(Died(attempt=attempt, rank=rank, reason=first_line(error)))

    # -- how a step follows another --------------------------------------------------------------------------------

    def _after(self, calls: Sequence[Any], step: Callable[[list[Any]], None]) -> None:
        """Take a step with the answers of these calls, or report that the group did not start."""
        answers = [call.future() for call in calls]
        left = len(answers)

        def one_is_here(answer: Future[Any]) -> None:
            nonlocal left
            left -= 1
            error = answer.exception()
            if error is not None:
                left = -1  # once is enough
                self._tell(NotStarted(attempt=self._plan.attempt, reason=first_line(error)))
            elif left == 0:
                step([each.result() for each in answers])

        for answer in answers:
            answer.add_done_callback(partial(self._soon, one_is_here))

    def _soon(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step on the group's thread, unless the group has ended."""
        with contextlib.suppress(RuntimeError):  # it has: its thread takes no more
            self._steps.submit(self._unless_ended, step, *arguments)

    def _unless_ended(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._ended:
            return
        try:
            step(*arguments)
        except Exception as error:
            self._tell(NotStarted(attempt=self._plan.attempt, reason=first_line(error)))


@ray.remote(num_cpus=0)
def _exit_status(pid: int) -> int | None:
    """The exit status of a process of this node; None if nobody has recorded it."""
    return exit_status(pid, STATUS_S)
