"""The place of a DataLoader in its epochs, as a state that a checkpoint can hold.

A sampler is the user's own code, and usually cannot say where it is. So the state holds what the sampler drew its random numbers from when
the epoch began, and how many batches the program has got since. A resumed loader draws the epoch's indices again and leaves these out.
That is right only if it draws the same indices: the state also holds the arguments that decide it, and the checksum of those batches.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from offload.errors import ConfigError
from offload.loader.arguments import GENERATOR, other_rank
from offload.loader.json_state import decoded, encoded
from offload.loader.trail import Trail
from offload.model.checks import check_count, check_mapping
from offload.train.checkpoints.plain import NotPlainError

VERSION = 2
_DAMAGED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
)  # what reading a state raises if it is not as it was written


@dataclass(eq=False, kw_only=True)
class Progress:
    """The place in an epoch.

    Args:
        epoch: the number of epochs begun before.
        batches: those that the program has got.
        start: the state at the beginning of the epoch, as :func:`state_of` gives it, with what the loader adds.
        between: before the epoch has begun, the state of what the loader draws from alone, as :func:`generators_of` gives it.
        arguments: those of the epoch, see :func:`offload.loader.arguments.arguments_of`.
        trail: the checksums of the batches that the sampler has given.
    """

    epoch: int = 0
    batches: int = 0
    start: Mapping[str, Any] | None = None
    between: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trail: Trail = field(default_factory=Trail)
    over: bool = False

    def state(self) -> dict[str, Any]:
        """The place as plain data, which JSON holds, and which ``torch.load(weights_only=True)`` reads back."""
        if self.over or self.start is None:
            # What the generators hold at the end of an epoch, the loader adds.
            between = None if self.over else self.between
            epoch = self.epoch + self.over
            return {"version": VERSION, "epoch": epoch, "batches": 0, "start": None, "between": between}
        batches = self.batches
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "batches": batches,
            "start": dict(self.start),
            "arguments": dict(self.arguments),
            "checksum": self.trail.after(batches),
        }

    @classmethod
    def of(cls, state: object) -> Progress:
        """The place that :meth:`state` described, in this release or in those that wrote tensors. Raises ConfigError for anything else."""
        found = check_mapping("DataLoader: the state", state, sane="the result of state_dict()")
        if found.get("version") not in (1, VERSION) or not {"epoch", "batches", "start"} <= found.keys():
            raise ConfigError(
                f"this is no state of an offload.DataLoader of this release: it has the keys {', '.join(map(str, found)) or 'none'}. "
                "Load the result of its state_dict()."
            )
        epoch = check_count("DataLoader: the state's epoch", found["epoch"])
        batches = check_count("DataLoader: the state's batches", found["batches"])
        try:
            if found["version"] == 1:
                found = _of_version_1(found)
            for each in (found["start"], found.get("between")):
                _check(each)
            arguments = dict(found.get("arguments", {}))
        except _DAMAGED as error:
            raise ConfigError(
                f"the state of the DataLoader is damaged ({type(error).__name__}: {error}). Load the result of state_dict() as it was."
            ) from None
        return cls(
            epoch=epoch,
            batches=batches,
            start=found["start"],
            between=found.get("between"),
            arguments=arguments,
            trail=Trail(batches, found.get("checksum")),
        )

    def check_order(self, trail: Trail, *, random: bool, rank: int) -> None:
        """Compare the order of a resumed epoch with the one that the program has read so far.

        Args:
            trail: of the batches that the sampler has given again.
            random: whether it took random numbers for them, of those that the state holds.
            rank: that of this process. If the state is another rank's, this rank had another order, which must come from no random numbers.

        Raises ConfigError if it is another order.
        """
        if not self.batches or self.start is None:
            return
        of_state = self.arguments.get("rank", rank)
        if rank != of_state:
            if random or any({"own", "object"} & each.keys() for each in self.start["samplers"]):
                raise other_rank(of_state, rank)
            return
        before, now = self.trail.after(self.batches), trail.after(self.batches)
        if None not in (before, now) and before != now:
            raise ConfigError(
                f"the state of the DataLoader was taken after {self.batches} batches of an epoch, and the sampler gives other batches now: "
                "the rest of that epoch would repeat samples or leave some out. Resume with the sampler and the data set of the state, or "
                "load no state and begin the epoch anew. A sampler with random numbers of its own needs a state_dict and a "
                "load_state_dict."
            )


def too_few(batches: int, source: str, found: int) -> ConfigError:
    """The error for an epoch that has fewer batches now than a state leaves out. ``source``: who gives them."""
    return ConfigError(
        f"the state of the DataLoader was taken after {batches} batches of an epoch, and the {source} gives {found} now. "
        "Resume with the data set, the sampler and the batch size with which the state was taken."
    )


def state_of(samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None) -> dict[str, Any]:
    """The state of everything from which samplers usually draw: the global generators, the loader's, their own, and their epochs. A data
    set may have an epoch, too."""
    return {
        "random": _encoded_random(_global_state()),
        "generator": _encoded_generator(generator),
        "samplers": [_state_of_sampler(sampler) for sampler in samplers],
        "data_epoch": _epoch(dataset),
    }


def generators_of(samplers: Iterable[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The state of the generators that the loader and its samplers hold, and that of samplers which tell their own. A program that resumes
    between two epochs has the global ones in its own hands, and a sampler's epoch."""
    return {"generator": _encoded_generator(generator), "samplers": [_state_between(sampler) for sampler in samplers]}


