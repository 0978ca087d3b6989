"""A trial of Ray Tune: it runs an ``offload.Trainer`` on a thread, and hands its reports and checkpoints to Tune.

Tune asks for one result after another, and decides after each. The run trains on meanwhile. Once Tune ends the trial, the run ends at
once, and everything that it held is free.

Where it stops: :mod:`offload.tune.pairing` decides which checkpoint belongs to which result, :mod:`offload.tune.copies` copies them.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.train import RunConfig
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from offload.arbiter import registry
from offload.callbacks import rates_of
from offload.errors import ConfigError, RunError
from offload.model.checks import shown
from offload.pipeline.preprocessing.shared_samples import Sharing
from offload.process.interrupts import Interrupts, ended_by
from offload.train.callback import Callback, Checkpoint, Interval, Metrics
from offload.train.driver.trainer import Result, Trainer
from offload.tune import copies
from offload.tune.pairing import Pairing, Reported

TOKEN_BYTES = (
    1 << 20
)  # of memory: Tune reserves nothing without a resource, and a share of a CPU would cost the run a whole one
HOLD_S = 60.0  # a report waits at most this long for a checkpoint of its step: a slow commit must not cost the result its checkpoint
LOOK_S = 0.5
END_S = 60.0  # time for a run to end, which takes a few seconds
RUNS = "offload"  # the folder of run directories among the trial's files


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a run: its result, or its error."""

    result: Result | None
    error: BaseException | None


Event = Metrics | Checkpoint | Interval | Ended


