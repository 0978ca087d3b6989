"""The end of the user's function, as the driver hears of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle

from offload.errors import RunError
from offload.train.driver.failure_texts import describe_failure
from offload.train.group.in_worker import RestatedError
from offload.train.worker.process import _share, run_user_function


class BadLine(Exception):
    """Its message is not what it is made of, so pickle cannot make it again."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} is damaged\nsee line {line}")


class Locked(Exception):
    """It holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BadLine("a.csv", 3), "BadLine: a.csv is damaged see line 3"),
        (Locked("taken."), "Locked: taken"),
        (Locked("first\n" + "x" * 600 + "\n\tlast.\n"), "Locked: first … last"),
        (Locked(""), "Locked: no message"),
        (KeyError("image"), "KeyError: 'image'"),
    ],
    ids=repr,
)
def test_every_exception_of_the_users_function_reaches_the_driver(error: Exception, told: str) -> None:
    def train(ctx: Any) -> None:
        raise error

    context: Any = SimpleNamespace(rank=0)
    with pytest.raises((RestatedError, KeyError)) as raised:
        run_user_function(train, context)
    arrived = cloudpickle.loads(cloudpickle.dumps(raised.value))
    failure = describe_failure(arrived, "training failed", "Help.")
    assert (type(failure), str(failure)) == (RunError, f"training failed: {told}. Help.")
    (note,) = failure.__notes__
    assert re.fullmatch(rf'On rank 0:\n  File "{__file__}", line \d+, in train\n    raise error', note)


def test_an_exception_that_travels_stays_what_it_is() -> None:
    error = ValueError("a bad batch")

    def train(ctx: Any) -> None:
        raise error

    context: Any = SimpleNamespace(rank=0)
    with pytest.raises(ValueError, match="a bad batch") as raised:
        run_user_function(train, context)
    assert raised.value is error


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_weights_and_buffers_of_every_type_and_layout_are_shared() -> None:
    types = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16)
    tensors = [torch.ones(2).to(each) for each in types]
    tensors += [torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0)[2:4], torch.tensor(3.0), torch.empty(0)]
    before = [each.clone() for each in tensors]
    _share(tensors)
    assert [each.tolist() for each in tensors] == [each.tolist() for each in before]
