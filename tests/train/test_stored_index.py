"""Runs whose index is on disk: every sample once, also after a stop in the middle of an epoch, and no files afterwards."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offload
from offload.pipeline.index import listing_cache, stored_rows
from offload.pipeline.index.stored_rows import StoredRows
from offload.report.run_dir import read_lines
from offload.train.driver.listed import Listed
from tests.helpers import write_jpegs
from tests.train.test_training import fit_linear, log_ids, seen, stop_now, trainer

IMAGES, TARS = 60, 3


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(listing_cache, "folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(stored_rows, "IN_MEMORY", 10)
    return tmp_path / "cache"


def means(batch: dict[str, Any]) -> dict[str, Any]:
    x = np.array([[image.mean(), image.std()] for image in batch["image"]], np.float32) / 255
    return {"x": x, "y": x[:, 0], "label": batch["label"]}


def write_tars(folder: Path, images: Path) -> None:
    folder.mkdir()
    files = sorted(images.rglob("*.jpg"))
    for number in range(TARS):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for path in files[number::TARS]:
                for name, content in ((f"{path.stem}.jpg", path.read_bytes()), (f"{path.stem}.cls", b"1")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def source(kind: str, folder: Path) -> offload.Pipeline:
    images, tars = folder / "images", folder / "tars"
    if kind == "folder":
        return offload.image_folder(images, means)
    if kind == "tars":
        return offload.webdataset(tars, means)
    return offload.mix({"a": offload.image_folder(images, means), "b": offload.webdataset(tars, means)})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jpegs(tmp_path / "images", IMAGES)
    write_tars(tmp_path / "tars", tmp_path / "images")
    return tmp_path


def train(ctx: offload.Context) -> None:
    see = log_ids(ctx.config["log"])
    marker = Path(ctx.config["log"]) / "stopped"

    def stop_in_the_second_epoch(ctx: offload.Context, batch: Any) -> None:
        see(ctx, batch)
        if ctx.epoch == 1 and ctx.global_step == ctx.config["stop"] and not marker.exists():
            marker.touch()
            stop_now(ctx)

    fit_linear(ctx, stop_in_the_second_epoch)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.soak), "mix"])
def test_a_stopped_run_resumes_with_exactly_the_rest_and_leaves_no_files(data: Path, cache: Path, kind: str) -> None:
    log = data / "log"
    log.mkdir()
    samples = {"folder": IMAGES, "mix": 2 * IMAGES}[kind]

    def run() -> offload.Result:
        config = {"log": str(log), "stop": samples // 4 + 3}
        return trainer(train, source(kind, data), batch_size=4, config=config).fit(run_dir=data / "run", quiet=True)

    run()
    assert sum(map(Counter.total, seen(log).values())) < 2 * samples
    (data / "run" / "summary.json").unlink()  # as an interrupted run leaves it
    run()
    assert "resumed" in [event["event"] for event in read_lines(data / "run" / "events.jsonl")]
    assert seen(log) == {epoch: Counter(range(samples)) for epoch in range(2)}
    assert not list(cache.glob("offload-index-*"))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_index_is_removed_ends_with_a_sentence(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = offload.Trainer.listed

    def then_removed(self: offload.Trainer, *arguments: Any) -> Listed:
        found = listed(self, *arguments)
        assert found.index is not None
        assert isinstance(found.index.rows, StoredRows)
        shutil.rmtree(found.index.rows.folder)
        return found

    monkeypatch.setattr(offload.Trainer, "listed", then_removed)
    log = data / "log"
    log.mkdir()
    with pytest.raises(
        offload.RunError, match=r"the index of this run cannot be read on the driver's machine: .*cache"
    ) as error:
        trainer(train, source("folder", data), config={"log": str(log), "stop": -1}).fit(
            run_dir=data / "run", quiet=True
        )
    assert error.value.exit_code == 1
