"""A run's newest checkpoint gets to where a job writes, whichever number of GPU hosts wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.launch.sagemaker.container import checkpoints
from offload.launch.sagemaker.container.checkpoints import Shelf, bring_newest
from offload.launch.sagemaker.container.head import Head
from offload.launch.sagemaker.container.hosts import HostGroup, JobHosts
from offload.launch.sagemaker.container.place import HostPlace
from offload.launch.sagemaker.settings import Settings
from offload.report.run_dir import EVENTS
from offload.train.checkpoints.run_folder import OLD_LIST, RunFolder
from offload.train.checkpoints.storage import CHECKSUMS_FILE, Storage


@pytest.fixture
def folder(tmp_path: Path) -> Shelf:
    return Shelf(uri=str(tmp_path / "run"), name="checkpoints")


@pytest.fixture
def shared(tmp_path: Path) -> Shelf:
    return Shelf(uri=str(tmp_path / "of-workers"), name="run")


def named(number: int) -> str:
    return f"checkpoint_2026-11-22_10-00-00.{number}"


def write(shelf: Shelf, *numbers: int, name: str | None = None) -> Path:
    """A run's folder with checkpoints."""
    path = Path(shelf.uri) / (name or shelf.name)
    path.mkdir(parents=True, exist_ok=True)
    names = [named(number) for number in numbers]
    for each in names:
        (path / each).mkdir()
        (path / each / "model.pt").write_text(each)
        (path / each / CHECKSUMS_FILE).write_text(json.dumps({"model.pt": {"bytes": len(each), "crc32": 1}}))
    return path


def whole(path: Path) -> list[str]:
    names = RunFolder(Storage(path=str(path.parent)), path.name).whole()
    assert all((path / name / "model.pt").read_text() == name for name in names)
    return names


def test_what_one_host_wrote_is_brought_to_several_and_back(folder: Shelf, shared: Shelf) -> None:
    write(folder, 1, 2)
    [said] = bring_newest(folder, shared)
    assert said == f"the newest checkpoint, {named(2)}, is in {folder.uri}: copying it to {shared.uri}"
    assert whole(Path(shared.uri) / "run") == [named(1), named(2)]
    path = write(shared, 5, 6)
    for number in (1, 2):  # the run has replaced them
        shutil.rmtree(path / named(number))
    assert [*bring_newest(shared, folder)]
    assert whole(Path(folder.uri) / "checkpoints") == [named(5), named(6)]
    assert not (Path(folder.uri) / "checkpoints" / named(2)).exists()
    assert whole(path) == [named(5), named(6)]


def test_what_is_older_stays_where_it_is(folder: Shelf, shared: Shelf) -> None:
    write(folder, 1, 2)
    path = write(shared, 2, 3)
    assert not [*bring_newest(folder, shared)]
    assert whole(path) == [named(2), named(3)]


def test_nothing_anywhere_is_nothing(folder: Shelf, shared: Shelf) -> None:
    assert not [*bring_newest(folder, shared)]
    assert not shared.folders()


def test_a_checkpoint_that_was_copied_in_half_is_not_the_newest(folder: Shelf, shared: Shelf) -> None:
    path = write(folder, 1, 2, 3)
    (path / named(3) / "model.pt").write_text("check")
    (path / named(2) / CHECKSUMS_FILE).unlink()
    write(shared)
    assert [*bring_newest(folder, shared)]
    assert whole(Path(shared.uri) / "run") == [named(1)]


@pytest.mark.parametrize("listed", [{"loss": 0.5}, None])
def test_the_metrics_of_checkpoints_of_an_earlier_version_are_copied_with_them(
    folder: Shelf, shared: Shelf, listed: dict[str, float] | None
) -> None:
    """They lie in Ray Train's list, which the service may have copied in half."""
    path = write(folder, 1)
    document = json.dumps({"checkpoint_results": [{"checkpoint_dir_name": named(1), "metrics": listed}]})
    (path / OLD_LIST).write_text(document if listed else document[:30])
    assert [*bring_newest(folder, shared)]
    (entry,) = RunFolder(Storage(path=shared.uri), "run").entries()
    assert entry.metrics == (listed or {})
    assert not (Path(shared.uri) / "run" / OLD_LIST).exists()


