"""Splitting of image transforms: CPU part and device part together are what the user wrote."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from timm.data.transforms import MaybeToTensor
from timm.data.transforms_factory import create_transform
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import whole_samples, wire
from offload.pipeline.blocks.wire import POSITION, SAMPLE_ID
from offload.pipeline.describe.sources import from_torch, image_folder
from offload.pipeline.images.split import SplitTransform, is_image_transform, split_transform
from offload.pipeline.index.rows import rows_at
from offload.pipeline.preprocessing.processing import process
from offload.transforms import GaussianBlur
from tests.helpers import case
from tests.pipeline.index_pass import a_pass, listed, stream_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUNDING = 1 / 255 / min(STD)  # one step of uint8, seen through Normalize


def photo(height: int = 60, width: int = 80) -> np.ndarray[Any, Any]:
    """Smooth, as photographs are, and through JPEG, as files are."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 3, y * 4, (x + y) * 2], axis=-1) % 256
    out = io.BytesIO()
    PIL.Image.fromarray(pixels.astype(np.uint8)).resize((width, height)).save(out, "JPEG", quality=95)
    return np.asarray(PIL.Image.open(out))


PHOTO = photo()


def seeded(seed: int, call: Callable[[], Any]) -> Any:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return call()


def delivered(split: SplitTransform, pixels: np.ndarray[Any, Any], seeds: Sequence[int] = range(4)) -> torch.Tensor:
    """What a worker receives for one image under several seeds: through the wire, then the device part."""
    rows = [seeded(seed, lambda: split.cpu(pixels)) for seed in seeds]
    column = wire.decode(wire.encode({"image": wire.stack("image", rows)}))["image"]
    assert isinstance(column, np.ndarray)
    batch = {"image": torch.from_numpy(column.copy())}
    image = (split.on_device(batch) if split.on_device else batch)["image"]
    assert isinstance(image, torch.Tensor)
    return image


def original(transform: Any, image: Any, seeds: Sequence[int] = range(4)) -> torch.Tensor:
    made = [seeded(seed, lambda: transform(image)) for seed in seeds]
    return torch.stack([m if isinstance(m, torch.Tensor) else torch.from_numpy(np.array(m)) for m in made])


def wire_dtype(split: SplitTransform) -> np.dtype[Any]:
    return np.asarray(split.cpu(PHOTO)).dtype


def pil(pixels: np.ndarray[Any, Any] = PHOTO) -> PIL.Image.Image:
    return PIL.Image.fromarray(pixels)


def tensor(pixels: np.ndarray[Any, Any] = PHOTO) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


# --- transforms that are split ----------------------------------------------------------------------------------------

