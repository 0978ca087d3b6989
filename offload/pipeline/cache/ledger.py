"""The bytes that a cache uses, as a number that all processes of a node share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

_NUMBER = struct.Struct("<q")


class Ledger:
    """A number of bytes in a file. Read and change it only while it is held.

    Whoever adds bytes writes the number first, and whoever removes bytes writes it last. A process that is killed in between leaves a
    number that is too large, never one that is too small.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()  # a file lock belongs to the process, not to a thread
        with self.held():
            if os.fstat(self._fd).st_size != _NUMBER.size:
                self.used = 0  # on a full disk this fails now, and no later write needs space

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other threads and processes out."""
        with self._lock:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # in here, since a signal's handler may raise right after it
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def used(self) -> int:
        """The bytes in use."""
        return int(_NUMBER.unpack(os.pread(self._fd, _NUMBER.size, 0))[0])

    @used.setter
    def used(self, number: int) -> None:
        os.pwrite(self._fd, _NUMBER.pack(max(number, 0)), 0)
