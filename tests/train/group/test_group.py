"""The contract of worker groups, for Ray's actors and for processes of this machine."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group_table

from offload import preload
from offload.actors.starter import Starter
from offload.train.cluster.holdings import Holdings
from offload.train.group import ray_group
from offload.train.group.group import Died, Ended, Groups, Joining, NotStarted, Plan, Reservation
from offload.train.group.in_worker import Main, Member
from offload.train.group.joined import members
from offload.train.group.local_group import LocalGroups
from offload.train.group.ray_group import RayGroups
from tests.helpers import eventually

DEADLINE_S = 800.0
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    """Starts the processes of all groups of this machine, as one does for all attempts of a run."""
    starter = Starter.fresh("offload.actors.processes:answer_calls", ["offload.train.group.local_group"])
    yield starter
    starter.close()


def reservation() -> Reservation:
    return Reservation(bundle={"CPU": 1.0}, runtime_env=preload.runtime_env({}, also=preload.TRAINING))


@pytest.fixture(params=["ray", "this machine"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    if request.param != "ray":
        yield LocalGroups(request.getfixturevalue("starter"))
        return
    request.getfixturevalue("ray_cluster")
    monkeypatch.setattr(ray_group, "ANSWER_S", DEADLINE_S)  # of a node that is asked how a process ended
    holdings = Holdings()
    yield RayGroups(reservation(), title="contract worker", holdings=holdings)
    holdings.release()
    holdings.drop()
    eventually(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))


pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Heard:
    """A group that was started, and its events."""

    def __init__(self, groups: Groups, main: Main, workers: int = 2, attempt: int = 1) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.group = groups.start(main, Plan(attempt=attempt, workers=workers), self._events.put)

    def next(self) -> Any:
        return self._events.get(timeout=DEADLINE_S)

    def ends(self, workers: int = 2) -> dict[int, Any]:
        """The ends of all ranks, after the group has joined."""
        assert isinstance(self.next(), Joining)
        return {end.rank: end for end in (self.next() for _ in range(workers))}

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *error: object) -> None:
        self.group.end()


def described(folder: Path, member: Member) -> str:
    total = torch.ones(1)
    dist.all_reduce(total)
    environment = ",".join(os.environ[name] for name in ENVIRONMENT[:5])
    (folder / str(member.rank)).write_text(f"{environment} {dist.get_rank()} {int(total)} {member.device}")
    return "finished"


def test_the_processes_join_and_return(groups: Groups, tmp_path: Path) -> None:
    with Heard(groups, partial(described, tmp_path)) as heard:
        ends = heard.ends()
    assert {rank: end.report.outcome for rank, end in ends.items()} == {0: "finished", 1: "finished"}
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0,2,0,2,0 0 2 cpu", "1,2,1,2,0 1 2 cpu"]


class Unpicklable(Exception):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} is damaged")


def raising(member: Member) -> str:
    if member.rank == 0:
        raise ValueError("a bad batch")
    raise Unpicklable("a.jpg", 3)


def test_an_exception_arrives_with_its_traceback(groups: Groups) -> None:
    with Heard(groups, raising) as heard:
        ends = heard.ends()
    assert isinstance(ends[0].report.error, ValueError)
    assert 'raise ValueError("a bad batch")' in ends[0].report.trace
    assert str(ends[1].report.error) == "Unpicklable: a.jpg is damaged"


def leaving(how: str, folder: Path, member: Member) -> str:
    if member.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        if how == "exits":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # a rank that waits for its peer
    return "finished"


@pytest.mark.parametrize(("how", "words"), [("exits", "ended with exit code 7"), ("is killed", "signal 9 (SIGKILL)")])
def test_a_process_that_ends_is_told_of_at_once(groups: Groups, how: str, words: str, tmp_path: Path) -> None:
    with Heard(groups, partial(leaving, how, tmp_path)) as heard:
        assert isinstance(heard.next(), Joining)
        died = heard.next()
        assert isinstance(died, Died)
        assert died.rank == 1
        assert words in str(heard.group.how_ended(1))
        assert f"(process {(tmp_path / 'pid').read_text()})" in str(heard.group.how_ended(1))


def waiting(folder: Path, member: Member) -> str:
    (folder / f"{member.attempt}.{member.rank}").write_text(str(os.getpid()))
    threading.Event().wait()
    return "finished"


def written(folder: Path, attempt: int, workers: int) -> list[int]:
    """The process ids of a group's ranks, once all have begun."""
    files = [folder / f"{attempt}.{rank}" for rank in range(workers)]
    eventually(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_groups_of_other_sizes_follow_and_leave_nothing_behind(groups: Groups, tmp_path: Path) -> None:
    pids = []
    for attempt, workers in enumerate((1, 3, 2), start=1):
        with Heard(groups, partial(waiting, tmp_path), workers, attempt) as heard:
            joining = heard.next()
            assert (joining.attempt, len(joining.nodes)) == (attempt, workers)
            pids += written(tmp_path, attempt, workers)
    eventually(lambda: gone(pids))


@pytest.mark.parametrize("after", ["at once", "joined"])
def test_a_group_ends_in_each_phase_of_its_start(groups: Groups, after: str, tmp_path: Path) -> None:
    with Heard(groups, partial(waiting, tmp_path)) as heard:
        if after == "joined":
            assert isinstance(heard.next(), Joining)
        heard.group.end()
    with Heard(groups, partial(described, tmp_path), attempt=2) as again:  # what the first held is free
        assert all(end.report.outcome == "finished" for end in again.ends().values())


class Closed:
    """It arrives nowhere."""

    def __reduce__(self) -> Any:
        return _refuse, ()

    def __call__(self, member: Member) -> str:
        return "finished"


def _refuse() -> Any:
    raise OSError("its file is closed")


def test_a_function_that_does_not_arrive_ends_the_attempt(groups: Groups) -> None:
    with Heard(groups, Closed()) as heard:
        event = heard.next()
        if isinstance(event, Joining):
            event = heard.next()
        error = str(event.report.error) if isinstance(event, Ended) else str(getattr(event, "reason", ""))
    assert "its file is closed" in error


@pytest.mark.usefixtures("ray_cluster")
def test_a_group_whose_processes_cannot_start_says_why() -> None:
    holdings = Holdings()
    environment = {"working_dir": "https://127.0.0.1:9/nothing.zip"}
    groups = RayGroups(Reservation(bundle={"CPU": 1.0}, runtime_env=environment), title="w", holdings=holdings)
    with Heard(groups, raising) as heard:
        event = heard.next()
    holdings.drop()
    assert isinstance(event, NotStarted)
    assert "RuntimeEnvSetupError" in event.reason


def test_ranks_are_contiguous_within_a_node_and_see_all_its_gpus() -> None:
    places = members(4, ["b", "a", "b"], [("3",), ("0",), ("1",)])
    by_rank = sorted(places, key=lambda member: member.rank)
    assert [(m.node, m.local_rank, m.local_world_size, m.node_rank, m.gpus, m.gpu) for m in by_rank] == [
        ("b", 0, 2, 0, ("1", "3"), 0),
        ("b", 1, 2, 0, ("1", "3"), 1),
        ("a", 0, 1, 1, ("0",), 0),
    ]
    assert [member.rank for member in places] == [1, 2, 0]
    assert {member.attempt for member in places} == {4}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("elsewhere", ["avoided", "another home"])
def test_workers_run_on_no_other_nodes_than_the_plan_says(elsewhere: str) -> None:
    here = ray.get_runtime_context().get_node_id()
    wherever = {"avoid": (here,)} if elsewhere == "avoided" else {"homes": ("f" * len(here),)}
    holdings = Holdings()
    groups = RayGroups(reservation(), title="w", holdings=holdings)
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group = groups.start(raising, Plan(attempt=1, workers=1, **wherever), heard.put)
    eventually(lambda: any(each["state"] == "PENDING" for each in placement_group_table().values()))
    assert heard.empty()
    group.end()
    group = groups.start(raising, Plan(attempt=2, workers=2, homes=(here, here)), heard.put)
    assert heard.get() == Joining(attempt=2, nodes=(here, here))
    group.end()
    holdings.drop()