V1 = {
    "train": v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "eval": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "jitter": v1.Compose([v1.RandomCrop(32), v1.ColorJitter(0.4, 0.4, 0.4), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "autoaugment": v1.Compose([v1.Resize(32), v1.RandAugment(), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "to tensor only": v1.Compose([v1.ToTensor()]),
    "a bare ToTensor": v1.ToTensor(),
    "dtype": v1.Compose([v1.Resize(32), v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]),
    "normalised twice": v1.Compose(
        [v1.Resize(32), v1.ToTensor(), v1.Normalize(MEAN, STD), v1.Normalize((0.1, 0.2, 0.3), (2.0, 0.5, 1.5))]
    ),
    "normalised by one number": v1.Compose([v1.Resize(32), v1.ToTensor(), v1.Normalize(0.5, 0.5)]),
    "one number, then three": v1.Compose(
        [v1.Resize(32), v1.ToTensor(), v1.Normalize(0.5, 0.5), v1.Normalize(MEAN, STD)]
    ),
    "nested": v1.Compose([v1.Compose([v1.RandomCrop(32)]), v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])]),
    "sometimes": v1.Compose(
        [v1.RandomApply([v1.GaussianBlur(3)], p=0.5), v1.RandomCrop(32), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
    "blur of a uint8 tensor": v1.Compose(
        [
            v1.Resize(32),
            v1.PILToTensor(),
            v1.GaussianBlur(3),
            v1.ConvertImageDtype(torch.float32),
            v1.Normalize(MEAN, STD),
        ]
    ),
    "a tensor of bytes": v1.Compose([v1.RandomCrop(32), v1.PILToTensor()]),
    "half precision at the end": v1.Compose(
        [v1.Resize(32), v1.ToTensor(), v1.Normalize(MEAN, STD), v1.ConvertImageDtype(torch.float16)]
    ),
}


@pytest.mark.parametrize("name", V1)
def test_torchvision_v1(name: str) -> None:
    split = split_transform(V1[name])
    assert wire_dtype(split) == np.uint8
    got, want = delivered(split, PHOTO), original(V1[name], pil())
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    # On PIL images the CPU part is the user's own: nothing is rounded that was not rounded before.
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if got.dtype == torch.float16 else 1e-5)


def tail(**kwargs: Any) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True, **kwargs), v2.Normalize(MEAN, STD)]


V2 = {
    "train": v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), *tail()]),
    "eval": v2.Compose([v2.Resize(40), v2.CenterCrop(32), *tail()]),
    "image first": v2.Compose([v2.ToImage(), v2.RandomCrop(32), *tail()[1:]]),
    "bytes first": v2.Compose([v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.RandomCrop(32), *tail()[1:]]),
    "blur": v2.Compose([v2.RandomCrop(32), v2.GaussianBlur(5), *tail()]),
    "pure tensor": v2.Compose([v2.RandomCrop(32), *tail(), v2.ToPureTensor()]),
    "nested": v2.Compose([v2.RandomCrop(32), v2.Compose(tail())]),
    "sequential": nn.Sequential(v2.RandomCrop(32), *tail()),
    "half precision at the end": v2.Compose([v2.RandomCrop(32), *tail(), v2.ToDtype(torch.float16)]),
    "trivial augment": v2.Compose([v2.TrivialAugmentWide(), v2.RandomCrop(32), *tail()]),
    "unscaled": v2.Compose([v2.RandomCrop(32), v2.ToImage(), v2.ToDtype(torch.float32)]),
    "unscaled, then normalised": v2.Compose(
        [v2.RandomCrop(32), v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([127.5] * 3, [60.0] * 3)]
    ),
    "unscaled, then from float to float": v2.Compose(
        [v2.RandomCrop(32), v2.ToImage(), v2.ToDtype(torch.float32), v2.ToDtype(torch.float64, scale=True)]
    ),
    "an image tensor": v2.Compose([v2.RandomCrop(32), v2.ToImage()]),
}


@pytest.mark.parametrize("name", V2)
def test_torchvision_v2(name: str) -> None:
    split = split_transform(V2[name])
    assert wire_dtype(split) == np.uint8
    got, want = delivered(split, PHOTO), original(V2[name], tensor())
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if got.dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_torchvision_v2_gives_what_it_gives_for_pil_images(name: str) -> None:
    # Tensors are resized where the user's own loader would have handed over PIL images: within a step or two of uint8.
    got, want = delivered(split_transform(V2[name]), PHOTO), original(V2[name], pil())
    assert (got - want).abs().mean() < ROUNDING / 2
    assert (got - want).abs().quantile(0.99) <= 2 * ROUNDING


