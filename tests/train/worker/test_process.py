"""The end of the user's function, as the driver hears of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from offload.errors import RunError
from offload.train.driver.failures import describe_failure
from offload.train.worker.process import RestatedError, run_user_function


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
        (BadLine("a.csv", 3), "BadLine: see line 3"),
        (Locked("taken"), "Locked: taken"),
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
    assert describe_failure(arrived, "training failed", "Help.") == (f"training failed: {told}. Help.", RunError)


def test_an_exception_that_travels_stays_what_it_is() -> None:
    error = ValueError("a bad batch")

    def train(ctx: Any) -> None:
        raise error

    context: Any = SimpleNamespace(rank=0)
    with pytest.raises(ValueError, match="a bad batch") as raised:
        run_user_function(train, context)
    assert raised.value is error
