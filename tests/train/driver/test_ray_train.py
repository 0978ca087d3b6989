"""The last look at workers before they end: no report is lost, and nobody waits for workers that are gone. (With real workers:
test_elastic.py.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import RayActorError

from offload.train.driver import ray_train
from offload.train.driver.ray_train import LastLook, is_broken_connection


class Group:
    """A worker group of two ranks. ``polls``: which ranks have a report in each poll; an exception is raised."""

    def __init__(self, look: LastLook, polls: list[Any]) -> None:
        self.look, self.polls, self.asked = look, polls, 0

    def poll_status(self, timeout: float) -> Any:
        assert timeout > 0
        self.asked += 1
        found = self.polls.pop(0) if self.polls else ()
        if isinstance(found, Exception):
            raise found
        errors = {rank: OSError() for rank in found if rank < 0}
        reports = {rank: SimpleNamespace(training_report=object() if rank in found else None) for rank in (0, 1)}
        status = SimpleNamespace(worker_statuses=reports, errors=errors)
        self.look.after_worker_group_poll_status(status)
        return status


def ended(*polls: Any, before: Any = ()) -> Group:
    look = LastLook()
    group = Group(look, [before, *polls])
    look.after_worker_group_start(group)
    group.poll_status(1.0)
    with look.on_worker_group_shutdown():
        pass
    return group


@pytest.mark.parametrize(
    ("before", "polls"),
    [
        ((), [(0, 1)]),
        ((), [(0,), (), (1,)]),  # one rank reports a moment after the other
        ((0,), [(), (1,)]),  # the first report was taken in before
        ((1,), [(0,)]),
        ((0, 1), [()]),
    ],
)
def test_the_last_look_waits_until_all_ranks_have_reported(before: Any, polls: list[Any]) -> None:
    group = ended(*polls, before=before)
    assert group.polls == []
    assert group.asked == 1 + len(polls)


@pytest.mark.parametrize("gone", [(-1,), RayActorError(), RuntimeError("no active worker group")], ids=repr)
def test_the_last_look_does_not_wait_for_workers_that_are_gone(gone: Any) -> None:
    assert ended((0,), gone).asked == 3


def test_the_last_look_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train, "LAST_LOOK_S", 0.2)
    assert ended((0,)).asked >= 3


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9"
            ),
            True,
        ),
        (RuntimeError("Gloo connectFullMesh failed with [../gloo/pair.cc:7] connect: Connection refused"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (RuntimeError("my feature store: Connection refused"), False),
        (RuntimeError("[/gloo/allreduce.cc:1] Invalid scalar type"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
    ids=str,
)
def test_only_torchs_own_lost_connections_count_as_a_lost_worker(error: Exception, broken: bool) -> None:
    assert is_broken_connection(error) == broken
