"""Decode image files to arrays: whole images, or the region that a transform needs.

Where it stops: a region at full scale is bit for bit that of the decoded image. A smaller scale is close to it: the caller decides.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import PIL.Image
from dataclasses import dataclass
from typing import Literal

from offload.pipeline.images import turbojpeg

Image = NDArray[np.uint8]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class DecodeError(ValueError):
    """The bytes are not a complete image."""


def decode_image(data: bytes) -> Image:
    """HWC uint8 RGB pixels of an encoded image, in memory of their own. Of pixels of 16 bits, the upper 8 remain.

    simplejpeg decodes JPEG (at 1.6 times Pillow's rate on one core), Pillow everything else. Raises DecodeError for
    corrupt, truncated or unknown data, and for pixels of 32 bits that 8 bits cannot hold.
    """
    if data[:2] == b"\xff\xd8":
        import simplejpeg

        try:
            pixels: Image = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except ValueError as error:
            # Not every JPEG that simplejpeg rejects is broken (harmless warnings): Pillow decides.
            return _decode_with_pillow(data, str(error))
        return pixels
    return _decode_with_pillow(data, "")


def _decode_with_pillow(data: bytes, reason: str) -> Image:
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return _rgb(image)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DecodeError(f"{error}{f' ({reason})' if reason else ''}" if data else "the file is empty") from None


def _rgb(image: PIL.Image.Image) -> Image:
    """The pixels as HWC uint8. Pillow itself clips grey pixels of more than 8 bits at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _of_grey((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        grey = np.asarray(image.convert("L"))
        if not np.array_equal(grey, np.asarray(image)):
            raise DecodeError(
                "8 bits cannot hold its pixels of 32 bits. Convert it, or read it in a data set of your own (offload.from_torch)"
            )
        return _of_grey(grey)
    # A copy: Pillow's own memory is read-only, and a transform may write to its sample.
    return np.array(image.convert("RGB"))


def _of_grey(pixels: Image) -> Image:
    return np.repeat(pixels[..., None], 3, axis=2)


Decode = Literal["auto", "exact"]
DECODE: tuple[Decode, ...] = ("auto", "exact")

_PLAIN = ("YCbCr", "RGB", "Gray")
_END, _NEAR_END = b"\xff\xd9", 64


class UndecodableError(DecodeError):
    """An image that its source passed on encoded is broken. The text is what the source says of such an image."""


@dataclass(frozen=True)
class EncodedImage:
    """A JPEG whose header was read. ``broken``: what the source says before the error of an image that cannot be decoded."""

    data: bytes
    height: int
    width: int
    broken: str

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def pixels(self) -> Image:
        """The whole image. Raises UndecodableError."""
        try:
            return decode_image(self.data)
        except DecodeError as error:
            raise UndecodableError(f"{self.broken}: {error}") from None

    def region(self, top: int, left: int, height: int, width: int, scale: int = 1) -> Image:
        """The pixels of a region, at 1/``scale`` of their number on each side: 1, 2, 4 or 8. Raises UndecodableError."""
        region = decode_region(self.data, top, left, height, width, scale)
        if region is None:
            # Whatever is wrong with the file, the full decode says it in its own words, or knows a way.
            region = self.pixels()[top : top + height, left : left + width]
        return np.ascontiguousarray(region)  # torch resizes a part of a larger image at two thirds of the rate


def read_image(data: bytes, broken: str, *, encoded: bool) -> EncodedImage | Image:
    """The decoded image. With ``encoded``, a plain JPEG stays encoded. Raises DecodeError without ``broken`` before it."""
    # A region's decoder does not read the data below it. The end's marker tells that the file is not truncated.
    if not encoded or data[:2] != b"\xff\xd8" or _END not in data[-_NEAR_END:]:
        return decode_image(data)
    import simplejpeg

    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return decode_image(data)
    return EncodedImage(data, height, width, broken) if colors in _PLAIN else decode_image(data)


def decode_region(data: bytes, top: int, left: int, height: int, width: int, scale: int = 1) -> Image | None:
    """A JPEG's region as HWC uint8 RGB, at 1/``scale``. None: this file, or this machine, needs the full decode.

    The box is in pixels of the full scale. A scaled region has the same bytes on nodes with and without TurboJPEG.
    """
    top, bottom, left, right = (round(edge / scale) for edge in (top, top + height, left, left + width))
    found = turbojpeg.library()
    header = found.header(data) if found is not None else None
    if found is not None and header is not None:
        region = found.region(data, header, top, left, bottom - top, right - left, scale)
        if region is not None:
            return region
    small = _scaled(data, scale) if scale > 1 else None
    return None if small is None else small[top:bottom, left:right]


def _scaled(data: bytes, scale: int) -> Image | None:
    """The whole image at 1/``scale``, which simplejpeg decodes on every machine."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        least = {"min_height": -(-height // scale), "min_width": -(-width // scale), "min_factor": scale}
        small: Image = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True, **least)
    except ValueError:
        return None
    return small
