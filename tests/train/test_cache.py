"""A real run against a real S3 server: each object is read over the network once, and never again from then on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest
import torch
from ray.train import ScalingConfig

import offload
from offload.errors import ConfigError
from offload.pipeline.sources.file_versions import SETTLED_S
from offload.report.events import read_event
from offload.report.run_dir import read_lines
from offload.report.terminal.summary import summary_rows
from tests.conftest import LOGICAL_CPUS
from tests.helpers import eventually, moto_server, mount_small_disk, write_jpegs

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

IMAGES = 48
# Preprocessing has one core: with several, the next epoch may begin while another core still makes a sample of the last one.
ONE_CORE_LEFT = ScalingConfig(resources_per_worker={"CPU": LOGICAL_CPUS - 1})


class Requests(logging.Handler):
    """The requests that a server has answered, as its log tells."""

    def __init__(self) -> None:
        super().__init__()
        self.of_objects: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"(GET|HEAD) /bucket/([^? ]+\.jpg)", record.getMessage()):
            self.of_objects[found[1], found[2]] += 1


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pafs.FileSystem, Requests]]:
    """A file system whose bucket holds images, and the requests of its server."""
    folder = tmp_path_factory.mktemp("images")
    write_jpegs(folder, IMAGES)
    log, requests = logging.getLogger("werkzeug"), Requests()
    level, propagate = log.level, log.propagate
    log.addHandler(requests)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with moto_server() as (env, client):
            client.create_bucket(Bucket="bucket")
            for path in folder.rglob("*.jpg"):
                client.put_object(Bucket="bucket", Key=str(path.relative_to(folder)), Body=path.read_bytes())
            put_at = time.time()
            eventually(lambda: time.time() > put_at + SETTLED_S + 1)  # storage tells times to a second
            yield (
                pafs.S3FileSystem(
                    access_key=env["AWS_ACCESS_KEY_ID"],
                    secret_key=env["AWS_SECRET_ACCESS_KEY"],
                    region=env["AWS_REGION"],
                    endpoint_override=env["AWS_ENDPOINT_URL"],
                    connect_timeout=800,  # the server shares the machine with the run
                    request_timeout=800,
                ),
                requests,
            )
    finally:
        log.removeHandler(requests)
        log.setLevel(level)
        log.propagate = propagate


def means(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.array([[image.mean()] for image in batch["image"]], np.float32) / 255}


def train(ctx: Any) -> None:
    model = torch.nn.Linear(1, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            ctx.backward(model(batch["x"]).square().mean())
            ctx.step()


def fit(filesystem: pafs.FileSystem, run_dir: Path, cache: str, epochs: int) -> offload.Result:
    data = offload.image_folder("s3://bucket", means, cache=cache, filesystem=filesystem)
    trainer = offload.Trainer(
        train,
        datasets={"train": data},
        batch_size=8,
        workers=1,
        scaling_config=ONE_CORE_LEFT,
        train_loop_config={"epochs": epochs},
    )
    return trainer.fit(run_dir=run_dir, quiet=True)


def test_later_epochs_and_later_runs_read_nothing_over_the_network(
    tmp_path: Path, bucket: tuple[pafs.FileSystem, Requests]
) -> None:
    filesystem, requests = bucket
    requests.of_objects.clear()
    cache = f"ssd:{tmp_path / 'cache'}:50MB"
    result = fit(filesystem, tmp_path / "a", cache, epochs=3)
    gets = {key: number for (method, key), number in requests.of_objects.items() if method == "GET"}
    assert len(gets) == IMAGES
    assert set(gets.values()) == {1}
    rates = result.document["input"]["train"]
    assert rates["cache_bytes"] == 2 * rates["storage_bytes"] > 0
    said = dict(summary_rows(result.document))["reading of train"]
    assert said.startswith("67% of ")
    assert said.endswith(" came from the nodes' caches")

    requests.of_objects.clear()
    rates = fit(filesystem, tmp_path / "b", cache, epochs=1).document["input"]["train"]
    assert not requests.of_objects
    assert rates["storage_bytes"] == 0


class Noted(torch.utils.data.Dataset[Any]):
    """A data set that notes each sample that it makes."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, i: int) -> dict[str, Any]:
        with self.log.open("a") as file:
            file.write(f"{i}\n")
        return {"x": np.array([i / IMAGES], np.float32)}


def test_a_node_makes_a_sample_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    data = offload.cached(Noted(log), cache=f"ssd:{tmp_path / 'cache'}:50MB", name="a")
    trainer = offload.Trainer(
        train,
        datasets={"train": data},
        batch_size=8,
        workers=1,
        scaling_config=ONE_CORE_LEFT,
        train_loop_config={"epochs": 3},
    )
    result = trainer.fit(run_dir=tmp_path / "run", quiet=True)
    assert result.document["samples"] == 3 * IMAGES
    assert Counter(map(int, log.read_text().split())) == Counter(range(IMAGES))
    rates = result.document["input"]["train"]
    assert rates["cache_bytes"] == 2 * rates["storage_bytes"] > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path: Path, bucket: tuple[pafs.FileSystem, Requests]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # It has room for bytes, so that the run begins, but for a few files only.
    mount_small_disk(disk, "size=2m,nr_inodes=16")
    try:
        result = fit(bucket[0], tmp_path / "run", f"ssd:{disk / 'cache'}:1MB", epochs=2)
        assert result.document["samples"] == 2 * IMAGES
        told = [line for line in read_lines(tmp_path / "run" / "events.jsonl") if line["event"] == "cache_stopped"]
        assert [line["reason"] for line in told] == [f"{disk / 'cache'}: No space left on device"]
        said = read_event(told[0]).sentence({})
        assert said is not None
        assert "stores nothing more in its cache" in said
        assert "No space left on device" in said
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("absent/cache:1MB", "absent does not exist. Make it, mount its disk, or name another path."),
        ("file:1MB", "cannot be written (Not a directory). Name a folder that this user can write to."),
        ("cache:900PB", "free for it. Free space, or name a size that every node has."),
    ],
)
def test_a_cache_that_a_node_cannot_hold_is_refused_before_the_run_begins(
    tmp_path: Path, bucket: tuple[pafs.FileSystem, Requests], cache: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    cache = f"ssd:{tmp_path}/{cache}"
    with pytest.raises(ConfigError) as refused:
        fit(bucket[0], tmp_path / "run", cache, epochs=1)
    text = str(refused.value)
    assert re.match(rf"cache='{re.escape(cache)}' cannot be used on node \S+: ", text)
    assert text.endswith(says)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run" / "events.jsonl").exists()