def test_a_copy_that_was_cut_off_is_made_again(folder: Shelf, shared: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 1, 2)
    path = write(shared, 0)
    real = checkpoints.pafs.copy_files

    def fails(source: str, target: str, **more: object) -> None:
        real(source, target, **more)
        if f"{named(2)}/model.pt" in source:
            Path(target).write_text("half")
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.pafs, "copy_files", fails)
        with pytest.raises(ConfigError, match=rf"{named(2)} in .* cannot be copied to .*: no space left"):
            [*bring_newest(folder, shared)]
    assert whole(path) == [named(0), named(1)]
    assert [*bring_newest(folder, shared)]
    assert whole(path) == [named(1), named(2)]


def test_runs_that_the_script_names_keep_their_names(folder: Shelf, shared: Shelf) -> None:
    write(folder, 1, name="mine")
    assert [*bring_newest(folder, shared)]
    assert whole(Path(shared.uri) / "mine") == [named(1)]


# --- what the head makes of it --------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> HostPlace:
    """Of a head that is the only GPU host."""
    (tmp_path / "checkpoints").mkdir()
    hosts = JobHosts(
        current="algo-1",
        groups=(HostGroup(name="gpu", instance_type="ml.g5.xlarge", hosts=("algo-1",)),),
        interface="eth0",
    )
    return HostPlace(
        base=tmp_path, folder=tmp_path, hosts=hosts, job="job-1", token="t", token_file=tmp_path, address="127.0.0.1",
        head_address="127.0.0.1",
    )  # fmt: skip


def starts_anew(place: HostPlace, storage: str | None = None) -> bool:
    return Head(place)._starts_anew(Settings(script="train.py", storage=storage))


def test_a_job_whose_run_directory_was_not_kept_resumes_from_its_checkpoints(place: HostPlace) -> None:
    """The service copies files in any order."""
    write(Shelf(uri=str(place.run_dir), name="checkpoints"), 1)
    assert not starts_anew(place)
    assert (place.run_dir / EVENTS).exists()


def test_a_job_finds_what_several_hosts_wrote_where_nothing_else_was_kept(place: HostPlace, shared: Shelf) -> None:
    write(shared, 1)
    assert not starts_anew(place, shared.uri)
    assert (place.run_dir / EVENTS).exists()
    assert whole(place.run_dir / "checkpoints") == [named(1)]


@pytest.mark.parametrize(("owner", "anew"), [("job-1", True), ("another", False), (None, True)])
def test_half_a_checkpoint_alone_is_replaced_by_the_job_that_wrote_it(
    place: HostPlace, owner: str | None, anew: bool
) -> None:
    path = write(Shelf(uri=str(place.run_dir), name="checkpoints"), 1)
    (path / named(1) / CHECKSUMS_FILE).unlink()
    if owner is not None:
        (place.run_dir / "job.txt").write_text(owner)
        (place.run_dir / EVENTS).write_text("{}\n")
    assert starts_anew(place) == anew


def test_nothing_is_replaced_where_there_is_nothing(place: HostPlace, shared: Shelf) -> None:
    """A script's own storage, which the head knows nothing of, stays as it is."""
    assert not starts_anew(place)
    assert not starts_anew(place, shared.uri)
    place.run_dir.mkdir()
    (place.run_dir / EVENTS).write_text("{}\n")
    (place.run_dir / "job.txt").write_text("job-1")
    assert not starts_anew(place)


def test_a_place_that_may_not_be_read_is_named_and_the_other_is_used(
    place: HostPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = checkpoints.open_filesystem

    def denied(uri: str) -> object:
        if uri.startswith("s3://"):
            raise PermissionError("ACCESS_DENIED")
        return real(uri)

    write(Shelf(uri=str(place.run_dir), name="checkpoints"), 1)
    monkeypatch.setattr(checkpoints, "open_filesystem", denied)
    assert not starts_anew(place, "s3://not/mine")
    assert "offload: not looking for checkpoints in s3://not/mine: ACCESS_DENIED" in capsys.readouterr().err
