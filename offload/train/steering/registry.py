"""The runs of a Ray cluster, by the names of their desks."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offload.errors import ConfigError
from offload.train.cluster.connection import head_node
from offload.train.cluster.holdings import DESK, HUB, NAMESPACE, Holdings
from offload.train.steering.listening import Listening
from offload.train.steering.messages import Command, Reply, RunState
from offload.train.steering.ray_desk import RayDesk

_GONE = (ray.exceptions.RayError, ValueError)  # no such actor any more
TAKEN = ValueError  # Ray's error for a name that another actor has
CALLS = 64  # calls that a desk answers at a time; those who wait for an answer keep one
DESK_S = 30.0  # time for a desk to start
WAIT_S = 60.0  # a desk answers after this long, whether or not there is a command


class OwnDesk:
    """A run's own side of its desk. Its calls never wait, and never fail: a run goes on without its desk.

    Args:
        state: what the run has shown last.
        actor: the handle of the desk.
        listening: runs the thread that hears commands.
    """

    def __init__(self, state: RunState, actor: Any, listening: Listening) -> None:
        self.state, self._actor, self._listening = state, actor, listening
        self._shown = 0  # states
        # This process owns the answer, so its end tells the desk of the end of the run.
        self._stay = actor.stay.remote()
        self._watches = actor.watch.remote([self._stay]).future()

    def wait_for_watch(self) -> None:
        """Wait until the desk watches over what the run makes. A desk that does not come, on a head that cannot start it, must not keep the
        run from training."""
        wait([self._watches], timeout=DESK_S)

    def show(self, state: RunState) -> None:
        """See :meth:`offload.train.steering.desk.Desk.show`."""
        if state != self.state:
            self.state = state
            self._shown += 1
            self._start(self._actor.show, self._shown, state)

    def reply(self, number: int, reply: Reply) -> None:
        """See :meth:`offload.train.steering.desk.Desk.reply`."""
        self._start(self._actor.reply, number, reply)

    def hear(self, tell: Callable[[int, Command], None]) -> None:
        """Call ``tell`` with the number of each command, from 0, and the command, from a thread."""
        self._listening.start(partial(self._listen, tell), "commands")

    def _listen(self, tell: Callable[[int, Command], None]) -> None:
        seen = 0
        with contextlib.suppress(
            ray.exceptions.RayError, RuntimeError, ValueError
        ):  # the run, or the cluster, has ended
            while True:
                for command in self._listening.answer(partial(self._actor.asked.remote, seen, WAIT_S)):
                    tell(seen, command)
                    seen += 1

    def _start(self, method: Any, *arguments: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ValueError):
            # Ray would print an error that nobody retrieves.
            method.remote(*arguments).future().add_done_callback(Future.exception)


def open_desk(state: RunState, holdings: Holdings, runtime_env: Mapping[str, Any], listening: Listening) -> OwnDesk:
    """Start a run's desk, and note it in ``holdings``. If another run has the name of ``state``, the run is called ``NAME-2`` and so on."""
    run, number = state.name, 1
    actor_class: Any = ray.remote(RayDesk)
    options = {
        "num_cpus": 0,
        "max_concurrency": CALLS,
        "lifetime": "detached",
        "namespace": NAMESPACE,
        "enable_task_events": False,
        "runtime_env": dict(runtime_env) or None,
        # The head: without it there is no cluster, while the host of the program may be what is lost.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(head_node(), soft=False),
    }
    while True:
        name = run if number == 1 else f"{run}-{number}"
        if name not in names():
            own = replace(state, name=name)
            holdings.note_actor(name + DESK)
            try:
                actor = actor_class.options(**options, name=name + DESK).remote(own, holdings.rooms)
            except TAKEN:  # by another driver, in this moment
                holdings.forget_actor(name + DESK)
            else:
                return OwnDesk(own, actor, listening)
        number += 1


def user_name() -> str:
    """The user of this process, by name; by number if there is no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def names() -> list[str]:
    """The names of the cluster's runs, those included that wait and those that have no desk."""
    return _names_with(HUB, DESK)


def desk_names() -> list[str]:
    """The names of the runs that have a desk."""
    return _names_with(DESK)


def _names_with(*ends: str) -> list[str]:
    """The runs that have an actor whose name ends so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted({name.removesuffix(end) for end in ends for name in ours if name.endswith(end)})


def desk_of(run: str) -> Any:
    """The handle of a run's desk. Raises ValueError if the run has ended."""
    return ray.get_actor(run + DESK, namespace=NAMESPACE)


# -- others ------------------------------------------------------------------------------------------------------------


def states(timeout_s: float) -> list[RunState]:
    """What the runs of the cluster have shown last, in the order of their names. A run that ends meanwhile is left out, and so is one
    whose desk does not answer within ``timeout_s``: it is just starting, or its program has just ended."""
    asked = {}
    for name in desk_names():
        with contextlib.suppress(*_GONE):
            asked[name] = desk_of(name).state.remote()
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    shown: list[RunState] = []
    for answer in asked.values():
        if answer in ready:
            with contextlib.suppress(*_GONE):
                shown.append(ray.get(answer))
    return shown


def ask(run: str, command: Command, *, timeout_s: float, answer_s: float) -> Reply:
    """Ask something of a run, and wait for its answer, at most for ``timeout_s``; for its desk alone, at most for ``answer_s``.

    Raises ConfigError if there is no such run, it ends meanwhile, or no answer comes.
    """
    there = desk_names()
    if run not in there:
        known = f"there are {', '.join(there)}" if there else "no run trains or waits there"
        raise ConfigError(f"no run {run!r} on this Ray cluster: {known}. offload runs lists them.")
    try:
        desk = desk_of(run)
        number = ray.get(desk.ask.remote(command), timeout=answer_s)
        reply: Reply | None = ray.get(desk.replied.remote(number, timeout_s), timeout=timeout_s + answer_s)
    except ray.exceptions.GetTimeoutError:
        reply = None
    except _GONE:
        if command.action == "stop":
            return Reply(text="stopped")
        raise ConfigError(f"run {run!r} has ended meanwhile: offload runs lists those that are left.") from None
    if reply is None:
        raise ConfigError(
            f"run {run!r} has not answered within {timeout_s:g} s. It obeys as soon as it can, unless its program hangs: offload runs "
            "shows what it does."
        )
    return reply
