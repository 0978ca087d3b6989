"""Training on a real Ray cluster: every sample once, gradients exact, runs resumable, results reproducible."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train
import torch

import offload
from offload.pipeline.order.ranges import Ranges
from offload.pipeline.order.shuffling import epoch_permutation
from offload.report.run_dir import read_lines
from offload.train.checkpoints.format import MODEL_FILE, Progress, Training
from offload.train.checkpoints.storage import Storage
from offload.train.messages import Orders
from offload.train.worker.links.peers import NoPeers
from offload.train.worker.saving.checkpointer import FolderCheckpointer
from offload.train.worker.saving.training_state import TrainingState
from tests.emulation.numbers import Line
from tests.helpers import write_jpegs

# A run starts a dozen processes: half a minute on a busy machine, and some tests need two.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SAMPLES = 103
STARTED_IN = os.getcwd()  # as the Ray of all tests


def stop_now(ctx: Any) -> None:
    """As if the driver had ordered it."""
    ctx._loop.setup.hub.publish(Orders(serial=1 << 30, stop=True))
    while not ctx._loop.reporter.end:
        ctx._loop.reporter.flush()


def linear() -> torch.nn.Linear:
    torch.manual_seed(7)
    return torch.nn.Linear(2, 1)


class Recent:
    """What a user may keep beside the model: settings, and the newest few values."""

    def __init__(self) -> None:
        self.settings = argparse.Namespace(window=np.int64(3))
        self.values: deque[np.float64] = deque(maxlen=int(self.settings.window))

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settings, self.values = state["settings"], state["values"]


def fit_linear(
    ctx: offload.Context, see: Callable[[offload.Context, Any], None] = lambda ctx, batch: None, *others: Any
) -> Any:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    model, optimizer, *_ = ctx.prepare(model, optimizer, *others)
    for _ in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            see(ctx, batch)
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)
    return model


def trainer(
    train: Callable[[offload.Context], Any],
    dataset: Any = None,
    *,
    workers: int = 1,
    epochs: int = 2,
    batch_size: Any = 16,
    **kwargs: Any,
) -> offload.Trainer:
    kwargs.setdefault("datasets", {"train": dataset if dataset is not None else offload.from_torch(Line(SAMPLES))})
    config = {"epochs": epochs, **kwargs.pop("config", {})}
    return offload.Trainer(train, batch_size=batch_size, workers=workers, train_loop_config=config, **kwargs)


def log_ids(folder: str) -> Callable[[offload.Context, Any], None]:
    def see(ctx: offload.Context, batch: Any) -> None:
        rows = ctx.rows  # a filler's row is nobody's sample
        line = {"epoch": ctx.epoch, "rank": ctx.rank, "ids": batch["sample_id"][:rows].tolist()}
        with open(f"{folder}/rank{ctx.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    return see


def seen(folder: Path) -> dict[int, Counter[int]]:
    """Per epoch, how often each id was trained."""
    epochs: dict[int, Counter[int]] = {}
    for path in folder.glob("rank*.jsonl"):
        for line in read_lines(path):
            epochs.setdefault(line["epoch"], Counter()).update(line["ids"])
    return epochs


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "batch_size"), [(2, 16), (3, 40)])
def test_every_sample_of_every_epoch_comes_exactly_once(tmp_path: Path, workers: int, batch_size: int) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        fit_linear(ctx, log_ids(ctx.config["log"]))

    result = trainer(train, workers=workers, batch_size=batch_size, epochs=3, config={"log": str(log)}).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    assert seen(log) == {epoch: Counter(range(SAMPLES)) for epoch in range(3)}
    assert result.document["samples"] == 3 * SAMPLES
    assert result.status == "finished"


def reference_gradient_descent(order: list[list[int]], lr: float = 0.1) -> torch.nn.Linear:
    """Plain SGD over these global batches: what any number of workers must come to."""
    model, data = linear(), Line(SAMPLES)
    for ids in order:
        x = torch.tensor(np.stack([data[i]["x"] for i in ids]))
        y = torch.tensor(np.array([data[i]["y"] for i in ids]))
        model.zero_grad()
        ((model(x)[:, 0] - y) ** 2).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= lr * p.grad
    return model


def global_batches(log: Path, workers: int, size: offload.BatchSize) -> list[list[int]]:
    """The ids of each optimizer step, as the ranks logged them. A step ends with its epoch."""
    ranks = [read_lines(log / f"rank{k}.jsonl") for k in range(workers)]
    per_step = size.split(workers).accum_steps + 1
    steps = []
    for epoch in sorted({line["epoch"] for line in ranks[0]}):
        lines = [[line for line in rank if line["epoch"] == epoch] for rank in ranks]
        micro = [[i for rank in lines for i in rank[j]["ids"]] for j in range(len(lines[0]))]
        steps += [[i for part in micro[j : j + per_step] for i in part] for j in range(0, len(micro), per_step)]
    return steps


def assert_weights(trained: dict[str, torch.Tensor], expected: torch.nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("workers", "local"),
    [
        pytest.param(1, None, marks=pytest.mark.soak),
        pytest.param(2, None, marks=pytest.mark.soak),
        (3, None),
        pytest.param(1, (1, 8), marks=pytest.mark.soak),
        pytest.param(2, (1, 5), marks=pytest.mark.soak),
    ],
    ids=["1", "2 workers", "3 workers", "accumulating", "2 workers accumulating"],
)
def test_every_sample_comes_once_and_the_gradient_is_the_mean_over_the_global_batch_however_uneven(
    tmp_path: Path, workers: int, local: tuple[int, int] | None
) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        see = log_ids(ctx.config["log"])
        batches = len(ctx.batches("train"))
        model = fit_linear(ctx, see)
        assert 2 * batches == len(read_lines(Path(ctx.config["log"]) / f"rank{ctx.rank}.jsonl"))
        if ctx.rank == 0:
            torch.save(getattr(model, "module", model).state_dict(), f"{ctx.config['log']}/model.pt")

    batch_size = offload.BatchSize(initial=25, local=local)
    result = trainer(train, workers=workers, batch_size=batch_size, epochs=2, config={"log": str(log)}).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    assert seen(log) == {epoch: Counter(range(SAMPLES)) for epoch in range(2)}
    steps = global_batches(log, workers, batch_size)
    assert (result.status, result.document["samples"], result.document["steps"]) == (
        "finished",
        2 * SAMPLES,
        len(steps),
    )
    assert_weights(torch.load(log / "model.pt", weights_only=True), reference_gradient_descent(steps))


def test_a_stopped_run_resumes_with_exactly_the_samples_it_had_not_trained(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        see = log_ids(ctx.config["log"])
        marker = Path(ctx.config["log"]) / "stopped"

        recent = Recent()

        def stop_at_third_batch(ctx: offload.Context, batch: Any) -> None:
            see(ctx, batch)
            assert len(recent.values) == min(ctx.global_step, recent.values.maxlen or 0)
            recent.values.append(np.float64(ctx.global_step))
            if ctx.epoch == 1 and ctx.global_step == 9 and not marker.exists():
                marker.touch()
                stop_now(ctx)

        fit_linear(ctx, stop_at_third_batch, recent)
        assert list(recent.values) == [18, 19, 20]

    def run(**where: Any) -> offload.Result:
        return trainer(train, epochs=3, config={"log": str(log)}).fit(run_dir=tmp_path / "run", quiet=True, **where)

    run()
    events = [e["event"] for e in read_lines(tmp_path / "run" / "events.jsonl")]
    assert ("checkpoint", "stop") in [
        (e["event"], e.get("reason")) for e in read_lines(tmp_path / "run" / "events.jsonl")
    ]
    assert events[0] == "run_started"
    (tmp_path / "run" / "summary.json").unlink()  # as an interrupted run leaves it
    elsewhere = f"committed a checkpoint at step \\d+, .* storage {tmp_path}/other/run holds none.* storage_path"
    with pytest.raises(offload.ConfigError, match=elsewhere):
        run(storage_path=str(tmp_path / "other"))
    again = run()
    assert seen(log) == {epoch: Counter(range(SAMPLES)) for epoch in range(3)}
    assert again.document["steps"] == 3 * 7
    assert "resumed" in [e["event"] for e in read_lines(tmp_path / "run" / "events.jsonl")]


class Remote(Line):
    """Items that take long to come, and no core meanwhile."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(0.02)
        return super().__getitem__(i)


