"""Measure a data set's samples with faster equivalents of its transforms, beside the originals.

An instance of torchvision's class becomes one of offload's by its ``__class__``: both hold the same attributes. So all that refers to
it, in containers, closures or worker objects, uses the equivalent, and goes back to the original afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offload.measure.equivalents import DROP_INS, DropIn
from offload.measure.replacement import WORTH_TAKING, Distance, Replacement
from offload.pipeline.preprocessing.environment import hold_to_one_core
from offload.probe.work import SampleWork

CHUNK = 4  # samples at a time
SEEN_CHUNKS = 4  # chunks within which a transform must run at least once: some are applied at random
LEAST_CHUNKS = 3


def instances() -> dict[DropIn, list[Any]]:
    """The living transforms of this process that an equivalent could replace."""
    classes: dict[type, DropIn] = {}
    for drop_in in DROP_INS:
        for path in drop_in.replaces:
            module, _, name = path.rpartition(".")
            with contextlib.suppress(ImportError, AttributeError):  # of another version of torchvision
                classes[getattr(importlib.import_module(module), name)] = drop_in
    by_drop_in: dict[DropIn, list[Any]] = {}
    for instance in gc.get_objects():
        if (equivalent := classes.get(type(instance))) is not None:
            by_drop_in.setdefault(equivalent, []).append(instance)
    return by_drop_in


def _used(work: SampleWork, by_drop_in: dict[DropIn, list[Any]]) -> dict[DropIn, list[Any]]:
    """The transforms that some samples pass through. Others may belong to validation, or be left over."""
    used: set[DropIn] = set()
    before = [(instance, type(instance)) for instance in itertools.chain(*by_drop_in.values())]
    for drop_in, objects in by_drop_in.items():
        for instance in objects:
            object.__setattr__(instance, "__class__", _noting(type(instance), used, drop_in))
    try:
        for chunk in range(SEEN_CHUNKS):
            start = chunk * CHUNK
            if start < work.samples and len(used) < len(by_drop_in):
                work.make(start, min(CHUNK, work.samples - start))
    finally:
        _give_back(before)
    return {drop_in: objects for drop_in, objects in by_drop_in.items() if drop_in in used}


def _noting(kind: Any, used: set[DropIn], drop_in: DropIn) -> type:
    """The same class, but its instances note their calls."""

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        used.add(drop_in)
        return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": noted, "__module__": kind.__module__})


def _give_back(before: Sequence[tuple[Any, type]]) -> None:
    for instance, kind in before:
        object.__setattr__(instance, "__class__", kind)


@contextlib.contextmanager
def replaced(by_drop_in: Mapping[DropIn, Sequence[Any]], drop_ins: Sequence[DropIn]) -> Iterator[None]:
    """A context in which the instances of ``drop_ins`` compute with offload's classes."""
    before = [(instance, type(instance)) for drop_in in drop_ins for instance in by_drop_in[drop_in]]
    for drop_in in drop_ins:
        module, _, name = drop_in.path.rpartition(".")
        ours = getattr(importlib.import_module(module), name)
        for instance in by_drop_in[drop_in]:
            object.__setattr__(instance, "__class__", ours)
    hold_to_one_core()  # OpenCV too, which the import may have loaded
    try:
        yield
    finally:
        _give_back(before)


def measure(work: SampleWork, *, seconds: float) -> Replacement | None:
    """Make samples with and without the equivalents, in turn, for about ``seconds``. None if no transform of the data set has an
    equivalent. Raises what the data set raises."""
    work.make(0, CHUNK)  # constructs what the data set makes at its first sample
    by_drop_in = _used(work, instances())
    if not by_drop_in:
        return None
    names = sorted(by_drop_in, key=lambda drop_in: drop_in.name)
    alone = {name: _side_by_side(work, by_drop_in, (name,), seconds / (len(names) + 1)) for name in names}
    unlike = tuple(name for name, pairs in alone.items() if pairs.apart is not None and not pairs.apart.alike)
    chosen = tuple(name for name in names if alone[name].over <= 1 - WORTH_TAKING and name not in unlike)
    left = tuple((name, alone[name].over) for name in names if name not in (*chosen, *unlike))
    both = (
        alone[chosen[0]]
        if len(chosen) == 1
        else _side_by_side(work, by_drop_in, chosen, seconds / (len(names) + 1) if chosen else 0)
    )
    return Replacement(
        chosen=chosen,
        left=left,
        unlike=unlike,
        samples=both.samples,
        before_s=both.before_s,
        after_s=both.before_s * both.over,
        over=both.over,
        distances=None if both.apart is None else both.apart.distances(),
    )


