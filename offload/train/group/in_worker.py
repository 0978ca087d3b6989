"""The inside of a training process: its place in the group, and the report on how its function ended."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle


@dataclass(frozen=True, kw_only=True)
class Member:
    """The place of a process in its group.

    Args:
        attempt: the number of the group within the run.
        rank, world_size: the rank among all processes, and their number.
        local_rank, local_world_size: the rank among the processes of its node, and their number.
        node_rank: the rank of its node.
        node: the id of its node.
        homes: the id of each rank's node, for rank 0 alone.
        master: the host at which rank 0 is found.
        port: the port of rank 0's store; a free port where ``store`` is a file.
        store: the file that is the store of a group on one machine; "" for a store at ``master`` and ``port``.
        gpus: the ids of all GPUs of the node that belong to the group. Each of its processes sees all of them.
        gpu: the index in ``gpus`` of the process's first own GPU; None without GPUs.
        device: the device of the model and the batches, once the process has joined.
    """

    attempt: int = 1
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node: str
    homes: tuple[str, ...] = ()
    master: str = "127.0.0.1"
    port: int = 0
    store: str = ""
    gpus: tuple[str, ...] = ()
    gpu: int | None = None
    device: str = "cpu"


Main = Callable[[Member], str]
"""The function of each process. It returns an outcome of :data:`offload.train.group.group.Outcome`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the function of a process ended.

    Args:
        outcome: what it returned; "" if it raised.
        error: what it raised.
        trace: the traceback of that, as text: a traceback cannot travel.
    """

    outcome: str = ""
    error: BaseException | None = None
    trace: str = ""


class RestatedError(Exception):
    """An exception that cannot travel to the driver: its type's ``name`` and its ``text``."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name, self.text = name, text

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def travelling(error: BaseException) -> BaseException:
    """The exception itself if it arrives where it is sent, else a :class:`RestatedError`.

    Many do not arrive: those with an open file, and those whose ``__init__`` takes other arguments than the message, such as
    torch.compile's.
    """
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # pickling runs the user's code
        return RestatedError(type(error).__name__, str(error))
    return error


def report_of(function: Callable[[], str]) -> Report:
    """Call a function, and report how it ended."""
    try:
        return Report(outcome=function())
    except BaseException as error:
        return Report(error=travelling(error), trace=traceback.format_exc())
