"""Normalisation on the device."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import ConfigError, Normalize
from offload.pipeline.images.on_device import ToChannelsFirst

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def images(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def reference(nchw: torch.Tensor, mean: Any = MEAN, std: Any = STD) -> torch.Tensor:
    from torchvision.transforms.v2 import functional as F

    normalized: torch.Tensor = F.normalize(nchw.to(torch.float64) / 255, list(mean), list(std))
    return normalized.to(torch.float32)


def test_nhwc_and_nchw_become_the_same_nchw() -> None:
    nhwc = images(4, 10, 12, 3)
    want = reference(nhwc.permute(0, 3, 1, 2))
    for batch in (nhwc, nhwc.permute(0, 3, 1, 2), nhwc.permute(0, 3, 1, 2).contiguous()):
        got = Normalize(MEAN, STD)({"image": batch, "label": 7})
        assert got["label"] == 7
        assert got["image"].dtype == torch.float32
        torch.testing.assert_close(got["image"], want, rtol=0, atol=2e-6)


def test_what_came_as_nhwc_stays_channels_last_in_memory() -> None:
    got = Normalize(MEAN, STD)({"image": images(4, 10, 12, 3)})["image"]
    assert got.shape == (4, 3, 10, 12)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_the_batch_that_it_got_is_left_alone() -> None:
    batch = {"image": images(2, 5, 6, 3)}
    before = batch["image"].clone()
    Normalize(MEAN, STD)(batch)
    assert torch.equal(batch["image"], before)


@settings(deadline=None)
@given(
    mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    std=st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    shape=st.tuples(st.integers(0, 3), st.integers(5, 9), st.integers(5, 9), st.just(3)),
)
def test_the_formula(mean: list[float], std: list[float], shape: tuple[int, ...]) -> None:
    batch = images(*shape)
    got = Normalize(mean, std)({"image": batch})["image"]
    torch.testing.assert_close(got, reference(batch.permute(0, 3, 1, 2), mean, std), rtol=1e-5, atol=1e-5)


def test_numbers_hold_for_all_channels() -> None:
    batch = images(2, 8, 9, 3)
    want = reference(batch.permute(0, 3, 1, 2), [0.5] * 3, [0.25] * 3)
    for normalize in (Normalize(0.5, 0.25), Normalize([0.5] * 3, 0.25), Normalize(0.5, [0.25] * 3)):
        torch.testing.assert_close(normalize({"image": batch})["image"], want, rtol=0, atol=2e-6)


def test_greyscale_and_other_numbers_of_channels() -> None:
    for shape, channels in (((2, 28, 28, 1), 1), ((2, 1, 28, 28), 1), ((2, 20, 30, 6), 6), ((2, 6, 20, 30), 6)):
        got = Normalize([0.5] * channels, [0.5] * channels)({"image": images(*shape)})["image"]
        assert got.shape[1] == channels
    assert Normalize(0.5, 0.5)({"image": images(2, 20, 30, 6)})["image"].shape == (2, 6, 20, 30)
    assert Normalize(0.5, 0.5)({"image": images(2, 6, 20, 30)})["image"].shape == (2, 6, 20, 30)


def test_images_as_low_as_they_have_channels() -> None:
    # NHWC is what travels.
    assert Normalize(MEAN, STD)({"image": images(2, 3, 9, 3)})["image"].shape == (2, 3, 3, 9)
    assert Normalize(0.5, 0.5)({"image": images(2, 4, 9, 3)})["image"].shape == (2, 3, 4, 9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1e-2), ("float64", 2e-6)])
def test_other_dtypes(dtype: str, tolerance: float) -> None:
    batch = images(2, 8, 9, 3)
    got = Normalize(MEAN, STD, dtype=dtype)({"image": batch})["image"]
    assert got.dtype == getattr(torch, dtype)
    torch.testing.assert_close(
        got.to(torch.float32), reference(batch.permute(0, 3, 1, 2)), rtol=tolerance, atol=tolerance
    )


def test_another_column_and_a_changed_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        got = Normalize(MEAN, STD, column="pixels")({"pixels": images(1, 5, 6, 3), "image": "kept"})
    finally:
        torch.set_default_dtype(torch.float32)
    assert got["pixels"].dtype == torch.float32
    assert got["image"] == "kept"


def test_what_cannot_be_normalised() -> None:
    with pytest.raises(ConfigError, match=r"std must not contain 0, found \[0.2, 0.0\]"):
        Normalize((0.1, 0.2), (0.2, 0.0))
    with pytest.raises(ConfigError, match="mean has 3 channels and std 2"):
        Normalize((0.1, 0.2, 0.3), (0.2, 0.1))
    with pytest.raises(ValueError, match=r"NHWC or NCHW, found \(2, 28, 28\)"):
        Normalize(0.5, 0.5)({"image": images(2, 28, 28)})
    with pytest.raises(ValueError, match=r"3 channels; images of shape \(2, 28, 28, 1\) do not"):
        Normalize(MEAN, STD)({"image": images(2, 28, 28, 1)})


def test_floats_are_not_scaled_a_second_time() -> None:
    floats = {"image": images(2, 8, 9, 3).to(torch.float32) / 255}
    with pytest.raises(ValueError, match=r"takes uint8 images .* found torch.float32: ship uint8, or pass scale=1"):
        Normalize(MEAN, STD)(floats)
    got = Normalize(MEAN, STD, scale=1)(floats)["image"]
    torch.testing.assert_close(got, reference((floats["image"] * 255).permute(0, 3, 1, 2)), rtol=0, atol=2e-6)


def test_it_travels_and_shows_itself() -> None:
    again = pickle.loads(pickle.dumps(Normalize(MEAN, STD)))
    assert repr(again) == "Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))"


def test_channels_first_is_a_view() -> None:
    batch = images(2, 8, 9, 3)
    got = ToChannelsFirst()({"image": batch, "label": 1})
    assert got["label"] == 1
    assert got["image"].shape == (2, 3, 8, 9)
    assert got["image"].data_ptr() == batch.data_ptr()
