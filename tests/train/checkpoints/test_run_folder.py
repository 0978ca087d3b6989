"""The folder of a run's checkpoints: what counts, what is half-written, and what belongs to others."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pyarrow.fs as pafs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.train.checkpoints import format as checkpoint
from offload.train.checkpoints import run_folder
from offload.train.checkpoints.format import Progress, Training
from offload.train.checkpoints.retention import Entry
from offload.train.checkpoints.run_folder import OLD_LIST, PREFIX, RunFolder, new_name
from offload.train.checkpoints.storage import CHECKSUMS_FILE, METRICS_FILE, MODEL_FILE, Storage, storage_of
from tests.helpers import moto_server

NAMES = ["checkpoint_2026-11-22_10-00-00.1", "checkpoint_2026-11-22_10-00-10.2", "checkpoint_2026-11-22_10-00-20.3"]


def files(folder: Path, **metrics: float) -> Path:
    """A local folder with the files of a checkpoint."""
    folder.mkdir(parents=True)
    checkpoint.save(folder, {}, Training(progress=Progress()).to_state(), metrics)
    return folder


def local(tmp_path: Path, names: list[str] = NAMES) -> RunFolder:
    """A folder with checkpoints, on this disk."""
    for number, name in enumerate(names):
        files(tmp_path / "run" / name, loss=float(number))
    return RunFolder(Storage(path=str(tmp_path)), "run")


def states(folder: RunFolder) -> dict[str, str]:
    return {found.name: found.state for found in folder.look()}


@pytest.fixture(params=["disk", "memory", "s3"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """The folder of a run on each kind of storage."""
    with contextlib.ExitStack() as stack:
        path = str(tmp_path / "store")
        if request.param == "memory":
            path = f"memory://store-{uuid4().hex}"
        if request.param == "s3":
            environment, client = stack.enter_context(moto_server())
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            client.create_bucket(Bucket="bucket")
            path = "s3://bucket/runs"
        yield RunFolder(storage_of(path, None, tmp_path), "team/a")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_checkpoints_are_put_listed_and_removed_on_any_storage(anywhere: RunFolder, tmp_path: Path) -> None:
    assert anywhere.look() == []
    for number, name in enumerate(NAMES):
        anywhere.put(name, files(tmp_path / name, loss=float(number)))
    assert anywhere.entries() == [Entry(name=name, metrics={"loss": float(n)}) for n, name in enumerate(NAMES)]
    with anywhere.fs.open_input_stream(f"{anywhere.path_of(NAMES[1])}/{METRICS_FILE}") as stream:
        assert json.loads(stream.read()) == {"loss": 1.0}
    assert anywhere.address_of(NAMES[0]).endswith(f"/team/a/{NAMES[0]}")
    anywhere.fs.delete_file(f"{anywhere.path_of(NAMES[2])}/{CHECKSUMS_FILE}")
    assert states(anywhere) == {NAMES[0]: "whole", NAMES[1]: "whole", NAMES[2]: "unfinished"}
    anywhere.remove(NAMES[2])
    anywhere.remove(NAMES[0])
    anywhere.remove(NAMES[0])
    assert anywhere.whole() == [NAMES[1]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_checkpoints_are_copied_between_storages(anywhere: RunFolder, tmp_path: Path) -> None:
    source = local(tmp_path / "source", NAMES[:2])
    for entry in source.entries():
        anywhere.copy(source, entry)
    assert anywhere.entries() == source.entries()


def test_a_storage_that_remembers_its_listings_is_asked_again(tmp_path: Path) -> None:
    """As s3fs and gcsfs do: the driver looks at the end for what workers have written."""

    class Remembering(type(fsspec.filesystem("file"))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(skip_instance_cache=True)
            self.known: dict[str, Any] = {}

        def find(self, path: str, *args: Any, **named: Any) -> Any:
            return self.known.setdefault(path, super().find(path, *args, **named))

        def invalidate_cache(self, path: str | None = None) -> None:
            self.known.clear()

    (tmp_path / "run").mkdir()
    folder = RunFolder(storage_of(str(tmp_path), Remembering(), tmp_path), "run")
    assert folder.whole() == []
    local(tmp_path, NAMES[:1])
    assert folder.whole() == NAMES[:1]


@pytest.mark.parametrize("at", range(4))
def test_what_a_killed_run_was_writing_does_not_count_and_those_before_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The process ends within each of the four files."""
    folder, real, copied = local(tmp_path, NAMES[:2]), pafs.copy_files, 0

    def until_killed(source: str, target: str, **named: Any) -> None:
        nonlocal copied
        copied += 1
        if copied > at:
            Path(target).write_bytes(Path(source).read_bytes()[:5])
            raise KeyboardInterrupt
        real(source, target, **named)

    monkeypatch.setattr(run_folder.pafs, "copy_files", until_killed)
    with pytest.raises(KeyboardInterrupt):
        folder.put(NAMES[2], files(tmp_path / "files"))
    assert states(folder) == {NAMES[0]: "whole", NAMES[1]: "whole", NAMES[2]: "unfinished"}
    assert folder.whole() == NAMES[:2]


