"""What users see of a worker, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import OffloadError, RunError
from offload.train.worker.context import Context, DatasetInfo
from offload.train.worker.setup import DatasetSetup


def context() -> Context:
    loop: Any = SimpleNamespace(
        setup=SimpleNamespace(
            datasets={
                "train": DatasetSetup(samples=103, class_names=("cat", "dog"), resumable=True, ordered=False),
                "val": DatasetSetup(samples=None, resumable=True, ordered=True),
            },
            drop_last=False,
        )
    )
    return Context(loop)


def test_the_context_shows_what_users_call_and_nothing_internal() -> None:
    assert {name for name in dir(context()) if not name.startswith("_")} == {
        *("rank", "world_size", "device", "config", "epoch", "global_step", "rows", "info"),
        *(
            "prepare",
            "autocast",
            "epochs",
            "steps",
            "batches",
            "backward",
            "skip",
            "step",
            "stop",
            "sum",
            "gather",
            "accumulate",
            "accumulated",
            "report",
        ),
    }


def test_what_is_known_of_a_data_set() -> None:
    assert context().info() == DatasetInfo(samples=103, class_names=("cat", "dog"))
    assert context().info("val") == DatasetInfo(samples=None, class_names=None)
    for ask in (context().info, context().batches):
        with pytest.raises(RunError, match="there is no data set 'test'; the Trainer's datasets are train, val"):
            ask("test")


MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ctx: ctx.prepare(), "ctx.prepare takes a model and its optimizers, found nothing"),
        (lambda ctx: ctx.prepare(3), "ctx.prepare takes a model and its optimizers, found 3"),
        (
            lambda ctx: ctx.prepare(MODEL, 3),
            "ctx.prepare takes models, optimizers and objects with a state_dict; found int",
        ),
        (
            lambda ctx: ctx.prepare(MODEL, ddp=3),
            "ctx.prepare(ddp=...) takes a dict of arguments of DistributedDataParallel",
        ),
        (lambda ctx: ctx.prepare(MODEL, ddp={"find_unused": True}), "or False, found find_unused"),
        (lambda ctx: ctx.steps(), "ctx.steps(n) needs a number of steps, or seconds=..."),
        (lambda ctx: ctx.steps(-1), "the number of steps in ctx.steps(n) must be at least 0"),
        (lambda ctx: ctx.steps(seconds=0), "ctx.steps(seconds=...) must be greater than 0"),
        (lambda ctx: ctx.batches("train", min_rows=0), "ctx.batches(min_rows=...) must be at least 1"),
        (lambda ctx: ctx.batches("train", drop_last=3), "ctx.batches(drop_last=...) must be True or False"),
        (
            lambda ctx: ctx.report({"val": {"loss": [1, 2]}}),
            "ctx.report(val/loss=...) takes a number, or a tensor or array of one element",
        ),
        (lambda ctx: ctx.report(loss=np.eye(2)), "of one element, found an array of shape (2, 2)"),
        (lambda ctx: ctx.report(loss=torch.eye(2)), "of one element, found a tensor of shape (2, 2)"),
        (lambda ctx: ctx.report(name=np.array("x")), "or a tensor or array of one element, found array('x'"),
        (
            lambda ctx: ctx.report(0.5),
            "ctx.report(metrics) takes a dict of metrics, or keywords such as ctx.report(loss=0.5), found 0.5",
        ),
    ],
)
def test_bad_calls_are_named(call: Callable[[Context], Any], text: str) -> None:
    with pytest.raises(OffloadError) as caught:
        call(context())
    assert text in str(caught.value)


def test_metrics_have_the_names_and_values_that_loggers_know() -> None:
    told: list[Any] = []
    ctx = context()
    ctx._loop.report = lambda *parts: told.extend(parts)  # type: ignore[method-assign]
    ctx.report(
        {"val/loss": 0.5, "lr": {"head": torch.tensor(1e-3), "body": {"first": np.float32(2)}}, "best": True}, note="ok"
    )
    numbers, texts = told
    assert numbers == pytest.approx({"val/loss": 0.5, "lr/head": 1e-3, "lr/body/first": 2.0, "best": 1.0})
    assert texts == {"note": "ok"}


@pytest.mark.parametrize("three", [3, np.int64(3), np.array(3), np.array([3]), np.array([[3.0]]), torch.tensor([3])])
def test_a_number_may_be_an_array_or_tensor_of_one_element(three: Any) -> None:
    told: list[Any] = []
    ctx = context()
    ctx._loop.sum = lambda values, what: [2 * value for value in values]  # type: ignore[method-assign]
    ctx._loop.report = lambda *parts: told.extend(parts)  # type: ignore[method-assign]
    assert ctx.sum(three) == 6.0
    ctx.report(three=three)
    assert told[0] == {"three": 3.0}