def restore_own(
    state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None
) -> None:
    """Set the loader's own generator and what the state holds of the samplers back to it. What the loader does not have any more, as after
    a change of its arguments between two epochs, is left out."""
    _restore_generator(generator, state["generator"])
    for sampler, of_sampler in zip(samplers, state["samplers"], strict=False):
        if of_sampler.get("class") in (None, type(sampler).__qualname__):
            _restore_sampler(sampler, of_sampler)
    if state.get("data_epoch") is not None and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(state["data_epoch"])


def restore(
    state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None
) -> Aside:
    """Set them back to the beginning of an epoch, and return the global generators, to be used aside."""
    restore_own(state, samplers, generator, dataset)
    return Aside(_decoded_random(state["random"]))


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
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}


def _set_global_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def _encoded_random(state: Mapping[str, Any]) -> Any:
    version, words, gauss = state["python"]
    python = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    return encoded({**state, "python": python}, "the state of the global generators")


def _decoded_random(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = decoded(state)
    python = found["python"]
    return {**found, "python": (python["version"], tuple(python["words"].tolist()), python["gauss"])}


def _encoded_generator(generator: torch.Generator | None) -> Any:
    return None if generator is None else encoded(generator.get_state(), "the state of a generator")


def _restore_generator(generator: torch.Generator | None, state: Any) -> None:
    if generator is None or state is None:
        return
    try:
        generator.set_state(decoded(state))
    except RuntimeError as error:
        raise ConfigError(
            f"the state of the DataLoader does not fit the generator on {generator.device} ({error}). Resume with a generator on the "
            "device of the one with which the state was taken."
        ) from None


def _state_of_sampler(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(sampler).__qualname__}
    if (generator := _own(sampler)) is not None:
        state["generator"] = _encoded_generator(generator)
    if (epoch := _epoch(sampler)) is not None:
        state["epoch"] = epoch
    # The order of a DistributedSampler depends on its epoch alone. torchdata's adds how far the last epoch came, and would skip so much.
    has_own = hasattr(sampler, "load_state_dict") and not isinstance(sampler, DistributedSampler)
    if has_own and _takes_nothing(getattr(sampler, "state_dict", None)):
        state |= _encoded_own(sampler.state_dict(), sampler)
    return state


def _encoded_own(own: Any, sampler: Any) -> dict[str, Any]:
    """A sampler's own state. An object that is not data stays one, which pickle can save and JSON cannot."""
    try:
        return {"own": encoded(own, f"the state of {type(sampler).__name__}")}
    except NotPlainError:
        return {"object": copy.deepcopy(own)}  # some give the dict that they go on to change


def _state_between(sampler: Any) -> dict[str, Any]:
    state = _state_of_sampler(sampler)
    if hasattr(sampler, "set_epoch"):
        # The program sets the next epoch before it iterates. An older state would undo that.
        for name in ("epoch", "own", "object"):
            state.pop(name, None)
    return state


def _epoch(what: Any) -> int | None:
    """The epoch of a sampler or a data set that can be told it."""
    epoch = getattr(what, "epoch", None) if hasattr(what, "set_epoch") else None
    return epoch if isinstance(epoch, int) else None


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
    if hasattr(sampler, "load_state_dict"):
        if "own" in state:
            sampler.load_state_dict(decoded(state["own"]))
        elif "object" in state:
            sampler.load_state_dict(copy.deepcopy(state["object"]))
    if "epoch" in state and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state["epoch"])
    _restore_generator(_own(sampler), state.get("generator"))


def _check(state: Any) -> None:
    """Raise one of _DAMAGED for a part of a state that :func:`restore` could not use."""
    if state is None:
        return
    if "random" in state:
        with Aside(_decoded_random(state["random"])).used():
            pass
    if not isinstance(state["drawn"], int | None):
        raise TypeError("the seed is no number")
    for each in (state, *state["samplers"]):
        decoded([each.get("generator"), each.get("own")])


def _of_version_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of releases that wrote tensors, as this one writes it. It tells no arguments, except whether there was a generator."""

    def part(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        samplers = [
            {
                **{name: each for name, each in sampler.items() if name == "epoch"},
                **({"generator": encoded(sampler["generator"], "a generator")} if "generator" in sampler else {}),
                **(_encoded_own(sampler["own"], sampler) if "own" in sampler else {}),
            }
            for sampler in found["samplers"]
        ]
        return {"generator": encoded(found["generator"], "a generator"), "samplers": samplers, "drawn": found["drawn"]}

    start, between, arguments = part(state["start"]), part(state.get("between")), {}
    if start is not None:
        kind, words, position, has_gauss, gauss = state["start"]["numpy"]
        numpy = {
            "bit_generator": kind,
            "state": {"key": np.array(words, np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
        start["random"] = _encoded_random({**state["start"], "numpy": numpy})
        arguments = {"generator": None if start["generator"] is None else GENERATOR}
    return {**state, "start": start, "between": between, "arguments": arguments}
