"""Whatever is given to a public constructor: it is accepted, or a ConfigError says what to pass instead."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.errors import ConfigError
from offload.train.config import WorkerOverrides
from tests.helpers import case

numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([math.nan, math.inf, -math.inf, True, False, 2.5, 1e300, 10**30, -(10**400), 2**53 + 1, 1 + 2j])
    | st.sampled_from([np.int64(64), np.uint8(3), np.float32(0.5), np.float64("nan"), np.bool_(True)])
)
junk = (
    numbers
    | st.none()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.builds(object)
    | st.lists(numbers, max_size=3)
    | st.tuples(numbers, numbers)
    | st.dictionaries(numbers | st.text(max_size=2), numbers, max_size=2)
    | st.sampled_from([np.arange(2), torch.ones(2), Fraction(1, 2), int, print, lambda: None, {1, 2}, np.array(["a"])])
)
DATA = {"train": offload.from_torch([{"x": 1.0}])}


def trainer(**given: Any) -> offload.Trainer:
    return offload.Trainer(**{"train": print, "datasets": DATA, "batch_size": 8, **given})


def resources(amount: Any) -> offload.Trainer:
    # Ray Train checks what it is given, too, in its own words.
    config = ray.train.ScalingConfig()
    config.resources_per_worker = {"CPU": amount}
    return trainer(scaling_config=config)


CONSTRUCTORS: list[tuple[Callable[..., Any], str]] = [
    (lambda v: offload.BatchSize(initial=v), "BatchSize: initial"),
    (lambda v: offload.BatchSize(initial=1, max=v), "BatchSize: max"),
    (lambda v: offload.BatchSize(initial=64, local=v), "BatchSize: local"),
    (lambda v: offload.BatchSize(initial=64, local=(1, v)), "BatchSize: local"),
    (lambda v: offload.Checkpoints(every_epochs=v), "Checkpoints: every_epochs"),
    (lambda v: offload.Checkpoints(every_s=v), "Checkpoints: every_s"),
    (lambda v: offload.Checkpoints(keep=v), "Checkpoints: keep"),
    (lambda v: offload.Checkpoints(best=v), "Checkpoints: best"),
    (lambda v: offload.Checkpoints(mode=v), "Checkpoints: mode"),
    (lambda v: offload.Adaptation(learning_rate=v), "Adaptation: learning_rate"),
    (lambda v: offload.Adaptation(warmup_epochs=v), "Adaptation: warmup_epochs"),
    (lambda v: offload.Adaptation(interval_s=v), "Adaptation: interval_s"),
    (lambda v: offload.Adaptation(schedule=v), "Adaptation: "),
    (lambda v: offload.Adaptation(schedule={0: v}), r"Adaptation: schedule\[0\]"),
    (lambda v: offload.Cluster(preprocessing_cores=v), "Cluster: preprocessing_cores"),
    (lambda v: offload.Cluster(preprocessing_cores=(v, 64)), "Cluster: preprocessing_cores"),
    (lambda v: offload.Cluster(autoscale_workers=v), "Cluster: autoscale_workers"),
    (lambda v: offload.Cluster(nodes_deadline_s=v), "Cluster: nodes_deadline_s"),
    (lambda v: offload.Cluster(mixed_gpus=v), "Cluster: mixed_gpus"),
    (lambda v: offload.Adaptation(objective=v), "Adaptation: objective"),
    (lambda v: offload.Cluster(usd_per_hour=v), "Cluster: "),
    (lambda v: offload.Cluster(usd_per_hour={"ml.g5.xlarge": v}), r"Cluster: usd_per_hour\['ml.g5.xlarge'\]"),
    (lambda v: trainer(train=v), "train"),
    (lambda v: trainer(datasets=v), "datasets"),
    (lambda v: trainer(datasets={"train": v}), "datasets"),
    (lambda v: trainer(batch_size=v), "batch_size"),
    (lambda v: trainer(workers=v), "workers"),
    (lambda v: trainer(workers=(1, v)), "workers"),
    (lambda v: trainer(adaptation=v), "adaptation"),
    (lambda v: trainer(cluster=v), "cluster"),
    (lambda v: trainer(precision=v), "precision"),
    (lambda v: trainer(checkpoints=v), "checkpoints"),
    (lambda v: trainer(seed=v), "seed"),
    (lambda v: trainer(deterministic=v), "deterministic"),
    (lambda v: trainer(hang_s=v), "hang_s"),
    (lambda v: trainer(train_loop_config=v), "train_loop_config"),
    (lambda v: trainer(setup=v), "setup"),
    (lambda v: trainer(scaling_config=v), "scaling_config"),
    (resources, r"scaling_config: resources_per_worker\['CPU'\]"),
    (lambda v: trainer(run_config=v), "run_config"),
    (lambda v: trainer(storage_path=v), "storage_path"),
    (lambda v: trainer().with_workers(max_workers=v), "max_workers"),
    (lambda v: trainer().with_workers(cpus_per_worker=v), "cpus_per_worker"),
    (lambda v: trainer().with_workers(gpus_per_worker=v), "gpus_per_worker"),
    (lambda v: WorkerOverrides(max_workers=v), "max_workers"),
    (lambda v: offload.Normalize(v), "Normalize: mean"),
    (lambda v: offload.Normalize((0.5, v)), "Normalize: mean"),
    (lambda v: offload.Normalize(0.5, v), "Normalize: std"),
    (lambda v: offload.Normalize(column=v), "Normalize: column"),
    (lambda v: offload.Normalize(dtype=v), "Normalize: dtype"),
    (lambda v: offload.Normalize(scale=v), "Normalize: scale"),
    (lambda v: offload.image_folder(v), "image_folder: path"),
    (lambda v: offload.image_folder("x", v), "transform"),
    (lambda v: offload.image_folder("x", per_sample=v), "per_sample"),
    (lambda v: offload.image_folder("x", on_device=v), "on_device"),
    (lambda v: offload.image_folder("x", on_error=v), "on_error"),
    (lambda v: offload.image_folder("x", sample_timeout_s=v), "sample_timeout_s"),
    (lambda v: offload.image_folder("x", shuffle=v), "shuffle"),
    (lambda v: offload.from_torch(DATA, columns=v), "from_torch: columns"),
    (lambda v: offload.parquet(v), "parquet: path"),
    (lambda v: offload.parquet("x", columns=v), "parquet: columns"),
    (lambda v: offload.parquet("x", images=v), "parquet: images"),
    (lambda v: offload.webdataset(v), "webdataset: shards"),
    (lambda v: offload.webdataset([v]), "webdataset: shards"),
    (lambda v: offload.from_ray(v), "from_ray"),
]


@given(which=st.sampled_from(CONSTRUCTORS), value=junk)
def test_junk_is_accepted_or_refused_by_name(which: tuple[Callable[[Any], Any], str], value: Any) -> None:
    make, name = which
    try:
        make(value)
    except ConfigError as error:
        text = str(error)
        assert re.search(name.split(": ")[-1] or "Adaptation|Cluster", text), text
        assert len(text) < 500


NUMBERS = [
    *[(make, name) for make, name in CONSTRUCTORS if name.split(": ")[-1] in {
        "initial", "max", "every_epochs", "every_s", "keep", "warmup_epochs", "interval_s", r"schedule\[0\]", "nodes_deadline_s",
        r"usd_per_hour\['ml.g5.xlarge'\]", "batch_size", "workers", "seed", "hang_s", r"resources_per_worker\['CPU'\]", "max_workers",
        "cpus_per_worker", "gpus_per_worker", "sample_timeout_s", "mean", "std", "scale", "local", "preprocessing_cores"}],
]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "64", 1 + 2j, 10**400], ids=repr)
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    for make, name in NUMBERS:
        with case(name), pytest.raises(ConfigError, match=rf"^{name}.*found"):
            make(value)


@pytest.mark.parametrize("value", [64.0, 2.5, np.float64(64)])
def test_floats_are_no_counts(value: Any) -> None:
    for make in (
        lambda: offload.BatchSize(initial=value),
        lambda: trainer(batch_size=value),
        lambda: trainer(workers=value),
    ):
        with pytest.raises(ConfigError, match=r"must be a whole number \(such as .*found"):
            make()


def test_numbers_of_numpy_become_pythons_own() -> None:
    size = offload.BatchSize(initial=np.int64(64), max=np.int32(256), local=[np.int64(1), np.int64(64)])  # type: ignore[arg-type]
    assert [type(v) for v in (size.initial, size.max)] == [int, int]
    assert size == offload.BatchSize(initial=64, max=256, local=(1, 64))
    made = trainer(batch_size=np.int64(8), workers=np.int64(2), seed=np.uint8(3), hang_s=np.float32(60))
    assert [type(v) for v in (made.batch_size.initial, made.workers[0], made.seed, made.hang_s)] == [
        int,
        int,
        int,
        float,
    ]  # type: ignore[index]
    assert offload.Adaptation(schedule={np.int64(0): np.int64(2)}).schedule == {0: 2}


def test_paths_may_be_paths() -> None:
    assert trainer(storage_path=Path("x")).storage_path == "x"
    with pytest.raises(ConfigError, match="run_dir must be a path"):
        trainer().fit(run_dir=5)  # type: ignore[arg-type]


# --- transforms -------------------------------------------------------------------------------------------------------


class NeedsSize:
    def __init__(self, size: int) -> None: ...
    def __call__(self, batch: Any) -> Any: ...


class NotCallable:
    pass


class OfTwo:
    def __call__(self, image: Any, label: Any) -> Any: ...


class Good:
    def __call__(self, batch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (NeedsSize, r"class NeedsSize without arguments, .* misses a required argument: 'size'.*NeedsSize\(\.\.\.\)"),
        (NotCallable, r"instances of the transform class NotCallable cannot be called: define __call__"),
        (dict, "instances of the transform class dict cannot be called"),
        (NotCallable(), r"transform must be callable .*found <"),
        (OfTwo, r"the transform OfTwo with one argument.* misses a required argument: 'label'"),
        (OfTwo(), r"the transform OfTwo with one argument.* misses a required argument: 'label'"),
        (lambda: None, r"with one argument, a batch as a dict of columns, and it .*too many positional"),
    ],
)  # fmt: skip
def test_transforms_that_cannot_be_called_are_refused_where_they_are_given(transform: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offload.image_folder("x", transform)


@pytest.mark.parametrize("transform", [Good, Good(), torch.nn.Identity(), lambda b, n=1: b, lambda *b: b[0]])
def test_transforms_that_can_be_called_are_taken(transform: Any) -> None:
    offload.image_folder("x", transform)
