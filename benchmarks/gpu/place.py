"""What every check gets and returns: the place where it runs, its findings, and the two ways to end without any."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

Size = TypeVar("Size")


class NotApplicable(Exception):
    """The check cannot run here; the text says what it needs."""


class CheckFailed(Exception):
    """The check ran and found something wrong; the text says what."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a check found: a sentence for the table, and figures for the file."""

    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a check runs.

    Args:
        device: ``"cuda"``, or ``"cpu"`` for the stand-in that tests run, with tiny sizes.
        gpus: the number of GPUs.
        folder: an empty folder for the check's files.
        so_far: keeps these figures if the check does not come to its end.
    """

    device: Literal["cuda", "cpu"]
    gpus: int
    folder: Path
    so_far: Callable[[Mapping[str, Any]], None] = lambda figures: None

    def pick(self, on_gpu: Size, on_cpu: Size) -> Size:
        """The size for this device."""
        return on_gpu if self.device == "cuda" else on_cpu

    def need_gpu(self) -> None:
        """Raise NotApplicable on a CPU."""
        if self.device == "cpu":
            raise NotApplicable("needs a GPU")

    def need_two_gpus(self) -> None:
        """Raise NotApplicable with fewer than two GPUs."""
        if self.gpus < 2:
            raise NotApplicable("needs two GPUs")

    @contextlib.contextmanager
    def ray(self, cores: int | None = None) -> Iterator[None]:
        """A Ray of this machine alone, for all runs within. On a GPU machine, this process and all that it starts then keep to so many
        ``cores``; None: to all."""
        from offload import machine
        from offload.train.cluster.connection import connected

        before, allowed = machine.usable_cores, os.sched_getaffinity(0)
        if self.device == "cpu":
            machine.usable_cores = lambda: 4  # the stand-in shares its cores
        elif cores is not None:
            os.sched_setaffinity(0, sorted(allowed)[:cores])
        try:
            with connected("local"):
                yield
        finally:
            machine.usable_cores = before
            os.sched_setaffinity(0, allowed)


def expect(holds: bool, otherwise: str) -> None:
    """Raise CheckFailed unless it holds."""
    if not holds:
        raise CheckFailed(otherwise)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The documents of a ``.jsonl`` file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
