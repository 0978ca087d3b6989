"""Where checkpoints go: what cannot be written is found before Ray is started, and S3 serves as well as a folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import offload
from offload.errors import ConfigError
from offload.report.run_dir import CHECKPOINTS
from offload.train.checkpoints.run_folder import RunFolder
from offload.train.checkpoints.storage import (
    Marker,
    check_storage,
    fetch,
    holds_checkpoints,
    storage_of,
    telling_errors,
)
from tests.emulation.numbers import Numbers
from tests.helpers import ROOT, moto_server, nobody, without_ray

DEADLINE_S = 800.0


def refusal(storage_path: str, filesystem: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_storage(storage_of(storage_path, filesystem, Path("unused")))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_home_folder_of_nobody_is_named() -> None:
    assert refusal("~nobody-of-that-name/runs") == (
        "storage_path='~nobody-of-that-name/runs': nobody knows the home folder ~nobody-of-that-name. Write the path in full."
    )


def test_a_uri_that_was_a_path_is_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal(str(Path("s3://bucket/runs")))
    assert text.startswith("storage_path='s3:/bucket/runs' is no URI: a slash is missing")
    assert text.endswith("Pass the text 's3://bucket/runs'.")
    assert list(tmp_path.iterdir()) == []


# --- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own in a folder. Only root can mount one: elsewhere the test is skipped, except under CI=true."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        text = f"no file system can be mounted here: {done.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [("size=64k", "No space left on device"), ("ro,size=64k", "Read-only file system")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_nothing_is_found_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, says: str
) -> None:
    def nothing(platform: Any, *, metrics_port: int | None = None) -> None:
        raise AssertionError("the run was about to start")

    monkeypatch.setattr("offload.train.driver.platform.this_machine.OnThisMachine.opened", nothing)
    disk = tmp_path / "disk"
    with small_disk(disk, options):
        trainer = offload.Trainer(
            print, datasets={"train": offload.from_torch(Numbers(64))}, batch_size=8, storage_path=str(disk / "here")
        )
        with pytest.raises(
            ConfigError, match=f"checkpoints cannot be stored under '{disk}/here': {says}.*Free space"
        ) as e:
            trainer.fit(run_dir=tmp_path / "run", quiet=True)
        assert e.value.exit_code == 2
        assert not [p for p in disk.rglob("*") if p.is_file()]


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_folder_that_a_workers_host_does_not_see_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Marker, "put", lambda marker: None)  # as if the driver wrote to a disk of another host
    trainer = offload.Trainer(print, datasets={"train": offload.from_torch(Numbers(64))}, batch_size=8)
    with pytest.raises(ConfigError, match=r"the worker's host \S+ does not see that folder: pass storage_path="):
        trainer.fit(run_dir=tmp_path / "run", quiet=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_disk_that_fills_during_the_run_is_named_and_the_same_call_goes_on_later(tmp_path: Path) -> None:
    def train(ctx: offload.Context) -> None:
        model, _ = ctx.prepare(*big_linear())
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(model(batch["x"].repeat(1, 256)).mean())
                ctx.step()

    def big_linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(512, 512)  # a checkpoint of 1 MiB
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    disk = tmp_path / "disk"

    def fit() -> offload.Result:
        data = {"train": offload.from_torch(Numbers(64))}
        trainer = offload.Trainer(train, datasets=data, workers=1, batch_size=16, storage_path=str(disk))
        return trainer.fit(run_dir=tmp_path / "run", quiet=True)

    with small_disk(disk, "size=1m"):
        with pytest.raises(offload.RunError) as caught:
            fit()
        assert str(caught.value).startswith("the checkpoint could not be stored: No space left on device. Free space")
        assert caught.value.exit_code == 1
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert fit().document["samples"] == 64


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights, which only root can")
def test_a_folder_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        (root / "closed").mkdir(mode=0o755)
        (root / "open").mkdir()
        (root / "open").chmod(0o777)
        paths = [str(root / "closed"), str(root / "closed" / "new"), str(root / "open" / "new")]
        check_storage(storage_of(str(root / "open"), None, Path("unused")))  # imports what it needs, as root
        for path in paths[:2]:
            with pytest.raises(ConfigError) as refused, nobody():
                check_storage(storage_of(path, None, Path("unused")))
            text = str(refused.value)
            assert text.startswith(f"checkpoints cannot be stored under '{path}': Permission denied. ")
            assert "allow writing" in text
        with nobody():
            check_storage(storage_of(paths[2], None, Path("unused")))
        assert list((root / "open" / "new").iterdir()) == []


class NoCredentialsError(Exception):
    """An error of a storage's client, which is no OSError."""


