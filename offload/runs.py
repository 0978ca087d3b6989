"""The runs of a Ray cluster: list them, and pause, resume, stop or resize one from outside.

::

    for run in offload.runs.listed("auto"):
        print(run.name, run.user, run.state, run.workers)
    offload.runs.pause("vit", address="auto")

Where it stops: a command asks, and the run's own state machine decides how it obeys. A run without a cluster is not listed: signals
steer its program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from offload.errors import ConfigError
from offload.model.checks import check_count, check_text
from offload.train.steering.messages import Command, RunState

__all__ = ["RunState", "listed", "pause", "resize", "resume", "stop"]

PATIENCE_S = 120.0  # a commit may take long, and so may the start of workers
ANSWER_S = 5.0  # for a desk, which does nothing but answer


def listed(address: str | None = None) -> list[RunState]:
    """The runs of a Ray cluster, those included that wait for room, in the order of their names.

    Args:
        address: the cluster; None: RAY_ADDRESS, or else the one on this host.

    Raises:
        ConfigError: if there is no such cluster.
    """
    with _cluster(address):
        from offload.train.steering import registry

        return registry.states(ANSWER_S)


def pause(name: str, address: str | None = None, *, timeout_s: float = PATIENCE_S) -> str:
    """Let a run commit and release everything that it holds; its ``fit()`` waits meanwhile. Return its answer in words.

    Args:
        name: the run, as :func:`listed` names it.
        address: see :func:`listed`.
        timeout_s: how long to wait for the answer.

    Raises:
        ConfigError: if there is no such run or cluster, the run refuses, or it does not answer in time.
    """
    return _ask(name, Command(action="pause"), address, timeout_s)


def resume(name: str, address: str | None = None, *, timeout_s: float = PATIENCE_S) -> str:
    """Let a paused run go on where it has committed. ``name``, ``address``, ``timeout_s`` and errors: see :func:`pause`."""
    return _ask(name, Command(action="resume"), address, timeout_s)


def stop(name: str, address: str | None = None, *, timeout_s: float = PATIENCE_S) -> str:
    """Let a run commit and end: its ``fit()`` returns a result whose status is ``"interrupted"``. ``name``, ``address``,
    ``timeout_s`` and errors: see :func:`pause`."""
    return _ask(name, Command(action="stop"), address, timeout_s)


def resize(
    name: str,
    workers: int,
    address: str | None = None,
    *,
    nodes: Mapping[str, int] | None = None,
    timeout_s: float = PATIENCE_S,
) -> str:
    """Let a run commit and go on with this many workers, which stay until they are chosen anew. ``name``, ``address``,
    ``timeout_s`` and errors: see :func:`pause`.

    ``nodes``: the workers on each node, by the node's id or address, ``workers`` in all; None: Ray chooses. They stay there until the run
    changes its workers, or loses one of these nodes.
    """
    check_count("workers", workers, least=1, sane="a number of workers, such as 2")
    for node, there in (nodes or {}).items():
        check_count(f"nodes[{node!r}]", there, least=0, sane="a number of workers, such as 2")
    if nodes is not None and sum(nodes.values()) != workers:
        raise ConfigError(
            f"nodes has places for {sum(nodes.values())} workers, and workers={workers}: make them equal."
        )
    return _ask(name, Command(action="resize", workers=workers, nodes=dict(nodes or {})), address, timeout_s)


def _ask(name: str, command: Command, address: str | None, timeout_s: float) -> str:
    check_text("the name of a run", name, sane="a name that offload runs lists")
    with _cluster(address):
        from offload.train.steering import registry

        reply = registry.ask(name, command, timeout_s=timeout_s, answer_s=ANSWER_S)
    if not reply.done:
        raise ConfigError(f"run {name!r} was not {_DONE[command.action]}: {reply.text}.")
    return reply.text


_DONE = {"pause": "paused", "resume": "resumed", "stop": "stopped", "resize": "resized"}


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to the cluster."""
    from offload.train.cluster.running import connected_to_running  # it imports Ray

    with connected_to_running(address, "runs are listed"):
        yield
