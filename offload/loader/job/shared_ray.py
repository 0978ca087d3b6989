"""The Ray that the ranks of a job share. On one machine, without an address, the first rank starts it and the others join."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import ray

from offload.loader.job.ranks import Ranks
from offload.preload.python import own_folder
from offload.process import forks
from offload.train.cluster.connection import ConnectedCluster, connected_as_library
from offload.train.cluster.ray_settings import token_in_use

OTHERS_S = 600.0  # time for the other ranks to finish with a Ray that this process started
LOOK_S = 0.5
TOKEN = "RAY_AUTH_TOKEN"


@contextmanager
def shared(job: Ranks, address: str | None) -> Iterator[ConnectedCluster]:
    """A connection to the cluster at ``address``; with ``"local"``, to a Ray of this machine that the job's ranks share."""
    named = address or os.environ.get("RAY_ADDRESS") or "local"
    if ray.is_initialized() or job.world_size == 1 or named != "local":
        with connected_as_library(address) as cluster:
            yield cluster
        return
    with _Meeting(job) as meeting, connected_as_library(meeting.address) as cluster:
        meeting.tell()
        yield cluster
        meeting.wait_for_others()


class _Meeting:
    """The ranks' meeting point: a file with the address and the token of their Ray, which only this user can read."""

    def __init__(self, job: Ranks) -> None:
        folder = Path(own_folder())
        self._path = folder / f"ranks-{job.name}.json"
        self._users = folder / f"ranks-{job.name}.users"
        self._lock: IO[bytes] | None = None
        self._mine: IO[bytes] | None = None
        self._token_before: str | None = None
        self.address: str | None = None

    def __enter__(self) -> _Meeting:
        # Only one rank looks and starts at a time; the others wait for the lock.
        self._lock = _opened(self._path.with_suffix(".lock"))
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._mine = _opened(self._users)
        # Every rank holds a shared lock on the users' file: the owner of Ray can tell whether any other is left.
        fcntl.flock(self._mine, fcntl.LOCK_SH)
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(self._path.read_text(encoding="utf-8"))
            os.kill(known["pid"], 0)  # a file may be left from a job whose first rank was killed
            self.address = known["address"]
            if known["token"]:
                self._token_before = os.environ.get(TOKEN, "")
                os.environ[TOKEN] = known["token"]
        return self

    @property
    def owner(self) -> bool:
        """Whether this rank starts Ray."""
        return self.address is None

    def tell(self) -> None:
        """Tell the other ranks where Ray is."""
        if self.owner:
            known = {
                "pid": os.getpid(),
                "address": ray.get_runtime_context().gcs_address,
                "token": token_in_use(),
            }
            written = self._path.with_suffix(f".{os.getpid()}")
            with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(known, file)
            written.replace(self._path)
        self._release()

    def wait_for_others(self) -> None:
        """Wait until no other rank uses the Ray that this one started.

        After an exception in the program, do not wait: the launcher must see this rank's end before it ends the others.
        """
        if not self.owner or self._mine is None or hasattr(sys, "last_value"):
            return
        until = time.monotonic() + OTHERS_S
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOOK_S)

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.owner:  # the lock's file stays: others may wait for it
            self._path.unlink(missing_ok=True)
            self._users.unlink(missing_ok=True)
        if self._mine is not None:
            fcntl.flock(self._mine, fcntl.LOCK_UN)
            self._mine.close()

    def _release(self) -> None:
        if self._token_before is not None:  # programs that the user starts later must not inherit the token
            os.environ.pop(TOKEN, None)
            if self._token_before:
                os.environ[TOKEN] = self._token_before
            self._token_before = None
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None


def _opened(path: Path) -> IO[bytes]:
    return forks.locked_file(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
