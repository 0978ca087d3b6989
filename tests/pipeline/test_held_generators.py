"""Generators of random numbers that a transform holds: a sample's draws depend on the seed, the epoch and the sample alone."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ray import cloudpickle

from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.index.source import At, Reader, Samples, nowhere
from offload.pipeline.order.chunks import CHUNK
from offload.pipeline.pool.packed_recipe import pack
from offload.pipeline.preprocessing.processing import process
from offload.pipeline.preprocessing.recipe import Recipe

Batch = dict[str, Any]
ROWS = 60 * CHUNK


@pytest.fixture(autouse=True)
def without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OpenCV, whose generator tells no state, rows always come 16 at a time; tests of this process may have imported it."""
    monkeypatch.delitem(sys.modules, "cv2", raising=False)


class Numbers(Reader):
    """A source whose sample i is i."""

    def read(self, rows: pa.Table, at: At = nowhere) -> Samples:
        return Samples({"label": rows.column(SAMPLE_ID).to_numpy()})

    def describe(self, rows: pa.Table, row: int) -> str:
        return str(row)


def sent(transform: Any, kind: Any = "batch") -> Callable[[], Recipe]:
    """Make the recipe ready as another process does."""
    packed = pack(Recipe(transform=transform, kind=kind, seed=7, reader=Numbers())).tobytes()
    return lambda: cloudpickle.loads(packed).ready()  # type: ignore[no-any-return]


def draws(recipe: Recipe, start: int, stop: int, epoch: int = 0) -> Any:
    numbers = np.arange(start, stop)
    return wire.decode(process(recipe, pa.table({SAMPLE_ID: numbers, POSITION: numbers}), epoch=epoch))["draws"]


# Each row makes a generator and draws from it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "numpy": (lambda: np.random.default_rng(0), lambda held: held.random()),
    "another bit generator": (lambda: np.random.Generator(np.random.MT19937(0)), lambda held: held.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda held: held.rand()),
    "python": (lambda: random.Random(0), lambda held: held.random()),
    "torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda held: torch.rand((), dtype=torch.float64, generator=held).item(),
    ),
}
GLOBAL = np.random.default_rng(0)


class Holder:
    shared = np.random.default_rng(0)

    def __init__(self, kind: str = "numpy") -> None:
        self.held, self.draw = KINDS[kind][0](), KINDS[kind][1]

    def __call__(self, batch: Batch) -> Batch:
        return {"draws": np.array([self.draw(self.held) for _ in batch["label"]])}

    def of_class(self, batch: Batch) -> Batch:
        return {"draws": self.shared.random(len(batch["label"]))}


class Steps:
    """What composes transforms, as torchvision's Compose does."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self, batch: Batch) -> Batch:
        made = [step(batch) for step in self.steps]
        return {"draws": sum(each["draws"] for each in made) / len(made)}


def of_global(batch: Batch) -> Batch:
    return {"draws": np.array([from_global() for _ in batch["label"]])}


def from_global() -> float:
    return float(GLOBAL.random())


def of_default(batch: Batch, held: Any = np.random.default_rng(0)) -> Batch:  # noqa: B008
    return {"draws": held.random(len(batch["label"]))}


def of_closure() -> Any:
    held = np.random.default_rng(0)
    return lambda batch: {"draws": held.random(len(batch["label"]))}


HOLDING: dict[str, Callable[[], Any]] = {
    **{kind: functools.partial(Holder, kind) for kind in KINDS},
    "composed": lambda: Steps(Holder(), Steps(Holder("python"))),
    "constructed there": lambda: Holder,
    "class": lambda: Holder().of_class,
    "global": lambda: of_global,
    "default": lambda: functools.partial(of_default),
    "closure": of_closure,
}


@pytest.mark.parametrize("how", HOLDING)
def test_draws_do_not_depend_on_the_process_or_on_the_cut_into_calls(how: str) -> None:
    elsewhere = sent(HOLDING[how]())
    whole = draws(elsewhere(), 0, ROWS)
    assert len(np.unique(whole)) == ROWS
    late = elsewhere()  # a process that begins with other samples
    assert np.array_equal(draws(late, 40 * CHUNK, ROWS), whole[40 * CHUNK :])
    assert np.array_equal(draws(late, 0, CHUNK), whole[:CHUNK])
    assert not np.intersect1d(draws(late, 0, ROWS, epoch=1), whole).size


def test_draws_belong_to_the_sample_if_the_transform_takes_samples() -> None:
    held = np.random.default_rng(0)
    elsewhere = sent(lambda sample: {"draws": held.random()}, "sample")
    assert np.array_equal(draws(elsewhere(), 5, 9), draws(elsewhere(), 0, 20)[5:9])


def test_a_seldom_draw_is_noticed() -> None:
    held = random.Random(0)

    def seldom(batch: Batch) -> Batch:
        return {"draws": np.array([held.random() if i % 61 == 0 else 0.0 for i in batch["label"].tolist()])}

    elsewhere = sent(seldom)
    fixed = elsewhere()
    fixed.calls.fix()
    assert np.array_equal(draws(elsewhere(), 0, ROWS), draws(fixed, 0, ROWS))


def test_generators_of_one_transform_draw_different_numbers() -> None:
    steps = [Holder(), Holder()]
    both = sent(lambda batch: {"draws": np.stack([step(batch)["draws"] for step in steps], axis=1)})
    assert len(np.unique(draws(both(), 0, 20))) == 40
