"""The server of a Ray that this process is about to start: it imports while the driver still lists its data and starts Ray.

Without it, the first process of a run would start the server (:mod:`offload.preload.python`), seconds after ``fit()`` was called. This
server belongs to the driver: it ends when the driver says so, or has ended. It serves the processes of one Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload.preload.python import driver_path
from offload.process import forks
from offload.ray_private.preload import SERVER

STDIN = "-"  # an owner for :mod:`offload.ray_private.preload.server`, which imports Ray: this module must not
FIRST_JOB = "01000000"
"""The id of a new Ray's first job, which is the driver's. Ray's library keeps the job, the raylet and the authentication that it
finds in its environment when it is loaded."""
NO_TITLES = {"SPT_NOENV": "1"}
"""As Ray does for its workers: a process title must not overwrite the environment, by which :func:`offload.train.cluster.reaper.marked`
recognises processes."""

READ_AT_IMPORT = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "PYTORCH_",
    "TORCH",
    "NCCL_",
    "LD_",
    "PYTHON",
    "RAY_TRAIN_",
    "CUDA_VISIBLE",
)


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A server that has been started. ``mark``: the mark of the Ray to come, in the server's environment; ``read``: the variables of
    the driver at that time that libraries read when they are imported."""

    key: str
    mark: str
    read: Mapping[str, str]
    process: subprocess.Popen[bytes]
    link: socket.socket

    @property
    def current(self) -> bool:
        """Whether the server lives, and libraries would be imported with the same settings now."""
        return self.process.poll() is None and self.read == _read_at_import()

    def tell(self, raylet: int, environment: Mapping[str, str]) -> None:
        """Tell the server of the raylet and of Ray's settings in its environment, without which it cannot import Ray."""
        settings = {name: value for name, value in environment.items() if name.startswith("RAY_")}
        settings |= {"RAY_RAYLET_PID": str(raylet), "RAY_JOB_ID": FIRST_JOB}
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(settings).encode() + b"\n")

    def end(self) -> None:
        """Let the server end with its processes. Does not wait."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)  # also ends the copies that the user's forks may have
        self.link.close()
        # Or it would stay a zombie. While Python ends (from 3.12 on), no thread starts, and none is needed.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.process.wait, daemon=True).start()


def _read_at_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}


_now: Ahead | None = None


def key() -> str | None:
    """The key of this process's server; None if there is none."""
    return None if _now is None else _now.key


@contextlib.contextmanager
def serving(
    modules: Sequence[str], then: Sequence[str], *, mark_name: str, mark: str, env: Mapping[str, str]
) -> Iterator[str]:
    """A context in which a server of this process runs; it yields the server's mark.

    An enclosing context's server is used, and ended with this context, unless the environment has changed since. On any error the
    processes do without.

    Args:
        modules: what the server imports before it serves.
        then: what it imports afterwards, while it has nothing else to do.
        mark_name, mark: an environment variable of the server.
        env: environment variables that this process may lack.
    """
    global _now
    if _now is not None and not _now.current:
        end()
    if _now is None:
        with contextlib.suppress(OSError):
            _now = _started(modules, then, mark_name, mark, env)
    try:
        yield mark if _now is None else _now.mark
    finally:
        end()


def tell(raylet: int, environment: Mapping[str, str]) -> None:
    """Tell this process's server, if there is one, of the raylet whose processes it will fork, and of the raylet's environment."""
    if _now is not None:
        _now.tell(raylet, environment)


def end() -> None:
    """End this process's server, if there is one."""
    global _now
    if _now is not None:
        _now.end()
        _now = None


def _started(modules: Sequence[str], then: Sequence[str], mark_name: str, mark: str, env: Mapping[str, str]) -> Ahead:
    key = uuid.uuid4().hex
    path = driver_path(key)
    ours, its = socket.socketpair()
    forks.closes(ours)  # the server ends with this process
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        server = str(SERVER)
        flags = ["-s"] if sys.flags.no_user_site else []
        process = subprocess.Popen(
            [sys.executable, *flags, server, path, ",".join(modules), STDIN, str(lock), ",".join(then)],
            stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**env, **os.environ, **NO_TITLES, mark_name: mark}, pass_fds=[lock], start_new_session=True,
        )  # fmt: skip
    except OSError:
        ours.close()
        raise
    finally:
        its.close()
        os.close(lock)
    return Ahead(key=key, mark=mark, read=_read_at_import(), process=process, link=ours)
