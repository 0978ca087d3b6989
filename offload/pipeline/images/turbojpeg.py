"""Decode a region of a JPEG with the TurboJPEG 3 C API.

simplejpeg decodes whole images only. The documented functions ``tj3*`` also decode a region: they skip the transform, upsampling and
colours of all other pixels. Where it stops: without such a library, :func:`library` is None and callers decode whole images.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.pipeline.images.decode import Image, decode_image

# From turbojpeg.h, whose numbers are part of its ABI.
_DECOMPRESS = 1
_RGB = 0
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLORSPACE = 0, 4, 5, 6, 7, 8
_ARITHMETIC, _LOSSLESS = 14, 15
_YCBCR_RGB_GRAY = (0, 1, 2)
_BLOCK_WIDTH = {0: 8, 1: 16, 2: 16, 3: 8, 4: 8, 5: 32, 6: 8}
"""The width of an iMCU by subsampling (4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1). A region begins at a multiple of it."""
_AROUND = 4
"""Pixels decoded on each side of a region: upsampled chroma depends on the pixels beside it."""


class _Factor(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tj3Init": (ctypes.c_void_p, (ctypes.c_int,)),
    "tj3Destroy": (None, (ctypes.c_void_p,)),
    "tj3Set": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)),
    "tj3Get": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "tj3DecompressHeader": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
    "tj3SetScalingFactor": (ctypes.c_int, (ctypes.c_void_p, _Factor)),
    "tj3SetCroppingRegion": (ctypes.c_int, (ctypes.c_void_p, _Region)),
    "tj3Decompress8": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    ),
}


@dataclass(frozen=True)
class Header:
    """The size of a JPEG whose regions can be decoded. ``block``: the width at whose multiples a region begins."""

    height: int
    width: int
    block: int


class TurboJpeg:
    """A loaded library. Each thread gets a decoder of its own."""

    def __init__(self, path: str) -> None:
        """Raises OSError or AttributeError if the file is no TurboJPEG 3 library."""
        self.path = path
        self._library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        # A decoder holds the state of one file.
        self._local = threading.local()

    def header(self, data: bytes) -> Header | None:
        """The header, or None if only the whole image can be decoded: CMYK, 12 bits, arithmetic coding, damage."""
        tj, decoder = self._library, self._decoder()
        if tj.tj3DecompressHeader(decoder, data, len(data)):
            self._local.decoder = None  # a decoder that failed may refuse the next file too
            return None
        block = _BLOCK_WIDTH.get(tj.tj3Get(decoder, _SUBSAMPLING))
        plain = (
            tj.tj3Get(decoder, _COLORSPACE) in _YCBCR_RGB_GRAY
            and tj.tj3Get(decoder, _PRECISION) == 8
            and tj.tj3Get(decoder, _ARITHMETIC) == tj.tj3Get(decoder, _LOSSLESS) == 0
        )
        if block is None or not plain:
            return None
        return Header(tj.tj3Get(decoder, _HEIGHT), tj.tj3Get(decoder, _WIDTH), block)

    def region(
        self, data: bytes, header: Header, top: int, left: int, height: int, width: int, scale: int = 1
    ) -> Image | None:
        """The pixels of a region at 1/``scale``, bit for bit those of the whole image.

        None if the library warns of anything in the file.
        """
        tj, decoder = self._library, self._decoder()
        block = -(-header.block // scale)
        # Down to a multiple of the block, which the library demands for columns, but not for rows.
        x = max(left - _AROUND, 0) // block * block
        y = max(top - _AROUND, 0)
        stop_x = min(left + width + _AROUND, -(-header.width // scale))
        stop_y = min(top + height + _AROUND, -(-header.height // scale))
        pixels = np.empty((stop_y - y, stop_x - x, 3), dtype=np.uint8)
        # The region is set after the header of the same file: the library checks one against the other.
        failed = (
            tj.tj3DecompressHeader(decoder, data, len(data))
            or tj.tj3SetScalingFactor(decoder, _Factor(1, scale))
            or tj.tj3SetCroppingRegion(decoder, _Region(x, y, stop_x - x, stop_y - y))
            or tj.tj3Decompress8(decoder, data, len(data), pixels.ctypes.data, 0, _RGB)
        )
        if failed:
            self._local.decoder = None
            return None
        return pixels[top - y : top - y + height, left - x : left - x + width]

    def _decoder(self) -> int:
        decoder: _Decoder | None = getattr(self._local, "decoder", None)
        if decoder is None:
            decoder = self._local.decoder = _Decoder(self._library)
        return decoder.handle


class _Decoder:
    """A handle that is freed with its thread."""

    def __init__(self, library: Any) -> None:
        self._destroy = library.tj3Destroy
        self.handle: int = library.tj3Init(_DECOMPRESS)
        if not self.handle:
            raise MemoryError("no memory for a JPEG decoder")
        # Stop at a warning: the full decode decides whether the file is good, with the same words on all machines.
        library.tj3Set(self.handle, _STOP_ON_WARNING, 1)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self._destroy(self.handle)


@functools.cache
def library() -> TurboJpeg | None:
    """The first library on this machine that passes a test; None if there is none."""
    for path in _candidates():
        try:
            candidate = TurboJpeg(path)
        except (OSError, AttributeError):  # no such file, or TurboJPEG 2
            continue
        if _agrees(candidate):
            return candidate
    return None


def _candidates() -> Iterator[str]:
    """The environment's own library, then that of the extra ``regions``."""
    yield os.path.join(sys.prefix, "lib", "libturbojpeg.so.0")
    yield "libturbojpeg.so.0"
    spec = importlib.util.find_spec("pylibjxl")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        # Its extension module exports the whole TurboJPEG API, but its Python functions decode whole images only.
        yield from sorted(glob.glob(os.path.join(folder, "_pylibjxl*.so")))


def _agrees(library: TurboJpeg) -> bool:
    """Return whether the library's regions are those of simplejpeg: another version might round differently."""
    import simplejpeg

    y, x = np.mgrid[:80, :96]
    picture = np.stack([x * 5 % 256, y * 3 + x, (x * y) % 251], axis=-1).astype(np.uint8)
    for subsampling in ("420", "422", "444"):
        data = simplejpeg.encode_jpeg(picture, quality=85, colorsubsampling=subsampling)
        header = library.header(data)
        if header is None or (header.height, header.width) != (80, 96):
            return False
        region = library.region(data, header, 27, 37, 30, 41)
        if region is None or not np.array_equal(region, decode_image(data)[27:57, 37:78]):
            return False
    return True
