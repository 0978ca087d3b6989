"""What a user gets for a mistake: one paragraph that names the thing, the value found and the remedy, and an exit code.

Found before the first step: exit 2. Later: exit 1. Never a traceback, never a hang.
"""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import ray.train
import torch

import offload
from tests.helpers import write_jpegs

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def count(ctx: offload.Context) -> None:
    ctx.prepare(torch.nn.Linear(1, 1))
    for _ in ctx.epochs(1):
        for _batch in ctx.batches("train"):
            ctx.backward(torch.zeros((), requires_grad=True))
            ctx.step()


def fit(tmp_path: Path, source: Any, train: Any = count, **kwargs: Any) -> offload.Result:
    kwargs.setdefault("batch_size", 8)
    kwargs.setdefault("workers", 1)
    return offload.Trainer(train, datasets={"train": source}, **kwargs).fit(run_dir=tmp_path / "run", quiet=True)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=r"/nowhere' does not exist"):
        fit(tmp_path, offload.image_folder(tmp_path / "nowhere"))


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(offload.ConfigError, match=r"no images under .*Expected .*/<class>/<name>"):
        fit(tmp_path, offload.image_folder(tmp_path / "empty"))


def test_a_batch_larger_than_the_data(tmp_path: Path, jpeg_folder: Path) -> None:
    with pytest.raises(offload.ConfigError, match=r"batch size is 500, but .* only 103 samples.*batch_size=103"):
        fit(tmp_path, offload.image_folder(jpeg_folder), batch_size=500)


def test_more_gpus_than_exist(tmp_path: Path, jpeg_folder: Path) -> None:
    scaling = ray.train.ScalingConfig(use_gpu=True)
    with pytest.raises(offload.ConfigError, match=r"4 workers ask for 4 GPUs .*has 0 and cannot grow.*fewer workers"):
        fit(tmp_path, offload.image_folder(jpeg_folder), workers=4, scaling_config=scaling)


def test_a_number_of_workers_in_the_scaling_config(tmp_path: Path, jpeg_folder: Path) -> None:
    with pytest.raises(offload.ConfigError, match=r"scaling_config: num_workers=4 is not used\. Pass workers=4"):
        fit(tmp_path, offload.image_folder(jpeg_folder), scaling_config=ray.train.ScalingConfig(num_workers=4))


def test_workers_that_leave_preprocessing_no_cpu(tmp_path: Path, jpeg_folder: Path) -> None:
    with pytest.raises(
        offload.ConfigError, match=r"4 workers of 1 CPUs each reserve 4 of the cluster's 4 CPUs.*forever"
    ):
        fit(tmp_path, offload.image_folder(jpeg_folder), workers=4)


def test_a_truncated_jpeg_ends_the_run_by_default(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "data", 30)
    victim = sorted((tmp_path / "data").rglob("*.jpg"))[7]
    victim.write_bytes(victim.read_bytes()[:300])
    with pytest.raises(
        offload.RunError, match=r"sample 7 \(.*\.jpg\) is unusable: corrupt or truncated.*on_error=\"skip\""
    ) as e:
        fit(tmp_path, offload.image_folder(tmp_path / "data"))
    assert str(victim) in str(e.value)
    assert e.value.exit_code == 1


def test_a_run_that_skips_every_sample_has_not_finished(tmp_path: Path) -> None:
    """As where storage refuses every read."""
    write_jpegs(tmp_path / "data", 16)
    for path in (tmp_path / "data").rglob("*.jpg"):
        path.write_bytes(b"denied")
    with pytest.raises(
        offload.RunError,
        match=r"epoch 1 delivered no batch, since training samples were skipped, such as sample \d+ \(.*\.jpg",
    ) as e:
        fit(tmp_path, offload.image_folder(tmp_path / "data", on_error="skip"))
    assert e.value.exit_code == 1
    assert len((tmp_path / "run" / "skipped.jsonl").read_text().splitlines()) == 16