TIMM: dict[str, dict[str, Any]] = {
    "train": {"is_training": True, "re_prob": 0.0},
    "train with augmentation": {"is_training": True, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.0},
    "eval": {"is_training": False},
    "eval as bytes": {"is_training": False, "use_prefetcher": True},
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    transform = create_transform(32, **TIMM[name])
    split = split_transform(transform)
    assert wire_dtype(split) == np.uint8
    got, want = delivered(split, PHOTO), original(transform, pil())
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The transform `ToTensor\\(\\)` is deprecated")
def test_v2_to_tensor_at_the_end() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = v2.Compose([v2.RandomCrop(32), v2.ToTensor(), v2.Normalize(MEAN, STD)])
    split = split_transform(transform)
    assert wire_dtype(split) == np.uint8
    torch.testing.assert_close(delivered(split, PHOTO), original(transform, pil()), rtol=0, atol=1e-5)


def test_the_wire_is_four_times_narrower() -> None:
    split = split_transform(V1["train"])
    assert split.cpu(PHOTO).nbytes * 4 == np.asarray(V1["train"](pil())).nbytes


def test_it_says_what_it_does() -> None:
    assert (
        split_transform(V1["train"]).says
        == "CPUs: RandomResizedCrop, RandomHorizontalFlip, shipping uint8; device: ToTensor, Normalize"
    )
    assert split_transform(v1.ToTensor()).says == "CPUs: decode only, shipping uint8; device: ToTensor"
    assert "ships its result" in split_transform(v1.Resize(32)).says


# --- a user's own steps ------------------------------------------------------------------------------------------------


class Solarised:
    """A user's own augmentation, as they are usually written: on PIL images."""

    def __call__(self, image: PIL.Image.Image) -> PIL.Image.Image:
        assert isinstance(image, PIL.Image.Image)
        return image.point([min(i, 255 - i) for i in range(256)] * 3)


OWN = {
    "a class": v1.Compose([v1.RandomCrop(32), Solarised(), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "a class among v2": v2.Compose([v2.RandomCrop(32), Solarised(), *tail()]),
    "a lambda": v1.Compose([v1.Lambda(lambda im: im.rotate(90)), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "a lambda among v2": v2.Compose([v2.Lambda(lambda im: im.rotate(90)), v2.RandomCrop(32), *tail()]),
    "an array": v1.Compose([v1.Lambda(lambda im: np.asarray(im)[::2].copy()), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
}


@pytest.mark.parametrize("name", OWN)
def test_own_steps_get_pil_images_and_the_tail_is_split_off(name: str) -> None:
    split = split_transform(OWN[name])
    assert wire_dtype(split) == np.uint8
    torch.testing.assert_close(delivered(split, PHOTO), original(OWN[name], pil()), rtol=0, atol=1e-5)


def test_own_steps_that_make_floats_before_the_tail() -> None:
    # What uint8 cannot carry stays on the CPUs, tail and all.
    floats = v1.Lambda(lambda im: torch.from_numpy(np.array(im)).permute(2, 0, 1) / 255 * 0.5)
    for transform in (
        v1.Compose([floats, v1.Normalize(MEAN, STD)]),
        v1.Compose([floats, v1.ConvertImageDtype(torch.float16)]),
        v1.Compose([v1.Lambda(lambda im: np.asarray(im, np.float32) / 300), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    ):
        got, want = delivered(split_transform(transform), PHOTO), original(transform, pil())
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


# --- transforms that are not split ------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # v2.ToTensor is deprecated, and in use
    V2_TO_TENSOR_THEN_BLUR = v2.Compose([v2.ToTensor(), v2.GaussianBlur(5)])

WHOLE: dict[str, Any] = {
    "erasing after ToTensor": v1.Compose([v1.RandomCrop(32), v1.ToTensor(), v1.RandomErasing(p=1.0)]),
    "erasing at the end": v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomErasing(p=1.0)]),
    "blur after ToTensor": v1.Compose([v1.ToTensor(), v1.GaussianBlur(11)]),
    "blur between ToTensor and Normalize": v1.Compose([v1.ToTensor(), v1.GaussianBlur(5), v1.Normalize(MEAN, STD)]),
    "crop after ToTensor": v1.Compose([v1.ToTensor(), v1.RandomCrop(32), v1.Normalize(MEAN, STD)]),
    "a lambda at the end": v1.Compose([v1.ToTensor(), v1.Lambda(lambda x: x * 2 - 1)]),
    "v2 blur after ToTensor": V2_TO_TENSOR_THEN_BLUR,
    "v2 erasing": v2.Compose([v2.RandomCrop(32), *tail(), v2.RandomErasing(p=1.0)]),
    "v2 blur of floats": v2.Compose([*tail(), v2.GaussianBlur(5)]),
    "v2 nested with floats": v2.Compose(
        [v2.RandomApply([v2.ToImage(), v2.ToDtype(torch.float32)], p=1.0), v2.RandomCrop(32)]
    ),
    "v2 dtype per kind": v2.Compose([v2.ToImage(), v2.ToDtype({torch.Tensor: torch.float32, "others": torch.float32})]),
    "v2 five crops": v2.Compose([v2.FiveCrop(32), *tail()]),
    "v2 ten crops of bytes": v2.Compose([v2.ToImage(), v2.TenCrop(32)]),
    "timm erasing": create_transform(32, is_training=True, re_prob=1.0),
    "integers at the end": v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.int16)]),
    "and back to bytes": v1.Compose([v1.ToTensor(), v1.ConvertImageDtype(torch.uint8)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_arrives_as_the_user_made_it(name: str) -> None:
    transform = WHOLE[name]
    split = split_transform(transform)
    assert "ships its result" in split.says
    got, want = delivered(split, PHOTO), original(transform, pil())
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_preset_of_torchvisions_models() -> None:
    from torchvision.models import ResNet18_Weights

    transform = ResNet18_Weights.DEFAULT.transforms()
    assert is_image_transform(transform)
    split = split_transform(transform)
    assert wire_dtype(split) == np.uint8
    got, want = delivered(split, PHOTO, [0]), original(transform, pil(), [0])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    floats = torch.rand(3, 60, 80)  # a data set's own tensors
    torch.testing.assert_close(delivered(split, floats.numpy(), [0]), original(transform, floats, [0]))


def test_without_a_conversion_uint8_arrives_in_the_layout_that_the_transform_returned() -> None:
    crop = v1.Compose([v1.RandomCrop(32)])  # PIL in, PIL out: HWC, as decoded
    assert torch.equal(delivered(split_transform(crop), PHOTO), original(crop, pil()))
    crop2 = v2.Compose([v2.RandomCrop(32)])  # tensor in, tensor out: CHW
    assert torch.equal(delivered(split_transform(crop2), PHOTO), original(crop2, tensor()))
    blur = v1.Compose([v1.PILToTensor(), v1.RandomCrop(32), v1.GaussianBlur(3)])
    assert torch.equal(delivered(split_transform(blur), PHOTO), original(blur, pil()))


def test_a_normalisation_of_bytes_fails_as_it_does_without_offload() -> None:
    transform = v1.Compose([v1.PILToTensor(), v1.Normalize(MEAN, STD)])
    with pytest.raises(TypeError, match="float"):
        transform(pil())
    with pytest.raises(TypeError, match="float"):
        split_transform(transform).cpu(PHOTO)


@pytest.mark.parametrize("kind", [v1.RandomApply, v1.RandomChoice, v1.RandomOrder])
def test_a_choice_of_transforms_is_no_sequence_of_them(kind: Any) -> None:
    transform = kind([v1.Resize((32, 32)), v1.Resize((32, 48))])
    split = split_transform(transform)
    for seed in range(6):
        got = seeded(seed, lambda: split.cpu(PHOTO))
        assert np.array_equal(got, np.asarray(seeded(seed, lambda: transform(pil()))))


# --- images of other kinds --------------------------------------------------------------------------------------------


def test_greyscale() -> None:
    grey = np.asarray(pil().convert("L"))
    for transform in (
        v1.Compose([v1.RandomCrop(32), v1.ToTensor(), v1.Normalize(0.5, 0.5)]),
        v1.Compose([v1.ToTensor(), v1.Normalize((0.1307,), (0.3081,))]),
    ):
        want = original(transform, PIL.Image.fromarray(grey))
        torch.testing.assert_close(delivered(split_transform(transform), grey), want, rtol=0, atol=1e-5)
    transform = v2.Compose([v2.RandomCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    want = original(transform, torch.from_numpy(grey.copy())[None])
    torch.testing.assert_close(delivered(split_transform(transform), grey), want, rtol=0, atol=1e-5)


def test_tensors_that_a_data_set_gives_in_its_own_layout() -> None:
    chw = np.ascontiguousarray(PHOTO.transpose(2, 0, 1))
    got = delivered(split_transform(V2["train"]), chw)
    torch.testing.assert_close(got, original(V2["train"], tensor()), rtol=0, atol=1e-5)
    floats = chw.astype(np.float32) / 255
    transform = v2.Compose([v2.RandomCrop(32), v2.Normalize(MEAN, STD)])
    got = delivered(split_transform(transform), floats)
    torch.testing.assert_close(got, original(transform, torch.from_numpy(floats)), rtol=0, atol=1e-5)


# --- what a data set of torch returns ----------------------------------------------------------------------------------


def received(value: Any, transform: Any) -> torch.Tensor:
    """The images that a worker receives for a data set of one value: after the tasks, the wire and the device part."""
    pipeline = from_torch([{"image": value}] * 2, transform)
    rows = a_pass(stream_of(pipeline, shuffle=False))
    batch: dict[str, Any] = {"image": torch.stack([torch.from_numpy(rows[i]["image"].copy()) for i in range(2)])}
    for step in pipeline.on_device:
        batch = step(batch)
    image = batch["image"]
    assert isinstance(image, torch.Tensor)
    return image


def check_same(value: Any, transform: Any, *, tolerance: float = 1e-5) -> None:
    """The worker receives what the transform makes of the value, or its error."""
    try:
        want = original(transform, value, range(2)).as_subclass(torch.Tensor)
    except Exception as error:
        with pytest.raises(RunError, match=rf"the transform .* raised {type(error).__name__}"):
            received(value, transform)
        return
    got = received(value, transform)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=tolerance)


def bands(*shape: int, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, shape).astype(dtype)


def of_mode(mode: str) -> PIL.Image.Image:
    """A photograph in a mode of Pillow's."""
    if mode in ("I;16", "I", "F"):
        return PIL.Image.fromarray(bands(40, 48, dtype={"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    if mode in ("LAB", "La"):
        return PIL.Image.frombytes(mode, (48, 40), bands(40, 48, len(mode)).tobytes())
    return pil().resize((48, 40)).convert(mode)


def masked_photo() -> PIL.Image.Image:
    image = of_mode("P")
    image.info["transparency"] = 0
    return image


RGB = v1.Lambda(lambda image: image.convert("RGB"))
FLOAT = v2.ToDtype(torch.float32, scale=True)

GIVEN_IMAGES: dict[str, Any] = {
    "v1": v1.Compose([v1.CenterCrop(32), v1.ToTensor()]),
    "v1 all on the device": v1.Compose([v1.ToTensor(), v1.Normalize(0.5, 0.25)]),
    "v1 after ToTensor": v1.Compose([v1.ToTensor(), v1.RandomHorizontalFlip(1.0), v1.Normalize(0.5, 0.25)]),
    "v2": v2.Compose([v2.RandomHorizontalFlip(1.0), v2.CenterCrop(32), v2.ToImage(), FLOAT]),
    "v2 image first": v2.Compose([v2.ToImage(), v2.CenterCrop(32), FLOAT, v2.Normalize([0.5], [0.25])]),
    "v2 all on the device": v2.Compose([v2.ToImage(), FLOAT]),
    "v2 unscaled": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]),
}
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F")


@pytest.mark.parametrize("name", GIVEN_IMAGES)
def test_pil_images_of_any_mode(name: str) -> None:
    for mode in MODES:
        with case(mode):
            check_same(of_mode(mode), GIVEN_IMAGES[name])


@pytest.mark.parametrize("mode", ["P", "CMYK", "YCbCr", "HSV", "1"])
def test_a_transform_that_converts_the_modes_of_pil_images_gets_them(mode: str) -> None:
    for transform in (
        v1.Compose([RGB, v1.CenterCrop(32), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
        v1.Compose([RGB, v1.ToTensor(), v1.RandomErasing(p=0.0)]),
        v2.Compose([v2.Lambda(lambda image: image.convert("RGB")), v2.CenterCrop(32), v2.ToImage(), FLOAT]),
        v2.Compose([v2.RGB(), v2.ToImage(), FLOAT]),
    ):
        got, want = received(of_mode(mode), transform), original(transform, of_mode(mode), range(2))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


ARRAYS = {
    "colours": bands(40, 48, 3),
    "grey": bands(40, 48),
    "one channel": bands(40, 48, 1),
    "two channels": bands(40, 48, 2),
    "five channels": bands(40, 48, 5),
    "three rows": bands(3, 48, 3),
    "float32": bands(40, 48, 3, dtype=np.float32) / 255,
    "uint16": bands(40, 48, 3, dtype=np.uint16) * 200,
    "float grey": bands(40, 48, dtype=np.float32),
}
GIVEN_ARRAYS = {name: GIVEN_IMAGES[name] for name in GIVEN_IMAGES if name not in ("v1", "v2")} | {
    "v2 resized": v2.Compose([v2.ToImage(), v2.Resize((20, 24)), v2.ToDtype(torch.float32)]),
    "a function": v1.Compose([v1.Lambda(lambda array: array[:2].copy()), v1.ToTensor()]),
    "v2 passed on": v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToImage(), v2.CenterCrop(20), FLOAT]),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", GIVEN_ARRAYS)
def test_arrays_of_any_type_and_channels(name: str) -> None:
    for kind, array in ARRAYS.items():
        # torch's kernels of the two layouts round differently.
        tolerance = 1.0 if (name, array.dtype) == ("v2 resized", np.uint8) else 1e-5
        with case(kind):
            check_same(array, GIVEN_ARRAYS[name], tolerance=tolerance)


@pytest.mark.parametrize("kind", ["colours", "grey", "one channel", "two channels"])
def test_arrays_become_pil_images_for_a_transform_that_takes_none(kind: str) -> None:
    transform = GIVEN_IMAGES["v1"]
    want = original(transform, pil(ARRAYS[kind].squeeze()), range(2))
    torch.testing.assert_close(received(ARRAYS[kind], transform), want)


def test_arrays_that_no_pil_image_can_hold_are_refused_as_torchvision_refuses_them() -> None:
    for kind in ("five channels", "float32", "uint16"):
        check_same(ARRAYS[kind], GIVEN_IMAGES["v1"])
        check_same(ARRAYS[kind], v1.Compose([v1.Resize(20)]))


def test_pil_images_with_transparency_take_every_step() -> None:
    check_same(of_mode("RGBA"), v2.Compose([v2.Grayscale(), v2.ToImage(), FLOAT]))


TO_PIL = v1.Compose([v1.ToPILImage(), v1.RandomCrop(32, 4), v1.ToTensor()])


@pytest.mark.parametrize("kind", ["colours", "grey", "two channels", "uint16 grey"])
def test_arrays_that_a_transform_makes_pil_images_of(kind: str) -> None:
    transform = v1.Compose([v1.ToPILImage(), v1.CenterCrop(32), v1.ToTensor()])
    array = bands(40, 48, dtype=np.uint16) if kind == "uint16 grey" else ARRAYS[kind]
    check_same(array, transform)
    if array.dtype == np.uint8:  # of other sources, too
        got = delivered(split_transform(TO_PIL), array)
        torch.testing.assert_close(got, original(TO_PIL, array), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["two channels", "five channels", "float32"])
def test_arrays_of_other_sources_before_to_tensor(kind: str) -> None:
    for name in ("v1 all on the device", "v1 after ToTensor"):
        got = delivered(split_transform(GIVEN_ARRAYS[name]), ARRAYS[kind])
        torch.testing.assert_close(got, original(GIVEN_ARRAYS[name], ARRAYS[kind]), rtol=0, atol=1e-5)


TENSORS = {
    "colours": torch.from_numpy(bands(3, 40, 48)),
    "six bands": torch.from_numpy(bands(6, 40, 48)),
    "six bands, three columns": torch.from_numpy(bands(6, 48, 3)),
    "a clip": torch.from_numpy(bands(5, 3, 40, 48)),
    "floats": torch.from_numpy(bands(3, 40, 48, dtype=np.float32)) / 255,
    "an image": tv_tensors.Image(torch.from_numpy(bands(3, 40, 48))),
    "a video": tv_tensors.Video(torch.from_numpy(bands(5, 3, 40, 48))),
    "int16": torch.from_numpy(bands(3, 40, 48, dtype=np.int16)),
}
GIVEN_TENSORS = {
    "v1": v1.Compose([v1.RandomVerticalFlip(1.0), v1.ConvertImageDtype(torch.float32), v1.Normalize(0.5, 0.25)]),
    "v1 without conversion": v1.Compose([v1.RandomVerticalFlip(1.0)]),
    "v2": v2.Compose([v2.RandomVerticalFlip(1.0), FLOAT]),
    "v2 all on the device": v2.Compose([v2.ToImage(), FLOAT]),
    "v2 without conversion": v2.Compose([v2.RandomVerticalFlip(1.0)]),
    "v2 image": v2.Compose([v2.RandomVerticalFlip(1.0), v2.ToImage()]),
    "timm": v1.Compose([v1.RandomVerticalFlip(1.0), MaybeToTensor(), v1.Normalize(0.5, 0.25)]),
    "v1 for PIL images": v1.Compose([v1.RandomVerticalFlip(1.0), v1.ToTensor()]),
}


@pytest.mark.parametrize("name", GIVEN_TENSORS)
def test_tensors_of_any_type_and_shape(name: str) -> None:
    for kind, tensor in TENSORS.items():
        with case(kind):
            check_same(tensor, GIVEN_TENSORS[name])


def resizes(image: PIL.Image.Image) -> bool:
    """Return whether this Pillow interpolates images of this mode."""
    try:
        image.resize((4, 4), PIL.Image.Resampling.BILINEAR)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", ["colours", "a clip", "floats", "P", "I;16", "RGB"])
def test_a_preset_gets_what_the_data_set_returned(kind: str) -> None:
    from torchvision.models import ResNet18_Weights

    transform = ResNet18_Weights.DEFAULT.transforms(crop_size=24, resize_size=32)
    value = TENSORS[kind] if kind in TENSORS else of_mode(kind)
    if kind == "I;16" and not resizes(value):
        pytest.skip("this Pillow does not resize images of 16 bits")
    if kind == "P":
        value = masked_photo()
    if kind in ("P", "I;16"):  # one channel
        transform.mean, transform.std = [0.5], [0.25]
    torch.testing.assert_close(received(value, transform), original(transform, value, range(2)), rtol=0, atol=1e-5)


def test_tensors_that_a_transform_makes_pil_images_of_travel_as_bytes() -> None:
    transform = v1.Compose([v1.ToPILImage(), v1.CenterCrop(32), v1.ToTensor()])
    check_same(TENSORS["colours"], transform)
    assert split_transform(transform, from_dataset=True).cpu(TENSORS["colours"]).dtype == np.uint8


def test_clips_as_arrays_of_other_sources() -> None:
    transform = GIVEN_TENSORS["v2"]
    got = delivered(split_transform(transform), TENSORS["a clip"].numpy())
    torch.testing.assert_close(got, original(transform, TENSORS["a clip"]))


@pytest.mark.parametrize("value", [pil(), TENSORS["colours"], TENSORS["floats"]])
def test_a_collate_fn_gets_what_a_preset_returns(value: Any) -> None:
    from torchvision.models import ResNet18_Weights

    transform = ResNet18_Weights.DEFAULT.transforms(crop_size=24, resize_size=32)
    made: Any = from_torch([{"image": value}], transform, collate_fn=list).transform
    assert torch.equal(made(value), transform(value))


@pytest.mark.parametrize("value", [pil(), of_mode("P"), TENSORS["colours"], ARRAYS["colours"]])
def test_a_collate_fn_gets_what_the_transform_returns(value: Any) -> None:
    for transform in (
        v1.Compose([v1.Lambda(lambda x: x)]),
        v2.Compose([v2.Lambda(lambda x: x), v2.RandomHorizontalFlip(0.0)]),
    ):
        made: Any = from_torch([{"image": value}], transform, collate_fn=list).transform
        assert type(made(value)) is type(transform(value))


def test_a_transform_that_writes_to_its_image_leaves_the_data_set_alone() -> None:
    def black(image: Any) -> Any:
        if isinstance(image, PIL.Image.Image):
            image.paste(0, (0, 0, *image.size))
        else:
            image[:] = 0
        return image

    for value in (of_mode("RGB"), bands(40, 48, 3), torch.from_numpy(bands(3, 40, 48))):
        before = wire.as_array(value).copy()
        for transform in (v1.Compose([v1.Lambda(black)]), v1.Compose([v1.Lambda(black), v1.PILToTensor()])):
            if isinstance(value, PIL.Image.Image) or len(transform.transforms) == 1:
                assert not received(value, transform).any()
        assert np.array_equal(wire.as_array(value), before)


def test_a_broken_file_that_the_data_set_opened_is_skipped(tmp_path: Path) -> None:
    pil().save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "b.jpg").write_bytes(whole[: len(whole) // 2])

    class Opened(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Any:
            return PIL.Image.open(io.BytesIO((tmp_path / f"{'ab'[i]}.jpg").read_bytes())), i

    rows = a_pass(stream_of(from_torch(Opened(), v1.ToTensor(), on_error="skip"), shuffle=False))
    assert [row["__error__"] is None for row in rows.values()] == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_a_function_gets_the_colours_of_pil_images(mode: str) -> None:
    def same(sample: dict[str, Any]) -> dict[str, Any]:
        return {"got": sample["image"]}

    image = of_mode(mode)
    got = a_pass(stream_of(from_torch([{"image": image}], same, per_sample=True)))[0]["got"]
    stays = mode in ("1", "L", "LA", "RGB", "RGBA", "I;16", "I", "F", "LAB")
    assert np.array_equal(got, np.array(image if stays else image.convert("RGB")))


def test_a_function_gets_the_transparency_of_a_palette() -> None:
    got = a_pass(stream_of(from_torch([{"image": masked_photo()}])))[0]["image"]
    assert np.array_equal(got, np.array(masked_photo().convert("RGBA")))


def test_a_mask_with_a_palette_keeps_its_classes() -> None:
    """As those of VOC."""
    mask = of_mode("P")
    data_set = [{"image": of_mode("RGB"), "mask": mask}]
    for transform in (None, v1.ToTensor()):
        got = a_pass(stream_of(from_torch(data_set, transform)))[0]["mask"]
        assert np.array_equal(got, np.array(mask))


def test_memory_of_a_data_set_that_is_read_only_stays_as_it_is() -> None:
    kept = bands(28, 28, dtype=np.float32)
    kept.flags.writeable = False
    before = kept.copy()
    received(kept, v1.Compose([v1.ToTensor(), v1.Normalize(0.5, 0.5, inplace=True)]))
    assert np.array_equal(kept, before)


def test_a_drop_in_blurs_arrays_as_the_transform_that_it_stands_for() -> None:
    value = bands(40, 48, 3)
    for kind in (v1.GaussianBlur, GaussianBlur):
        transform = v1.Compose([kind(11, sigma=5.0), v1.ToTensor()])
        sharp = received(value, v1.ToTensor())
        assert received(value, transform).std() < 0.5 * sharp.std()


# --- several views of an image -----------------------------------------------------------------------------------------


class Views:
    """As DINO's crops."""

    def __init__(self, *sizes: int) -> None:
        self.crops = [v1.Compose([v1.CenterCrop(size), v1.ToTensor()]) for size in sizes]

    def __call__(self, image: Any) -> list[torch.Tensor]:
        return [crop(image) for crop in self.crops]


class PilViews(Views):
    def __call__(self, image: Any) -> Any:
        return [crop.transforms[0](image) for crop in self.crops]


VIEWS = {
    "two sizes": v1.Compose([v1.RandomHorizontalFlip(0.0), Views(32, 32, 16)]),
    "one size": v1.Compose([v1.RandomHorizontalFlip(0.0), Views(32, 32)]),
    "v2 steps of views": v2.Compose([PilViews(32, 32, 16), v2.ToImage(), FLOAT]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_several_views_arrive_as_a_list(name: str) -> None:
    transform = VIEWS[name]
    pipeline = from_torch([{"image": pil()}] * 3, transform)
    index = listed(pipeline)
    rows = rows_at(index.rows, np.arange(3))
    for column in (SAMPLE_ID, POSITION):
        rows = rows.append_column(column, pa.array(np.arange(3)))
    block = process(pipeline.recipe(index, seed=0), rows, epoch=0)
    samples = [row[0] for row in whole_samples.decode(wire.decode(block))]
    for step in pipeline.on_device:
        assert step({"image": [sample["image"] for sample in samples]})["image"]
    want = transform(pil())
    assert len(want) == len(samples[0]["image"])
    for got in zip(*[sample["image"] for sample in samples], strict=True):
        torch.testing.assert_close(torch.stack(list(got)), torch.stack([want.pop(0)] * 3), rtol=0, atol=1e-5)


def test_an_error_names_all_steps() -> None:
    assert repr(split_transform(GIVEN_IMAGES["v1 all on the device"]).cpu) == "ToTensor, Normalize"
    assert repr(split_transform(V1["eval"]).cpu) == "Resize, CenterCrop, ToTensor, Normalize"


def test_pixels_of_a_block_in_shared_memory_are_read_only() -> None:
    frozen = PHOTO.copy()
    frozen.setflags(write=False)
    for name in ("train", "jitter"):
        split_transform(V1[name]).cpu(frozen)
    split_transform(V2["train"]).cpu(frozen)


# --- what is recognised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [*V1.values(), *V2.values(), *WHOLE.values(), create_transform(32)])
def test_transforms_of_one_image(transform: Any) -> None:
    assert is_image_transform(transform)


class Inverted(v2.Transform):
    """As torchvision says how to write a transform of one's own."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.invert(inpt)


class Normalize(Inverted):
    """A name that means something else in torchvision."""


class Quarter(v1.RandomCrop):
    def __init__(self) -> None:
        super().__init__(16)


class OfBatches(v2.Transform):
    def forward(self, *inputs: Any) -> Any:
        return inputs[0]


class CallsItself(v1.RandomCrop):
    def __call__(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("own", [Inverted(), Normalize(), Quarter(), v2.Compose([Inverted(), Normalize()])])
def test_subclasses_that_are_called_as_torchvisions_classes_take_one_image(own: Any) -> None:
    assert is_image_transform(own)
    torch.testing.assert_close(delivered(split_transform(own), PHOTO), original(own, pil()))


@pytest.mark.parametrize("kind", [v2.RandomHorizontalFlip, v1.ToTensor, Inverted])
def test_a_class_of_image_transforms_is_refused_since_it_would_get_batches(kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"the transform class {kind.__name__} takes an image, not a batch"):
        image_folder("data", kind)
    assert image_folder("data", OfBatches).kind == "batch"


@pytest.mark.parametrize(
    "other",
    [
        lambda batch: batch,
        len,
        Solarised(),
        OfBatches(),
        CallsItself(8),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(),
        nn.ReLU(),
        None,
    ],
)
def test_everything_else_is_the_users_function(other: Any) -> None:
    assert not is_image_transform(other)
