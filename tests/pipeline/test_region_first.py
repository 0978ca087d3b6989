"""A transform that decodes what its first step needs: the same random numbers, and the same result."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.data.transforms_factory import create_transform
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

import offload
from offload.errors import ConfigError, RunError
from offload.pipeline.blocks import wire
from offload.pipeline.blocks.wire import ERROR, POSITION, SAMPLE_ID
from offload.pipeline.describe.pipeline import Pipeline
from offload.pipeline.images import turbojpeg
from offload.pipeline.images.decode import decode_image
from offload.pipeline.images.region_decode import EncodedImage, read_image
from offload.pipeline.images.region_first import RegionFirst
from offload.pipeline.images.split import split_transform
from offload.pipeline.pool import packed_recipe
from offload.pipeline.preprocessing.processing import process
from tests.pipeline.test_region_decode import jpeg, picture

TRAIN = {
    "v1": v1.RandomResizedCrop(40),
    "v1, bicubic": v1.RandomResizedCrop((36, 48), interpolation=InterpolationMode.BICUBIC),
    "v1, nearest": v1.RandomResizedCrop(40, interpolation=InterpolationMode.NEAREST),
    "v1, center crop": v1.CenterCrop(33),
    "v1, resize": v1.Resize(64),
    "timm": RandomResizedCropAndInterpolation(40),
    "timm, random interpolation": RandomResizedCropAndInterpolation(40, interpolation="random"),
    "a crop of extreme shape": v1.RandomResizedCrop(40, scale=(1.0, 1.0), ratio=(5.0, 6.0)),
}
TRAIN_V2 = {
    "v2": v2.RandomResizedCrop(40, antialias=True),
    "v2, no antialias": v2.RandomResizedCrop((36, 48), antialias=False),
    "v2, center crop": v2.CenterCrop((31, 40)),
    "v2, resize": v2.Resize((50, 70)),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    **{name: v1.Compose([step, v1.RandomHorizontalFlip(), v1.ToTensor()]) for name, step in TRAIN.items()},
    **{f"{name}, of PIL images": v1.Compose([step, v1.ToTensor()]) for name, step in TRAIN_V2.items()},
    **{
        name: v2.Compose([step, v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
        for name, step in TRAIN_V2.items()
    },
    "v2, an image first": v2.Compose([v2.ToImage(), TRAIN_V2["v2"], v2.ColorJitter(0.4), v2.ToPureTensor()]),
    "v1 of a tensor": v1.Compose([v1.PILToTensor(), v1.RandomResizedCrop(40), v1.ConvertImageDtype(torch.float32)]),
    "timm's training": create_transform(40, is_training=True),
    "timm's evaluation": create_transform(40),
    "a bare step": v1.RandomResizedCrop(40),
}
RESIZED_AS_PILLOW = {
    "v1", "v1, bicubic", "v1, resize", "v2, of PIL images", "v2, no antialias, of PIL images", "v2, resize, of PIL images", "timm",
    "a crop of extreme shape", "timm's training", "timm's evaluation", "a bare step",
}  # fmt: skip
"""Their images are Pillow's, which torch resizes within two levels."""


def psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((a.astype(float) - b.astype(float)) ** 2), 1e-9)))


