"""Regions of JPEGs are those of the decoded image, bit for bit; what cannot be decoded in part is decoded as a whole."""

from __future__ import annotations

import contextlib
import ctypes.util
import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.pipeline.images import turbojpeg
from offload.pipeline.images.decode import DecodeError, decode_image
from offload.pipeline.images.region_decode import EncodedImage, decode_region, read_image

BROKEN = "corrupt or truncated image"


def picture(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    """Coarse noise, enlarged: edges and colours of every kind, as in photographs."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BICUBIC)


def jpeg(image: PIL.Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def in_kind(image: PIL.Image.Image, kind: str, quality: int) -> bytes:
    if kind in ("440", "411"):  # Pillow writes none of these
        return bytes(simplejpeg.encode_jpeg(np.asarray(image).copy(), quality=quality, colorsubsampling=kind))
    if kind == "grey":
        return jpeg(image.convert("L"), quality=quality)
    if kind == "restarts":
        return jpeg(image, quality=quality, restart_marker_blocks=3)
    if kind == "rgb":
        return jpeg(image, quality=quality, keep_rgb=True)
    sampling, _, progressive = kind.partition(" ")
    return jpeg(image, quality=quality, subsampling=sampling, progressive=bool(progressive))


KINDS = [
    *("4:4:4", "4:2:2", "4:2:0", "4:4:4 progressive", "4:2:2 progressive", "4:2:0 progressive"),
    *("440", "411", "grey", "rgb", "restarts"),
]


@pytest.fixture(scope="module")
def library() -> turbojpeg.TurboJpeg:
    found = turbojpeg.library()
    assert found is not None, "the extra `regions` is not installed"
    return found


# --- the contract with TurboJPEG ---------------------------------------------------------------------------------------


def test_the_extra_exports_turbojpeg_3() -> None:
    """pylibjxl promises its Python functions only. If a version exports no TurboJPEG any more, this fails."""
    *_, own = turbojpeg._candidates()
    assert Path(own).name.startswith("_pylibjxl")
    assert turbojpeg._agrees(turbojpeg.TurboJpeg(own))


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from([1, 1, 2, 4, 8]),
    height=st.integers(1, 150),
    width=st.integers(1, 150),
    quality=st.integers(20, 100),
    seed=st.integers(0, 99),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_region_is_that_of_the_whole_image(
    library: turbojpeg.TurboJpeg,
    kind: str,
    scale: int,
    height: int,
    width: int,
    quality: int,
    seed: int,
    corners: tuple[float, float, float, float],
) -> None:
    data = in_kind(picture(height, width, seed), kind, quality)
    header = library.header(data)
    assert header is not None
    assert (header.height, header.width) == (height, width)
    whole = simplejpeg.decode_jpeg(
        data, min_height=-(-height // scale), min_width=-(-width // scale), min_factor=scale, strict=True
    )
    height, width = whole.shape[:2]
    rows, columns = 1 + int(corners[0] * (height - 1)), 1 + int(corners[1] * (width - 1))
    top, left = int(corners[2] * (height - rows)), int(corners[3] * (width - columns))
    region = library.region(data, header, top, left, rows, columns, scale)
    assert region is not None
    np.testing.assert_array_equal(region, whole[top : top + rows, left : left + columns])


def test_images_of_any_size_in_turn(library: turbojpeg.TurboJpeg) -> None:
    """The decoder keeps nothing of the file before, nor of one that failed."""
    large, small = jpeg(picture(140, 150)), jpeg(picture(20, 30))
    for data in (large, small, large[:-300], small, b"\xff\xd8nothing", large):
        header = library.header(data)
        if header is None:
            continue
        region = library.region(data, header, header.height - 9, header.width - 9, 9, 9)
        if data in (large, small):
            assert region is not None
            assert np.array_equal(region, decode_image(data)[-9:, -9:])
        else:
            assert region is None


def test_a_library_that_decodes_otherwise_is_not_taken(library: turbojpeg.TurboJpeg) -> None:
    class Shifted(turbojpeg.TurboJpeg):
        def region(self, data: bytes, header: turbojpeg.Header, top: int, left: int, *size: int) -> Any:
            return super().region(data, header, top, left - 1, *size)

    assert turbojpeg._agrees(library)
    assert not turbojpeg._agrees(Shifted(library.path))


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(turbojpeg, "library", lambda: None)


def test_files_that_are_no_library_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ctypes.util.find_library("c") or "libc.so.6"  # a library without these functions
    monkeypatch.setattr(turbojpeg, "_candidates", lambda: iter(["/nowhere/libturbojpeg.so.0", other]))
    assert turbojpeg.library.__wrapped__() is None


# --- encoded images ----------------------------------------------------------------------------------------------------


def test_without_a_library_the_same_pixels_come_from_the_whole_image(without_library: None) -> None:
    data = jpeg(picture(60, 80))
    image = read_image(data, BROKEN, encoded=True)
    assert isinstance(image, EncodedImage)
    assert decode_region(data, 5, 6, 30, 40) is None
    assert np.array_equal(image.region(5, 6, 30, 40), decode_image(data)[5:35, 6:46])


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_scaled_regions_do_not_depend_on_the_library(scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(picture(163, 171))
    image = read_image(data, BROKEN, encoded=True)
    assert isinstance(image, EncodedImage)
    region = image.region(11, 3, 140, 150, scale)
    assert region.shape == (round(151 / scale) - round(11 / scale), round(153 / scale) - round(3 / scale), 3)
    monkeypatch.setattr(turbojpeg, "library", lambda: None)
    assert np.array_equal(region, image.region(11, 3, 140, 150, scale))


def test_it_travels() -> None:
    image = read_image(jpeg(picture(30, 40)), BROKEN, encoded=True)
    assert isinstance(image, EncodedImage)
    assert pickle.loads(pickle.dumps(image)) == image
    assert image.nbytes == len(image.data)


def cmyk() -> bytes:
    return jpeg(PIL.Image.new("CMYK", (40, 30), (10, 20, 30, 40)))


def saved(kind: str) -> bytes:
    out = io.BytesIO()
    picture(30, 40).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    "data", [saved("PNG"), saved("WEBP"), saved("BMP"), cmyk()], ids=["png", "webp", "bmp", "cmyk"]
)
def test_other_images_are_decoded_at_once(data: bytes) -> None:
    image = read_image(data, BROKEN, encoded=True)
    assert isinstance(image, np.ndarray)
    assert np.array_equal(image, decode_image(data))
    assert decode_region(data, 0, 0, 30, 40) is None


def test_a_turned_image_stays_turned() -> None:
    """decode_image leaves the EXIF orientation alone, and so does a region."""
    exif = PIL.Image.Exif()
    exif[274] = 6
    data = jpeg(picture(60, 80), exif=exif)
    image = read_image(data, BROKEN, encoded=True)
    assert isinstance(image, EncodedImage)
    assert np.array_equal(image.region(5, 6, 30, 40), decode_image(data)[5:35, 6:46])


def test_exact_decodes_at_once() -> None:
    assert isinstance(read_image(jpeg(picture(30, 40)), BROKEN, encoded=False), np.ndarray)


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 3000))
def test_a_truncated_file_fails_in_the_same_words(cut: int) -> None:
    data = jpeg(picture(60, 80))[:-1][:cut]
    with pytest.raises(DecodeError) as full:
        decode_image(data)
    with pytest.raises(DecodeError) as caught:
        read_image(data, BROKEN, encoded=True)
    assert re.sub("0x\\w+", "", str(caught.value)) == re.sub("0x\\w+", "", str(full.value))  # Pillow names an object


@settings(max_examples=200, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(2, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6))
@example(flips=[(169, 0x14)])  # a header with the subsampling 4:4:1
def test_damage_is_an_error_of_the_image_or_goes_unnoticed(flips: list[tuple[int, int]]) -> None:
    data = bytearray(jpeg(picture(60, 80)))
    for place, value in flips:
        data[place % len(data)] = value
    # No other error, and nothing that harms the next image.
    with contextlib.suppress(DecodeError):
        image = read_image(bytes(data), BROKEN, encoded=True)
        if isinstance(image, EncodedImage):
            assert image.region(5, 6, 30, 40).dtype == np.uint8
    found = turbojpeg.library()
    assert found is not None
    assert turbojpeg._agrees(found)