class Refusing(MemoryFileSystem):
    """A file system of fsspec whose client finds no credentials."""

    def _refuse(self, *args: Any, **named: Any) -> Any:
        raise NoCredentialsError("Unable to locate credentials")

    _open = rm = rm_file = _refuse


def test_an_error_of_a_storages_own_client_is_told_with_the_remedy() -> None:
    told = refusal("bucket/runs", Refusing())
    assert (
        "'/bucket/runs': Unable to locate credentials. Check the bucket's name, its endpoint and the credentials"
        in told
    )


class Unlisted(MemoryFileSystem):
    """A file system of fsspec that may be written, and not listed."""

    def find(self, *args: Any, **named: Any) -> Any:
        raise PermissionError("Access Denied")


def test_a_storage_that_may_not_be_listed_is_told_with_the_remedy() -> None:
    storage = storage_of("unlisted/runs", Unlisted(), Path("unused"))
    check_storage(storage)
    storage.filesystem.create_dir("unlisted/runs/a")
    says = r"cannot be looked for under '/unlisted/runs': Access Denied\. Check the bucket"
    with pytest.raises(ConfigError, match=says), telling_errors(storage):
        holds_checkpoints(storage, "a", resuming=False, overwrite=False)


def test_what_is_no_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """storage_path="s3://bucket", data in s3://bucket/train, a script called train.py."""
    (tmp_path / "train" / "class_0").mkdir(parents=True)
    storage = storage_of(str(tmp_path), None, Path("unused"))
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"train is where .*it holds other files \(class_0\)"):
            holds_checkpoints(storage, "train", resuming=False, overwrite=overwrite)
    assert not holds_checkpoints(storage, "validate", resuming=False, overwrite=False)
    (tmp_path / "old" / "checkpoint_2026").mkdir(parents=True)
    assert holds_checkpoints(storage, "old", resuming=False, overwrite=True)
    assert not holds_checkpoints(storage, "old", resuming=True, overwrite=False)


def test_paths_are_made_absolute_and_other_file_systems_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_of(None, None, tmp_path / "run").path == str(tmp_path / "run")
    assert storage_of("here", None, tmp_path).path == str(tmp_path / "here")
    assert storage_of("file:///there", None, tmp_path).path == "file:///there"
    # Ray takes a pyarrow file system with a path that has no scheme, and no fsspec URL.
    for path, given in (("memory://bucket/x", None), ("memory://bucket/x", fsspec.filesystem("memory"))):
        storage = storage_of(path, given, tmp_path)
        assert storage.path.strip("/") == "bucket/x"
        assert isinstance(storage.filesystem, pafs.FileSystem)
        check_storage(storage)
    assert "cannot open 'nonsense://x'" in refusal("nonsense://x")


@pytest.mark.parametrize("name", ["my runs", "Läufe", "run#3", "run?", "[new]", "50%", "a%20b"])
def test_a_run_writes_to_the_folder_of_a_uri_that_was_checked(tmp_path: Path, name: str) -> None:
    storage = storage_of(f"file://{tmp_path}/{name}", None, Path("unused"))
    check_storage(storage)
    checked = tmp_path / name.replace("%20", " ")
    assert checked.is_dir()
    assert RunFolder(storage, "a").path == f"{checked}/a"


