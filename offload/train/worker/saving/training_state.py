"""A worker's training state (model, optimizers, generators, progress), committed to checkpoints and restored from them.

Where it stops: :mod:`offload.train.worker.loop` decides when to commit, and handles batches.
"""

from __future__ import annotations

import dataclasses
import io
import random
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError, RunError, argument
from offload.pipeline.order.ranges import Ranges
from offload.train.checkpoints import format as checkpoints
from offload.train.checkpoints.format import Progress, Training
from offload.train.checkpoints.plain import NotPlainError, to_plain
from offload.train.worker.links.peers import INTERNAL, Talk
from offload.train.worker.saving.checkpointer import Checkpointer, Stored
from offload.train.worker.saving.objects import REMEDY_PLAIN, TensorMap, TrainedObjects, copied, gathered

MOST_SAID = 300  # characters of the reason why a checkpoint does not fit


class TrainingState:
    """The state of one worker. All ranks must call the methods that talk to other ranks.

    Args:
        talk: the other ranks.
        checkpoints: the run's checkpoints.
        seed, samples, source: the seed of the run, the number of its training samples (None: unknown), and their identity if their
            number does not tell it. Together they determine the order of an epoch; checkpoints record them.
        scaler: the gradient scaler, for fp16.
        resumable: whether training samples have stable ids, so that a pass can go on where it stopped.
        other_options_at: the step of a checkpoint whose options optimizers do not take; None: they take those of any.
    """

    def __init__(
        self,
        talk: Talk,
        checkpoints: Checkpointer,
        *,
        seed: int,
        samples: int | None,
        source: str | None = None,
        scaler: torch.amp.GradScaler | None,
        resumable: bool,
        other_options_at: int | None = None,
    ) -> None:
        self.progress = Progress()
        self.objects = TrainedObjects(scaler)
        self.committed_at = self._began = time.monotonic()
        self.settled = True  # the last commit is complete
        self.changed = ""
        self.damaged: list[str] = []
        self._sums: dict[str, float] = {}
        self._summed: dict[str, float] = {}
        self.adapting: dict[str, Any] = {}
        self._checkpoints = checkpoints
        self._talk, self._resumable = talk, resumable
        self._other_options_at = other_options_at
        self._order: dict[str, Any] = {"seed": seed, "samples": samples, "source": source}
        self._trained: list[Ranges] = []  # positions since the last commit
        self._committed_step = 0
        self._stored_model: dict[str, Any] = {}
        self._stored: Training | None = None

    @property
    def models(self) -> list[torch.nn.Module]:
        """The trained models."""
        return self.objects.models

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the models."""
        return self.objects.optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, for fp16."""
        return self.objects.scaler

    @property
    def storing(self) -> bool:
        """Whether a commit is under way without training waiting for it."""
        return self._checkpoints.storing

    @property
    def failed(self) -> bool:
        """Whether a commit that training did not wait for has failed."""
        return self._checkpoints.failed

    @property
    def resumed(self) -> bool:
        """Whether this worker began from a checkpoint."""
        return self._stored is not None

    @property
    def uncommitted(self) -> bool:
        """Whether there were steps since the last commit."""
        return self.progress.step > self._committed_step

    def load(self) -> None:
        """Read the run's newest checkpoint, if there is one. It records trained samples by their position in the epoch's order. If that
        order has changed, ``changed`` says why, and the epoch starts again."""
        newest = self._checkpoints.newest()
        if newest is None:
            return
        self._stored_model, self._stored = self._read_newest_good(newest)
        self.progress = self._stored.progress
        self.adapting = dict(self._stored.adapting)
        self._summed = dict(self._stored.sums)
        before = {name: getattr(self._stored, name) for name in self._order}
        if before != self._order and len(self.progress.trained):
            self.changed = ", ".join(f"{n} {before[n]} → {now}" for n, now in self._order.items() if before[n] != now)
            self.progress = dataclasses.replace(self.progress, trained=Ranges(), passes={})
            self._summed = {}

    def _read_newest_good(self, newest: Stored) -> tuple[dict[str, Any], Training]:
        """The content of the newest undamaged checkpoint, the same one on every rank."""
        tried = [newest]
        at, content, errors = 0, None, []
        while True:
            try:
                content = tried[at].read()
            except RunError as error:
                content = None
                errors.append(str(error))
            # One rank may be able to read a checkpoint that another cannot: all use the newest that every rank can read.
            furthest = at if content is not None else at + 1
            # The oldest that any rank asks for. It repeats until all ranks can read the same one.
            agreed = max(self._talk.gather_objects(furthest))
            if agreed == at and content is not None:
                self.damaged = errors
                return content
            at = agreed
            if len(tried) == 1:
                tried += self._checkpoints.before(newest)
            if at >= len(tried):
                raise RunError(errors[0] if errors else "another worker could not read any checkpoint of this run.")

    def adopt(self, models: Sequence[torch.nn.Module], others: Sequence[Any]) -> None:
        """Take charge of models on their device and of the objects that belong to them, and restore the checkpoint's state.

        Raises ConfigError if the checkpoint does not fit, and for state that no checkpoint can hold: better now than hours later, when
        the run resumes.
        """
        self.objects.adopt(models, others)
        if self._stored is not None:
            self._restore(self._stored)
        self._try_commit()

    def stepped(self, positions: Sequence[Ranges], rows: int, useful: float) -> None:
        """Record an optimizer step on these positions of the pass. ``rows``: the samples of all ranks; ``useful``: their worth."""
        self._trained += positions
        progress = self.progress
        self.progress = dataclasses.replace(
            progress, step=progress.step + 1, samples=progress.samples + rows, useful=progress.useful + useful
        )

    def accumulate(self, values: Mapping[str, float]) -> None:
        """Add to this rank's sums of the pass."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def accumulated(self, what: str = INTERNAL) -> dict[str, float]:
        """The sums of the pass over all ranks, including those from before a restart. ``what``: the user's call that asks for them."""
        total = dict(self._summed)
        for sums in self._talk.gather_objects(self._sums, what):
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def passed(self, positions: Sequence[Ranges]) -> None:
        """Record positions that were delivered and count as trained, without a step."""
        self._trained += positions

    def stop(self) -> None:
        """Record that the user's code ended training."""
        self.progress = dataclasses.replace(self.progress, stopped=True)

    @property
    def seconds(self) -> float:
        """The seconds of training so far, including those before a restart that a checkpoint holds."""
        return self.progress.seconds + time.monotonic() - self._began

    def credit(self, useful: float) -> None:
        """Add progress without a step."""
        self.progress = dataclasses.replace(self.progress, useful=self.progress.useful + useful)

    def next_epoch(self, epoch: int) -> None:
        """End this pass and begin that of ``epoch``."""
        self._trained.clear()
        self._sums, self._summed = {}, {}
        self.progress = dataclasses.replace(self.progress, epoch=epoch, trained=Ranges(), passes={})

    def ended_pass(self, name: str) -> None:
        """Record that this epoch has ended a pass over another data set: a resumed run goes on with the next one."""
        passes = {**self.progress.passes, name: self.progress.passes.get(name, 0) + 1}
        self.progress = dataclasses.replace(self.progress, passes=passes)

    def commit(self, metrics: Mapping[str, Any], adapting: Mapping[str, Any], *, wait: bool) -> None:
        """Write a checkpoint of this step. ``adapting``: the state of adaptation; ``wait``: whether to wait until the checkpoint is
        stored, or only until its content is copied.

        Raises RunError if the storage refuses it; without ``wait``, the next call raises the error.
        """
        # Each rank knows only the positions that it has trained itself.
        all_trained = self._talk.gather_objects(Ranges.of_all(self._trained))
        generators = self._talk.gather_objects(checkpoints.rng_state())
        trained = self.progress.trained
        for part in all_trained:
            trained = trained.union(part)
        # From here on, the sums of all ranks are the common past. Each rank's own begin anew, or they would count
        # twice.
        self._summed, self._sums = self.accumulated(), {}
        if not self._resumable:
            # Without ids, a resumed run cannot tell which samples were trained: it repeats the epoch, with its sums.
            trained = Ranges()
        passes = self.progress.passes if self._resumable else {}
        self.progress = dataclasses.replace(self.progress, trained=trained, passes=passes, seconds=self.seconds)
        self._began = time.monotonic()
        self._trained.clear()
        position = {"epoch": self.progress.epoch, "step": self.progress.step}
        writes = self._talk.rank == 0 and bool(self.models)
        # Without waiting, the next steps change the tensors while the checkpoint is written.
        keep = (lambda tensor: tensor) if wait else copied
        try:
            if self.objects.sharded:  # gathering needs all ranks, though one writes
                whole = self._content(generators, adapting, lambda tensor: gathered(tensor, keep, writes))
                content = whole if writes else None
            else:
                content = self._content(generators, adapting, keep) if writes else None
        except NotPlainError as error:
            raise RunError(f"a checkpoint could not be committed: {error} {REMEDY_PLAIN}") from None
        self._checkpoints.keep({**metrics, **position}, content, wait=wait)
        self.committed_at = self._began = time.monotonic()
        self._committed_step, self.settled = self.progress.step, wait

    def settle(self) -> None:
        """Wait until the last commit is complete. Raises RunError if the storage refuses it."""
        if not self.settled:
            self._checkpoints.settle()
            self.settled = True

    def _try_commit(self) -> None:
        """Save and load everything in memory, with empty tensors. Raises ConfigError for state that cannot be loaded."""
        try:
            content = self._content([checkpoints.rng_state()], {}, lambda tensor: torch.empty(0, dtype=tensor.dtype))
        except NotPlainError as error:
            raise ConfigError(f"{error} {REMEDY_PLAIN}") from None
        for part in content:
            buffer = io.BytesIO()
            torch.save(part, buffer)
            buffer.seek(0)
            # With the option of a real resume: what it refuses would be lost hours later.
            torch.load(buffer, map_location="cpu", weights_only=True)

    def _content(
        self, generators: list[Any], adapting: Mapping[str, Any], tensor: TensorMap
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(model state, :class:`Training` state) as plain data, with ``tensor`` applied to each tensor. Raises NotPlainError."""
        states = self.objects.states(tensor)
        training = Training(
            progress=self.progress,
            optimizers=states.optimizers,
            others=states.others,
            loose=states.loose,
            scaler=states.scaler,
            rng=generators,
            adapting=to_plain(adapting, "what adaptation learned", tensor),
            sums=self._summed if self._resumable else {},
            **self._order,
        )
        return states.model, training.to_state()

    def _restore(self, stored: Training) -> None:
        try:
            keeps = stored.progress.step == self._other_options_at
            self.objects.restore(self._stored_model, stored, keeps_options=keeps)
        except Exception as error:  # a load_state_dict may raise anything
            # The second line of torch's errors names the first parameter that does not fit, in a list that may be long.
            lines = (str(error).strip() or type(error).__name__).splitlines()[:2]
            why = textwrap.shorten(" ".join(lines), MOST_SAID, placeholder=" …").removesuffix(".")
            raise ConfigError(
                f"the checkpoint of this run does not fit the model or optimizer of the script: {why}. Restore the script "
                f"that began the run, or start again with {argument('overwrite', True)}."
            ) from None
        rank = self._talk.rank
        # Equal generators need equal ranks. With another number of workers, the run goes on with new ones that depend
        # on the step alone.
        if len(stored.rng) == self._talk.world_size:
            checkpoints.set_rng_state(stored.rng[rank])
        else:
            seed_at_step(self._order["seed"], rank, self.progress.step)
        self._stored_model = {}  # as large as the model


def seed_at_start(seed: int, rank: int) -> None:
    """Seed the generators before the user's function runs: torch's the same on all ranks, which build the same model, the others by
    rank."""
    torch.manual_seed(seed)
    np.random.seed((seed + rank) & 0xFFFFFFFF)
    random.seed(seed + rank)


def seed_at_step(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a run that goes on at this step with another number of workers. The checkpoint holds no generators for
    them."""
    # Mixed, so that neighbouring ranks and steps get unrelated generators.
    words = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, rank, step]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
