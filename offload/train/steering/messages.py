"""What a run says of itself, and what others ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "starting", "training", "resizing", "pausing", "paused", "stopping"]
Action = Literal["pause", "resume", "stop", "resize"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run of a cluster.

    Args:
        name: its name on the cluster. No two runs have the same.
        user, host, pid: whose program calls ``fit()``, on which host, and in which process.
        run_dir: the run directory, on that host.
        since: when ``fit()`` was called, in seconds since 1970.
        state: what it does now.
        reason: why it waits, or what it changes; empty while it trains.
        workers: the workers that train.
        cores: the cores that preprocess.
        goodput: the newest goodput, in samples/s as useful as those of the initial batch; None before the first measurement.
        bounds: the least and the most workers that the run allows; None before it starts.
    """

    name: str
    user: str
    host: str
    pid: int
    run_dir: str
    since: float
    state: State = "waiting"
    reason: str = ""
    workers: int = 0
    cores: int = 0
    goodput: float | None = None
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Command:
    """What somebody asks of a run.

    Args:
        action: what it should do.
        workers: the number that a resize asks for.
        nodes: the workers by node, by its id or address, that a resize asks for; empty: any nodes.
    """

    action: Action
    workers: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A run's answer to a command, as a sentence without its name and the full stop. ``done``: whether the run has obeyed."""

    text: str
    done: bool = True