@given(st.permutations(["model.pt", "training.pt", "metrics.json", "checksums.json"]), st.integers(0, 3), st.booleans())
def test_a_copy_by_a_cloud_service_counts_once_it_is_complete(order: list[str], number: int, half: bool) -> None:
    """The service copies files in any order, and the last one in part."""
    with contextlib.ExitStack() as stack:
        tmp_path = Path(stack.enter_context(_temporary()))
        source, folder = local(tmp_path / "source", NAMES[:1]), RunFolder(Storage(path=str(tmp_path)), "run")
        target = tmp_path / "run" / NAMES[0]
        target.mkdir(parents=True)
        for file in order[: number + 1]:
            shutil.copy(f"{source.path_of(NAMES[0])}/{file}", target)
        if half:
            last = target / order[number]
            last.write_bytes(last.read_bytes()[:-1])
        assert (folder.whole() == NAMES[:1]) == (number == 3 and not half)
        assert states(folder)[NAMES[0]] != "foreign"


def _temporary() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory()


def test_a_checkpoint_whose_removal_was_cut_off_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local(tmp_path, NAMES[:2])

    class Ending(pafs.PyFileSystem):  # type: ignore[misc]
        def delete_dir(self, path: str) -> None:
            raise KeyboardInterrupt

    ending = RunFolder(
        Storage(path=str(tmp_path), filesystem=Ending(pafs.FSSpecHandler(fsspec.filesystem("file")))), "run"
    )
    with pytest.raises(KeyboardInterrupt):
        ending.remove(NAMES[0])
    assert states(folder) == {NAMES[0]: "unfinished", NAMES[1]: "whole"}


def test_what_others_wrote_is_neither_a_checkpoint_nor_half_of_one(tmp_path: Path) -> None:
    folder = local(tmp_path, NAMES[:1])
    run = tmp_path / "run"
    shutil.copytree(run / NAMES[0], run / "checkpoint_best")  # by the user
    shutil.copytree(run / NAMES[0], run / "best")
    (run / "checkpoint_000001").mkdir()
    (run / NAMES[1] / "shards").mkdir(parents=True)  # of another version, or another program
    (run / NAMES[1] / "shards" / "0.pt").write_bytes(b"0")
    (run / NAMES[2]).mkdir()
    (run / NAMES[2] / CHECKSUMS_FILE).write_text('{"model-0.pt": {"bytes": 7}}')
    (run / NAMES[2] / "model-0.pt").write_bytes(b"short")
    (run / "checkpoint_2026-99-22_10-00-00.1").mkdir()
    assert {name for name, state in states(folder).items() if state == "foreign"} == {
        "checkpoint_best", "checkpoint_000001", "checkpoint_2026-99-22_10-00-00.1", NAMES[1], NAMES[2],
    }  # fmt: skip
    assert folder.whole() == NAMES[:1]


@pytest.mark.parametrize(
    "content", ["", "[]", "1", '{"model.pt": 3}', '{"model.pt": {}}', '{"model.pt": {"bytes": 1', "\xff"]
)
def test_checksums_that_are_none_make_a_damaged_checkpoint(tmp_path: Path, content: str) -> None:
    folder = local(tmp_path, NAMES[:1])
    (tmp_path / "run" / NAMES[0] / CHECKSUMS_FILE).write_text(content, encoding="latin-1")
    assert states(folder) == {NAMES[0]: "damaged"}
    assert folder.entries() == []