def seeded(seed: int, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The result, and the random numbers that come after it."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return call(), (random.random(), np.random.rand(), torch.rand(1).item())


def encoded(data: bytes) -> EncodedImage:
    image = read_image(data, "broken", encoded=True)
    assert isinstance(image, EncodedImage)
    return image


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_result_and_the_random_numbers_are_the_same(name: str) -> None:
    cpu = pickle.loads(pickle.dumps(split_transform(TRANSFORMS[name]).cpu))
    assert cpu.takes_encoded
    for seed, subsampling in enumerate(("4:2:0", "4:2:2", "4:4:4", "4:2:0", "4:2:0")):
        # Less than four times the result on a side, so that nothing is scaled.
        data = jpeg(picture(95 + seed, 120 - 7 * seed, seed), subsampling=subsampling)
        got, after = seeded(seed, lambda data=data: cpu(encoded(data)))
        want, after_want = seeded(seed, lambda data=data: cpu(decode_image(data)))
        assert after == after_want
        assert got.dtype == want.dtype
        if name in RESIZED_AS_PILLOW:
            assert got.shape == want.shape
            assert psnr(got, want) > 50
        else:
            np.testing.assert_array_equal(got, want)


def test_pillow_images_are_resized_within_two_levels() -> None:
    from sklearn.datasets import load_sample_images

    cpu: Any = split_transform(v1.Compose([v1.RandomResizedCrop(200), v1.ToTensor()])).cpu
    for photo in load_sample_images().images:
        data = jpeg(PIL.Image.fromarray(photo), quality=90)
        for seed in range(15):
            got, want = (
                seeded(seed, lambda image=image: cpu(image))[0] for image in (encoded(data), decode_image(data))
            )
            assert psnr(got, want) > 50
            assert np.abs(got.astype(int) - want.astype(int)).max() <= 2


@pytest.mark.parametrize("step", [v2.RandomResizedCrop(40, antialias=True), v2.CenterCrop(40)], ids=repr)
@pytest.mark.parametrize("as_decoded", [True, False])
def test_a_tensors_crop_stays_in_the_fast_layout(step: Any, as_decoded: bool) -> None:
    """torch resizes a part of a larger image more slowly, and the result would have to be turned from CHW to HWC."""
    cpu: Any = split_transform(v2.Compose([step, v2.ToDtype(torch.float32, scale=True)])).cpu
    data = jpeg(picture(95, 120))
    made = cpu(decode_image(data) if as_decoded else encoded(data))
    assert made.shape == (40, 40, 3)
    assert made.flags.c_contiguous


@pytest.mark.parametrize("channels", [1, 4])
def test_crops_of_other_channels_are_those_of_torchvision(channels: int) -> None:
    step = v2.RandomResizedCrop(12, antialias=True)
    cpu: Any = split_transform(v2.Compose([step])).cpu
    pixels = np.random.default_rng(0).integers(0, 256, (30, 41, channels), dtype=np.uint8)
    got, want = (
        seeded(3, lambda call=call: np.asarray(call()))[0]
        for call in (lambda: cpu(pixels), lambda: step(torch.from_numpy(pixels).permute(2, 0, 1)).permute(1, 2, 0))
    )
    np.testing.assert_array_equal(got, want)


def test_only_the_region_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[tuple[int, ...]] = []
    plain = EncodedImage.region

    def region(self: EncodedImage, *box: int) -> Any:
        regions.append(box)
        return plain(self, *box)

    monkeypatch.setattr(EncodedImage, "region", region)
    split_transform(v1.Compose([v1.CenterCrop(20), v1.ToTensor()])).cpu(encoded(jpeg(picture(50, 61))))  # type: ignore[arg-type]
    assert regions == [(15, 20, 20, 20, 1)]


class Twice(v1.RandomResizedCrop):
    """A user's own class may do anything with the image."""


@pytest.mark.parametrize(
    "transform",
    [v1.Compose([v1.RandomHorizontalFlip(), v1.RandomResizedCrop(40)]), v1.RandomCrop(9), Twice(40), v1.ToTensor()],
    ids=["a flip first", "a crop that may pad", "a subclass", "a conversion"],
)
def test_other_transforms_get_the_whole_image(transform: Any) -> None:
    assert not split_transform(v1.Compose([transform])).cpu.takes_encoded


def test_a_crop_that_pads_gets_the_whole_image() -> None:
    cpu: Any = split_transform(v1.Compose([v1.CenterCrop(70), v1.ToTensor()])).cpu
    data = jpeg(picture(60, 90))
    assert np.array_equal(cpu(encoded(data)), cpu(decode_image(data)))


# --- scaled decoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        v1.RandomResizedCrop(24),
        v2.RandomResizedCrop(24, antialias=True),
        v1.Resize(30),
        v2.Resize([30]),
        v1.Resize((24, 40)),
    ],
    ids=repr,
)
def test_large_crops_are_decoded_at_a_smaller_scale_and_stay_close(step: Any) -> None:
    from sklearn.datasets import load_sample_images

    cpu: Any = split_transform(
        v2.Compose([step]) if type(step).__module__.startswith("torchvision.transforms.v2") else v1.Compose([step])
    ).cpu
    distances = []
    for photo in load_sample_images().images:
        data = jpeg(PIL.Image.fromarray(photo), quality=90)
        for seed in range(15):
            got, after = seeded(seed, lambda data=data: cpu(encoded(data)))
            want, after_want = seeded(seed, lambda data=data: cpu(decode_image(data)))
            assert got.shape == want.shape
            assert after == after_want
            distances.append(psnr(got, want))
    assert min(distances) < 60  # some were scaled
    assert np.median(distances) >= 35


