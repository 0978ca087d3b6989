"""A folder of files that one process needs for a while. It is for this user alone, and goes when its process closes it or ends.

A killed process leaves its folder behind. The lock in it is free then, so that the next process of the host that makes a folder there
removes it. Other hosts may share the disk, and not every shared disk knows their locks: they leave it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path
from typing import IO

from offload import forks

_PREFIX = f"offload-index-{socket.gethostname()}-"
_LOCK = "lock"


class OwnedFolder:
    """A folder that this process owns. ``path``: where it is."""

    def __init__(self, parent: Path) -> None:
        """Make a folder in ``parent``. Raises OSError."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = forks.locked_file(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # it tells others that the owner lives
            except OSError:  # the disk knows no locks
                self._lock.close()
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            if os.fstat(self._lock.fileno()).st_nlink:
                break
            self._lock.close()  # another process took the folder for one that was left behind
        self._end = weakref.finalize(self, _end, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder, if it is still there."""
        self._end()

    def give(self, path: Path) -> None:
        """Rename the folder, which nobody owns any more. Raises OSError."""
        os.rename(self.path, path)
        self._end.detach()
        self._lock.close()
        (path / _LOCK).unlink()


def _end(path: Path, lock: IO[bytes], pid: int) -> None:
    if os.getpid() != pid:  # a fork, whose parent still needs the folder
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def remove_left(parent: Path) -> None:
    """Remove the folders of owners that were killed."""
    left: list[Path] = []
    with contextlib.suppress(OSError):
        left = list(parent.glob(f"{_PREFIX}*"))
    for path in left:
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