def test_a_storage_that_does_not_answer_leaves_no_checkpoint_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run removes damaged ones."""
    folder = local(tmp_path, NAMES[:1])

    class Silent(pafs.PyFileSystem):  # type: ignore[misc]
        def open_input_stream(self, *args: Any, **named: Any) -> Any:
            raise OSError("no answer")

    silent = RunFolder(
        Storage(path=str(tmp_path), filesystem=Silent(pafs.FSSpecHandler(fsspec.filesystem("file")))), "run"
    )
    with pytest.raises(OSError, match="no answer"):
        silent.look()
    assert folder.whole() == NAMES[:1]


# --- folders of earlier versions ------------------------------------------------------------------------------------------


def old_list(metrics: list[Any]) -> dict[str, Any]:
    """What Ray Train 2.60 wrote beside the checkpoints, its best last."""
    results = [
        {"version": 0, "checkpoint_dir_name": name, "metrics": m} for name, m in zip(NAMES, metrics, strict=True)
    ]
    return {
        "ray_version": "2.60.0",
        "checkpoint_results": results,
        "checkpoint_report_indices": [0, 1, 2],
        "latest_checkpoint_result": results[-1],
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 3,
    }


def as_before(tmp_path: Path) -> RunFolder:
    """A folder of an earlier version, whose checkpoints lack metrics."""
    folder = local(tmp_path)
    for name in NAMES:
        path = tmp_path / "run" / name
        (path / METRICS_FILE).unlink()
        sums = json.loads((path / CHECKSUMS_FILE).read_text())
        del sums[METRICS_FILE]
        (path / CHECKSUMS_FILE).write_text(json.dumps(sums))
    return folder


def test_the_metrics_of_old_checkpoints_are_those_of_ray_trains_list(tmp_path: Path) -> None:
    folder = as_before(tmp_path)
    assert folder.entries() == [Entry(name=name) for name in NAMES]
    metrics = [{"loss": 0.5}, {"loss": 0.1}, {}]
    text = json.dumps(old_list(metrics))
    (tmp_path / "run" / OLD_LIST).write_text(text)
    assert folder.entries() == [Entry(name=name, metrics=m) for name, m in zip(NAMES, metrics, strict=True)]
    assert (tmp_path / "run" / OLD_LIST).read_text() == text


@pytest.mark.parametrize(
    "content",
    ["", '{"checkpoint_results": [', "[]", "{}", '{"checkpoint_results": 3}', '{"checkpoint_results": [3, {}, {"metrics": 1}]}',
     '{"checkpoint_results": [{"checkpoint_dir_name": [], "metrics": {}}]}'],
)  # fmt: skip
def test_checkpoints_beside_half_a_list_count(tmp_path: Path, content: str) -> None:
    folder = as_before(tmp_path)
    (tmp_path / "run" / OLD_LIST).write_text(content)
    assert folder.entries() == [Entry(name=name) for name in NAMES]
    assert (tmp_path / "run" / OLD_LIST).read_text() == content


def test_a_list_that_names_what_is_not_there_adds_none(tmp_path: Path) -> None:
    folder = as_before(tmp_path)
    (tmp_path / "run" / OLD_LIST).write_text(json.dumps(old_list([{}, {}, {"loss": 1.0}])))
    shutil.rmtree(tmp_path / "run" / NAMES[2])
    (tmp_path / "run" / NAMES[1] / MODEL_FILE).write_bytes(b"half")
    assert folder.whole() == NAMES[:1]


# --- names ----------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)), max_size=5),
    st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)),
)
def test_a_new_name_sorts_behind_all_others(befores: list[datetime], now: datetime) -> None:
    """Also where a clock went back, or earlier names hold the local time of another zone."""
    names: list[str] = ["checkpoint_best", "checkpoint_9999"]
    for at in (*befores, now):
        name = new_name(names, at)
        assert all(name > other for other in names[2:])
        names.append(name)
    assert new_name([], now) == PREFIX + now.strftime("%Y-%m-%d_%H-%M-%S.%f")


def test_names_hold_the_time_in_utc() -> None:
    before = datetime.now() - timedelta(days=2)
    assert new_name([]) > PREFIX + before.strftime("%Y-%m-%d_%H-%M-%S.%f")


def test_an_error_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "PAUSE_S", 0.0)
    errors = [OSError("AWS Error SLOW_DOWN during PutObject"), OSError("AWS Error NETWORK_CONNECTION")]

    def call() -> str:
        if errors:
            raise errors.pop()
        return "stored"

    assert run_folder.persistent(call) == "stored"
    for error in (OSError("AWS Error ACCESS_DENIED"), OSError("AWS Error UNKNOWN (HTTP status 500)")):
        calls = []

        def fails(error: OSError = error, calls: list[int] = calls) -> None:
            calls.append(1)
            raise error

        with pytest.raises(OSError, match="AWS Error"):
            run_folder.persistent(fails)
        assert len(calls) == (1 if "DENIED" in str(error) else run_folder.ATTEMPTS)
