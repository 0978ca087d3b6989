"""Measure the cost of each stage of preprocessing: run the data set and the transform on one core and time their steps.

The steps come from a Compose (torchvision's or timm's) that is the transform itself or an attribute of the data set; anything else
is one stage.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from offload.measure.equivalents import Constant
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.describe.cached import CachedSamplesReader
from offload.pipeline.index.source import At, Reader, nowhere
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.randomness import Drawn, Held, held_by
from offload.pipeline.preprocessing.recipe import Recipe

PACK = "pack"
LEAST_RAW_BYTES = 256  # below this, reading the counters dominates
PAIRED_ROWS = 16  # rows decoded in both ways at a time
ROWS = 4  # rows at a time, at first: some samples take seconds
SHORT_S = 0.02  # shortest task: light rows come in larger tasks, as in a run


@dataclass
class Spent:
    """The CPU seconds of one thread and the output bytes, over ``calls`` calls of a step."""

    cpu_s: float = 0.0
    bytes_out: float = 0.0
    calls: int = 0


@dataclass
class StageCosts:
    """The costs of ``samples`` samples by stage. ``raw_bytes``: the bytes read from files meanwhile. ``reader``: the stage that reads; None
    if several do, or a cache is read. ``random``: the stages that draw random numbers, noted while ``watching``. ``held``: the generators
    that transforms hold."""

    samples: int = 0
    cpu_s: float = 0.0
    raw_bytes: float = 0.0
    spent: dict[str, Spent] = field(default_factory=dict)
    reader: str | None = None
    random: set[str] = field(default_factory=set)
    watching: bool = False
    held: Held = ()

    @contextmanager
    def timing(self, name: str) -> Iterator[list[Any]]:
        """A context that counts its time as one call of step ``name``, minus the time that other steps counted. The caller appends the
        output, and then the bytes of a row if these differ."""
        drawn = Drawn(self.held) if self.watching else None
        inside, began = self._counted(), time.thread_time()
        out: list[Any] = []
        yield out
        if drawn:
            self.random.add(name)
        spent = self.spent.setdefault(name, Spent())
        # Steps may call steps: each counts only its own time, so that the shares add up.
        spent.cpu_s += time.thread_time() - began - (self._counted() - inside)
        spent.bytes_out += out[1] if len(out) > 1 else size_of(out[0])
        spent.calls += 1

    def _counted(self) -> float:
        return sum(spent.cpu_s for spent in self.spent.values())

    def shares(self) -> Iterator[tuple[str, float, float | None]]:
        """Yield (name, share of the CPU time, output bytes of a sample) for each stage; the rest is called ``pack``."""
        known = sum(spent.cpu_s for spent in self.spent.values())
        for name, spent in self.spent.items():
            yield (
                name,
                spent.cpu_s / self.cpu_s,
                spent.bytes_out / spent.calls if spent.calls and spent.bytes_out else None,
            )
        yield PACK, max(self.cpu_s - known, 0.0) / self.cpu_s, None

    def constant(self) -> Constant | None:
        """The first stages, from reading on, up to the first one that draws random numbers; None if reading does, or nothing tells."""
        names = list(self.spent)
        first = next((i for i, name in enumerate(names) if name in self.random), len(names))
        before = names[:first]
        if self.reader not in before or not (last := self.spent[before[-1]]).bytes_out:
            return None
        return Constant(
            until=names[first] if first < len(names) else None,
            share=sum(self.spent[name].cpu_s for name in before) / self.cpu_s,
            bytes_out=last.bytes_out / last.calls,
        )


def measure_stages(recipe: Recipe, rows: pa.Table, *, seconds: float) -> StageCosts:
    """Run ``recipe`` repeatedly over index rows for about ``seconds``, and time its steps. This changes ``recipe``: do not use it
    again."""
    costs = StageCosts()
    if not (recipe.parts or isinstance(recipe.reader, CachedSamplesReader)):
        costs.reader = _reading(recipe.reader)
    recipe = _timed(recipe, costs)
    costs.held = held_by([recipe.transform, *(part.transform for part in recipe.parts)])
    start, size = 0, ROWS
    _once(recipe, rows.slice(0, size), start)  # imports, caches
    costs.watching = True
    _once(recipe, rows.slice(0, size), start)
    costs.watching = False
    # The first two tasks only warm up and watch for random numbers.
    costs.spent.clear()
    until = time.monotonic() + seconds
    while time.monotonic() < until or not costs.samples:
        began, read = time.thread_time(), _bytes_read()
        done = _once(recipe, rows.slice(start, size), start)
        took = time.thread_time() - began
        costs.cpu_s += took
        costs.raw_bytes += _bytes_read() - read
        costs.samples += done
        start = (start + done) % rows.num_rows
        if took < SHORT_S:
            size = min(2 * size, rows.num_rows)
    return costs


def exact_over_auto(recipe: Recipe, rows: pa.Table, *, seconds: float) -> float | None:
    """The CPU time of a sample if whole images are decoded, over that of ``recipe``, which decodes what a crop needs. None if it decodes
    whole images. Takes about ``seconds``: pairs of the same rows, and the median of their ratios."""
    if not getattr(recipe.reader, "encoded", False):
        return None
    exact: Any = copy.copy(recipe.reader)
    exact.encoded = False
    ways = (dataclasses.replace(recipe, reader=exact), recipe)
    for way in ways:
        _once(way, rows.slice(0, ROWS), 0)  # imports, caches
    until = time.monotonic() + seconds
    ratios: list[float] = []
    start = 0
    while time.monotonic() < until or not ratios:
        spent = []
        for way in ways:
            began = time.thread_time()
            done = _once(way, rows.slice(start, PAIRED_ROWS), start)
            spent.append(time.thread_time() - began)
        # Ratios of the same rows, back to back: the machine's speed and the rows' sizes cancel out.
        ratios.append(spent[0] / spent[1])
        start = (start + done) % rows.num_rows
    return float(np.median(ratios))


def _timed(recipe: Recipe, costs: StageCosts) -> Recipe:
    reader: Any = recipe.reader
    _wrap_attributes(getattr(reader, "dataset", None), costs)
    _wrap_steps(recipe.transform, costs)
    return dataclasses.replace(
        recipe,
        reader=_TimedReader(reader, costs),
        transform=_timed_transform(recipe, costs),
        parts=tuple(_timed(part, costs) for part in recipe.parts),
    )


def _once(recipe: Recipe, rows: pa.Table, start: int) -> int:
    ids = pa.array(np.arange(start, start + rows.num_rows, dtype=np.int64))
    process(recipe, rows.append_column(SAMPLE_ID, ids).append_column(POSITION, ids), epoch=0)
    return int(rows.num_rows)


def _wrap_attributes(owner: Any, costs: StageCosts) -> None:
    """Time the steps of every Compose among an object's attributes."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        _wrap_steps(value, costs)