@pytest.mark.parametrize("size", [(163, 240), (240, 163), (161, 161), (500, 170)])
def test_a_scaled_resize_has_the_size_of_the_step(size: tuple[int, int]) -> None:
    for step in (v1.Resize(20), v1.Resize((20, 17)), v2.Resize(20), v2.Resize([20])):
        cpu: Any = split_transform(v1.Compose([step, v1.ToTensor()])).cpu
        data = jpeg(picture(*size))
        assert cpu(encoded(data)).shape == cpu(decode_image(data)).shape


@pytest.mark.parametrize(
    "step",
    [v1.RandomResizedCrop(12, interpolation=InterpolationMode.NEAREST), v2.RandomResizedCrop(12, antialias=False)],
    ids=["nearest", "no antialias"],
)
def test_steps_that_pick_pixels_get_all_of_them(step: Any) -> None:
    cpu: Any = split_transform(v2.Compose([step])).cpu
    data = jpeg(picture(150, 180))
    for seed in range(8):
        got, want = (seeded(seed, lambda image=image: cpu(image))[0] for image in (encoded(data), decode_image(data)))
        np.testing.assert_array_equal(got, want)


# --- sources -----------------------------------------------------------------------------------------------------------

CROP = v2.Compose(
    [v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
)


def files(broken: bool = False) -> list[bytes]:
    made = [jpeg(picture(90 + i, 110 - i, i)) for i in range(20)]
    png = io.BytesIO()
    picture(80, 90).save(png, "PNG")
    made[3] = png.getvalue()
    if broken:
        made[7] = made[7][:-300]
    return made


def sources(folder: Path, data: list[bytes], **options: Any) -> dict[str, Pipeline]:
    (folder / "images" / "a").mkdir(parents=True)
    for i, each in enumerate(data):
        (folder / "images" / "a" / f"{i:03}.jpg").write_bytes(each)
    pq.write_table(pa.table({"image": data, "other": data, "label": list(range(len(data)))}), folder / "t.parquet")
    with tarfile.open(folder / "s.tar", "w") as tar:
        for i, each in enumerate(data):
            member = tarfile.TarInfo(f"{i:03}.jpg")
            member.size = len(each)
            tar.addfile(member, io.BytesIO(each))
    return {
        "image_folder": offload.image_folder(folder / "images", CROP, **options),
        "parquet": offload.parquet(folder / "t.parquet", CROP, images=("image",), **options),
        "webdataset": offload.webdataset(folder / "s.tar", CROP, **options),
    }


def block_of(pipeline: Pipeline, epoch: int = 0) -> dict[str, Any]:
    assert pipeline.list is not None
    index = pipeline.list()
    ids = pa.array(np.arange(len(index), dtype=np.int64))
    rows = index.table.append_column(SAMPLE_ID, ids).append_column(POSITION, ids)
    recipe = pickle.loads(packed_recipe.pack(pipeline.recipe(index, seed=5)).tobytes()).ready()
    return dict(wire.decode(process(recipe, rows, epoch=epoch)))


@pytest.mark.parametrize("with_library", [True, False])
def test_auto_and_exact_deliver_the_same_bytes(
    with_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_library:
        monkeypatch.setattr(turbojpeg, "library", lambda: None)
    auto = sources(tmp_path / "auto", files())
    exact = sources(tmp_path / "exact", files(), decode="exact")
    for name, pipeline in auto.items():
        assert pipeline.list is not None
        assert pipeline.list().reader.encoded  # type: ignore[attr-defined]
        for epoch in (0, 1):
            got, want = block_of(pipeline, epoch), block_of(exact[name], epoch)
            assert got.keys() == want.keys()
            np.testing.assert_array_equal(got["image"], want["image"])


def test_a_broken_file_fails_and_is_skipped_as_before(tmp_path: Path) -> None:
    said: dict[str, list[Any]] = {}
    for decode in ("auto", "exact"):
        for name, pipeline in sources(tmp_path / decode, files(broken=True), decode=decode).items():
            with pytest.raises(RunError) as caught:
                block_of(pipeline)
            said.setdefault(name, []).append(str(caught.value).replace(decode, ""))
        skips = sources(tmp_path / f"{decode}-skip", files(broken=True), decode=decode, on_error="skip")
        for name, pipeline in skips.items():
            block = block_of(pipeline)
            errors = [error and error.replace(decode, "") for error in block[ERROR]]
            said[name].append((errors, np.delete(block["image"], 7, axis=0).tobytes()))
    for name, (raised, skipped, exact_raised, exact_skipped) in said.items():
        assert raised == exact_raised
        assert "is unusable: corrupt" in raised
        assert skipped == exact_skipped, name
        assert [i for i, error in enumerate(skipped[0]) if error] == [7]


def test_an_image_that_breaks_only_when_it_is_decoded(tmp_path: Path) -> None:
    """Its header and end are fine. The row fails as if the source had decoded it; the others keep their bytes."""
    data = files()
    whole = block_of(sources(tmp_path / "whole", data)["image_folder"])
    broken = bytearray(jpeg(picture(97, 103), progressive=True))
    start = broken.index(b"\xff\xda", broken.index(b"\xff\xda") + 2)
    broken[start + 2 : start + 10] = b"\xff" * 8  # the header of the second scan
    data[7] = bytes(broken)
    assert isinstance(read_image(data[7], "", encoded=True), EncodedImage)
    skipped = block_of(sources(tmp_path / "skip", data, on_error="skip")["image_folder"])
    assert [i for i, error in enumerate(skipped[ERROR]) if error] == [7]
    assert "007.jpg: corrupt or truncated image: " in skipped[ERROR][7]
    np.testing.assert_array_equal(np.delete(skipped["image"], 7, axis=0), np.delete(whole["image"], 7, axis=0))
    for name, pipeline in sources(tmp_path / "raise", data).items():
        with pytest.raises(RunError, match=r"sample 7 .* is unusable: corrupt .*Repair or remove it"):
            block_of(pipeline)
        assert name


def test_functions_get_decoded_images(tmp_path: Path) -> None:
    seen = []

    def batch(columns: dict[str, Any]) -> dict[str, Any]:
        seen.extend(columns["image"])
        return {"n": np.array([image.shape[0] for image in columns["image"]])}

    sources(tmp_path, files())
    block_of(offload.image_folder(tmp_path / "images", batch))
    block_of(
        offload.parquet(tmp_path / "t.parquet", CROP, images=("image", "other"), columns=("label",), collate_fn=list)
    )
    assert all(isinstance(image, np.ndarray) for image in seen)


@pytest.mark.parametrize("source", [offload.image_folder, offload.webdataset, offload.parquet])
@pytest.mark.parametrize("value", ["fast", None, True, 1])
def test_only_known_ways_to_decode(source: Any, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decode must be"):
        source(tmp_path, CROP, decode=value)


def test_the_step_is_named_in_a_probe() -> None:
    first = split_transform(CROP).cpu.steps[0]  # type: ignore[attr-defined]
    assert isinstance(first, RegionFirst)
    assert first.__name__ == "decode, RandomResizedCrop"
    assert repr(split_transform(CROP).cpu) == "RandomResizedCrop, RandomHorizontalFlip, ToDtype"
