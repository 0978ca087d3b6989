"""The transforms of offload.transforms do what torchvision's of the same name do, up to rounding, and draw the same random numbers."""

from __future__ import annotations

import builtins
import copy
import pickle
import sys
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import offload
from offload import transforms
from offload.errors import ConfigError
from offload.pipeline.images.split import is_image_transform, split_transform
from offload.pipeline.preprocessing.recipe import hold_to_one_core

FLOAT = 1e-5

SIDES = st.integers(12, 40)
LEADING = st.sampled_from([(), (1,), (3,), (2, 2)])
DTYPES = st.sampled_from([torch.uint8, torch.float32])
LAYOUTS = st.sampled_from(["contiguous", "channels last", "a view"])
SEEDS = st.integers(0, 2**31)
KERNELS = st.sampled_from([1, 3, 5, 11, 23, (3, 7), (23, 1)])
SIGMAS = st.one_of(st.floats(0.05, 8.0), st.tuples(st.floats(0.05, 2.0), st.floats(2.0, 8.0)), st.just((0.1, 2.0)))


def image(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    *leading, c, h, w = shape
    if layout == "channels last":
        whole = torch.rand((*leading, h, w, c), generator=draw).movedim(-1, -3)
    elif layout == "a view":
        whole = torch.rand((*leading, c, h, 2 * w), generator=draw)[..., ::2]
    else:
        whole = torch.rand(shape, generator=draw)
    return whole if dtype == torch.float32 else (whole * 255.999).to(torch.uint8)


def check(theirs: Any, ours: Any, given: Any, seed: int, levels: int = 1) -> None:
    """Both give the same up to rounding, from the same random numbers, and leave their input as it was."""
    before = copy.deepcopy(given)
    torch.manual_seed(seed)
    expected = theirs(given)
    drawn = torch.get_rng_state()
    torch.manual_seed(seed)
    found = ours(given)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert type(found) is type(expected)
    if isinstance(found, PIL.Image.Image):
        assert (found.mode, found.size) == (expected.mode, expected.size)
        assert np.array_equal(np.asarray(given), np.asarray(before))
        expected, found = (torch.from_numpy(np.array(each)) for each in (expected, found))
    else:
        assert torch.equal(given, before)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if expected.numel():
        distance = float((found.double() - expected.double()).abs().max())
        assert distance <= (FLOAT if expected.is_floating_point() else levels)


@settings(max_examples=20)
@given(
    kernel=KERNELS, sigma=SIGMAS, leading=LEADING, c=st.integers(1, 5), h=SIDES, w=SIDES, dtype=DTYPES, layout=LAYOUTS,
    seed=SEEDS, old=st.booleans(),
)  # fmt: skip
def test_a_blur_is_torchvisions(
    kernel: Any, sigma: Any, leading: Any, c: int, h: int, w: int, dtype: Any, layout: str, seed: int, old: bool
) -> None:
    old = old and len(leading) < 2  # v1 takes one leading dimension
    theirs = (v1 if old else v2).GaussianBlur(kernel, sigma)
    given = image((*leading, c, h, w), dtype, layout, seed)
    check(theirs, transforms.GaussianBlur(kernel, sigma), given, seed)


@settings(max_examples=20)
@given(kernel=KERNELS, mode=st.sampled_from(["L", "RGB", "RGBA", "CMYK"]), h=SIDES, w=SIDES, seed=SEEDS)
def test_a_blur_of_a_pillow_image_is_torchvisions(kernel: Any, mode: str, h: int, w: int, seed: int) -> None:
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (h, w, channels), dtype=np.uint8)
    given = PIL.Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode if mode != "CMYK" else None)
    given = given.convert(mode)
    for theirs in (v1.GaussianBlur(kernel), v2.GaussianBlur(kernel)):
        check(theirs, transforms.GaussianBlur(kernel), given, seed)


@settings(max_examples=20)
@given(
    amounts=st.tuples(*[st.sampled_from([0, 0.4])] * 3, st.sampled_from([0, 0.1, 0.5, (-0.3, -0.1)])),
    leading=LEADING, c=st.sampled_from([1, 3]), h=SIDES, w=SIDES, dtype=DTYPES, layout=LAYOUTS, seed=SEEDS,
)  # fmt: skip
def test_a_change_of_colours_is_torchvisions(
    amounts: Any, leading: Any, c: int, h: int, w: int, dtype: Any, layout: str, seed: int
) -> None:
    given = image((*leading, c, h, w), dtype, layout, seed)
    # A level of hue is a few levels after contrast and saturation with factors up to 1.4.
    check(v2.ColorJitter(*amounts), transforms.ColorJitter(*amounts), given, seed, levels=4 if any(amounts[:3]) else 1)


@settings(max_examples=20)
@given(seed=SEEDS, factor=st.floats(-0.5, 0.5))
def test_colours_at_the_edges_turn_as_torchvisions(seed: int, factor: float) -> None:
    """Greys, pure colours and black, where the hue is undefined or at the end of a sector."""
    levels = torch.tensor([0, 1, 128, 254, 255], dtype=torch.uint8)
    given = levels[torch.randint(0, 5, (3, 16, 16), generator=torch.Generator().manual_seed(seed))]
    jitter = {"hue": (factor, factor)}
    check(v2.ColorJitter(**jitter), transforms.ColorJitter(**jitter), given, seed)
    check(v2.ColorJitter(**jitter), transforms.ColorJitter(**jitter), given.float() / 255, seed)
    grey = given[:1].expand(3, -1, -1)
    check(v2.ColorJitter(**jitter), transforms.ColorJitter(**jitter), grey, seed, levels=0)


