"""Read what a run directory's files have gained since the last look, here or, through the run's hub, on another host.

Where it stops: :mod:`offload.report.page.records` knows what the lines mean.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError
from offload.report.run_dir import EVENTS, METRICS, SKIPPED, SUMMARY


class RunOverError(Exception):
    """A run has ended, and this host does not see its files."""


FILES = (EVENTS, METRICS, SKIPPED, SUMMARY)
MOST_BYTES = 4 << 20  # of each file at a time


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What a file holds from an offset on.

    Args:
        data: at most ``MOST_BYTES`` bytes.
        size: the bytes of the whole file.
        file: a number that changes if another file takes the name.
    """

    data: bytes
    size: int
    file: int


Tails = dict[str, Tail]
Look = Callable[[Mapping[str, int]], Tails]
"""A function that gets offsets by file name, and returns the tails of those files that exist."""


def tails_in(path: Path) -> Look:
    """A function that reads the files of a run directory on this host. It raises ConfigError if one cannot be read."""
    return lambda offsets: {name: tail for name in FILES if (tail := _tail(path / name, offsets.get(name, 0)))}


def _tail(path: Path, offset: int) -> Tail | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would wait for a writer forever
            raise ConfigError(f"{path} is no ordinary file. Name the folder of a run.")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            file.seek(offset)
            return Tail(data=file.read(MOST_BYTES), size=found.st_size, file=found.st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
