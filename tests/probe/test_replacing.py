"""Equivalents are measured on a data set's own samples, wherever its transforms are held, and leave it as it was."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import offload
from offload.loader.probing import LoaderSource
from offload.measure.equivalents import DROP_INS, DropIn
from offload.pipeline.describe.sources import as_pipeline
from offload.probe.replacing import instances, measure, replaced
from offload.probe.work import LoaderWork, RowWork

BLUR, JITTER = DROP_INS


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return self.transform(torch.from_numpy(np.random.randint(0, 256, (3, 64, 64), dtype=np.uint8))), i


class Lazy(Images):
    """A data set that makes its transform at its first sample."""

    def __init__(self) -> None:
        self.made: Any = None

    def __getitem__(self, i: int) -> Any:
        self.transform = self.made = self.made or v2.GaussianBlur(11)
        return super().__getitem__(i)


def rows_of(dataset: Any) -> RowWork:
    pipeline = as_pipeline("train", dataset)
    assert pipeline.list is not None
    index = pipeline.list()
    return RowWork(pipeline.recipe(index, seed=0).ready(), index.table)


def source_of(loader: Any) -> LoaderSource:
    return LoaderSource(loader.dataset, loader.collate_fn, loader.sampler, loader.batch_sampler)


def held(holds: str) -> Images:
    blur = v1.GaussianBlur(11) if holds == "v1" else v2.GaussianBlur(11)
    ways: dict[str, Callable[[], Images]] = {
        "v1": lambda: Images(blur),
        "compose": lambda: Images(v2.Compose([blur] * 3)),
        "wrapped": lambda: Images(v2.RandomApply([v2.Compose([v2.RandomHorizontalFlip(), blur])], p=0.9)),
        "closure": lambda: Images(lambda image: blur(image)),
        "lazy": Lazy,
    }
    return ways[holds]()


@pytest.mark.parametrize("holds", ["v1", "compose", "wrapped", "closure", "lazy"])
def test_a_transform_is_found_wherever_it_is_held(holds: str) -> None:
    work = rows_of(held(holds))
    found = measure(work, seconds=0.2)
    assert found is not None
    assert BLUR in [*found.chosen, *(drop_in for drop_in, _ in found.left)]
    assert found.samples == 12
    assert found.distances is not None
    distances = {each.name: each for each in found.distances} or {"image": None}
    image = distances["image"]
    # Each blur rounds to a level, and the next one blurs what the one before rounded.
    assert image is None or (image.dtype == "uint8" and image.largest <= 3 and image.mean <= 0.01)
    assert {type(each).__module__.partition(".")[0] for each in itertools.chain(*instances().values())} <= {
        "torchvision"
    }


def test_within_the_context_offload_computes_and_afterwards_torchvision_does() -> None:
    blur, colours = v1.GaussianBlur(5), v2.ColorJitter(hue=0.1)
    found = {BLUR: [blur], JITTER: [colours]}
    with replaced(found, (BLUR,)):
        assert type(blur) is offload.transforms.GaussianBlur
        assert type(colours) is v2.ColorJitter
        assert blur(torch.zeros(3, 8, 8)).shape == (3, 8, 8)
    assert type(blur) is v1.GaussianBlur
    with pytest.raises(RuntimeError, match=r"[Pp]adding"), replaced(found, (BLUR,)):
        blur(torch.zeros(3, 1, 1))
    assert type(blur) is v1.GaussianBlur


def test_two_kinds_are_measured_alone_and_together() -> None:
    work = rows_of(Images(v2.Compose([v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.GaussianBlur(23)])))
    found = measure(work, seconds=0.3)
    assert found is not None
    assert {*found.chosen, *(drop_in for drop_in, _ in found.left)} >= {BLUR, JITTER}
    assert found.after_s == pytest.approx(found.before_s * found.over)


def test_a_transform_that_offload_leaves_to_torchvision_brings_nothing() -> None:
    work = rows_of(Images(lambda image: np.asarray(jitter(v2.functional.to_pil_image(image)))))
    jitter = v2.ColorJitter(hue=0.2)  # of Pillow images: torchvision's own
    found = measure(work, seconds=0.3)
    assert found is not None
    assert found.distances == [] or all(each.largest == 0 for each in found.distances or [])


def test_without_such_a_transform_there_is_nothing_to_measure() -> None:
    elsewhere = v2.GaussianBlur(3)  # of a validation, say
    assert any(each is elsewhere for each in instances()[BLUR])
    assert measure(rows_of(Images(v2.RandomHorizontalFlip())), seconds=0.1) is None


def test_samples_that_no_seed_fixes_are_not_compared() -> None:
    blur = v2.GaussianBlur(11)

    def unseeded(image: Any) -> Any:
        return blur(image) ^ int.from_bytes(os.urandom(1), "big")

    found = measure(rows_of(Images(unseeded)), seconds=0.1)
    assert found is not None
    assert found.distances is None


def test_an_equivalent_that_changes_a_type_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Floats(v2.GaussianBlur):  # type: ignore[misc]
        def transform(self, inpt: Any, params: Any) -> Any:
            return inpt.float()

    monkeypatch.setattr(offload.transforms, "GaussianBlur", Floats)
    found = measure(rows_of(Images(v2.GaussianBlur(23))), seconds=0.1)
    assert found is not None
    assert list(found.unlike) == [BLUR]
    assert found.chosen == ()


@pytest.mark.parametrize("batch_size", [5, None])
def test_the_samples_of_a_loader_are_repeated(batch_size: int | None) -> None:
    loader = offload.DataLoader(Images(v2.GaussianBlur(11)), batch_size=batch_size, shuffle=True)
    work = LoaderWork.of(source_of(loader))
    assert work is not None
    assert sorted(work.indices) == list(range(12))
    found = measure(work, seconds=0.1)
    assert found is not None
    assert found.distances is not None
    assert all(each.largest <= 1 for each in found.distances)


def test_an_iterable_data_set_offers_no_samples_to_repeat() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    assert LoaderWork.of(source_of(offload.DataLoader(Stream()))) is None


def test_errors_of_a_data_set_are_its_own() -> None:
    def fails(image: Any) -> Any:
        raise KeyError("no such colour")

    work = LoaderWork.of(source_of(offload.DataLoader(Images(fails), batch_size=2)))
    assert work is not None
    with pytest.raises(KeyError, match="no such colour"):
        measure(work, seconds=0.1)


def test_every_equivalent_exists_and_takes_the_same_arguments() -> None:
    for drop_in in DROP_INS:
        assert isinstance(drop_in, DropIn)
        ours = getattr(offload.transforms, drop_in.name)
        assert issubclass(ours, getattr(v2, drop_in.name))
