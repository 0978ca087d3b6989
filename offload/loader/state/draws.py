"""The state of everything from which samplers draw an epoch's order, and the way back to it.

Where it stops: a sampler is the user's own code. One that draws from a generator which this module does not know draws another order.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from offload.errors import ConfigError
from offload.loader.state.json_state import decoded, encoded
from offload.train.checkpoints.plain import NotPlainError


def state_of(samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None) -> dict[str, Any]:
    """The state of everything from which samplers usually draw: the global generators, the loader's, their own, and their epochs.

    A data set may have an epoch, too.
    """
    return {
        "random": global_state(),
        "generator": _state_of_generator(generator),
        "samplers": [_state_of_sampler(sampler) for sampler in samplers],
        "data_epoch": _epoch(dataset),
    }


def generators_of(samplers: Iterable[Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The state of the generators that the loader and its samplers hold, and of samplers with a ``state_dict``.

    A program that resumes between two epochs sets the global generators and a sampler's epoch itself.
    """
    return {"generator": _state_of_generator(generator), "samplers": [_state_between(sampler) for sampler in samplers]}


def restore_own(
    state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None
) -> None:
    """Set the loader's own generator and its samplers back to the state.

    Parts that the loader no longer has, such as after a change of its arguments between two epochs, are left out.
    """
    _restore_generator(generator, state["generator"])
    for sampler, of_sampler in zip(samplers, state["samplers"], strict=False):
        if of_sampler.get("class") in (None, type(sampler).__qualname__):
            _restore_sampler(sampler, of_sampler)
    if state.get("data_epoch") is not None and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(state["data_epoch"])


def restore(
    state: Mapping[str, Any], samplers: Iterable[Any], generator: torch.Generator | None, dataset: Any = None
) -> SecondGenerators:
    """Do as :func:`restore_own`, and return the global generators of the state, to be used beside the program's."""
    restore_own(state, samplers, generator, dataset)
    return SecondGenerators(state["random"])


def written(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of this module as plain data for JSON. A sampler's own state that is an object stays an object."""
    plain = {name: encoded(value, name) for name, value in state.items() if name not in ("random", "samplers")}
    if "random" in state:
        version, words, gauss = state["random"]["python"]
        # An array of words: as a list, they would be twice as long.
        python = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
        plain["random"] = encoded({**state["random"], "python": python}, "the global generators")
    return {**plain, "samplers": [_written_sampler(sampler) for sampler in state["samplers"]]}


def read(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`written`. Raises ValueError, KeyError, TypeError, AttributeError or RuntimeError for anything else."""
    state = {name: decoded(value) for name, value in plain.items() if name != "samplers"}
    if "random" in state:
        python = state["random"]["python"]
        words = tuple(python["words"].tolist())
        state["random"] = {**state["random"], "python": (python["version"], words, python["gauss"])}
    return _checked({**state, "samplers": [_read_sampler(sampler) for sampler in plain["samplers"]]})


def read_version_1(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state of releases that wrote tensors. Raises as :func:`read` does."""
    state = {name: saved[name] for name in ("generator", "samplers", "drawn")}
    if "numpy" in saved:
        kind, words, position, has_gauss, gauss = saved["numpy"]
        generator = {"key": np.array(words, np.uint32), "pos": position}
        numpy = {"bit_generator": kind, "state": generator, "has_gauss": has_gauss, "gauss": gauss}
        state["random"] = {"python": saved["python"], "numpy": numpy, "torch": saved["torch"].cpu()}
    return _checked(state)


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """The state, if its generators can be set to it. Raises what they raise, and TypeError for other wrong types."""
    if "random" in state:
        with SecondGenerators(state["random"]).used():
            pass
    for holder in (state, *state["samplers"]):
        if not isinstance(holder.get("generator"), torch.Tensor | None):
            raise TypeError("the state of a generator is not a tensor")
    if not isinstance(state["drawn"], int | None):
        raise TypeError("the seed is not a number")
    return state


def _written_sampler(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: encoded(value, name) for name, value in state.items() if name != "own"}
    if "own" in state:
        try:
            plain["own"] = encoded(state["own"], "the state of a sampler")
        except NotPlainError:
            plain["object"] = copy.deepcopy(state["own"])
    return plain


def _read_sampler(plain: Mapping[str, Any]) -> dict[str, Any]:
    state = {name: decoded(value) for name, value in plain.items() if name != "object"}
    return {**state, "own": plain["object"]} if "object" in plain else state


class SecondGenerators:
    """A second set of global generators, for a resumed sampler.

    Within :meth:`used`, Python, NumPy and torch draw from it, and the program's own random numbers stay unchanged.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    @contextmanager
    def used(self) -> Iterator[None]:
        """A context in which these generators are the global ones."""
        before = global_state()
        try:
            _set_global_state(self._state)
        except BaseException:  # a damaged state
            _set_global_state(before)
            raise
        try:
            yield
        finally:
            self._state = global_state()
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


def global_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}


def _set_global_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def _state_of_generator(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _restore_generator(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    if generator is None or state is None:
        return
    try:
        generator.set_state(state.cpu())
    except RuntimeError as error:
        raise ConfigError(
            f"the state of the DataLoader does not fit the generator on {generator.device} ({error}). Resume with a generator on the "
            "device of the one with which the state was taken."
        ) from None


def _state_of_sampler(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(sampler).__qualname__}
    if (own := _own(sampler)) is not None:
        state["generator"] = own.get_state()
    if (epoch := _epoch(sampler)) is not None:
        state["epoch"] = epoch
    # The order of a DistributedSampler depends on its epoch alone. torchdata's subclass also saves its place in the last epoch, which it
    # would then skip.
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


def _epoch(source: Any) -> int | None:
    """The epoch of a sampler or data set with ``set_epoch``. None for others."""
    epoch = getattr(source, "epoch", None) if hasattr(source, "set_epoch") else None
    return epoch if isinstance(epoch, int) else None


def _own(sampler: Any) -> torch.Generator | None:
    """The generator that a sampler holds."""
    own = getattr(sampler, "generator", None)
    return own if isinstance(own, torch.Generator) else None


def _takes_nothing(method: Any) -> bool:
    """Return whether a method can be called without arguments.

    Some samplers need the program's step for their state. The program must then keep that state itself.
    """
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # it is written in C, and does not say
        return True
    return True


def _restore_sampler(sampler: Any, state: Mapping[str, Any]) -> None:
    if "own" in state and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(copy.deepcopy(state["own"]))
    if "epoch" in state and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state["epoch"])
    _restore_generator(_own(sampler), state.get("generator"))
