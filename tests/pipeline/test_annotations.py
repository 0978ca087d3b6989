"""Boxes and masks are never left behind by a transform of their image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import offload
from offload.errors import RunError
from tests.pipeline.index_pass import a_pass, stream_of


class Detection(Dataset[Any]):
    def __init__(self, target: Any) -> None:
        self.target = target

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return tv_tensors.Image(torch.zeros(3, 8, 8, dtype=torch.uint8)), self.target


BOXES = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 1, 5, 6]]), format="XYXY", canvas_size=(8, 8))
MASK = tv_tensors.Mask(torch.ones(8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("target", [{"boxes": BOXES, "id": 1}, [0, {"masks": (MASK,)}], BOXES, MASK])
def test_a_transform_that_moves_pixels_of_the_image_alone_is_refused(target: Any) -> None:
    with pytest.raises(
        RunError, match=r"gets the image alone, and column 'label' holds (BoundingBoxes|Mask), which"
    ) as caught:
        a_pass(stream_of(offload.from_torch(Detection(target), v2.RandomHorizontalFlip(1.0))))
    assert "in the data set's own __getitem__." in str(caught.value)
    assert "make tv_tensors of both first" in str(caught.value)
    assert "\n" not in str(caught.value)


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    image, target = v2.RandomHorizontalFlip(1.0)(tv_tensors.Image(sample["image"]), sample["label"])
    return {"image": image, "boxes": target["boxes"]}


def test_a_function_of_a_sample_moves_both_once_it_has_made_tv_tensors_of_them() -> None:
    class Half(Detection):
        def __getitem__(self, i: int) -> Any:
            image, target = super().__getitem__(i)
            image[..., :4] = 9
            return image, target

    rows = a_pass(stream_of(offload.from_torch(Half({"boxes": BOXES}), flipped, per_sample=True)))
    for row in rows.values():
        assert np.unique(row["image"][..., 4:]).tolist() == [9]
        assert row["boxes"].tolist() == [[3.0, 1.0, 7.0, 6.0]]


class AsDict(Detection):
    def __getitem__(self, i: int) -> Any:
        image, target = super().__getitem__(i)
        return {"image": image, "label": target}


@pytest.mark.parametrize("inner", [None, v2.ColorJitter(0.3)], ids=["as it is", "colours"])
@pytest.mark.parametrize("source", [Detection, AsDict])
@pytest.mark.parametrize("target", [{"boxes": BOXES, "id": 1}, BOXES, MASK])
def test_a_cache_does_not_hide_boxes_and_masks(target: Any, source: Any, inner: Any, tmp_path: Path) -> None:
    given = {"cache": f"ssd:{tmp_path}:50MB", "name": "a"}
    for data in (source(target), lambda: source(target)):
        kept = offload.from_torch(data, inner)
        assert len(a_pass(stream_of(offload.cached(kept, v2.ColorJitter(0.3), **given)))) == 3
        for _ in range(2):  # samples come from the cache
            with pytest.raises(
                RunError, match=r"gets the image alone, and column 'label' holds (BoundingBoxes|Mask), "
            ):
                a_pass(stream_of(offload.cached(kept, v2.RandomHorizontalFlip(1.0), **given)))


def arrays(sample: dict[str, Any]) -> dict[str, Any]:
    assert type(sample["label"]) is np.ndarray
    return sample


def test_a_function_of_a_cached_sample_gets_its_boxes_and_masks_as_an_array(tmp_path: Path) -> None:
    for number, target in enumerate((BOXES, MASK)):
        kept = offload.from_torch(Detection(target))
        plain = a_pass(stream_of(kept))
        given = {"cache": f"ssd:{tmp_path}:50MB", "name": f"{number}", "per_sample": True}
        for _ in range(2):
            rows = a_pass(stream_of(offload.cached(kept, arrays, **given)))
            assert all(np.array_equal(rows[i]["label"], plain[i]["label"]) for i in range(3))


def test_other_labels_and_second_images_are_none_of_it() -> None:
    for target in (1, {"view": tv_tensors.Image(torch.zeros(3, 8, 8)), "names": ["a"]}):
        assert len(a_pass(stream_of(offload.from_torch(Detection(target), v2.RandomHorizontalFlip(1.0))))) == 3


@pytest.mark.parametrize("target", [{"boxes": BOXES, "id": 1}, MASK])
def test_a_transform_that_leaves_pixels_at_their_places_may_take_the_image_alone(target: Any) -> None:
    transform = v2.Compose(
        [v2.RandomApply([v2.ColorJitter(0.3)]), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    )
    assert len(a_pass(stream_of(offload.from_torch(Detection(target), transform)))) == 3