@pytest.mark.soak
def test_a_run_tells_how_much_of_preprocessing_is_waiting_for_files(tmp_path: Path) -> None:
    result = trainer(fit_linear, Remote(SAMPLES), epochs=1).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.document["input"]["train"]["blocked"] > 0.5


class Stuck(Line):
    """Item ``item`` never comes, until ``released`` exists."""

    def __init__(self, item: int, released: Path) -> None:
        super().__init__(SAMPLES)
        self.item, self.released = item, released

    def __getitem__(self, i: int) -> dict[str, Any]:
        while i == self.item and not self.released.exists():
            time.sleep(0.1)
        return super().__getitem__(i)


def test_a_sample_that_never_comes_does_not_hold_up_the_commit_of_a_run_that_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    stuck = Stuck(int(epoch_permutation(SAMPLES, seed=0, epoch=0)[70]), tmp_path / "released")

    def train(ctx: offload.Context) -> None:
        see = log_ids(ctx.config["log"])

        def stop_at_once(ctx: offload.Context, batch: Any) -> None:
            see(ctx, batch)
            if not stuck.released.exists():
                ctx._loop.setup.hub.publish(Orders(serial=1 << 30, stop=True))

        fit_linear(ctx, stop_at_once)

    def run() -> offload.Result:
        return trainer(train, stuck, workers=2, epochs=1, config={"log": str(log)}).fit(
            run_dir=tmp_path / "run", quiet=True
        )

    run()
    commits = [e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "checkpoint"]
    assert [e["reason"] for e in commits] == ["stop"]
    (tmp_path / "run" / "summary.json").unlink()  # as an interrupted run leaves it
    stuck.released.touch()
    run()
    assert seen(log) == {0: Counter(range(SAMPLES))}


