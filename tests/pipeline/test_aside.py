"""What may take long before a run begins: it is said, it has an end, and Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

import offload
from offload.errors import ConfigError
from offload.pipeline import aside
from offload.pipeline.aside import DeadlineError, call_aside, each_aside, each_in_order
from offload.pipeline.sources.storage_paths import list_files
from offload.report.terminal import live_line
from offload.train.checkpoints import storage
from offload.train.driver import trainer
from tests.helpers import eventually, write_jpegs

DEADLINE_S = 800.0


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def gs(address: str) -> str:
    """A path of Google's storage there; its client tries for minutes, in C++."""
    return f"gs://anonymous@bucket/x?endpoint_override={address}&scheme=http"


def test_a_call_aside() -> None:
    def broken() -> None:
        raise KeyError("x")

    assert call_aside(lambda: threading.current_thread().name) == "aside"
    with pytest.raises(KeyError):
        call_aside(broken)
    never = threading.Event()
    with pytest.raises(DeadlineError):
        call_aside(never.wait, deadline_s=0.1)
    looked: list[int] = []
    call_aside(never.wait, meanwhile=lambda: looked.append(1) or never.set())  # type: ignore[func-returns-value]
    assert looked


def test_calls_side_by_side() -> None:
    done: list[int] = []
    each_aside(lambda n: n * n, list(range(50)), threads=4, done=done.append)
    assert sorted(done) == [n * n for n in range(50)]
    each_aside(lambda n: n, [], threads=4, done=done.append)
    with pytest.raises(ZeroDivisionError):
        each_aside(lambda n: 1 / n, [0] * 20, threads=4, done=lambda made: None)


def test_results_in_order_and_few_ahead() -> None:
    """The first call ends last; meanwhile, only a few of the others may begin."""
    begun: list[int] = []
    first = threading.Event()

    def call(n: int) -> int:
        begun.append(n)
        if n == 0:
            eventually(lambda: len(begun) == 8)
            first.set()
        elif n >= 8:
            assert first.is_set()
        return n * n

    done: list[int] = []
    each_in_order(call, range(50), threads=4, done=done.append)
    assert done == [n * n for n in range(50)]
    each_in_order(call, [], threads=4, done=done.append)
    with pytest.raises(ZeroDivisionError):
        each_in_order(lambda n: 1 / n, [1] * 9 + [0] * 50, threads=4, done=lambda made: None)
    with pytest.raises(KeyError):
        each_in_order(lambda n: n, range(50), threads=4, done={}.__getitem__)


@pytest.mark.parametrize("folders", [1, 3, 40])
def test_a_storage_is_listed_as_the_disk_is_and_tells_how_far_it_is(tmp_path: Path, folders: int) -> None:
    for number in range(folders):
        for name in ("b.jpg", "a.jpg", ".hidden", "deep/c.jpg", ".hidden_too/d.jpg"):
            (tmp_path / f"class_{number}" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"class_{number}" / name).touch()
    (tmp_path / "loose.txt").touch()
    told: list[str] = []
    want = [path.removeprefix("/") for path in list_files(tmp_path, tell=told.append)[2]]
    assert told[-1] == f"{3 * folders + 1} files"
    inner = str(tmp_path).removeprefix("/")
    for path, remote in ((inner, pafs.SubTreeFileSystem("/", pafs.LocalFileSystem())), (str(tmp_path), in_python())):
        told.clear()
        assert [found.removeprefix("/") for found in list_files(path, remote, told.append)[2]] == want
        assert told[-1].endswith(" files")


def in_python() -> Any:
    import fsspec

    return fsspec.filesystem("file")


def test_a_listing_that_takes_long_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_jpegs(tmp_path / "data", 3)
    said = threading.Event()

    def slow(path: Any, *, tell: Any, **options: Any) -> Any:
        tell("1,234 files")
        assert said.wait(DEADLINE_S)
        raise ConfigError("listed at last.")

    printed = live_line.LiveLine.waiting

    def waiting(self: live_line.LiveLine, text: str) -> None:
        printed(self, text)
        said.set()

    monkeypatch.setattr("offload.pipeline.describe.sources.list_image_folder", slow)
    monkeypatch.setattr(trainer, "PATIENCE_S", 0.0)
    monkeypatch.setattr(live_line, "WAITING_INTERVAL_S", 0.0)
    monkeypatch.setattr(live_line.LiveLine, "waiting", waiting)
    made = offload.Trainer(print, datasets={"train": offload.image_folder(tmp_path / "data")}, batch_size=1)
    with pytest.raises(ConfigError, match="listed at last"):
        made.fit(run_dir=tmp_path / "run")
    assert f"listing train: image_folder({tmp_path / 'data'}), 1,234 files so far" in capfd.readouterr().err


def test_a_data_set_of_the_users_is_asked_on_the_thread_that_made_it() -> None:
    class Bound:
        """As a connection of sqlite is."""

        def __len__(self) -> int:
            assert threading.current_thread() is threading.main_thread()
            return 8

        def __getitem__(self, i: int) -> Any: ...

    made = offload.Trainer(print, datasets={"train": Bound()}, batch_size=1)
    listed = made.listed("train", lambda text: None)
    assert listed.index is not None
    assert len(listed.index) == 8


def test_a_line_of_waiting_comes_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(live_line.time, "monotonic", lambda: now[0])
    with live_line.LiveLine() as line:
        line.status("listing the data")
        for seconds in range(91):
            now[0] = 1000.0 + seconds
            line.waiting(f"{seconds} files so far")
    assert capfd.readouterr().err.splitlines() == ["listing the data", *(f"{n} files so far" for n in (30, 60, 90))]


def test_a_checkpoint_storage_that_never_answers(
    mute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "DEADLINE_S", 1.0)
    made = offload.Trainer(print, datasets={"train": offload.image_folder("nowhere")}, batch_size=1)
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"storage 'gs://.*did not answer within 1 s\. Check the bucket's name, its endpoint"
    ):
        made.fit(run_dir=tmp_path / "run", storage_path=gs(mute))
    assert time.monotonic() - began < DEADLINE_S
    assert "checking the checkpoint storage gs://" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["listing the data", pytest.param("checking the checkpoint storage", marks=pytest.mark.soak)]
)
def test_ctrl_c_ends_what_waits_for_a_storage(mute: str, tmp_path: Path, what: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import offload\n"
        f"def build():\n    return offload.Trainer(print, datasets={{'train': offload.image_folder({gs(mute)!r})}}, batch_size=1)\n"
    )
    command = [Path(sys.executable).with_name("python"), "-m", "offload", "run", script, "--run-dir", tmp_path / "run"]
    command += ["--storage-path", gs(mute)] if what.startswith("checking") else []
    said = tmp_path / "said"
    with (
        said.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "RAY_ADDRESS": ""}) as run,
    ):
        try:
            eventually(lambda: what in said.read_text() or run.poll() is not None, DEADLINE_S)
            time.sleep(aside.LOOK_S)  # to be within the client by then
            run.send_signal(signal.SIGINT)
            run.wait(800)
        finally:
            run.kill()
    assert run.returncode == 130, said.read_text()
    assert "Traceback" not in said.read_text()
