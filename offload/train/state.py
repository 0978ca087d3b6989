"""What a worker has trained: model, optimizers, generators and progress, committed to checkpoints and restored from them.

Where it stops: it does not know when to commit, nor what a batch is (:mod:`offload.train.context` does).
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch

from offload.errors import ConfigError, RunError
from offload.pipeline.ranges import Ranges
from offload.train import checkpoint as checkpoints
from offload.train.checkpoint import Progress, Training
from offload.train.peers import DistPeers
from offload.train.plain_state import NotPlainError, to_plain
from offload.train.storage import reason_of


class TrainingState:
    """One worker's. Methods that talk to the other ranks must be called by all of them.

    Args:
        talk: the other ranks; None in a world of one.
        seed, samples: of the run and its training data (None: unknown). Together they make the order of an epoch; both are
            recorded in its checkpoints.
        scaler: of the gradients, for fp16.
        resumable: whether the training samples can be told apart, so that a pass can go on where it stopped.
    """

    def __init__(
        self,
        talk: DistPeers | None,
        *,
        seed: int,
        samples: int | None,
        scaler: torch.amp.GradScaler | None,
        resumable: bool,
    ) -> None:
        self.progress = Progress()
        self.scaler = scaler
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.committed_at = time.monotonic()
        self.settled = True  # the last commit was waited for
        self.storing = False  # a commit that was not waited for is under way
        self.changed = ""
        self.damaged: list[str] = []
        self._sums: dict[str, float] = {}
        self._summed: dict[str, float] = {}
        self.adapting: dict[str, Any] = {}
        self._talk, self._order, self._resumable = talk, {"seed": seed, "samples": samples}, resumable
        self._others: list[Any] = []
        self._trained: list[np.ndarray[Any, Any]] = []  # positions since the last commit
        self._committed_step = 0
        self._stored_model: dict[str, Any] = {}
        self._stored: Training | None = None

    @property
    def resumed(self) -> bool:
        """Whether there was a checkpoint to begin from."""
        return self._stored is not None

    @property
    def uncommitted(self) -> bool:
        """Whether steps were made since the last commit."""
        return self.progress.step > self._committed_step

    def load(self) -> None:
        """Read the run's newest checkpoint, if there is one. What was trained of an epoch is known by its place in the
        epoch's order: where that is another by now, ``changed`` says why, and the epoch starts again."""
        newest = ray.train.get_checkpoint()
        if newest is None:
            return
        self._stored_model, self._stored = self._read_newest_good(newest)
        self.progress = self._stored.progress
        self.adapting = dict(self._stored.adapting)
        self._summed = dict(self._stored.sums)
        before = {"seed": self._stored.seed, "samples": self._stored.samples}
        if before != self._order and len(self.progress.trained):
            self.changed = ", ".join(f"{n} {before[n]} → {now}" for n, now in self._order.items() if before[n] != now)
            self.progress = dataclasses.replace(self.progress, trained=Ranges())
            self._summed = {}

    def _read_newest_good(self, newest: Any) -> tuple[dict[str, Any], Training]:
        """The content of the newest checkpoint that is whole, on every rank of the same one."""
        tried = [newest]
        at, content, errors = 0, None, []
        while True:
            try:
                content = _read(tried[at])
            except RunError as error:
                content = None
                errors.append(str(error))
            # A rank may have found whole what another could not read: all take what the worst off can.
            furthest = at if content is not None else at + 1
            agreed = furthest if self._talk is None else max(self._talk.gather_objects(furthest))
            if agreed == at and content is not None:
                self.damaged = errors
                return content
            at = agreed
            if len(tried) == 1:
                known = [each.checkpoint for each in ray.train.get_all_reported_checkpoints()]
                tried += [each for each in reversed(known) if each.path != newest.path]
            if at >= len(tried):
                raise RunError(errors[0] if errors else "another worker could read no checkpoint of this run.")

    def adopt(self, model: torch.nn.Module, others: Sequence[Any]) -> None:
        """Take charge of a model, on its device, and of what belongs to it; give them the state of the checkpoint.

        Raises RunError for what has no state, ConfigError where the checkpoint does not fit, and for state that no checkpoint
        can hold: better now than after hours, when the run is to be resumed.
        """
        odd = next((o for o in others if not hasattr(o, "load_state_dict")), None)
        if odd is not None:
            raise RunError(
                f"ctx.prepare takes a model, optimizers and what has a state_dict; found {type(odd).__name__}."
            )
        self.model = model
        self.optimizers = [o for o in others if isinstance(o, torch.optim.Optimizer)]
        self._others = [o for o in others if not isinstance(o, torch.optim.Optimizer)]
        if self._stored is not None:
            self._restore(model, self._stored)
        self._try_commit()

    def stepped(self, positions: Sequence[np.ndarray[Any, Any]], rows: int, useful: float) -> None:
        """An optimizer step was made on these positions of the pass; ``rows`` are those of all ranks, ``useful`` what they
        were worth."""
        self._trained += positions
        progress = self.progress
        self.progress = dataclasses.replace(
            progress, step=progress.step + 1, samples=progress.samples + rows, useful=progress.useful + useful
        )

    def accumulate(self, values: Mapping[str, float]) -> None:
        """Add to this rank's sums of the pass."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def accumulated(self) -> dict[str, float]:
        """The sums of the pass over all ranks, those from before a restart included."""
        mine = [self._sums] if self._talk is None else self._talk.gather_objects(self._sums)
        total = dict(self._summed)
        for each in mine:
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def credit(self, useful: float) -> None:
        """Progress without a step."""
        self.progress = dataclasses.replace(self.progress, useful=self.progress.useful + useful)

    def next_epoch(self, epoch: int) -> None:
        """The pass is over, and the one of ``epoch`` begins."""
        self._trained.clear()
        self._sums, self._summed = {}, {}
        self.progress = dataclasses.replace(self.progress, epoch=epoch, trained=Ranges())

    def commit(self, metrics: Mapping[str, Any], adapting: Mapping[str, Any], *, wait: bool) -> None:
        """Write a checkpoint of this very step, through Ray Train. ``adapting``: what adaptation has learned; ``wait``: until
        it is stored, or only until its content is copied.

        Raises RunError where the storage does not take it; without waiting, that ends the run later.
        """
        mine = Ranges.of(np.concatenate(self._trained)) if self._trained else Ranges()
        all_trained = [mine] if self._talk is None else self._talk.gather_objects(mine)
        generators = (
            [checkpoints.rng_state()] if self._talk is None else self._talk.gather_objects(checkpoints.rng_state())
        )
        trained = self.progress.trained
        for part in all_trained:
            trained = trained.union(part)
        self._summed, self._sums = self.accumulated(), {}
        if not self._resumable:
            self._summed = {}
            trained = Ranges()  # unnumbered samples cannot be told apart: the epoch starts again
        self.progress = dataclasses.replace(self.progress, trained=trained)
        self._trained.clear()
        position = {"epoch": self.progress.epoch, "step": self.progress.step}
        writes = (self._talk is None or self._talk.rank == 0) and self.model is not None
        try:
            keep = {} if wait else {"tensor": copied}
            content = self._content(generators, adapting, **keep) if writes else None
        except NotPlainError as error:
            raise RunError(f"a checkpoint could not be committed: {error} {_REMEDY_PLAIN}") from None
        if wait:
            _report({**metrics, **position}, content)
        else:
            self._report_later({**metrics, **position}, content)
        self.committed_at = time.monotonic()
        self._committed_step, self.settled = self.progress.step, wait

    def _report_later(self, metrics: dict[str, Any], content: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        """Report the content, which training must not change any more, from a thread of Ray Train's. It keeps reports in
        their order."""
        later = ray.train.CheckpointUploadMode.ASYNC
        if content is None:
            ray.train.report(metrics, checkpoint_upload_mode=later)
            return
        storage: Any = ray.train.get_context().get_storage()
        folder = Path(tempfile.mkdtemp(prefix="offload-"))
        self.storing = True

        def store(checkpoint: Any, name: str) -> Any:
            try:
                checkpoints.save(folder, *content)
                return storage.persist_current_checkpoint(checkpoint, name)
            except OSError as error:
                raise _storage_error(error) from None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self.storing = False

        saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(
            metrics,
            saved,
            checkpoint_upload_mode=later,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=store,
        )

    def _try_commit(self) -> None:
        """Save and load everything in memory, with tensors of no size. Raises ConfigError for what cannot be loaded."""
        try:
            content = self._content([checkpoints.rng_state()], {}, tensor=lambda each: each.detach().new_empty(0))
        except NotPlainError as error:
            raise ConfigError(f"{error} {_REMEDY_PLAIN}") from None
        for part in content:
            buffer = io.BytesIO()
            torch.save(part, buffer)
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)

    def _content(
        self,
        generators: list[Any],
        adapting: Mapping[str, Any],
        tensor: Callable[[torch.Tensor], torch.Tensor] = lambda each: each,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(model state, :class:`Training` state) as plain data, with ``tensor`` of each tensor. Raises NotPlainError."""
        assert self.model is not None
        model = to_plain(self.model.state_dict(), "the model's state_dict()", tensor)
        training = Training(
            progress=self.progress,
            optimizers=[_state_of(each, tensor) for each in self.optimizers],
            others=[_state_of(each, tensor) for each in self._others],
            scaler=_state_of(self.scaler, tensor) if self.scaler is not None else None,
            rng=generators,
            adapting=to_plain(adapting, "what adaptation learned", tensor),
            sums=self._summed,
            **self._order,
        )
        return model, training.to_state()

    def _restore(self, model: torch.nn.Module, stored: Training) -> None:
        try:
            model.load_state_dict(self._stored_model)
            for group, states in ((self.optimizers, stored.optimizers), (self._others, stored.others)):
                for item, state in zip(group, states, strict=True):
                    item.load_state_dict(state)
            if self.scaler is not None and stored.scaler is not None:
                self.scaler.load_state_dict(dict(stored.scaler))
        except Exception as error:  # whatever a load_state_dict comes across
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"the checkpoint of this run does not fit the model or optimizer of the script: {first} Restore the script "
                "that began the run, or start again with --overwrite."
            ) from None
        rank, ranks = (0, 1) if self._talk is None else (self._talk.rank, self._talk.world_size)
        if len(stored.rng) == ranks:
            checkpoints.set_rng_state(stored.rng[rank])
        self._stored_model = {}  # as large as the model


_REMEDY_PLAIN = "Let its state_dict() give such data, or do not pass it to ctx.prepare."


def _state_of(item: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return to_plain(item.state_dict(), f"the state_dict() of {type(item).__name__}", tensor)


def _report(metrics: dict[str, Any], content: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    """Store a checkpoint and report it; ``content`` is None on the ranks that write none."""
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        try:
            if content is not None:
                checkpoints.save(Path(folder), *content)
            saved = ray.train.Checkpoint.from_directory(folder) if content is not None else None
            ray.train.report(metrics, checkpoint=saved)
        except OSError as error:
            raise _storage_error(error) from None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is now, on the CPU, that training does not change any more."""
    return tensor.detach().to("cpu", copy=True)


def _read(stored: Any) -> tuple[dict[str, Any], Training]:
    with stored.as_directory() as folder:
        return checkpoints.load(Path(folder), called=stored.path)


def _storage_error(error: OSError) -> RunError:
    return RunError(
        f"the checkpoint could not be stored: {reason_of(error)}. Free space or allow writing there, or choose "
        "another storage_path; the same command then resumes from the last checkpoint."
    )
