"""Runs on a Ray cluster whose data is drawn by weight, mixed, or constructed by each process: every draw is trained once."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import ray.data
import torch
import torch.utils.data

import offload
from offload.pipeline.order.shuffling import Draws
from offload.report.run_dir import read_lines
from tests.train.test_training import fit_linear, log_ids, seen, stop_now, trainer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Held(torch.utils.data.Dataset[Any]):
    """A data set that holds a lock, and tells which of torch's workers reads it."""

    def __init__(self, first: float = 0.0) -> None:
        self.first, self.lock = first, threading.Lock()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        info: Any = torch.utils.data.get_worker_info()
        assert 0 <= info.id < info.num_workers
        assert info.dataset is self
        with self.lock:
            x = np.float32((self.first + i) / 80)
        return {"x": np.array([x, 1 - x], dtype=np.float32), "y": x}


def held_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """The samples of ``Held(40.0)``, as a step of a ``ray.data.Dataset`` makes them."""
    x = ((40 + batch["id"]) / 80).astype(np.float32)
    return {"x": np.stack([x, 1 - x], axis=1), "y": x}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_stopped_run_of_drawn_samples_resumes_with_exactly_the_rest(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        see = log_ids(ctx.config["log"])
        marker = Path(ctx.config["log"]) / f"stopped{ctx.rank}"
        assert ctx.info("train").samples == 120

        def stop_in_the_second_epoch(ctx: offload.Context, batch: Any) -> None:
            see(ctx, batch)
            if ctx.epoch == 1 and ctx.global_step == 10 and not marker.exists():
                marker.touch()
                if ctx.rank == 0:
                    stop_now(ctx)

        fit_linear(ctx, stop_in_the_second_epoch)

    def run() -> offload.Result:
        rows = ray.data.range(40, override_num_blocks=4).map_batches(held_rows, udf_modifying_row_count=False)
        data = offload.mix(
            {"a": offload.from_torch(Held), "b": rows},
            weights={"a": 1, "b": 3},
            samples=120,
        )
        return trainer(train, data, workers=workers, epochs=2, config={"log": str(log)}).fit(
            run_dir=tmp_path / "run", quiet=True
        )

    run()
    assert sum(map(Counter.total, seen(log).values())) < 240
    (tmp_path / "run" / "summary.json").unlink()  # as an interrupted run leaves it
    result = run()
    assert "resumed" in [event["event"] for event in read_lines(tmp_path / "run" / "events.jsonl")]
    draws = Draws(weights=np.repeat([1.0 / 40, 3.0 / 40], 40), number=120)
    assert seen(log) == {epoch: Counter(draws.order(seed=0, epoch=epoch).tolist()) for epoch in range(2)}
    assert result.document["samples"] == 240


class OfH5:
    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path)

    def __len__(self) -> int:
        return len(self.file["x"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.file["x"][i], "y": np.float32(i)}


class OfLmdb:
    def __init__(self, path: Path) -> None:
        self.env = lmdb.open(str(path), readonly=True, lock=False)

    def __len__(self) -> int:
        return int(self.env.stat()["entries"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        with self.env.begin() as reading:
            return {"x": np.frombuffer(reading.get(b"%d" % i), np.float32), "y": np.float32(i)}


class OfSqlite:
    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)

    def __len__(self) -> int:
        return int(self.database.execute("select count(*) from samples").fetchone()[0])

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self.database.execute("select a, b from samples where id = ?", [i]).fetchone()
        return {"x": np.array(row, np.float32), "y": np.float32(i)}


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_every_process_opens_its_own_files_and_databases(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = rows
    with lmdb.open(str(tmp_path / "a.lmdb")) as env, env.begin(write=True) as writing:
        for i, row in enumerate(rows):
            writing.put(b"%d" % i, row.tobytes())
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as database, database:
        database.execute("create table samples (id integer, a real, b real)")
        database.executemany("insert into samples values (?, ?, ?)", [(i, *row.tolist()) for i, row in enumerate(rows)])
    made: dict[str, Callable[[], Any]] = {
        "h5": lambda: OfH5(tmp_path / "a.h5"),
        "lmdb": lambda: OfLmdb(tmp_path / "a.lmdb"),
        "sqlite": lambda: OfSqlite(tmp_path / "a.sqlite"),
    }

    def train(ctx: offload.Context) -> None:
        totals: list[torch.Tensor] = []
        fit_linear(ctx, lambda ctx, batch: totals.append(batch["x"].sum(0)))
        ctx.report(total=float(torch.stack(totals).sum()))

    data = offload.mix({name: offload.from_torch(make) for name, make in made.items()})
    result = trainer(train, data, epochs=1).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics["total"] == pytest.approx(3 * rows.sum(), rel=1e-5)
    for name, attribute in (("h5", "file"), ("lmdb", "env"), ("sqlite", "database")):
        with pytest.raises(offload.ConfigError, match=rf"\.{attribute} .*from_torch\(lambda: Of"):
            trainer(train, offload.from_torch(made[name]()), batch_size=4).fit(run_dir=tmp_path / name, quiet=True)
