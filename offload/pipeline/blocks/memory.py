"""Memory for blocks: reused for blocks that a process receives, and writable for blocks of the object store.

The kernel clears fresh pages before it hands them out. For a block of 40 MB, that takes as long as receiving it, so a receiver uses its
memory again and again. Ray hands out its object store's memory as read-only. But every row of a block has exactly one reader, which may
write to it. torch has no read-only tensors: an in-place operation on a read-only mapping would crash the process.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, TypeAlias

import numpy as np

from offload.process import forks

Bytes: TypeAlias = np.ndarray[Any, Any]
"""An array of uint8."""


class ReusedMemory:
    """Keeps up to ``kept_bytes`` of memory that nobody uses."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._free: list[Bytes] = []
        self._lent_bytes = 0
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()

    def lend(self, size: int) -> Bytes:
        """Lend ``size`` bytes of any content. Once nobody refers to the array or a view of it, its memory is reused."""
        with self._lock:
            fits = [memory for memory in self._free if size <= len(memory) <= 2 * size]  # a larger one would be wasted
            # An eighth of slack: the next block may have a few more rows.
            whole = min(fits, key=len) if fits else np.empty(size + size // 8, np.uint8)
            self._free = [memory for memory in self._free if memory is not whole]
            self._lent_bytes += len(whole)
        # Not a slice of `whole`: views of it would refer to `whole`, and nobody would notice the end of the last one.
        lent = np.frombuffer(whole.data[:size], np.uint8)
        weakref.finalize(lent, self._give_back, whole).atexit = False
        return lent

    def lent_bytes(self) -> int:
        """The bytes in use, of arrays as they were allocated."""
        with self._lock:
            self._count_dropped()
            return self._lent_bytes

    def _give_back(self, whole: Bytes) -> None:
        # The garbage collector calls this on any thread, perhaps within one of these methods: it must not wait for the lock.
        if not self._lock.acquire(blocking=False):
            self._dropped.append(len(whole))
            return
        try:
            self._count_dropped()
            self._lent_bytes -= len(whole)
            self._free.append(whole)
            while sum(map(len, self._free)) > self._kept_bytes:
                del self._free[0]  # the oldest: blocks may have another size now
        finally:
            self._lock.release()

    def _count_dropped(self) -> None:
        while self._dropped:
            self._lent_bytes -= self._dropped.popleft()


class _OwnedMemory:
    """The memory of an array, as NumPy's array interface describes it, but writable. It keeps the array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._owner = array
        address = array.__array_interface__["data"][0]
        forks.keeps(self)  # a fork's copy must not release the block in Ray
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as a writable array."""
    return array if array.flags.writeable else np.asarray(_OwnedMemory(array))