@pytest.mark.parametrize(
    "given",
    [
        torch.rand(3, 20, 20, dtype=torch.float64),
        torch.zeros(0, 3, 20, 20),
        torch.rand(3, 20, 20) * 3 - 1,  # outside the colours
        tv_tensors.Image(torch.randint(0, 256, (3, 20, 20), dtype=torch.uint8)),
        tv_tensors.Video(torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)),
        tv_tensors.Mask(torch.ones(20, 20, dtype=torch.uint8)),
        PIL.Image.effect_noise((20, 20), 50).convert("RGB"),
    ],
    ids=["float64", "empty", "wide range", "image", "video", "mask", "pillow"],
)
@pytest.mark.parametrize(("name", "arguments"), [("GaussianBlur", (5,)), ("ColorJitter", (0.2, 0.2, 0.2, 0.2))])
def test_every_kind_of_input_passes_as_in_torchvision(name: str, arguments: Any, given: Any) -> None:
    check(getattr(v2, name)(*arguments), getattr(transforms, name)(*arguments), given, 3, levels=4)


@pytest.mark.parametrize("bands", [128, 129, 600])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_of_many_bands_are_blurred(bands: int, dtype: torch.dtype) -> None:
    given = image((bands, 9, 7), dtype, "channels last", 0)
    check(v2.GaussianBlur(3), transforms.GaussianBlur(3), given, 0)


def test_half_precision_is_blurred_as_in_torchvision() -> None:
    check(v2.GaussianBlur(5), transforms.GaussianBlur(5), torch.rand(3, 20, 20).to(torch.float16), 3, levels=4)


def test_a_sample_of_several_values_is_handled_as_v2_does() -> None:
    mask = tv_tensors.Mask(torch.ones(20, 20, dtype=torch.uint8))
    sample = {
        "image": tv_tensors.Image(torch.randint(0, 256, (3, 20, 20), dtype=torch.uint8)),
        "mask": mask,
        "label": 3,
    }
    torch.manual_seed(0)
    found = transforms.GaussianBlur(5)(sample)
    torch.manual_seed(0)
    expected = v2.GaussianBlur(5)(sample)
    assert (found["image"].int() - expected["image"].int()).abs().max() <= 1
    assert torch.equal(found["mask"], mask)
    assert found["label"] == 3


def test_a_tensor_with_gradients_keeps_them() -> None:
    given = torch.rand(3, 20, 20, requires_grad=True)
    transforms.GaussianBlur(5)(given).sum().backward()
    assert given.grad is not None


def test_an_image_too_small_to_reflect_is_refused_as_by_torchvision() -> None:
    for kind in (v2, transforms):
        with pytest.raises(RuntimeError, match=r"[Pp]adding size"):
            kind.GaussianBlur(11)(torch.rand(3, 5, 20))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("GaussianBlur", (4,)), ("GaussianBlur", (3, -1.0)), ("GaussianBlur", (3, (2.0, 1.0))), ("ColorJitter", (-1,))],
)
def test_bad_arguments_are_refused_as_by_torchvision(name: str, arguments: Any) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011 - any text, if it is the same
        getattr(v2, name)(*arguments)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        getattr(transforms, name)(*arguments)
    assert str(ours.value) == str(theirs.value)


def test_it_travels_and_counts_as_an_image_transform() -> None:
    blur = transforms.GaussianBlur(5, (0.1, 3.0))
    again = pickle.loads(pickle.dumps(blur))
    assert (again.kernel_size, again.sigma) == (blur.kernel_size, blur.sigma)
    assert isinstance(blur, v2.GaussianBlur)
    assert is_image_transform(blur)
    # Steps of v2 get tensors, and so do these.
    assert split_transform(v2.Compose([v2.RandomCrop(8), blur, v2.ToDtype(torch.float32)])).cpu.tensors  # type: ignore[attr-defined]


def test_preprocessing_holds_opencv_to_one_thread() -> None:
    import cv2

    transforms.GaussianBlur(3)
    before = cv2.getNumThreads()
    try:
        hold_to_one_core()
        assert cv2.getNumThreads() == 1
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize("name", offload.transforms.__all__)
def test_without_opencv_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = pickle.dumps(getattr(transforms, name)(3))
    real = builtins.__import__

    def no_opencv(module: str, *rest: Any) -> Any:
        if module == "cv2":
            raise ImportError("No module named 'cv2'")
        return real(module, *rest)

    monkeypatch.delitem(sys.modules, "cv2")
    monkeypatch.setattr(builtins, "__import__", no_opencv)
    said = rf"offload.transforms.{name} needs OpenCV.* pip install 'offload\[opencv\]'"
    with pytest.raises(ConfigError, match=said):
        getattr(transforms, name)(3)
    with pytest.raises(ConfigError, match=said):
        pickle.loads(made)
