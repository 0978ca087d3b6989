"""Ranks of a job know each other by their environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

from offload.loader.job import ranks
from offload.loader.job.ranks import Ranks

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_ranks_of_one_job_share_its_name() -> None:
    first, second = Ranks.of({**TORCHRUN, "RANK": "0"}), Ranks.of(TORCHRUN)
    assert first.name == second.name
    assert (first.rank, second.rank, second.world_size) == (0, 1, 2)


@pytest.mark.parametrize(
    "changed", [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"WORLD_SIZE": "3"}]
)
def test_other_jobs_have_other_names(changed: dict[str, str]) -> None:
    assert Ranks.of({**TORCHRUN, **changed}).name != Ranks.of(TORCHRUN).name


@pytest.mark.parametrize("env", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_a_process_alone_is_a_job_of_its_own(env: dict[str, str]) -> None:
    first, second = Ranks.of(env), Ranks.of(env)
    assert first.world_size == 1
    assert first.name != second.name


def test_ranks_that_only_torch_distributed_knows_are_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.multiprocessing.spawn and Lightning's own launcher start them."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert Ranks.of(env).world_size == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    jobs = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        jobs.append(Ranks.of(env))
    assert [(ranks.rank, ranks.world_size) for ranks in jobs] == [(0, 2), (1, 2)]
    assert jobs[0].name == jobs[1].name
    assert Ranks.of({**env, "RANK": "5", "WORLD_SIZE": "6"}).rank == 5  # the launcher's word comes first
    assert (
        Ranks.of({}).world_size == 1
    )  # without an address or a store, another job of this machine would have the same name


@pytest.mark.parametrize("ranks_in_environment", [False, True])
@pytest.mark.parametrize("how", ["tcp", "file"])
def test_ranks_that_met_without_an_address_in_the_environment_are_one_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, ranks_in_environment: bool
) -> None:
    """As with ``init_process_group(init_method="tcp://host:port", rank=rank, world_size=2)`` in spawned processes."""

    def met(name: str) -> list[torch.distributed.Store]:
        if how == "file":
            return [torch.distributed.FileStore(str(tmp_path / name), 2) for _ in range(2)]
        first = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        return [first, torch.distributed.TCPStore("127.0.0.1", first.port, 2, is_master=False)]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    jobs = []
    for stores in (met("one"), met("other")):
        for rank, store in enumerate(stores):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda store=store: store)
            env = {"RANK": f"{rank}", "WORLD_SIZE": "2"} if ranks_in_environment else {}
            jobs.append(Ranks.of(env))
            assert Ranks.of(env) == jobs[-1]
    assert [(ranks.rank, ranks.world_size) for ranks in jobs] == [(0, 2), (1, 2)] * 2
    assert jobs[0].name == jobs[1].name != jobs[2].name == jobs[3].name


def test_torch_has_the_store_by_which_ranks_met(tmp_path: Path) -> None:
    """The contract behind the test above, which puts stores in the place of torch's own: torch has no public function for it."""
    assert ranks._agreed() == ""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        told = ranks._agreed()
        assert told
        assert ranks._agreed() == told
    finally:
        torch.distributed.destroy_process_group()


def test_processes_of_a_rank_are_told_its_place() -> None:
    assert Ranks.of(TORCHRUN).variables({"LOCAL_RANK": "1", "HOME": "/root"}) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }
    assert Ranks.of({}).variables({"LOCAL_RANK": "1"}) == {}