@dataclass(frozen=True)
class _Pairs:
    """Chunks of samples that both ways made."""

    samples: int
    before_s: float
    over: float
    apart: _Apart | None


def _side_by_side(
    work: SampleWork, instances: Mapping[DropIn, Sequence[Any]], drop_ins: Sequence[DropIn], seconds: float
) -> _Pairs:
    ratios: list[float] = []
    times: list[float] = []
    alike = _Apart().count(work.make(0, CHUNK), work.make(0, CHUNK))
    apart = _Apart() if alike else None
    with replaced(instances, drop_ins):
        work.make(0, CHUNK)  # imports
    until = time.monotonic() + seconds
    seen = start = 0
    while time.monotonic() < until or len(ratios) < LEAST_CHUNKS:
        count = min(CHUNK, work.samples - start)
        before, before_s = _timed(work, start, count)
        with replaced(instances, drop_ins):
            after, after_s = _timed(work, start, count)
        if apart is not None and seen < work.samples:
            apart.count(before, after)
        seen = min(seen + count, work.samples)
        times.append(before_s / count)
        ratios.append(after_s / before_s)
        start = (start + count) % work.samples
    return _Pairs(seen, float(np.median(times)), float(np.median(ratios)), apart)


def _timed(work: SampleWork, start: int, count: int) -> tuple[Any, float]:
    began = time.thread_time()
    samples = work.make(start, count)
    return samples, max(time.thread_time() - began, 1e-9)


@dataclass
class _Apart:
    """The distances of outputs, by their place in a sample. ``alike``: whether all have the same shapes and types."""

    alike: bool = True
    largest: dict[tuple[str, str], float] = field(default_factory=dict)
    total: dict[tuple[str, str], float] = field(default_factory=dict)
    values: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, before: Any, after: Any, name: str = "") -> bool:
        """Count two outputs, and return whether they are equal."""
        if isinstance(before, Mapping) and isinstance(after, Mapping) and before.keys() == after.keys():
            equal = [self.count(before[key], after[key], f"{name}.{key}".lstrip(".")) for key in before]
            return all(equal)
        if isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
            places = [name] * len(before) if isinstance(before, list) else [f"{name}[{i}]" for i in range(len(before))]
            equal = [self.count(*pair) for pair in zip(before, after, places, strict=True)]
            return all(equal)
        a, b = _array(before), _array(after)
        if a is None or b is None:
            return True  # text and other objects, which no transform of images makes
        key = (name or "the sample", str(a.dtype))
        if a.shape != b.shape or a.dtype != b.dtype:
            self.alike = False
            return False
        a, b = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        if a.size:
            self._add(key, float(difference.max()), float(difference.sum()), a.size)
        return not difference.any()

    def _add(self, key: tuple[str, str], largest: float, total: float, values: int) -> None:
        self.largest[key] = max(self.largest.get(key, 0.0), largest)
        self.total[key] = self.total.get(key, 0.0) + total
        self.values[key] = self.values.get(key, 0) + values

    def distances(self) -> list[Distance]:
        """The distances of everything counted."""
        return [
            Distance(name=name, dtype=dtype, largest=largest, mean=self.total[name, dtype] / self.values[name, dtype])
            for (name, dtype), largest in self.largest.items()
        ]


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """Numbers as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    elif hasattr(value, "getbands"):  # an image of Pillow
        value = np.asarray(value)
    array = np.asarray(value) if isinstance(value, int | float | np.generic | np.ndarray) else None
    return array if array is not None and array.dtype.kind in "biuf" else None