@pytest.mark.parametrize("on_error", [pytest.param("raise", marks=pytest.mark.soak), "skip"])
def test_a_sample_that_takes_longer_than_its_deadline(tmp_path: Path, on_error: Any) -> None:
    stuck = offload.from_torch(Stuck(33, tmp_path / "never"), on_error=on_error, sample_timeout_s=0.5)
    slow = trainer(fit_linear, stuck, epochs=1)
    if on_error == "raise":
        with pytest.raises(
            offload.RunError, match=r"reading sample 33 \(item 33 of Stuck\) took longer than sample_time"
        ):
            slow.fit(run_dir=tmp_path / "run", quiet=True)
        return
    result = slow.fit(run_dir=tmp_path / "run", quiet=True)
    assert result.document["samples"] == SAMPLES - 1
    (skipped,) = read_lines(tmp_path / "run" / "skipped.jsonl")
    assert (skipped["sample_id"], skipped["reason"][-34:]) == (33, "took longer than sample_timeout_s=0.5"[-34:])


def test_a_run_with_one_worker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its order is that of the seed. Its checkpoints are plain torch, and old ones go. What the function prints reaches the driver. It
    runs in the folder of the command, so that relative paths name what they name in the rest of the script."""
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        print("hello from the worker in", os.getcwd())
        fit_linear(ctx, log_ids(ctx.config["log"]))

    kept = offload.Checkpoints(keep=2)
    result = trainer(train, epochs=4, seed=5, checkpoints=kept, config={"log": str(log)}).fit(run_dir=tmp_path / "run")
    out, err = capfd.readouterr()
    assert (out.count(f"hello from the worker in {STARTED_IN}\n"), err.count("hello")) == (1, 0)
    lines = read_lines(log / "rank0.jsonl")
    for epoch in range(4):
        order = [i for line in lines if line["epoch"] == epoch for i in line["ids"]]
        assert order == epoch_permutation(SAMPLES, seed=5, epoch=epoch).tolist()
    assert result.checkpoint is not None
    assert len(list((tmp_path / "run" / "checkpoints").glob("checkpoint_*/"))) == 2
    code = (
        "import sys, torch; sys.modules['offload'] = sys.modules['ray'] = None; "
        "m = torch.nn.Linear(2, 1); m.load_state_dict(torch.load(sys.argv[1], weights_only=True)); print(m.bias.item())"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, f"{result.checkpoint}/{MODEL_FILE}"], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr


def test_augmentation_is_a_function_of_the_seed(tmp_path: Path, jpeg_folder: Path) -> None:
    def augment(batch: dict[str, Any]) -> dict[str, Any]:
        noise = np.random.randint(0, 256, (len(batch["image"]), 4), dtype=np.uint8)
        return {"noise": noise, "label": batch["label"]}

    def train(ctx: offload.Context) -> None:
        ctx.prepare(linear())
        rows: dict[str, Any] = {"names": ctx.info().class_names}
        for epoch in ctx.epochs(2):
            for batch in ctx.batches("train"):
                for i, noise in zip(batch["sample_id"].tolist(), batch["noise"].tolist(), strict=True):
                    rows[f"{epoch}:{i}"] = noise
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()
        Path(ctx.config["out"]).write_text(json.dumps(rows, sort_keys=True))

    def run(name: str, seed: int, batch_size: int) -> dict[str, Any]:
        out = tmp_path / f"{name}.json"
        source = offload.image_folder(jpeg_folder, augment)
        trainer(train, source, batch_size=batch_size, seed=seed, config={"out": str(out)}).fit(
            run_dir=tmp_path / name, quiet=True
        )
        rows: dict[str, Any] = json.loads(out.read_text())
        return rows

    first, other_batches = run("a", 1, 16), run("b", 1, 40)
    assert first == other_batches
    assert first["names"] == ["class_0", "class_1", "class_2"]
    assert first["0:5"] != first["1:5"]


def test_validation_gives_each_worker_its_part_and_nothing_twice_and_steps_are_measured_apart(tmp_path: Path) -> None:
    def train(ctx: offload.Context) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                ctx.backward(((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean())
                ctx.step()
            model.eval()
            ids = [i for batch in ctx.batches("val") for i in batch["sample_id"].tolist() if model(batch["x"]).shape[1]]
            ctx.report(count=ctx.sum(len(ids)), total=ctx.sum(sum(ids)))
            assert sorted(i for part in ctx.gather(ids) for i in part) == list(range(17))
            assert ctx.sum(torch.tensor([ctx.rank, 1.0])).tolist() == [1.0, 2.0]
            model.train()

    result = trainer(
        train, workers=2, datasets={"train": offload.from_torch(Line(SAMPLES)), "val": offload.from_torch(Line(17))}
    ).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics == {"count": 17, "total": sum(range(17))}
    steps = result.document
    parts = steps["data_wait_s"] + steps["peer_wait_s"] + steps["compute_s"] + steps["sync_s"]
    assert steps["sync_s"] > 0
    assert 0.75 * steps["step_time_s"] < parts <= 1.01 * steps["step_time_s"]
    assert 0 <= steps["stall"] <= 1


@pytest.mark.soak
def test_a_class_is_set_up_once_per_actor(tmp_path: Path, jpeg_folder: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()

    class Costly:
        def __init__(self) -> None:
            import uuid

            (built / uuid.uuid4().hex).touch()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"mean": np.array([im.mean() for im in batch["image"]], dtype=np.float32)}

    def train(ctx: offload.Context) -> None:
        ctx.prepare(linear())
        for _ in ctx.epochs(1):
            count = 0
            for batch in ctx.batches("train"):
                count += len(batch["mean"])
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()
            ctx.report(count=count)

    result = trainer(train, offload.image_folder(jpeg_folder, Costly)).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics["count"] == SAMPLES
    assert 1 <= len(list(built.iterdir())) <= 4


@pytest.mark.soak
@pytest.mark.parametrize("id_column", [None, "key"])
def test_a_ray_dataset_as_it_is(tmp_path: Path, id_column: str | None) -> None:
    import ray.data

    dataset = ray.data.range(SAMPLES, override_num_blocks=7).map_batches(
        lambda b: {
            "key": b["id"] + 1000,
            "x": np.stack([b["id"] / SAMPLES, np.ones(len(b["id"]))], 1).astype(np.float32),
        }
    )

    def train(ctx: offload.Context) -> None:
        model, _ = ctx.prepare(linear(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
        for _ in ctx.epochs(2):
            ids: list[int] = []
            for batch in ctx.batches("train"):
                ids += batch["sample_id"].tolist()
                ctx.backward(model(batch["x"]).mean())
                ctx.step()
            ctx.report(count=len(set(ids)), low=min(ids), rows=len(ids))

    source = offload.from_ray(dataset, id_column=id_column)
    result = trainer(train, source).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics == {"count": SAMPLES, "low": 1000 if id_column else 0, "rows": SAMPLES}


def test_skipped_files_are_counted_and_listed(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "data", 44)
    files = sorted((tmp_path / "data").rglob("*.jpg"))
    broken = [*files[:30:10], files[-1]]  # 40 are left, five whole batches: the last broken one comes behind them
    for path in broken:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def train(ctx: offload.Context) -> None:
        ctx.prepare(linear())
        for _ in ctx.epochs(2):
            count = 0
            for batch in ctx.batches("train"):
                count += len(batch["label"])
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()
            ctx.report(count=count, validated=sum(len(batch["label"]) for batch in ctx.batches("val")))

    source = offload.image_folder(tmp_path / "data", on_error="skip", shuffle=False)
    result = trainer(train, batch_size=8, datasets={"train": source, "val": source}).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    listed = read_lines(tmp_path / "run" / "skipped.jsonl")
    assert result.metrics == {"count": 44 - len(broken), "validated": 44 - len(broken)}
    assert result.document["skipped"] == 2 * len(broken)
    for name in ("train", "val"):
        reasons = [line["reason"] for line in listed if line["dataset"] == name]
        assert all(any(str(p) in reason for reason in reasons) for p in broken)


@pytest.mark.parametrize("local", [pytest.param(None, marks=pytest.mark.soak), (1, 4)], ids=["whole", "accumulated"])
def test_checkpoints_within_an_epoch_lie_between_global_batches_and_change_nothing(
    tmp_path: Path, local: tuple[int, int] | None
) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def train(ctx: offload.Context) -> None:
        fit_linear(ctx, log_ids(ctx.config["log"]))

    size = offload.BatchSize(initial=32, local=local)
    kept = offload.Checkpoints(every_s=1e-9)
    result = trainer(train, workers=2, epochs=1, batch_size=size, checkpoints=kept, config={"log": str(log)}).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    steps = global_batches(log, 2, size)
    commits = [e for e in read_lines(tmp_path / "run" / "events.jsonl") if e["event"] == "checkpoint"]
    assert [c["step"] for c in commits if c["reason"] == "interval"] == list(range(1, len(steps)))
    assert result.checkpoint is not None
    newest = torch.load(Path(result.checkpoint) / MODEL_FILE, weights_only=True)
    assert_weights(newest, reference_gradient_descent(steps))


def test_an_epoch_whose_data_changed_meanwhile_starts_again(tmp_path: Path) -> None:
    progress = Progress(epoch=3, trained=Ranges(((0, 5),)), step=7, samples=70)
    kept = FolderCheckpointer(Storage(path=str(tmp_path)), "run", offload.Checkpoints(), NoPeers())
    kept.keep({}, ({}, Training(progress=progress, seed=1, samples=10).to_state()), wait=True)

    def resumed(seed: int, samples: int | None) -> TrainingState:
        made = TrainingState(NoPeers(), kept, seed=seed, samples=samples, scaler=None, resumable=True)
        made.load()
        assert (made.progress.epoch, made.progress.step) == (3, 7)
        return made

    assert (resumed(1, 10).progress.trained, resumed(1, 10).changed) == (progress.trained, "")
    for seed, samples, says in ((2, 10, "seed 1 → 2"), (1, 9, "samples 10 → 9")):
        again = resumed(seed, samples)
        assert (len(again.progress.trained), again.changed) == (0, says)


@pytest.mark.soak
def test_a_new_run_does_not_take_anothers_checkpoints_for_its_own(tmp_path: Path) -> None:
    store = str(tmp_path / "store")

    def run(**kwargs: Any) -> offload.Result:
        return trainer(fit_linear, storage_path=store, epochs=1).fit(run_dir=tmp_path / "run", quiet=True, **kwargs)

    run()
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(
        offload.ConfigError, match=r"store/run holds the checkpoints of another run\. Pass overwrite=True"
    ):
        run()
    assert run(overwrite=True).document["steps"] == 7


def test_a_checkpoint_of_another_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def stop_later(ctx: offload.Context, batch: Any) -> None:
        if ctx.epoch == 1:
            raise RuntimeError("stop")

    with pytest.raises(offload.OffloadError):
        trainer(lambda ctx: fit_linear(ctx, stop_later)).fit(run_dir=tmp_path / "run", quiet=True)

    def fit_other(ctx: offload.Context) -> None:
        model = torch.nn.Linear(3, 1)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(offload.ConfigError, match="does not fit the model") as error:
        trainer(fit_other).fit(run_dir=tmp_path / "run", quiet=True)
    assert "start again with overwrite=True" in str(error.value)


@pytest.mark.soak
def test_a_worker_may_reserve_nothing(tmp_path: Path) -> None:
    """As the error for workers that leave preprocessing no core proposes."""
    scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": 0})
    result = trainer(fit_linear, epochs=1, scaling_config=scaling).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.document["preprocessing_cores"] == 4
    assert result.document["samples"] == SAMPLES


def test_relative_paths_begin_at_the_folder_of_the_program_wherever_ray_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Any:
            return {"x": torch.tensor([float(Path("factor.txt").read_text()) * number])}

    def train(ctx: offload.Context) -> None:
        model = torch.nn.Linear(1, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        seen: list[float] = []
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                seen += batch["x"].flatten().tolist()
                ctx.backward(model(batch["x"]).mean())
                ctx.step()
        Path("written.txt").write_text(str(sorted(seen)))

    monkeypatch.chdir(tmp_path)
    Path("factor.txt").write_text("2")
    data = {"train": offload.from_torch(Numbers())}
    offload.Trainer(train, datasets=data, batch_size=8).fit(run_dir=tmp_path / "run", quiet=True)
    assert (tmp_path / "written.txt").read_text() == str([2.0 * number for number in range(32)])


def test_a_compiled_model_trains_and_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    def train(ctx: offload.Context) -> None:
        plain = linear()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = ctx.prepare(torch.compile(plain, backend="aot_eager"), optimizer)
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean())
                ctx.step()

    ran = trainer(train, seed=5).fit(run_dir=tmp_path / "run", quiet=True)
    assert ran.checkpoint is not None
    weights = torch.load(Path(ran.checkpoint) / MODEL_FILE, weights_only=True)
    assert list(weights) == list(linear().state_dict())
    order = epoch_permutation(SAMPLES, seed=5, epoch=0).tolist()
    assert_weights(weights, reference_gradient_descent([order[at : at + 16] for at in range(0, SAMPLES, 16)]))


def test_a_batch_may_be_changed_in_place_and_its_labels_kept(tmp_path: Path) -> None:
    """Rows this large are views of the object store."""

    def train(ctx: offload.Context) -> None:
        ctx.prepare(linear())
        kept = []
        for _ in ctx.epochs(2):
            for batch in ctx.batches("train"):
                assert torch.equal(batch["image"].amax((1, 2)).long(), batch["label"])
                batch["image"].add_(1)
                kept.append(batch["label"])
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()
        ctx.report(total=int(torch.cat(kept).sum()))

    rows = [{"image": np.full((64, 128), i, np.uint8), "label": np.int64(i)} for i in range(SAMPLES)]
    result = trainer(train, offload.from_torch(rows)).fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics["total"] == 2 * sum(range(SAMPLES))


def test_a_run_whose_feed_dies_ends_with_an_error(tmp_path: Path) -> None:
    def train(ctx: offload.Context) -> None:
        fit_linear(ctx, lambda ctx, batch: ray.kill(ctx._loop.setup.hub))

    with pytest.raises(offload.RunError, match=r"training failed: .*The whole traceback is in"):
        trainer(train).fit(run_dir=tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
