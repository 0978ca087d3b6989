"""Files that are read by position: what they share, whatever reads a range."""

from __future__ import annotations

import io
import os


class Positioned(io.RawIOBase):
    """A file of a known size, in bytes. A subclass reads at ``_at``, and moves it on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at
