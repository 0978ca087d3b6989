"""The checkpoints of the ranks of a run: written in order, on all ranks or on none, and found again."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
import torch

from offload.errors import RunError
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints import run_folder
from offload.train.checkpoints.format import Progress, Training
from offload.train.checkpoints.run_folder import OLD_LIST, RunFolder
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE, MODEL_FILE, Storage
from offload.train.config import Checkpoints
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.saving import checkpointer
from offload.train.worker.saving.checkpointer import CheckpointContent, FolderCheckpointer, FolderStored
from tests.emulation.in_threads import Peer, Ranks

DEADLINE_S = 800.0
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def content(step: int = 0) -> CheckpointContent:
    return {"weight": torch.full((3,), float(step))}, Training(progress=Progress(step=step)).to_state()


def alone(folder: Path, settings: Checkpoints | None = None, filesystem: Any = None) -> FolderCheckpointer:
    """The checkpointer of a run with one worker."""
    return FolderCheckpointer(
        Storage(path=str(folder), filesystem=filesystem), "run", settings or Checkpoints(), NoPeers()
    )


def steps(folder: Path) -> list[Any]:
    return [entry.metrics["step"] for entry in RunFolder(Storage(path=str(folder)), "run").entries()]


def on_ranks(workers: int, call: Callable[[Peer], Any]) -> list[Any]:
    """What each rank, a thread, returns or raises."""
    ranks, outcomes = Ranks(workers), [None] * workers

    def work(rank: int) -> None:
        try:
            outcomes[rank] = call(Peer(ranks, rank))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


class Gate:
    """Holds checkpoints back while their files are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        real = checkpoints.save

        def save(*arguments: Any) -> None:
            self.reached.set()
            assert self.open.wait(DEADLINE_S)
            real(*arguments)

        monkeypatch.setattr(checkpoints, "save", save)


# --- writing --------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_the_newest_and_the_ones_before(tmp_path: Path) -> None:
    kept = alone(tmp_path, Checkpoints(keep=3))
    assert kept.newest() is None
    for step in range(1, 5):
        kept.keep({"step": step}, content(step), wait=True)
    assert steps(tmp_path) == [2, 3, 4]
    again = alone(tmp_path)
    newest = again.newest()
    assert newest is not None
    model, training = newest.read()
    assert (model["weight"][0].item(), training.progress.step) == (4.0, 4)
    assert [stored.read()[1].progress.step for stored in again.before(newest)] == [3, 2]


