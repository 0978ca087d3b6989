"""Encoded images, which a transform decodes only as far as it needs.

Where it stops: a region at full scale equals that of the decoded image bit for bit. A smaller scale is only close: the caller decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from offload.pipeline.images import turbojpeg
from offload.pipeline.images.decode import DecodeError, Image, decode_image

Decode = Literal["auto", "exact"]


DECODE: tuple[Decode, ...] = ("auto", "exact")


_PLAIN = ("YCbCr", "RGB", "Gray")


_END, _NEAR_END = b"\xff\xd9", 64

# What simplejpeg raises for a header: it knows no name for the subsampling 4:4:1, and raises KeyError.
_UNREADABLE = (ValueError, KeyError)


class UndecodableError(DecodeError):
    """An image that its source passed on encoded is broken. The text begins with the source's own words for that."""


@dataclass(frozen=True)
class EncodedImage:
    """A JPEG whose header was read. ``broken``: the source's words for an image that cannot be decoded, before the error."""

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
            # The full decode may still succeed, or says in its own words what is wrong with the file.
            region = self.pixels()[top : top + height, left : left + width]
        return np.ascontiguousarray(region)  # torch resizes a part of a larger image at two thirds of the rate


def read_image(data: bytes, broken: str, *, encoded: bool) -> EncodedImage | Image:
    """The decoded image. With ``encoded``, a plain JPEG stays encoded. Raises DecodeError without ``broken`` before it."""
    # Decoding a region does not read the data below it, so the end marker must show that the file is complete.
    if not encoded or data[:2] != b"\xff\xd8" or _END not in data[-_NEAR_END:]:
        return decode_image(data)
    import simplejpeg

    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except _UNREADABLE:
        return decode_image(data)
    return EncodedImage(data, height, width, broken) if colors in _PLAIN else decode_image(data)


def decode_region(data: bytes, top: int, left: int, height: int, width: int, scale: int = 1) -> Image | None:
    """A JPEG's region as HWC uint8 RGB, at 1/``scale``. None: this file, or this machine, needs the full decode.

    The box is in pixels of the full scale. A scaled region has the same bytes on nodes with and without TurboJPEG.
    """
    # Edges, not sizes: neighbouring regions then meet at any scale.
    top, bottom, left, right = (round(edge / scale) for edge in (top, top + height, left, left + width))
    library = turbojpeg.library()
    header = library.header(data) if library is not None else None
    if library is not None and header is not None:
        region = library.region(data, header, top, left, bottom - top, right - left, scale)
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
    except _UNREADABLE:
        return None
    return small
