"""Ray Datasets in a Trainer: what is known of them, what is refused, and what the run says."""

from __future__ import annotations

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
from tests.conftest import LOGICAL_CPUS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead:UserWarning"),
]

N = 96


def features(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "x": np.stack([batch["id"] / N, np.ones(len(batch["id"]))], 1).astype(np.float32)}


def known() -> ray.data.Dataset:
    return ray.data.range(N, override_num_blocks=6).map_batches(features, udf_modifying_row_count=False)


def unknown() -> ray.data.Dataset:
    return ray.data.range(N, override_num_blocks=6).map_batches(features)


def foreign() -> ray.data.Dataset:
    """A function before a shuffle may draw random numbers in every epoch."""
    dataset = ray.data.range(N, override_num_blocks=2).map_batches(features).random_shuffle()
    dataset.context.enable_progress_bars = False
    return dataset


def executed_in_part() -> ray.data.Dataset:
    return ray.data.from_items([{"id": i} for i in range(N)], override_num_blocks=3).sort("id").map_batches(features)


def fit(tmp_path: Path, source: Any, train: Any = None, **options: Any) -> Any:
    def nothing(ctx: offload.Context) -> None:
        raise AssertionError("refused before the function is called")

    options = {"workers": 1, "batch_size": 16, **options}
    return offload.Trainer(train or nothing, datasets={"train": source}, **options).fit(
        run_dir=tmp_path / "run", quiet=True
    )


def train(ctx: offload.Context) -> None:
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids: list[list[int]] = []
    try:
        count = len(ctx.batches("train"))
    except TypeError:
        count = -1
    for _ in ctx.epochs(1):
        for batch in ctx.batches("train"):
            ids.append(batch["id"].tolist())
            ctx.backward(model(batch["x"]).mean())
            ctx.step()
    seen = Counter(i for each in ids for i in each)
    ctx.report(
        samples=len(seen), most=max(seen.values()), batches=len(ids), count=count, ordered=ids[0] == sorted(ids[0])
    )


@pytest.mark.parametrize(
    ("source", "count", "ordered"),
    [
        (known, N // 16, False),
        (unknown, -1, False),
        pytest.param(lambda: offload.from_ray(unknown(), shuffle=False), -1, True, marks=pytest.mark.soak),
    ],
    ids=["known", "unknown", "not shuffled"],
)
def test_an_epoch_delivers_each_row_once(tmp_path: Path, source: Any, count: int, ordered: bool) -> None:
    result = fit(tmp_path, source(), train)
    assert result.metrics == {"samples": N, "most": 1, "batches": N // 16, "count": count, "ordered": ordered}


@pytest.mark.soak
def test_a_known_dataset_takes_part_in_deterministic_batches(tmp_path: Path) -> None:
    assert fit(tmp_path, known(), train, deterministic=True).metrics["samples"] == N


def test_unusable_rows_are_counted_and_listed(tmp_path: Path) -> None:
    def odd(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 10 == 3:
            raise ValueError("no such colour")
        return {"id": row["id"], "x": np.zeros(2, np.float32)}

    source = offload.from_ray(ray.data.range(N, override_num_blocks=6).map(odd), on_error="skip")
    result = fit(tmp_path, source, train)
    assert result.metrics["samples"] == N - 10
    assert result.document["skipped"] == 10
    reasons = [line["reason"] for line in read_lines(tmp_path / "run" / "skipped.jsonl")]
    assert len(reasons) == 10
    assert all("no such colour" in reason and "of read task" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            foreign,
            [
                "Ray Data executes it, in its own order: its step RandomShuffle needs rows of several blocks",
                "without id_column, an interrupted epoch starts again from its beginning",
            ],
        ),
        pytest.param(
            executed_in_part,
            ["Ray Data executed it up to Sort, once for all epochs: 0.0 MiB in the object store"],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["all of it", "a part"],
)
def test_what_ray_data_executes_comes_once_and_the_run_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: Any, says: list[str]
) -> None:
    result = offload.Trainer(train, datasets={"train": source()}, workers=1, batch_size=16).fit(
        run_dir=tmp_path / "run"
    )
    assert result.metrics == {"samples": N, "most": 1, "batches": N // 16, "count": -1, "ordered": False}
    said = " ".join(capfd.readouterr().err.split())
    for text in says:
        assert text in said
    assert f"train: {says[0]}" in said


@pytest.mark.parametrize("executed", [pytest.param("val", marks=pytest.mark.soak), "train and val"])
def test_what_ray_data_executes_finds_a_core_where_the_pool_has_the_only_one(tmp_path: Path, executed: str) -> None:
    """Of four, the worker reserves three."""

    def validates(ctx: offload.Context) -> None:
        model = torch.nn.Linear(2, 1)
        model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        counts = []
        for _ in ctx.epochs(1):
            for step, batch in enumerate(ctx.batches("train")):
                ctx.backward(model(batch["x"]).mean())
                ctx.step()
                if step == 1:  # while the training data is under way, too
                    counts.append(sum(len(each["id"]) for each in ctx.batches("val")))
            counts.append(sum(len(each["id"]) for each in ctx.batches("val")))
        ctx.report(within=counts[0], after=counts[1])

    sets = {"train": foreign() if "train" in executed else known(), "val": foreign()}
    scaling = ray.train.ScalingConfig(resources_per_worker={"CPU": LOGICAL_CPUS - 1})
    trainer = offload.Trainer(validates, datasets=sets, workers=1, batch_size=16, scaling_config=scaling)
    result = trainer.fit(run_dir=tmp_path / "run", quiet=True)
    assert result.metrics == {"within": N, "after": N}


def halves(row: dict[str, Any]) -> Any:
    yield from (row, row)


HALFWAY = offload.Adaptation(schedule={0.0: 1, 0.5: 2})


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (lambda: offload.from_ray(foreign(), shuffle=True), {}, r"shuffle=True\) needs .* step RandomShuffle .*materialize\(\)"),
        (lambda: offload.from_ray(foreign(), on_error="skip"), {}, r'on_error="skip"\) needs .* Leave unusable rows out in Ray Data'),
        (foreign, {"cluster": offload.Cluster(preprocessing_cores=(1, 2))}, "asks the cluster for cores, and so does Ray Data"),
        (unknown, {"deterministic": True}, "deterministic=True needs training samples whose number and order are known"),
        (unknown, {"adaptation": HALFWAY, "workers": (1, 2)}, "shares of the training, and the number of samples of 'train' is unknown"),
        (lambda: offload.from_ray(known(), halves), {"adaptation": HALFWAY, "workers": (1, 2)}, "number of samples of .train. is unknown"),
        (known, {"batch_size": 97}, "the batch size is 97, but ray.data.Dataset has only 96 samples"),
        (lambda: ray.data.range(9).limit(0), {}, "the ray.data.Dataset has no rows"),
        (lambda: offload.from_ray(known(), on_error="ignore"), {}, "on_error must be"),
        (lambda: offload.from_ray(known(), shuffle="yes"), {}, "shuffle must be"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, source: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(offload.ConfigError, match=message):
        fit(tmp_path, source(), **options)