def _wrap_steps(transform: Any, costs: StageCosts) -> None:
    """Time the steps of a Compose, or of an image transform's CPU part, and the steps within steps such as RandomApply."""
    for attribute in ("steps", "transforms"):
        steps = getattr(transform, attribute, None)
        if isinstance(steps, list | tuple) and all(callable(step) for step in steps):
            for step in steps:
                _wrap_steps(step, costs)
            timed = (step if isinstance(step, _TimedStep) else _TimedStep(step, costs) for step in steps)
            setattr(transform, attribute, type(steps)(timed))


class _TimedStep:
    """A step that times itself. Its public attributes are the step's: a data set may read the size of a crop."""

    def __init__(self, step: Any, costs: StageCosts) -> None:
        self._step, self._costs = step, costs
        self._name = getattr(step, "__name__", type(step).__name__)

    def __call__(self, *values: Any, **named: Any) -> Any:
        with self._costs.timing(self._name) as out:
            out.append(self._step(*values, **named))  # albumentations names what it passes
        return out[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._step, name)


def _timed_transform(recipe: Recipe, costs: StageCosts) -> Any:
    if recipe.kind == "none":
        return recipe.transform
    inner = recipe.transform
    name = getattr(inner, "__name__", type(inner).__name__)

    def timed(value: Any) -> Any:
        with costs.timing(name) as out:
            out.append(list(inner(value)) if recipe.kind == "generator" else inner(value))
            out[1:] = [_per_row(out[0], recipe.kind == "batch")]
        return out[0]

    return timed


class _TimedReader(Reader):
    """A reader that times reading, without the steps inside it."""

    def __init__(self, inner: Any, costs: StageCosts) -> None:
        self._inner, self._costs = inner, costs
        self._name = _reading(inner)

    def read(self, rows: pa.Table, at: At = nowhere) -> Any:
        with self._costs.timing(self._name) as out:
            out.append(self._inner.read(rows, at))
            out[1:] = [_per_row(out[0].columns, True)]
        return out[0]

    def describe(self, rows: pa.Table, row: int) -> str:
        return str(self._inner.describe(rows, row))


def _reading(reader: Any) -> str:
    """The name of the stage in which a reader reads."""
    if hasattr(reader, "dataset"):
        return type(reader.dataset).__name__
    return "read" if getattr(reader, "encoded", False) else "read and decode"


def _per_row(columns: Any, batched: bool) -> float:
    rows = max((len(column) for column in columns.values()), default=1) if batched and isinstance(columns, dict) else 1
    return size_of(columns) / max(rows, 1)


def size_of(value: Any) -> float:
    """The bytes of an array, a tensor, an image, or a container of these; 0 for anything else, such as a label."""
    if isinstance(value, dict):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value)
    if hasattr(value, "nbytes"):
        return float(value.nbytes)
    if hasattr(value, "size") and hasattr(value, "getbands"):  # an image of Pillow
        return float(value.size[0] * value.size[1] * len(value.getbands()))
    return 0.0


def _bytes_read() -> float:
    """The bytes that this process has read from files."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return float(next(line.split()[1] for line in file if line.startswith("rchar")))
    except (OSError, StopIteration):
        return 0.0
