"""How the ends of ranks judge an attempt."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from offload.train.driver.losses import AllReturned, Lost, Raised, SmallerBatches, is_broken_connection, verdict_of
from offload.train.group.group import Died, Ended
from offload.train.group.in_worker import Report
from offload.train.worker.steps.device_memory import DeviceMemoryError

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9")


def returned(outcome: str = "finished") -> Report:
    return Report(outcome=outcome)


def raised(error: BaseException) -> Report:
    return Report(error=error, trace="…")


def ends(*reports: Report | None) -> dict[int, Any]:
    """Ends by rank: of a death if there is no report."""
    return {
        rank: Died(attempt=1, rank=rank, reason="died")
        if report is None
        else Ended(attempt=1, rank=rank, report=report)
        for rank, report in enumerate(reports)
    }


@pytest.mark.parametrize(
    ("known", "soon", "settled"),
    [
        (ends(), "", ""),
        (ends(returned()), "", ""),
        (ends(returned(), returned()), AllReturned(outcome="finished"), AllReturned(outcome="finished")),
        (ends(returned("replaced"), returned("replaced")), AllReturned(outcome="replaced"), None),
        (ends(returned("stopped"), returned("finished")), AllReturned(outcome="finished"), None),
        (ends(raised(ValueError("bad"))), "exception", Raised(rank=0)),
        (ends(raised(GLOO)), "connection", Lost(ranks=(), reason=f"RuntimeError: {GLOO}")),
        (ends(raised(GLOO), raised(ValueError("bad"))), Raised(rank=1), None),
        (ends(raised(GLOO), raised(GLOO)), Lost(ranks=(), reason=f"RuntimeError: {GLOO}"), None),
        (ends(raised(ValueError("bad")), None), Lost(ranks=(1,), reason="died"), None),
        (ends(raised(DeviceMemoryError("too large")), None), SmallerBatches(), None),
    ],
    ids=str,
)
def test_the_verdict_waits_for_what_explains_more(known: dict[int, Any], soon: Any, settled: Any) -> None:
    assert verdict_of(known, 2, settled=False) == soon
    assert verdict_of(known, 2, settled=True) == (soon if settled is None else settled)


REPORTS = st.sampled_from([returned(), returned("replaced"), raised(ValueError("bad")), raised(GLOO), None])


@given(st.lists(REPORTS, min_size=1, max_size=5))
def test_whatever_ranks_report_there_is_a_verdict_once_all_have(reports: list[Any]) -> None:
    verdict = verdict_of(ends(*reports), len(reports), settled=False)
    assert not isinstance(verdict, str)
    assert isinstance(verdict, Lost) or None not in reports  # a death explains every other end


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (GLOO, True),
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
