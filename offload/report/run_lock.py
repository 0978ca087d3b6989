"""The lock of a run directory: a second run there would mix its files with those of the first, or remove its checkpoints.

The operating system frees the lock with the process that holds it, however that ends, and whatever its forks still do. File systems
without locks get none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from offload.errors import ConfigError, argument
from offload.process import forks

_LOCK = ".offload.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that holds the lock of a run directory. Raises ConfigError if another run holds it."""
    path = folder / _LOCK
    file = _open_locked(path)
    try:
        yield
    finally:
        if file is not None and not file.closed:  # a fork has closed it
            with contextlib.suppress(OSError):  # before the lock is free: later it may be another's
                path.unlink()
            file.close()


def _open_locked(path: Path) -> IO[bytes] | None:
    """The lock's file, or None where it cannot be locked."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:  # its holder has ended just now, and removed it
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(fd, 1000, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise ConfigError(
                f"a run trains in {path.parent} already: {holder}. Wait until it ends, or choose another {argument('run_dir')}."
            ) from None
        except OSError:
            os.close(fd)
            return None
        return forks.locked_file(fd)
