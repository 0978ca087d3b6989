"""The settings that a connection to Ray changes in this process. They end with the connection, whoever ends it.

Ray's library keeps the authentication mode and the token of the first cluster that it uses, and would use them for the user's next one.
It also keeps a level of its logger, and raises the limit on open files. Only this module touches Ray's private interface to them.

Where it stops: a connection that the user's code has made stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.worker
import ray._raylet

from offload.process.program_state import restored

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
                _read_anew()
        else:
            with _until_its_end():
                yield


@contextmanager
def _until_its_end() -> Iterator[None]:
    level, files = LOGGER.level, resource.getrlimit(resource.RLIMIT_NOFILE)
    _read_anew()  # the user's code may have used another cluster
    try:
        with restored():
            yield
    finally:
        before = (level, LOGGER.level, files, resource.getrlimit(resource.RLIMIT_NOFILE))
        node: Any = ray._private.worker._global_node
        if node is None:
            _end(*before)
        else:
            # ray.shutdown() drops the last reference, in our code and in the user's.
            weakref.finalize(node, _end, *before).atexit = False


def _end(level: int, level_then: int, files: tuple[int, int], files_then: tuple[int, int]) -> None:
    """Undo the changes, unless the user's code has changed the same settings since."""
    _read_anew()
    if LOGGER.level == level_then:
        LOGGER.setLevel(level)
    if resource.getrlimit(resource.RLIMIT_NOFILE) == files_then:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)


def _read_anew() -> None:
    """Make Ray's library read the mode and the token from the environment again when it next needs them."""
    library: Any = ray._raylet
    with contextlib.suppress(AttributeError):
        library.Config.initialize("")
        library.AuthenticationTokenLoader.instance().reset_cache()


def uses_token() -> bool:
    """Return whether Ray's library authenticates itself by a token."""
    library: Any = ray._raylet
    return bool(library.get_authentication_mode() == library.AuthenticationMode.TOKEN)


def token_in_use() -> str:
    """The token of this process's connection; empty if it needs none."""
    library: Any = ray._raylet
    return str(library.AuthenticationTokenLoader.instance().get_raw_token()) if uses_token() else ""
