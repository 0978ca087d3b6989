"""Workers that come and go on a real Ray cluster: every sample once in the history of the state that training ends with."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import ray.train
import torch

import offload
from offload.report.run_dir import read_lines
from offload.train.checkpoints import format as checkpoint
from offload.train.driver.conductor import Conductor
from offload.train.worker.data import batches
from tests.emulation.history import each_pass, log_batch, read_history
from tests.emulation.numbers import Line

# A run starts a dozen processes, and each change of the workers some more.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

SAMPLES = 203


def train(ctx: offload.Context) -> None:
    """Logs each step's ids; at the steps of ``kill`` the rank that is named there dies, at those of ``hang`` it hangs; once."""
    torch.manual_seed(7)
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    folder = Path(ctx.config["log"])
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            step = ctx.global_step
            log_batch(
                ctx, {"sample_id": batch["id"] if "id" in batch else batch["sample_id"]}, folder, ctx.config["round"]
            )
            marker = folder / f"killed-{step}"
            if ctx.config["kill"].get(str(step)) == ctx.rank and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            marker = folder / f"hung-{step}"
            if ctx.config["hang"].get(str(step)) == ctx.rank and not marker.exists():
                marker.touch()
                time.sleep(1000)
            if ctx.config["raise_at"] == step:
                raise ValueError("no such colour")
            time.sleep(ctx.config["pause_s"])
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def lines(batch: dict[str, Any]) -> dict[str, Any]:
    samples = [Line(SAMPLES, noise=1.0)[int(i)] for i in batch["id"]]
    return {"id": batch["id"], **{name: np.stack([sample[name] for sample in samples]) for name in samples[0]}}


def dataset() -> ray.data.Dataset:
    """The same samples as a Dataset whose steps tell their number of rows only once they run."""
    return ray.data.range(SAMPLES, override_num_blocks=9).flat_map(lambda row: [row]).map_batches(lines)


AS_DATASET = pytest.mark.parametrize(
    "source", [None, pytest.param(dataset, marks=pytest.mark.soak)], ids=["samples", "dataset"]
)


def run(
    tmp_path: Path,
    *,
    source: Any = None,
    epochs: int = 3,
    kill: dict[str, int] | None = None,
    hang: dict[str, int] | None = None,
    pause_s: float = 0.0,
    raise_at: int = -1,
    **given: Any,
) -> Any:
    log = tmp_path / "log"
    log.mkdir(exist_ok=True)
    given = {"workers": (1, 2), "batch_size": 16, **given}
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Line(SAMPLES, noise=1.0)) if source is None else source()},
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
        train_loop_config={
            "log": str(log),
            "epochs": epochs,
            "kill": kill or {},
            "hang": hang or {},
            "pause_s": pause_s,
            "raise_at": raise_at,
            "round": len(list((tmp_path / "run").glob("error.txt"))),
        },
        **given,
    ).fit(run_dir=tmp_path / "run", quiet=True)


def history(tmp_path: Path) -> list[dict[str, Any]]:
    return read_history(tmp_path / "log")


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return read_lines(tmp_path / "run" / "events.jsonl")


@AS_DATASET
def test_workers_follow_a_schedule_and_every_sample_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    schedule = {0: 1, 1: 2, 2: 1}
    rarely = offload.Checkpoints(every_epochs=100)
    look = Conductor.look

    def until_the_last_commit(conductor: Conductor, *seen: Any) -> None:
        if sum(e["event"] == "ready_to_resize" for e in events(tmp_path)) < 2:
            look(conductor, *seen)

    # Epochs of a fraction of a second may end between two looks of the driver: here the run ends before it sees the last workers.
    monkeypatch.setattr(Conductor, "look", until_the_last_commit)
    adaptation = offload.Adaptation(schedule=schedule)
    result = run(tmp_path, epochs=4, adaptation=adaptation, checkpoints=rarely, source=source)
    assert result.status == "finished"
    lines = history(tmp_path)
    assert each_pass(lines) == {epoch: Counter(range(SAMPLES)) for epoch in range(4)}
    assert {(line["epoch"], line["workers"]) for line in lines} == {(0, 1), (1, 2), (2, 1), (3, 1)}
    resized = [(e["workers_before"], e["workers"]) for e in events(tmp_path) if e["event"] == "resized"]
    assert resized == [(1, 2), (2, 1)]
    ready = [e["step"] for e in events(tmp_path) if e["event"] == "ready_to_resize"]
    assert [e["step"] for e in events(tmp_path) if e["event"] == "resumed"] == ready  # nothing is trained again
    assert result.document["samples"] == 4 * SAMPLES


@AS_DATASET
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_worker_costs_no_sample(tmp_path: Path, rank: int, source: Any) -> None:
    result = run(tmp_path, workers=2, kill={"17": rank}, checkpoints=offload.Checkpoints(every_s=0.2), source=source)
    assert result.status == "finished"
    assert each_pass(history(tmp_path)) == {epoch: Counter(range(SAMPLES)) for epoch in range(3)}
    (lost,) = [e for e in events(tmp_path) if e["event"] == "worker_lost"]
    assert lost["reason"]
    assert result.document["worker_groups"] == 2