def test_a_run_whose_name_has_folders_leaves_its_mark(tmp_path: Path) -> None:
    """Such as RunConfig(name="team/a"), which Ray Train takes."""
    marker = Marker.of(storage_of(str(tmp_path), None, Path("unused")), "team/a")
    assert marker is not None
    marker.put()
    marker.check()
    marker.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_on_a_file_system_of_fsspec_has_an_address(tmp_path: Path) -> None:
    """``Result.checkpoint``: without its scheme, it would name a local folder."""
    storage = storage_of("memory://bucket/addressed", None, Path("unused"))
    storage.filesystem.create_dir(f"{storage.path}/run/1")
    with storage.filesystem.open_output_stream(f"{storage.path}/run/1/model.pt") as stream:
        stream.write(b"weights")
    address = RunFolder(storage, "run").address_of("1")
    assert address.startswith("memory://")
    fetch(f"{address}/model.pt", tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_bytes() == b"weights"
    local = storage_of(str(tmp_path), fsspec.filesystem("file"), Path("unused"))
    assert RunFolder(local, "run").address_of("1") == f"{tmp_path}/run/1"


# --- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real S3 server with a bucket; environment variables lead to it, as they do to AWS."""
    with moto_server() as (environment, client):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client.create_bucket(Bucket="bucket")
        yield client


def keys(client: Any) -> list[str]:
    """All objects but the empty ones that stand for folders."""
    found = client.list_objects_v2(Bucket="bucket").get("Contents", [])
    return sorted(o["Key"] for o in found if not (o["Key"].endswith("/") and o["Size"] == 0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_is_checked_and_left_as_it_was(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="bucket", Key="runs/a/other", Body=b"kept")
    for path in ("s3://bucket/runs/a", "s3://bucket/new/", "s3://bucket"):
        check_storage(storage_of(path, None, Path("unused")))
    assert keys(s3) == ["runs/a/other"]
    text = refusal("s3://absent/runs")
    assert text.startswith("checkpoints cannot be stored under 's3://absent/runs'")
    assert "bucket does not exist" in text
    assert "Check the bucket's name" in text


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # given up after 12 s
    text = refusal("s3://bucket/runs")
    assert "Could not connect" in text or "NETWORK_CONNECTION" in text
    assert "its endpoint and the credentials" in text


PROGRAM = """
import json
import sys

import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem

import offload
from tests.emulation.numbers import Numbers
from offload.train.cluster import connection as cluster


def fit(fail_in_epoch=None, overwrite=False):
    def train(ctx):
        model = torch.nn.Linear(2, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for epoch in ctx.epochs(4):
            steps = 0
            for batch in ctx.batches("train"):
                if epoch == fail_in_epoch:
                    raise RuntimeError("on purpose")
                ctx.backward((model(batch["x"]) ** 2).mean())
                steps += ctx.step()
            ctx.report(steps=steps)

    trainer = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Numbers(64))},
        workers=1,
        batch_size=16,
        checkpoints=offload.Checkpoints(keep=2),
        storage_path="s3://bucket/runs/a",
    )
    try:
        return trainer.fit(run_dir=sys.argv[1], overwrite=overwrite, quiet=True).document
    except offload.RunError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    cluster._start_local()
    documents = [fit(fail_in_epoch=2), fit()]
    print(json.dumps(documents))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_run_whose_checkpoints_are_on_s3_resumes_from_them(tmp_path: Path, s3: Any) -> None:
    """In a process of its own: Ray's workers take the credentials from the environment that the cluster was started in."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = without_ray() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    failed, resumed = json.loads(done.stdout.splitlines()[-1])
    assert "RuntimeError: on purpose" in failed["error"]
    assert resumed["status"] == "finished"
    assert resumed["steps"] == 4 * 4
    assert resumed["samples"] == 4 * 64
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(e["epoch"], e["step"]) for e in events if e["event"] == "resumed"] == [(2, 8)]

    assert resumed["checkpoint"].endswith("bucket/" + newest(s3))
    assert len(folders(s3)) == 2  # as many as are kept
    assert not list((tmp_path / "run").glob(f"{CHECKPOINTS}/*"))


def folders(client: Any) -> list[str]:
    """The checkpoints in the bucket, oldest first."""
    return sorted({key.rpartition("/")[0] for key in keys(client) if key.endswith("/model.pt")})


def newest(client: Any) -> str:
    return folders(client)[-1]
