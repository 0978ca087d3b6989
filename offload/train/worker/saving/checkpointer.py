"""Store a worker's checkpoints, and find the one from which to resume."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offload.errors import RunError
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.format import Training
from offload.train.checkpoints.local_copy import local_copy
from offload.train.checkpoints.retention import Entry, to_remove
from offload.train.checkpoints.run_folder import Found, RunFolder, new_name
from offload.train.checkpoints.storage import Storage, reason_of
from offload.train.config import Checkpoints
from offload.train.worker.links.peers import Talk

TURN_S = 60.0  # ranks tell each other this often that a checkpoint is still being written: a message has a deadline, a checkpoint none
LEAVE_S = 60.0  # time for a checkpoint that is being written while its process fails

CheckpointContent = tuple[dict[str, Any], dict[str, Any]]
"""The states of the model and of its training, as plain data."""


class Stored(Protocol):
    """A checkpoint of the run."""

    def read(self) -> tuple[dict[str, Any], Training]:
        """Read the checkpoint's content. Raises RunError if it is damaged."""


class Checkpointer(Protocol):
    """The checkpoints of a run. All ranks must call each method but :meth:`close`.

    Attributes:
        storing: whether this rank is writing a checkpoint without training waiting for it.
        failed: whether it could not write one. The next call of :meth:`keep` or :meth:`settle` raises the error.
    """

    @property
    def storing(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def newest(self) -> Stored | None:
        """The checkpoint from which to resume; None for a new run."""

    def before(self, newest: Any) -> Sequence[Stored]:
        """The older checkpoints, newest first."""

    def keep(self, metrics: Mapping[str, Any], content: CheckpointContent | None, *, wait: bool) -> None:
        """Store a checkpoint. ``content`` is None on ranks that do not write. Without ``wait``, training goes on meanwhile, and must not
        change the content.

        Raises RunError on all ranks if the storage refuses it, or has refused the one before.
        """

    def settle(self) -> None:
        """Wait until every checkpoint is stored. Raises RunError on all ranks if the storage refuses one."""

    def close(self) -> None:
        """End, while the process fails: give a checkpoint that this rank is writing some time. Raises nothing."""


class FolderStored:
    """A checkpoint in the folder of a run."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.name = name
        self._folder = folder

    def read(self) -> tuple[dict[str, Any], Training]:
        path = self._folder.path_of(self.name)
        # The workers of a node share one copy of a remote checkpoint.
        with local_copy(self._folder.fs, path) as local:
            return checkpoints.load(local, called=path)


class FolderCheckpointer:
    """The checkpoints of one rank in the folder of its run. Rank 0 lists, writes and removes for all.

    It writes in a thread, one checkpoint at a time.

    Args:
        storage, name: the storage, and the name of the run's folder in it.
        settings: how many checkpoints to keep.
        talk: the other ranks' training threads.
    """

    def __init__(self, storage: Storage, name: str, settings: Checkpoints, talk: Talk) -> None:
        self._folder, self._settings, self._talk = RunFolder(storage, name), settings, talk
        self._names: list[str] = []  # the checkpoints that the run began with, oldest first
        self._idle = threading.Event()
        self._idle.set()
        self._error: str | None = None

    @property
    def storing(self) -> bool:
        return not self._idle.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def newest(self) -> FolderStored | None:
        names, error = self._talk.broadcast(self._look() if self._talk.rank == 0 else None, 0)
        if error is not None:
            raise RunError(error)
        self._names = list(names)
        return FolderStored(self._folder, self._names[-1]) if self._names else None

    def before(self, newest: FolderStored) -> list[FolderStored]:
        return [FolderStored(self._folder, name) for name in reversed(self._names) if name < newest.name]

    def keep(self, metrics: Mapping[str, Any], content: CheckpointContent | None, *, wait: bool) -> None:
        self.settle()  # the order of checkpoints is that of the calls
        if content is not None:
            assert self._talk.rank == 0, "another rank than 0 writes"
            self._idle.clear()
            threading.Thread(
                target=self._write, args=(dict(metrics), content), daemon=True, name="offload-checkpoint"
            ).start()
        if wait:
            self.settle()

    def settle(self) -> None:
        while True:
            if self._talk.rank == 0:
                self._idle.wait(TURN_S)
            # All ranks leave the loop with the same message, so none runs ahead.
            idle, error = self._talk.broadcast((self._idle.is_set(), self._error), 0)
            if idle:
                break
        # Raised once. The next checkpoint may succeed, for example once there is room again.
        self._error = None
        if error is not None:
            raise RunError(error)

    def close(self) -> None:
        self._idle.wait(LEAVE_S)

    def _look(self) -> tuple[list[str], str | None]:
        """The names of the checkpoints to resume from, oldest first, or the error. Remove what an earlier process has begun to write: it
        would take the room of the next one."""
        try:
            found = self._folder.look()
        except Exception as error:  # fsspec's file systems pass on their clients' own errors
            return [], (
                f"the checkpoints of this run could not be listed: {reason_of(error)}. The same command resumes from the last one."
            )
        self._remove([each.name for each in found if each.state == "unfinished"])
        if not any(each.state == "whole" for each in found):
            return [], None
        # Reading a damaged one reports the damage and falls back to the one before.
        return [each.name for each in found if each.state in ("whole", "damaged")], None

    def _write(self, metrics: dict[str, Any], content: CheckpointContent) -> None:
        """Write a checkpoint, in a thread of its own."""
        try:
            self._store(metrics, content)
        except RunError as error:
            self._error = str(error)
        except Exception as error:  # fsspec's file systems pass on their clients' own errors
            self._error = str(_storage_error(error))
        finally:
            self._idle.set()

    def _store(self, metrics: dict[str, Any], content: CheckpointContent) -> None:
        with _written(metrics, content) as files:
            before = self._folder.look()
            name = new_name([each.name for each in before])
            try:
                self._folder.put(name, files)
            except Exception:
                self._remove([name])  # its remains would take the room of the next one
                raise
        # Only now: until the new one is complete, an older one may be the only whole checkpoint.
        self._remove(self._replaced(before, Entry(name=name, metrics=metrics)))

    def _replaced(self, before: Sequence[Found], new: Entry) -> list[str]:
        """The names of the folders to remove once there is a new checkpoint beside those before."""
        useless = [each.name for each in before if each.state in ("unfinished", "damaged")]
        try:
            entries = self._folder.entries(before)
        except Exception:  # the storage does not answer; the next checkpoint's removal makes up for it
            return useless
        return [*useless, *to_remove([*entries, new], self._settings)]

    def _remove(self, names: Sequence[str]) -> None:
        """Remove folders. A storage that allows no removal does not end the run: the next checkpoint tries again."""
        for name in names:
            with contextlib.suppress(Exception):
                self._folder.remove(name)


@contextlib.contextmanager
def _written(metrics: Mapping[str, Any], content: CheckpointContent) -> Iterator[Path]:
    """A temporary folder with the files of a checkpoint, before the storage gets them. Raises RunError if it cannot be written."""
    with _writing():
        folder = Path(tempfile.mkdtemp(prefix="offload-"))
    try:
        with _writing():
            checkpoints.save(folder, *content, metrics)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """A context in which a checkpoint is written on this host, before the storage gets it. Raises RunError if that fails."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"a checkpoint could not be written to a temporary folder of {socket.gethostname()}: {reason_of(error)}. Free space in "
            f"{tempfile.tempdir or 'it'}, or name another folder there with TMPDIR; the same command then resumes from the last checkpoint."
        ) from None


def _storage_error(error: Exception) -> RunError:
    return RunError(
        f"the checkpoint could not be stored: {reason_of(error)}. Free space or allow writing there, or choose "
        "another storage_path; the same command then resumes from the last checkpoint."
    )
