"""Store a worker's checkpoints, and find the one from which to resume."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray.train

from offload.errors import RunError
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.format import Training
from offload.train.checkpoints.storage import reason_of

CheckpointContent = tuple[dict[str, Any], dict[str, Any]]
"""The states of the model and of its training, as plain data."""


class Stored(Protocol):
    """A checkpoint of the run."""

    def read(self) -> tuple[dict[str, Any], Training]:
        """Read the checkpoint's content. Raises RunError if it is damaged."""


class Checkpointer(Protocol):
    """The checkpoints of a run. ``storing``: whether the run is writing a checkpoint without waiting for it."""

    @property
    def storing(self) -> bool: ...

    def newest(self) -> Stored | None:
        """The checkpoint from which to resume; None for a new run."""

    def before(self, newest: Any) -> Sequence[Stored]:
        """The older checkpoints, newest first."""

    def keep(self, metrics: Mapping[str, Any], content: CheckpointContent | None, *, wait: bool) -> None:
        """Store a checkpoint. All ranks must call it; ``content`` is None on ranks that do not write. Without ``wait``, training goes on
        meanwhile, and must not change the content.

        Raises RunError if the storage refuses it; without ``wait``, the error ends the run later.
        """


class RayStored:
    """A checkpoint in Ray Train's list."""

    def __init__(self, checkpoint: Any) -> None:
        self.path = str(checkpoint.path)
        self._checkpoint = checkpoint

    def read(self) -> tuple[dict[str, Any], Training]:
        with self._checkpoint.as_directory() as folder:
            return checkpoints.load(Path(folder), called=self.path)


class RayCheckpointer:
    """The checkpoints of a run, stored through Ray Train."""

    def __init__(self) -> None:
        self._storing = False

    @property
    def storing(self) -> bool:
        return self._storing

    def newest(self) -> RayStored | None:
        checkpoint = ray.train.get_checkpoint()
        return None if checkpoint is None else RayStored(checkpoint)

    def before(self, newest: RayStored) -> list[RayStored]:
        known = [RayStored(reported.checkpoint) for reported in ray.train.get_all_reported_checkpoints()]
        # Ray Train sorts its list by score if the run keeps the best. The names of the folders begin with the time.
        known.sort(key=lambda stored: stored.path, reverse=True)
        return [stored for stored in known if stored.path != newest.path]

    def keep(self, metrics: Mapping[str, Any], content: CheckpointContent | None, *, wait: bool) -> None:
        if wait:
            _report(dict(metrics), content)
        else:
            self._report_later(dict(metrics), content)

    def _report_later(self, metrics: dict[str, Any], content: CheckpointContent | None) -> None:
        """Report the content, which training must not change any more, from a Ray Train thread that keeps the order of reports."""
        later = ray.train.CheckpointUploadMode.ASYNC
        if content is None:
            ray.train.report(metrics, checkpoint_upload_mode=later)
            return
        storage: Any = ray.train.get_context().get_storage()
        with _writing():
            folder = Path(tempfile.mkdtemp(prefix="offload-"))
        self._storing = True

        def store(checkpoint: Any, name: str) -> Any:
            try:
                with _writing():
                    checkpoints.save(folder, *content)
                return storage.persist_current_checkpoint(checkpoint, name)
            except OSError as error:
                raise _storage_error(error) from None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self._storing = False

        saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(
            metrics,
            saved,
            checkpoint_upload_mode=later,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=store,
        )


def _report(metrics: dict[str, Any], content: CheckpointContent | None) -> None:
    """Store a checkpoint and report it; ``content`` is None on ranks that do not write."""
    if content is None:
        ray.train.report(metrics, checkpoint=None)
        return
    with _writing():
        folder = Path(tempfile.mkdtemp(prefix="offload-"))
    try:
        with _writing():
            checkpoints.save(folder, *content)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
    except OSError as error:
        raise _storage_error(error) from None
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


def _storage_error(error: OSError) -> RunError:
    return RunError(
        f"the checkpoint could not be stored: {reason_of(error)}. Free space or allow writing there, or choose "
        "another storage_path; the same command then resumes from the last checkpoint."
    )