class Trial(tune.Trainable):
    """A trial. :func:`offload.tune.trainable` derives a class from it, with the user's ``build``."""

    build: ClassVar[Callable[..., Any]]
    sharing: ClassVar[Sharing | None] = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """See Tune's documentation: next to nothing. The run takes what it needs itself."""
        return tune.PlacementGroupFactory([{"memory": TOKEN_BYTES}])

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        """Build the Trainer. The run starts with the first :meth:`step`, once Tune has restored a checkpoint or not."""
        self._parameters = parameters
        self._run: TrialRun | None = None
        self._start: copies.Start | None = None
        self._tune(config)

    def step(self) -> dict[str, Any]:
        """The next result."""
        if self._run is None:
            self._run = TrialRun(self._trainer, self._new_run_dir(), self._start)
        reported = self._run.next()
        if reported is None:
            return {DONE: True, RESULT_DUPLICATE: True}
        result = {**self._run.rates, **reported.values, "epoch": reported.epoch, "step": reported.step}
        if reported.stored:
            result[SHOULD_CHECKPOINT] = True
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the checkpoint of the last result, or without one the newest."""
        if self._run is not None:
            copies.save(self._run.folder, self._run.stored_step, Path(checkpoint_dir), self._config)
        else:
            copies.save_start(self._start, Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Let the run start from this checkpoint. Raises RunError if an earlier run of this process does not end."""
        if not self._end():
            raise RunError(
                f"the earlier run of this trial's process has not ended within {END_S:.0f} s, so the trial cannot go on from a checkpoint. "
                "With RunConfig(failure_config=FailureConfig(max_failures=1)), Tune tries again in a new process."
            )
        self._start = copies.load(Path(checkpoint), self._config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial in the same process."""
        if not self._end():
            return False
        self._start = None
        self._tune(new_config)
        return True

    def cleanup(self) -> None:
        """End the run, and free what it holds."""
        self._end()

    def _tune(self, config: dict[str, Any]) -> None:
        """Build the Trainer of this configuration. Raises ConfigError if ``build`` returns anything else."""
        self._config = dict(config)
        trainer = type(self).build(config, **self._parameters)
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"build(config) must return an offload.Trainer, and {getattr(self.build, '__name__', 'it')} returned {shown(trainer)}: "
                "return offload.Trainer(...) without calling fit()."
            )
        self._trainer = copy.copy(trainer)
        self._trainer.sharing = self.sharing

    def _new_run_dir(self) -> Path:
        """A new folder for the run, named after the trial, as ``offload runs`` shows it."""
        name = run_name(str(self.trial_name or "trial"))
        base, number = Path(self.logdir) / RUNS, 1
        while (folder := base / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return folder

    def _end(self) -> bool:
        """End the run, if there is one. Return whether it has ended."""
        if self._run is not None and not self._run.end():
            return False
        self._run = None
        return True


def run_name(trial: str) -> str:
    """The name of a trial's first run: of its run directory, and on the cluster."""
    return re.sub(r"[^\w.-]+", "_", trial)


class TrialRun:
    """A run of a trial, on a thread.

    Args:
        trainer: what ``build`` returned.
        run_dir: a new folder.
        start: the checkpoint from which the run starts; None: from the beginning.
    """

    def __init__(self, trainer: Trainer, run_dir: Path, start: copies.Start | None) -> None:
        self.stored_step = -1
        self.rates: Mapping[str, float] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._interrupts = Interrupts()
        self._pairing, self._ready = Pairing(), list[Reported]()
        self._known: dict[str, float] = {}
        self._ended: Ended | None = None
        self._run_dir, self._resumed = run_dir, start is not None
        self._trainer = _of_trial(trainer, run_dir.name, _Ears(self._events.put), start)
        self.folder = self._trainer.checkpoint_folder(run_dir)
        if start is not None:
            run_dir.mkdir(parents=True)
            copies.put(start, run_dir, self.folder)
        self._thread = threading.Thread(target=self._fit, daemon=True, name="trial")
        self._thread.start()

    def next(self) -> Reported | None:
        """The next report; None if the run is over. Raises the error of a failed run, and RunError for one that reported nothing."""
        since = time.monotonic()
        while not self._ready:
            if self._ended is not None:
                self._check(self._ended)
                return None
            try:
                self._take(self._events.get(timeout=LOOK_S))
            except queue.Empty:
                pass
            if not self._pairing.waits:
                since = time.monotonic()
            elif time.monotonic() - since > HOLD_S:
                self._ready += self._pairing.flush()
        reported = self._ready.pop(0)
        self._known |= reported.values
        if reported.stored:
            self.stored_step = reported.step
            copies.remove_before(self.folder, reported.step)
        # Validation may be rarer than reports, and schedulers want their metric in each result.
        return dataclasses.replace(reported, values=dict(self._known))

    def end(self) -> bool:
        """End the run at once, if it has not ended by itself, and remove its checkpoints. Return whether it has ended."""
        if self._thread.is_alive():
            # As Ctrl-C twice: nothing needs to be committed, since Tune has what it wants.
            self._interrupts.presses += 2
            self._thread.join(END_S)
        ended = not self._thread.is_alive()
        if ended:
            copies.remove_all(self.folder)
        return ended

    def _take(self, event: Event) -> None:
        match event:
            case Metrics():
                self._ready += self._pairing.metrics(event)
            case Checkpoint():
                self._ready += self._pairing.checkpoint(event)
            case Interval():
                self.rates = rates_of(event)
                self._ready += self._pairing.reached(event.step)
            case Ended():
                self._ended = event
                self._ready += self._pairing.flush()

    def _check(self, ended: Ended) -> None:
        """Raise the error of a run that failed, or reported nothing."""
        if ended.error is not None:
            raise ended.error
        # A trial that goes on from the end of a training has nothing left to report.
        if not self._known and not self._resumed:
            raise RunError(
                "the training function reported nothing, so Tune has no result of this trial: call ctx.report(...) in each epoch, with the "
                "metric that the search compares."
            )

    def _fit(self) -> None:
        result, error = None, None
        try:
            with ended_by(self._interrupts):
                result = self._trainer.fit(run_dir=self._run_dir, quiet=True)
        except BaseException as raised:
            error = raised
        self._events.put(Ended(result, error))


class _Ears(Callback):
    """Pass on what the trial needs to know of its run."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell

    def interval(self, interval: Interval) -> None:
        self._tell(interval)

    def metrics(self, metrics: Metrics) -> None:
        self._tell(metrics)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self._tell(checkpoint)


def _of_trial(trainer: Trainer, name: str, ears: Callback, start: copies.Start | None) -> Trainer:
    """The Trainer as a trial runs it: heard, a job of the arbiter if there is one, and with checkpoints of its own."""
    changed = copy.copy(trainer)
    changed.callbacks = (*trainer.callbacks, ears)
    if trainer.storage_path is not None:
        # An earlier attempt, another search or a trial that trains now may have a folder of this name there.
        config = RunConfig() if trainer.run_config is None else trainer.run_config
        changed.run_config = dataclasses.replace(config, name=f"{name}-{uuid.uuid4().hex}")
    elif trainer.run_config is not None:
        # Without a storage, the folder lies in the run directory, under its usual name.
        changed.run_config = dataclasses.replace(trainer.run_config, name=None)
    changed.checkpoints = dataclasses.replace(trainer.checkpoints, keep=copies.KEEP)
    changed.other_options_at = start.step if start is not None and start.of_another else None
    return changed.with_sharing(arbiter=True) if registry.arbiter() is not None else changed
