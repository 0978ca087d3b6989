"""What users see of a worker, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import RunError
from offload.train.worker.context import Context, DatasetInfo


def context() -> Context:
    loop: Any = SimpleNamespace(
        setup=SimpleNamespace(sized={"train": 103, "val": None}, classes={"train": ("cat", "dog")})
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
