"""The place of a DataLoader in its epochs, as a state that a checkpoint can hold.

A sampler is the user's own code, and usually cannot say where it is. So the state holds what the sampler drew its random numbers from when
the epoch began, and how many batches the program has got since. A resumed loader draws the epoch's indices again and leaves these out.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from offload.errors import ConfigError
from offload.model.checks import check_count, check_mapping

VERSION = 1


@dataclass(eq=False, kw_only=True)
class Progress:
    """The place in an epoch. ``epoch``: the number of epochs begun before. ``batches``: those that the program has got.

    ``start``: the state at the beginning of the epoch, as :func:`state_of` gives it. ``between``: before the epoch has begun, the state of
    what the loader draws from alone, as :func:`generators_of` gives it.
    """

    epoch: int = 0
    batches: int = 0
    start: Mapping[str, Any] | None = None
    between: Mapping[str, Any] | None = None
    over: bool = False

    def state(self) -> dict[str, Any]:
        """The place as plain data, which ``torch.load(weights_only=True)`` reads back."""
        if self.over or self.start is None:
            # What the generators hold at the end of an epoch, the loader adds.
            between = None if self.over else self.between
            epoch = self.epoch + self.over
            return {"version": VERSION, "epoch": epoch, "batches": 0, "start": None, "between": between}
        return {"version": VERSION, "epoch": self.epoch, "batches": self.batches, "start": dict(self.start)}

    @classmethod
    def of(cls, state: object) -> Progress:
        """The place that :meth:`state` described. Raises ConfigError for anything else."""
        found = check_mapping("DataLoader: the state", state, sane="the result of state_dict()")
        if found.get("version") != VERSION or not {"epoch", "batches", "start"} <= found.keys():
            raise ConfigError(
                f"this is no state of an offload.DataLoader of this release: it has the keys {', '.join(map(str, found)) or 'none'}. "
                "Load the result of its state_dict()."
            )
        return cls(
            epoch=check_count("DataLoader: the state's epoch", found["epoch"]),
            batches=check_count("DataLoader: the state's batches", found["batches"]),
            start=found["start"],
            between=found.get("between"),
        )


def state_of(samplers: Iterable[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The state of everything from which samplers usually draw: the global generators, the loader's, their own, and their epochs."""
    return {
        **_global_state(),
        "generator": None if generator is None else generator.get_state(),
        "samplers": [_state_of_sampler(sampler) for sampler in samplers],
    }


def generators_of(samplers: Iterable[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The state of the generators that the loader and its samplers hold, and that of samplers which tell their own. A program that resumes
    between two epochs has the global ones in its own hands, and a sampler's epoch."""
    return {
        "generator": None if generator is None else generator.get_state(),
        "samplers": [_state_between(sampler) for sampler in samplers],
    }


def restore_own(state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None) -> None:
    """Set the loader's own generator and what the state holds of the samplers back to it."""
    if generator is not None and state["generator"] is not None:
        generator.set_state(state["generator"].cpu())
    for sampler, of_sampler in zip(samplers, state["samplers"], strict=False):
        _restore_sampler(sampler, of_sampler)


def restore(state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None) -> Aside:
    """Set them back to the beginning of an epoch, and return the global generators, to be used aside."""
    restore_own(state, samplers, generator)
    return Aside(state)


class Aside:
    """A second set of global generators, for a resumed sampler: within :meth:`used`, Python, NumPy and torch draw from it, and the
    program's own random numbers stay what they are."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    @contextmanager
    def used(self) -> Iterator[None]:
        """A context in which these generators are the global ones."""
        before = _global_state()
        _set_global_state(self._state)
        try:
            yield
        finally:
            self._state = _global_state()
            _set_global_state(before)

    def iterate(self, items: Iterator[Any]) -> Iterator[Any]:
        """The same items, each drawn from these generators."""
        nothing = object()
        while True:
            with self.used():
                item = next(items, nothing)
            if item is nothing:
                return
            yield item


def _global_state() -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in legacy],
        "torch": torch.get_rng_state(),
    }


def _set_global_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())


def _state_of_sampler(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if (own := _own(sampler)) is not None:
        state["generator"] = own.get_state()
    if hasattr(sampler, "set_epoch") and isinstance(epoch := getattr(sampler, "epoch", None), int):
        state["epoch"] = epoch
    # The order of a DistributedSampler depends on its epoch alone. torchdata's adds how far the last epoch came, and would skip so much.
    has_own = hasattr(sampler, "load_state_dict") and not isinstance(sampler, DistributedSampler)
    if has_own and _takes_nothing(getattr(sampler, "state_dict", None)):
        state["own"] = copy.deepcopy(sampler.state_dict())  # some give the dict that they go on to change
    return state


def _state_between(sampler: Any) -> dict[str, Any]:
    state = _state_of_sampler(sampler)
    if hasattr(sampler, "set_epoch"):
        # The program sets the next epoch before it iterates. An older state would undo that.
        state.pop("epoch", None)
        state.pop("own", None)
    return state


def _own(sampler: Any) -> torch.Generator | None:
    """The generator that a sampler holds."""
    own = getattr(sampler, "generator", None)
    return own if isinstance(own, torch.Generator) else None


def _takes_nothing(method: Any) -> bool:
    """Whether a method can be called without arguments. Some samplers want to be told the step for their state: the program keeps it."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # it is written in C, and does not say
        return True
    return True


def _restore_sampler(sampler: Any, state: Mapping[str, Any]) -> None:
    if "own" in state:
        sampler.load_state_dict(copy.deepcopy(state["own"]))
    if "epoch" in state:
        sampler.set_epoch(state["epoch"])
    if "generator" in state:
        sampler.generator.set_state(state["generator"].cpu())
