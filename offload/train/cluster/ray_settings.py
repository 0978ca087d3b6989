"""The settings that a connection to Ray changes in this process. They end with the connection, whoever ends it.

Ray's library keeps the authentication mode and the token of the first cluster that it uses, and would use them for the user's next one.
It also keeps a level of its logger, and raises the limit on open files.

Where it stops: a connection that the user's code has made stays as it is. :mod:`offload.ray_private.library_settings` knows Ray's library.
"""

from __future__ import annotations

import logging
import resource
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from offload.process.program_state import restored
from offload.ray_private.library_settings import connection, read_anew, token_in_use, uses_token

__all__ = ["settled", "token_in_use", "uses_token"]

LOGGER = logging.getLogger("ray")
_settling = threading.RLock()  # the settings belong to the process: threads that query several clusters take turns


@contextmanager
def settled() -> Iterator[None]:
    """A context for calls that query, join or start a cluster. It restores the process's settings at its end, except those that a new
    connection needs: they end with the connection."""
    with _settling:
        if ray.is_initialized():
            by_token = uses_token()
            with restored():
                yield
            if uses_token() != by_token:
                read_anew()
        else:
            with _until_its_end():
                yield


@contextmanager
def _until_its_end() -> Iterator[None]:
    level, files = LOGGER.level, resource.getrlimit(resource.RLIMIT_NOFILE)
    read_anew()  # the user's code may have used another cluster
    try:
        with restored():
            yield
    finally:
        before = (level, LOGGER.level, files, resource.getrlimit(resource.RLIMIT_NOFILE))
        if not ray.is_initialized():
            _end(*before)
        elif (known := connection()) is not None:
            # ray.shutdown() drops the last reference, in our code and in the user's.
            weakref.finalize(known, _end, *before).atexit = False


def _end(level: int, level_then: int, files: tuple[int, int], files_then: tuple[int, int]) -> None:
    """Undo the changes, unless the user's code has changed the same settings since."""
    read_anew()
    if LOGGER.level == level_then:
        LOGGER.setLevel(level)
    if resource.getrlimit(resource.RLIMIT_NOFILE) == files_then:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
