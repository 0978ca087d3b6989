"""The engine of a DataLoader without a cluster: which processes serve an iteration, and how they start."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload import machine
from offload.loader.batch_recipe import cannot_travel
from offload.loader.iterator import IterationPlan
from offload.loader.local.children import Children
from offload.loader.local.local_fetcher import Crew, LocalFetcher, Usual
from offload.loader.local.shares import share_of
from offload.loader.remarks import say
from offload.pipeline.program import pickling

AHEAD = 2  # batches of a process that wait for the program or are under way, as in torch
DEFAULT_METHOD: str | None = None  # of starting processes: the platform's, as in torch

_said = False


class ThisMachine:
    """The processes of one loader on this machine. ``persistent``: whether they serve all of its iterations; ``says``: whether a remark
    may name them."""

    def __init__(self, *, persistent: bool, says: bool = True) -> None:
        self._persistent, self._says = persistent, says
        self._usual = Usual()
        self._kept: list[Children] = []
        self._pid = os.getpid()
        weakref.finalize(self, _end_all, self._kept).atexit = False

    def fetcher(self, plan: IterationPlan, *, context: Any, prefetch_factor: int | None) -> LocalFetcher:
        """The fetcher of an iteration.

        Args:
            plan: the iteration. ``plan.workers`` is torch's ``num_workers``.
            context: Python's context of processes, or None for the platform's default.
            prefetch_factor: batches that each process makes ahead. By default, AHEAD, and more if they are small.

        Raises:
            ConfigError: if the data set cannot be sent to a process that starts anew.
        """
        if os.getpid() != self._pid:  # those that are kept belong to the process from which this one was forked
            self._kept.clear()
            self._pid = os.getpid()
        processes = process_count(plan, os.environ)
        if self._says:
            _say_once(processes, os.environ)
        context = context or multiprocessing.get_context(DEFAULT_METHOD)
        crew = Crew(
            children=self._kept.pop() if self._kept else _children(plan, context),
            processes=processes,
            ahead=prefetch_factor or AHEAD,
            fixed=prefetch_factor is not None,
            usual=self._usual,
            keep=self._keep,
        )
        return LocalFetcher(plan, crew)

    def _keep(self, children: Children) -> bool:
        if self._persistent and not self._kept:
            self._kept.append(children)
            return True
        return False


def process_count(plan: IterationPlan, env: Mapping[str, str]) -> int:
    """The number of an iteration's processes: one for each worker of an iterable data set; else one for each core of this rank's share, or
    ``num_workers`` if that is more, as for data sets that wait for storage."""
    if plan.orders is None:
        return plan.workers
    return max(share_of(machine.usable_cores(), env), plan.workers)


def _children(plan: IterationPlan, context: Any) -> Children:
    if context.get_start_method() == "fork":
        return Children(replace(plan.recipe, inherited=True), context, None)
    try:
        return Children(plan.recipe, context, pickling.dumps(plan.recipe))
    except Exception as error:  # the user's classes may raise anything
        raise cannot_travel(plan.recipe, error) from None


def _end_all(kept: list[Children]) -> None:
    for children in kept:
        children.end()


def _say_once(processes: int, env: Mapping[str, str]) -> None:
    """Say, once in a program and by one rank, that there is no cluster."""
    global _said
    if not _said and env.get("RANK", "0") == "0":
        said = f"{processes} process{'es' if processes > 1 else ''} of this machine make{'' if processes > 1 else 's'}"
        say(f'{said} the batches. With a cluster, all of its CPUs do: offload.DataLoader(…, address="host:port")')
    _said = True