def test_parameters_without_gradients_on_several_workers(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    def train(ctx: offload.Context) -> None:
        model = Two()
        model = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                ctx.backward(model(batch["x"][:, None]).sum())
                ctx.step()

    data = offload.from_torch([{"x": np.float32(i)} for i in range(64)])
    with pytest.raises(
        offload.RunError, match=r"got no gradient on some worker.*ddp=\{'find_unused_parameters': True\}"
    ):
        fit(tmp_path, data, train, workers=2)


def test_a_transform_that_raises_names_the_sample(tmp_path: Path, jpeg_folder: Path) -> None:
    def breaks_on_one(batch: dict[str, Any]) -> dict[str, Any]:
        if 2 in batch["label"] and any("x" for _ in batch["image"]):
            raise ValueError("no such colour")
        return {"label": batch["label"]}

    with pytest.raises(
        offload.RunError, match=r"breaks_on_one raised ValueError: no such colour \(breaks_on_one, .*test_bad_input"
    ) as e:
        fit(tmp_path, offload.image_folder(jpeg_folder, breaks_on_one))
    assert "on sample " in str(e.value)
    assert "class_2" in str(e.value)


def test_a_function_that_raises(tmp_path: Path, jpeg_folder: Path) -> None:
    def train(ctx: offload.Context) -> None:
        raise KeyError("lr")

    with pytest.raises(offload.RunError, match=r"training failed: KeyError: 'lr'.*error\.txt"):
        fit(tmp_path, offload.image_folder(jpeg_folder), train)
    assert "raise KeyError" in (tmp_path / "run" / "error.txt").read_text()


class Odd(torch.nn.Linear):
    """A model with state that no checkpoint can hold."""

    def get_extra_state(self) -> Any:
        return {"hooks": [Odd]}

    def set_extra_state(self, state: Any) -> None: ...


def test_state_that_could_not_be_loaded_again_is_refused_before_training(tmp_path: Path, jpeg_folder: Path) -> None:
    def train(ctx: offload.Context) -> None:
        ctx.prepare(Odd(1, 1))

    with pytest.raises(
        offload.ConfigError,
        match=r"state_dict\(\)\['_extra_state'\]\['hooks'\]\[0\] is of type type, .* Make its state_dict",
    ):
        fit(tmp_path, offload.image_folder(jpeg_folder), train)


@pytest.mark.parametrize(
    ("leave", "says"),
    [
        pytest.param(
            lambda: sys.exit(3), r"called sys\.exit\(3\) on rank 0 \(.*test_bad_input.*Return from it", id="3"
        ),
        pytest.param(sys.exit, r"called sys\.exit\(\) on rank 0", id="none", marks=pytest.mark.soak),
        pytest.param(
            lambda: _raise(KeyboardInterrupt),
            "raised KeyboardInterrupt on rank 0",
            id="KeyboardInterrupt",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_function_that_exits(tmp_path: Path, leave: Any, says: str) -> None:
    def train(ctx: offload.Context) -> None:
        leave()

    with pytest.raises(offload.RunError, match=rf"^train\(\) {says}"):
        fit(tmp_path, offload.from_torch([{"x": 1.0}] * 8), train)


def _raise(kind: type[BaseException]) -> None:
    raise kind


NO_NUMBERS_OF_EPOCHS = [math.nan, math.inf, "x", True, -1, 2.5, 2.0, None, 10**30]
NO_METRICS = ["x", None, torch.ones(2), {}, 1j]


def test_numbers_that_the_context_does_not_take(tmp_path: Path) -> None:
    """All in one run: each is caught in the function, but for the last."""

    def train(ctx: offload.Context) -> None:
        for n in NO_NUMBERS_OF_EPOCHS:
            with pytest.raises(offload.ConfigError, match=r"the number of epochs in ctx\.epochs\(n\)"):
                ctx.epochs(n)  # not even iterated
        for value in NO_METRICS:
            sums = () if isinstance(value, torch.Tensor | np.ndarray) else (ctx.sum,)  # it takes several elements
            reports = (
                () if isinstance(value, str | dict) else (lambda v: ctx.report(loss=v),)
            )  # it takes text and nested dicts
            for call in (*reports, lambda v: ctx.accumulate(loss=v), *sums):
                with pytest.raises(
                    offload.RunError, match=r"takes a number, or a tensor or array of one element, found"
                ):
                    call(value)
        for clip in (math.nan, -1, "x"):
            with pytest.raises(offload.ConfigError, match=r"clip_norm"):
                ctx.step(clip_norm=clip)
        ctx.report(loss=math.nan)  # which a loss may be
        assert list(ctx.epochs(np.int64(2))) == [0, 1]
        ctx.epochs(math.nan)

    with pytest.raises(
        offload.ConfigError, match=r"number of epochs in ctx\.epochs\(n\) must be a number .*10.*, found NaN"
    ):
        fit(tmp_path, offload.from_torch([{"x": 1.0}] * 8), train)


def test_columns_of_unusual_types_reach_the_loop(tmp_path: Path) -> None:
    def train(ctx: offload.Context) -> None:
        ctx.prepare(torch.nn.Linear(1, 1))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                for row, i in enumerate(batch["sample_id"].tolist()):
                    half = (torch.arange(3) / 7 + i).bfloat16()
                    assert batch["half"].dtype == torch.bfloat16
                    assert torch.equal(batch["half"][row], half)
                    assert batch["wave"][row].tolist() == [complex(i, 1)] * 2
                    assert batch["when"][row] == np.datetime64("2024-01-01") + i
                    assert batch["target"][row]["boxes"].tolist() == [[i] * 4] * (i % 3)
                    assert batch["some"][row] == (i if i % 2 else None)
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()

    class Unusual:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {
                "half": (torch.arange(3) / 7 + i).bfloat16(),
                "wave": np.full(2, complex(i, 1), np.complex64),
                "when": np.datetime64("2024-01-01") + i,
                "target": {"boxes": torch.full((i % 3, 4), i)},
                "some": i if i % 2 else None,
            }

    assert fit(tmp_path, Unusual(), train).document["samples"] == 40


def test_a_column_that_cannot_travel(tmp_path: Path) -> None:
    broken = offload.from_torch([{"x": 1.0}] * 8, lambda batch: {"x": [(i for i in "ab") for _ in batch["x"]]})
    with pytest.raises(
        offload.RunError,
        match=r"column 'x' of sample \d \(item \d of list\), returned by the transform .* holds an object of type generator",
    ) as told:
        fit(tmp_path, broken)
    assert "Ray" not in str(told.value)
    assert "Arrow" not in str(told.value)


@pytest.mark.soak
def test_a_ray_data_set_with_columns_of_unusual_types(tmp_path: Path) -> None:
    def unusual(batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["id"].tolist()
        return {"x": [None if i % 3 else {"n": i} for i in ids], "z": np.array(ids) * 1j, "t": [str(i) for i in ids]}

    def train(ctx: offload.Context) -> None:
        ctx.prepare(torch.nn.Linear(1, 1))
        for _ in ctx.epochs(1):
            for batch in ctx.batches("train"):
                for row, i in enumerate(batch["sample_id"].tolist()):
                    assert batch["x"][row] == (None if i % 3 else {"n": i})
                    assert batch["z"][row] == i * 1j
                    assert batch["t"][row] == str(i)
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()

    source = offload.from_ray(ray.data.range(64, override_num_blocks=8), unusual, id_column="id")
    assert fit(tmp_path, source, train).document["samples"] == 64


def test_an_unknown_data_set_and_a_column_that_there_is_not(tmp_path: Path) -> None:
    """Both in one run: the first is caught in the function."""

    def train(ctx: offload.Context) -> None:
        with pytest.raises(offload.RunError, match=r"no data set 'test'; the Trainer's datasets are train"):
            next(iter(ctx.batches("test")))
        next(ctx.batches("train", "x", "y"))

    with pytest.raises(offload.RunError, match=r"no column 'y'; a batch has x"):
        fit(tmp_path, offload.from_torch([{"x": np.float32(i)} for i in range(16)]), train)


def test_a_loop_without_ctx_epochs(tmp_path: Path, jpeg_folder: Path) -> None:
    def train(ctx: offload.Context) -> None:
        ctx.prepare(torch.nn.Linear(1, 1))
        for _ in range(10):
            for _batch in ctx.batches("train"):
                ctx.backward(torch.zeros((), requires_grad=True))
                ctx.step()

    small = offload.from_torch([{"x": np.float32(i)} for i in range(16)])
    with pytest.raises(offload.RunError, match=r"called twice in epoch 1.*for epoch in ctx\.epochs\(n\)"):
        fit(tmp_path, small, train)


def test_a_data_set_that_cannot_travel(tmp_path: Path) -> None:
    class Locked(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"x": np.float32(i)}

    with pytest.raises(
        offload.ConfigError,
        match=r"datasets\['train'\] cannot be sent .*Locked.lock \(a lock\).*from_torch\(lambda: Locked\(",
    ):
        fit(tmp_path, offload.from_torch(Locked()))


def test_a_training_function_that_cannot_travel(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train(ctx: offload.Context) -> None:
        with lock:
            ctx.prepare(torch.nn.Linear(1, 1))

    with pytest.raises(
        offload.ConfigError,
        match=r"the training function cannot be sent to the workers: train\(\) uses the variable lock of the function around it "
        r"\(a lock\), which cannot be pickled \(.*\)\. Make it within the function",
    ):
        fit(tmp_path, offload.from_torch([{"x": np.float32(i)} for i in range(16)]), train)


def test_a_file_as_storage(tmp_path: Path, jpeg_folder: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(offload.ConfigError, match=r"checkpoints cannot be stored under .*choose another storage_path"):
        fit(tmp_path, offload.image_folder(jpeg_folder), storage_path=str(tmp_path / "file" / "x"))


def test_arguments_are_checked_where_they_are_made() -> None:
    with pytest.raises(offload.ConfigError, match=r"initial must be at least 1 .*found 0"):
        offload.BatchSize(initial=0)
    with pytest.raises(offload.ConfigError, match=r"local must name the least first .*found \(8, 4\)"):
        offload.BatchSize(initial=8, local=(8, 4))
    with pytest.raises(offload.ConfigError, match=r"workers must name the least first .*found \(3, 1\)"):
        offload.Trainer(count, datasets={"train": offload.image_folder("x")}, batch_size=1, workers=(3, 1))
    with pytest.raises(offload.ConfigError, match=r'must name a "train" data set, found val'):
        offload.Trainer(count, datasets={"val": offload.image_folder("x")}, batch_size=1)
    with pytest.raises(offload.ConfigError, match=r"datasets\['train'\] is a dict"):
        offload.Trainer(count, datasets={"train": {}}, batch_size=1)
    with pytest.raises(offload.ConfigError, match=r'"raise" or "skip", found \'ignore\''):
        offload.image_folder("x", on_error="ignore")  # type: ignore[arg-type]