@pytest.mark.soak
@AS_DATASET
def test_a_worker_that_hangs_is_ended_and_training_goes_on(tmp_path: Path, source: Any) -> None:
    often = offload.Checkpoints(every_s=0.2)
    result = run(tmp_path, workers=2, hang={"17": 1}, hang_s=10.0, checkpoints=often, source=source)
    assert result.status == "finished"
    assert each_pass(history(tmp_path)) == {epoch: Counter(range(SAMPLES)) for epoch in range(3)}
    hung = [e for e in events(tmp_path) if e["event"] == "worker_hung"]
    assert any(e["rank"] == 1 and "in train" in e["where"] for e in hung)


@pytest.mark.soak
def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    said = r"several times in a row: worker 0 on \S+ \(process \d+\) was ended by signal 9 \(SIGKILL\).*; its log is /.*\.err; "
    with pytest.raises(offload.RunError, match=said):
        run(tmp_path, workers=1, kill={str(step): 0 for step in range(2, 60)}, epochs=1, batch_size=8)


@pytest.mark.soak
def test_an_exception_of_the_users_function_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(offload.RunError, match="no such colour"):
        run(tmp_path, workers=2, raise_at=5)
    attempts = {line["attempt"] for path in (tmp_path / "log").glob("*.jsonl") for line in read_lines(path)}
    assert attempts == {1}


def test_batches_grow_while_training_and_epochs_end_by_what_samples_were_worth(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        epochs=20,
        workers=2,
        batch_size=offload.BatchSize(initial=16, max=64),
        adaptation=offload.Adaptation(interval_s=0.5),
        checkpoints=offload.Checkpoints(every_epochs=100),
        pause_s=0.02,
    )
    assert result.status == "finished"
    document = result.document
    assert document["useful"] >= 20 * SAMPLES * (1 - 1e-6)
    assert document["samples"] >= document["useful"] * (1 - 1e-6)
    passes = each_pass(history(tmp_path))
    whole = [passes[number] for number in sorted(passes)[:-1]]
    assert all(one == Counter(range(SAMPLES)) for one in whole)
    last = passes[max(passes)]
    assert max(last.values()) == 1
    told = [e for e in events(tmp_path) if e["event"] == "pass_not_finished"]
    assert sum(e["untrained"] for e in told) == SAMPLES - len(last)
    decided = [e for e in events(tmp_path) if e["event"] == "decided"]
    assert decided
    assert all(e["reason"] for e in decided)


def test_a_dead_preprocessing_process_costs_no_sample(tmp_path: Path) -> None:
    class KillsItself(Line):
        def __getitem__(self, i: int) -> dict[str, Any]:
            marker = tmp_path / "died"
            if i == 77 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(i)

    log = tmp_path / "log"
    log.mkdir()
    result = offload.Trainer(
        train,
        datasets={"train": offload.from_torch(KillsItself(SAMPLES, noise=1.0))},
        workers=1,
        batch_size=16,
        train_loop_config={
            "log": str(log),
            "epochs": 2,
            "kill": {},
            "hang": {},
            "pause_s": 0.0,
            "raise_at": -1,
            "round": 0,
        },
    ).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.status == "finished"
    assert each_pass(history(tmp_path)) == {epoch: Counter(range(SAMPLES)) for epoch in range(2)}
    assert [e for e in events(tmp_path) if e["event"] == "preprocessing_lost"]


@AS_DATASET
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, source: Any) -> None:
    with pytest.raises(offload.RunError, match="no such colour"):
        run(tmp_path, workers=2, epochs=4, raise_at=30, source=source)
    checkpoints = sorted(p for p in (tmp_path / "run" / "checkpoints").glob("checkpoint_*") if p.is_dir())
    assert len(checkpoints) == 2
    model, training = (torch.load(checkpoints[-1] / name, weights_only=True) for name in ("model.pt", "training.pt"))
    checkpoint.save(checkpoints[-1], model, {**training, "progress": torch.zeros(3)})  # with checksums that hold
    assert run(tmp_path, workers=2, epochs=4, source=source).status == "finished"
    assert each_pass(history(tmp_path)) == {epoch: Counter(range(SAMPLES)) for epoch in range(4)}
    (resumed,) = [e for e in events(tmp_path) if e["event"] == "resumed"]
    (damaged,) = resumed["damaged"]
    assert f"{checkpoints[-1].name} is damaged: 'progress' is wrong" in damaged