def test_training_goes_on_while_a_checkpoint_is_written_and_their_order_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, kept = Gate(monkeypatch), alone(tmp_path, Checkpoints(keep=9))
    kept.keep({"step": 1}, content(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    assert kept.storing
    assert steps(tmp_path) == []
    gate.open.set()
    kept.keep({"step": 2}, content(2), wait=False)
    kept.keep({"step": 3}, content(3), wait=True)
    assert not kept.storing
    assert steps(tmp_path) == [1, 2, 3]
    kept.keep({"step": 4}, content(4), wait=False)
    kept.settle()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_process_that_fails_still_completes_the_checkpoint_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, kept = Gate(monkeypatch), alone(tmp_path)
    kept.keep({"step": 1}, content(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    closing = threading.Thread(target=kept.close, daemon=True)
    closing.start()
    gate.open.set()
    closing.join(DEADLINE_S)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("wait", [True, False])
def test_all_ranks_wait_for_the_one_that_writes(tmp_path: Path, wait: bool) -> None:
    def work(peer: Peer) -> tuple[list[Any], str]:
        kept = FolderCheckpointer(Storage(path=str(tmp_path)), "run", Checkpoints(), peer)
        assert kept.newest() is None
        kept.keep({"step": 1}, content(1) if peer.rank == 0 else None, wait=wait)
        kept.settle()
        known, newest = steps(tmp_path), kept.newest()
        assert newest is not None
        return known, newest.name

    outcomes = on_ranks(3, work)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0] == [1]


def test_ranks_hear_that_a_checkpoint_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message between ranks has a deadline, and a checkpoint may take longer."""
    monkeypatch.setattr(checkpointer, "TURN_S", 0.001)
    gate, heard = Gate(monkeypatch), threading.Semaphore(0)

    class Counting(Peer):
        def broadcast(self, value: Any, source: int) -> Any:
            heard.release()
            return super().broadcast(value, source)

    def work(peer: Peer) -> list[Any]:
        counting = Counting(peer._ranks, peer.rank)
        kept = FolderCheckpointer(Storage(path=str(tmp_path)), "run", Checkpoints(), counting)
        kept.keep({"step": 1}, content(1) if peer.rank == 0 else None, wait=True)
        return steps(tmp_path)

    def open_later() -> None:
        for _ in range(20):
            heard.acquire()
        gate.open.set()

    threading.Thread(target=open_later, daemon=True).start()
    assert on_ranks(2, work) == [[1], [1]]


def test_without_content_nothing_is_written(tmp_path: Path) -> None:
    """As in a loop without a model."""
    kept = alone(tmp_path)
    kept.keep({"step": 1}, None, wait=True)
    kept.keep({"step": 2}, None, wait=False)
    kept.settle()
    assert not list(tmp_path.iterdir())


# --- what stays -----------------------------------------------------------------------------------------------------------


def test_what_was_half_written_goes_when_a_run_resumes(tmp_path: Path) -> None:
    alone(tmp_path).keep({"step": 1}, content(1), wait=True)
    half = tmp_path / "run" / "checkpoint_2039-01-01_00-00-00.000000"
    foreign = tmp_path / "run" / "checkpoint_2039-01-01_00-00-00.000001"
    for folder in (half, foreign):
        folder.mkdir()
        (folder / MODEL_FILE).write_bytes(b"half")
    (foreign / "shard-0.pt").write_bytes(b"of another version")
    kept = alone(tmp_path)
    newest = kept.newest()
    assert newest is not None
    assert newest.read()[1].progress.step == 1
    assert not half.exists()
    kept.keep({"step": 2}, content(2), wait=True)
    assert steps(tmp_path) == [1, 2]
    assert foreign.exists()
    again = alone(tmp_path).newest()
    assert again is not None
    assert again.read()[1].progress.step == 2, "the new one sorts behind whatever is there"


def test_a_damaged_checkpoint_is_told_and_goes_after_the_next(tmp_path: Path) -> None:
    first = alone(tmp_path, Checkpoints(keep=3))
    for step in (1, 2):
        first.keep({"step": step}, content(step), wait=True)
    damaged = max((tmp_path / "run").iterdir())
    (damaged / MODEL_FILE).write_bytes(b"half")
    kept = alone(tmp_path, Checkpoints(keep=3))
    newest = kept.newest()
    assert newest is not None
    with pytest.raises(RunError, match=rf"{damaged.name} is damaged: model.pt has 4 bytes, and"):
        newest.read()
    assert [stored.read()[1].progress.step for stored in kept.before(newest)] == [1]
    assert damaged.exists()
    kept.keep({"step": 3}, content(3), wait=True)
    assert not damaged.exists()
    assert steps(tmp_path) == [1, 3]


def test_without_a_complete_checkpoint_a_run_begins_anew(tmp_path: Path) -> None:
    alone(tmp_path).keep({"step": 1}, content(1), wait=True)
    (tmp_path / "run").joinpath(os.listdir(tmp_path / "run")[0], MODEL_FILE).unlink()
    assert alone(tmp_path).newest() is None


def test_a_run_of_an_earlier_version_keeps_its_best(tmp_path: Path) -> None:
    """Its checkpoints lack metrics, which lie in Ray Train's list, and have names in local time, which may be ahead of UTC."""
    names = [f"checkpoint_2039-01-01_00-00-00.00000{number}" for number in range(3)]
    for step, name in enumerate(names):
        path = tmp_path / "run" / name
        path.mkdir(parents=True)
        checkpoints.save(path, *content(step))
        (path / METRICS_FILE).unlink()
        sums = json.loads((path / CHECKSUMS_FILE).read_text())
        del sums[METRICS_FILE]
        (path / CHECKSUMS_FILE).write_text(json.dumps(sums))
    results = [
        {"version": 0, "checkpoint_dir_name": name, "metrics": {"accuracy": accuracy, "step": step}}
        for step, (name, accuracy) in enumerate(zip(names, (0.9, 0.3, 0.5), strict=True))
    ]
    (tmp_path / "run" / OLD_LIST).write_text(json.dumps({"ray_version": "2.60.0", "checkpoint_results": results}))
    kept = alone(tmp_path, Checkpoints(keep=2, best="accuracy"))
    newest = kept.newest()
    assert newest is not None
    assert (newest.name, newest.read()[1].progress.step) == (names[-1], 2)
    kept.keep({"accuracy": 0.2, "step": 3}, content(3), wait=True)
    assert steps(tmp_path) == [0, 2, 3], "the two best, and the newest"
    kept.keep({"accuracy": 0.8, "step": 4}, content(4), wait=True)
    assert steps(tmp_path) == [0, 4]
    assert json.loads((tmp_path / "run" / OLD_LIST).read_text())["checkpoint_results"] == results


class Kept(pafs.PyFileSystem):  # type: ignore[misc]
    """A storage that allows no removal."""

    def delete_dir(self, path: str) -> None:
        raise PermissionError("Access Denied")

    delete_file = delete_dir


def test_a_storage_that_allows_no_removal_does_not_end_the_run(tmp_path: Path) -> None:
    kept = alone(tmp_path, Checkpoints(keep=1), Kept(pafs.FSSpecHandler(fsspec.filesystem("file"))))
    for step in (1, 2, 3):
        kept.keep({"step": step}, content(step), wait=True)
    assert steps(tmp_path) == [1, 2, 3]
    alone(tmp_path, Checkpoints(keep=1)).keep({"step": 4}, content(4), wait=True)
    assert steps(tmp_path) == [4]


# --- errors ---------------------------------------------------------------------------------------------------------------


def full(folder: Path, *content: Any) -> None:
    (folder / MODEL_FILE).write_bytes(b"a part")
    raise FULL


def test_a_full_temporary_folder_is_named_and_not_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(checkpoints, "save", full)
    told = rf"could not be written to a temporary folder of .*: No space left on device\. Free space in {temporary}, .* TMPDIR"
    with pytest.raises(RunError, match=told):
        alone(tmp_path).keep({}, content(), wait=True)
    assert not list(temporary.iterdir())
    assert steps(tmp_path) == []


def test_a_temporary_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(RunError, match=r"No such file or directory\. Free space in .*gone, or name another"):
        alone(tmp_path).keep({}, content(), wait=True)


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the storage be full once a file is written in part."""

    def copy(source: str, target: str, **named: Any) -> None:
        Path(target).write_bytes(b"a part")
        raise FULL

    monkeypatch.setattr(run_folder.pafs, "copy_files", copy)


def test_a_full_storage_is_told_on_all_ranks_and_keeps_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path).keep({"step": 1}, content(1), wait=True)

    def work(peer: Peer) -> None:
        kept = FolderCheckpointer(Storage(path=str(tmp_path)), "run", Checkpoints(), peer)
        kept.keep({"step": 2}, content(2) if peer.rank == 0 else None, wait=True)

    with monkeypatch.context() as patched:
        fill(patched)
        errors = on_ranks(2, work)
    for error in errors:
        assert isinstance(error, RunError)
        assert str(error).startswith("the checkpoint could not be stored: No space left on device. Free space or")
        assert "choose another storage_path" in str(error)
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert on_ranks(2, work) == [None, None]
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("at", ["keep", "settle"])
def test_the_error_of_a_checkpoint_that_nobody_waited_for_comes_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def work(peer: Peer) -> bool:
        kept = FolderCheckpointer(Storage(path=str(tmp_path)), "run", Checkpoints(), peer)
        kept.keep({"step": 1}, content(1) if peer.rank == 0 else None, wait=False)
        kept.close()
        assert kept.failed == (peer.rank == 0)
        with pytest.raises(RunError, match="could not be stored: No space left on device"):
            kept.keep(
                {"step": 2}, content(2) if peer.rank == 0 else None, wait=False
            ) if at == "keep" else kept.settle()
        assert not kept.storing
        return kept.failed

    fill(monkeypatch)
    assert on_ranks(2, work) == [False, False]
    assert steps(tmp_path) == []


class NoCredentialsError(Exception):
    """An error of a storage's client, which is no OSError."""


class Refusing(pafs.PyFileSystem):  # type: ignore[misc]
    def get_file_info(self, *args: Any) -> Any:
        raise NoCredentialsError("Unable to locate credentials")


def test_an_error_of_a_storages_own_client_is_told_on_all_ranks(tmp_path: Path) -> None:
    refusing = Refusing(pafs.FSSpecHandler(fsspec.filesystem("memory")))

    def work(peer: Peer) -> FolderStored | None:
        return FolderCheckpointer(Storage(path="a", filesystem=refusing), "run", Checkpoints(), peer).newest()

    for error in on_ranks(2, work):
        assert isinstance(error, RunError)
        assert "could not be listed: Unable to locate credentials." in str(error)
    with pytest.raises(RunError, match="could not be stored: Unable to locate credentials"):
        alone(Path("a"), filesystem=refusing).keep({}, content(), wait=True)
