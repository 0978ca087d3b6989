"""Decode image files to arrays."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class DecodeError(ValueError):
    """The bytes are not a complete image."""


def decode_image(data: bytes) -> Image:
    """HWC uint8 RGB pixels of an encoded image.

    simplejpeg decodes JPEG (at 1.6 times Pillow's rate on one core), Pillow everything else. Raises DecodeError for
    corrupt, truncated or unknown data.
    """
    if data[:2] == b"\xff\xd8":
        import simplejpeg

        try:
            pixels: Image = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except ValueError as error:
            # Not every JPEG that simplejpeg rejects is broken (CMYK, harmless warnings): Pillow decides.
            return _decode_with_pillow(data, str(error))
        return pixels
    return _decode_with_pillow(data, "")


def _decode_with_pillow(data: bytes, reason: str) -> Image:
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DecodeError(f"{error}{f' ({reason})' if reason else ''}" if data else "the file is empty") from None