@pytest.mark.soak
def test_sums_over_an_epoch_count_each_sample_once_across_a_restart(tmp_path: Path) -> None:
    sums = tmp_path / "sums.jsonl"

    def summing(ctx: offload.Context) -> None:
        model = torch.nn.Linear(2, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        for epoch in ctx.epochs(3):
            for batch in ctx.batches("train"):
                if ctx.global_step == 20 and ctx.rank == 1 and not sums.with_suffix(".killed").exists():
                    sums.with_suffix(".killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                rows = ctx.rows
                ids = batch["sample_id"][:rows]
                ctx.backward(model(batch["x"]).mean())
                ctx.step()
                ctx.accumulate(rows=rows, ids=ids.sum())
            total = ctx.accumulated()
            if ctx.rank == 0:
                with sums.open("a") as file:
                    file.write(json.dumps({"epoch": epoch, **total}) + "\n")

    offload.Trainer(
        summing,
        datasets={"train": offload.from_torch(Line(SAMPLES, noise=1.0))},
        workers=2,
        batch_size=16,
        checkpoints=offload.Checkpoints(every_s=0.2),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
    ).fit(run_dir=tmp_path / "run", quiet=True)
    expected = {"rows": float(SAMPLES), "ids": float(sum(range(SAMPLES)))}
    told = read_lines(sums)  # an epoch that ended just before the worker died may end twice
    assert all(each == {"epoch": each["epoch"], **expected} for each in told)
    assert {each["epoch"] for each in told} == {0, 1, 2}


def batches_of(tmp_path: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of each global batch, by epoch and step."""
    found: dict[tuple[int, int], list[int]] = {}
    for line in history(tmp_path):
        found.setdefault((line["epoch"], line["step"]), []).extend(line["ids"])
    return {place: sorted(ids) for place, ids in found.items()}


@pytest.mark.soak
def test_deterministic_batches_hold_the_same_samples_whatever_the_workers(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    run(folder, workers=1, deterministic=True, epochs=2, seed=5)
    batches = batches_of(folder)
    assert Counter(map(len, batches.values())) == {16: 2 * (SAMPLES // 16), SAMPLES % 16: 2}
    folder = tmp_path / "resized"
    folder.mkdir()
    schedule = offload.Adaptation(schedule={0.0: 1, 0.75: 2})
    run(folder, workers=(1, 2), deterministic=True, epochs=2, seed=5, adaptation=schedule)
    assert batches_of(folder) == batches
    first = next(
        s for s in range(26) if 16 * s - (5 if s >= 13 else 0) >= 0.75 * 2 * SAMPLES
    )  # 13 steps a pass, 11 rows left
    assert {line["step"]: line["workers"] for line in history(folder)} == {s: 1 + (s >= first) for s in range(26)}


def test_deterministic_needs_a_batch_that_workers_share_equally(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=r"no number of workers from 3 to 3 divides the batch"):
        run(tmp_path, workers=3, deterministic=True)
    with pytest.raises(offload.ConfigError, match=r"deterministic=True fixes .* pass batch_size=16"):
        run(tmp_path, deterministic=True, batch_size=offload.BatchSize(initial=16, max=64))


def test_a_batch_that_does_not_fit_into_memory_is_cut_smaller(tmp_path: Path) -> None:
    def small_memory(ctx: offload.Context) -> None:
        batches.CLOSE_S = 1.0
        model = torch.nn.Linear(2, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                if len(batch["x"]) > 5 and ctx.global_step >= 3 and ctx.rank == 0:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                log_batch(ctx, batch, tmp_path / "log")
                ctx.backward(model(batch["x"]).mean())
                ctx.step()

    (tmp_path / "log").mkdir()
    result = offload.Trainer(
        small_memory,
        datasets={"train": offload.from_torch(Line(SAMPLES, noise=1.0))},
        workers=2,
        batch_size=16,
        checkpoints=offload.Checkpoints(every_s=0.2),
        scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
    ).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.status == "finished"
    assert each_pass(history(tmp_path)) == {epoch: Counter(range(SAMPLES)) for epoch in range(2)}
    (told,) = [e for e in events(tmp_path) if e["event"] == "out_of_memory"]
    assert (told["did_not_fit"], told["local_batch_size"], told["accum_steps"]) == (8, 4, 1)
    assert result.document["global_batch_size"] == 16


@pytest.mark.soak
def test_a_model_that_fits_with_no_batch_at_all_ends_the_run(tmp_path: Path) -> None:
    def no_memory(ctx: offload.Context) -> None:
        model = torch.nn.Linear(2, 1)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        for _ in ctx.epochs(1):
            for _ in ctx.batches("train"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(offload.RunError, match=r"CUDA out of memory"):
        offload.Trainer(
            no_memory, datasets={"train": offload.from_torch(Line(SAMPLES, noise=1.0))}, workers=1, batch_size=2
        ).fit(run_dir=tmp_path / "run", quiet=True)  # fmt: skip


@pytest.mark.soak
def test_a_step_without_backward_on_one_rank_ends_the_run_and_hangs_nobody(tmp_path: Path) -> None:
    def forgetful(ctx: offload.Context) -> None:
        batches.CLOSE_S = 1.0  # a worker that fails alone waits that long for what it shares with the others
        model = torch.nn.Linear(2, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                if ctx.rank == 0 or ctx.global_step < 3:
                    ctx.backward(model(batch["x"]).mean())
                ctx.step()

    with pytest.raises(offload.RunError, match=r"worker 1 called ctx\.step\(\) for a batch without ctx\.backward"):
        offload.Trainer(
            forgetful,
            datasets={"train": offload.from_torch(Line(SAMPLES, noise=1.0))},
            workers=2,
            batch_size=16,
            scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 0.5}),
        ).fit(run_dir=tmp_path / "run", quiet=True)
