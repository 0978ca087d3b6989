"""Decode image files to arrays."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import PIL.Image


Image = NDArray[np.uint8]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class DecodeError(ValueError):
    """The bytes are not a complete image."""


def decode_image(data: bytes) -> Image:
    """Return an encoded image's HWC uint8 RGB pixels, in memory of their own. 16-bit pixels keep their upper 8 bits.

    simplejpeg decodes JPEG (at 1.6 times Pillow's rate on one core), Pillow everything else. Raises DecodeError for
    corrupt, truncated or unknown data, and for 32-bit pixels that 8 bits cannot hold.
    """
    if data[:2] == b"\xff\xd8":
        import simplejpeg

        try:
            # Strict: otherwise, a truncated file would give grey pixels and no error.
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
