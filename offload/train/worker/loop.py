"""The loop of one worker: batches, steps, and everything between two steps.

Where it stops: :mod:`offload.train.worker.ends` decides when training ends, :mod:`offload.train.worker.local_passes` opens passes,
:mod:`offload.train.worker.steps` makes steps, and :mod:`offload.train.worker.assembly` puts all of these together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.report.events.training import PassNotFinished
from offload.train.messages import TRAIN
from offload.train.worker.data.batch import shown_batch
from offload.train.worker.ends import Ends
from offload.train.worker.goal import Goal
from offload.train.worker.links.agreement import OVERS
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.local_passes import Passes, TrainingPass
from offload.train.worker.progress_report import ProgressReport
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.committing import Committer
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.steps.device_memory import DeviceMemoryError
from offload.train.worker.steps.preparation import Preparation
from offload.train.worker.steps.stepping import Stepper


class TrainingLoop:
    """The link between a user's loop and the rest of the run, on one worker.

    It uses neither Ray nor torch.distributed directly: ``place`` holds the parts that do.

    Attributes:
        rows: the number of real samples in the user's current batch.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        place: RankPlace,
        *,
        state: TrainingState,
        reporter: Reporter,
        watchdog: Watchdog,
        meter: StepMeter,
        committer: Committer,
        stepper: Stepper,
        preparation: Preparation,
        ends: Ends,
        passes: Passes,
        progress: ProgressReport,
    ) -> None:
        self.setup, self.place, self.state = setup, place, state
        self.reporter, self.watchdog, self.meter = reporter, watchdog, meter
        self.committer, self.stepper, self.preparation = committer, stepper, preparation
        self.ends, self.passes, self.progress = ends, passes, progress
        self.rows = 0
        self._pass: TrainingPass | None = None  # the newest one

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.passes.epoch

    def prepare(self, objects: Sequence[Any], ddp: Mapping[str, Any] | None) -> list[Any]:
        """See :meth:`Context.prepare`. Returns the objects, with trained models joined."""
        prepared = self.preparation.prepare(objects, ddp)
        self.meter.restart()
        return prepared

    # -- epochs ----------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """See :meth:`Context.epochs`."""
        epoch = self._begin_loop(Goal(epochs=n))
        while not self.ends.reached(epoch):
            self._begin_epoch(epoch)
            yield epoch
            epoch += 1
            self._end_epoch(epoch)

    def steps(self, goal: Goal, deliver: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """See :meth:`Context.steps`. ``deliver`` makes the iterator of a pass."""
        epoch = self._begin_loop(goal)
        while not self.ends.reached(epoch):
            self._begin_epoch(epoch)
            # A resumed epoch may have nothing left to train, which is no fault of the loop.
            resumed = len(self.state.progress.trained)
            yield from deliver()
            if self._pass is None or not self._pass.completed:
                return
            if not self._pass.rows and not resumed:  # another pass would not train any either
                raise RunError(
                    f"epoch {epoch + 1} trained no sample, and ctx.steps goes on until its goal: the loop skipped each batch."
                )
            epoch += 1
            self._end_epoch(epoch)

    def stop(self) -> None:
        """See :meth:`Context.stop`."""
        self.ends.stop()

    def _begin_loop(self, goal: Goal) -> int:
        """Begin a loop with this goal. Return its first epoch. If a loop before has left an epoch in its middle, that is the next one: an
        epoch delivers every sample once."""
        self.ends.aim(goal)
        self.progress.tell(self.ends.useful_goal())
        epoch = self.state.progress.epoch
        if self.passes.left_within(epoch) and not self.ends.reached(epoch):
            epoch += 1
            self._end_epoch(epoch)
        return epoch

    def _begin_epoch(self, epoch: int) -> None:
        self.passes.begin_epoch(epoch)
        self.meter.restart()

    def _end_epoch(self, following: int) -> None:
        """Agree on what follows, and commit if that is due."""
        self._leave_pass()
        # Gradients of a broken-off global batch belong to samples that count as untrained.
        self.stepper.abandon()
        self.passes.check_company()
        self.passes.in_epoch = False
        ranks = self.place.talk.gather_objects((self.ends.over_here(), self.passes.others.end_epoch()))
        self.passes.others.compare([entered for _, entered in ranks], self.epoch)
        # The strongest reason of any rank holds for all: a user's stop on one rank outranks the clock.
        self.ends.follow(max((over for over, _ in ranks), key=OVERS.index), self.epoch)
        self.state.next_epoch(following)
        ended = self.ends.reached(following)
        if following % self.setup.checkpoints.every_epochs == 0 or ended:
            self.committer.commit("epoch")
        if not ended:
            self.ends.await_schedule(following)
            self.ends.obey(self.ends.agreed_orders())

    # -- batches ---------------------------------------------------------------------------------------------------

    def batches(self, name: str, *, drop_last: bool = False, least: int = 1) -> Iterator[Any]:
        """See :meth:`Context.batches`. ``least``: the fewest rows of a batch, where that can be had."""
        self.passes.check_company()
        if name == TRAIN:
            yield from self._training_batches(drop_last=drop_last, least=least)
        else:
            yield from self._other_batches(name, drop_last=drop_last, least=least)

    def expected_batches(self, name: str, *, drop_last: bool = False) -> int | None:
        """The number of this worker's batches in a pass, at the present split; see :meth:`Passes.expected_batches`."""
        return self.passes.expected_batches(name, self.progress.split, drop_last=drop_last)

    def _other_batches(self, name: str, *, drop_last: bool, least: int) -> Iterator[Any]:
        """The batches of a pass over another data set than the training data."""
        rows = self.rows
        current = self.passes.open_other(name, self.progress.split, drop_last=drop_last, least=least)
        try:
            self.preparation.share_buffers()
            self.passes.others.enter(name)
            with self.meter.outside():  # a loop may validate within a step
                for batch in current:
                    if batch.rows:
                        self.rows = batch.rows
                        yield shown_batch(batch.content)
        finally:
            self.rows = rows  # the pass may lie within a training pass
            self.passes.close_other(current)

    def _training_batches(self, *, drop_last: bool, least: int) -> Iterator[Any]:
        """The batches of the epoch's training pass. Between two global batches, ranks act on what they have agreed on."""
        split = self.progress.split
        current = self.passes.open_training(
            split,
            followed=self.ends.followed(self.epoch, split),
            drop_last=drop_last,
            least=least,
            agreement=self.ends.agreement(),
        )
        self._pass = current
        # Kept until the global batch is complete: the ranks agree with each micro-batch, and act only between two
        # global ones.
        due = over = False
        try:
            for batch in current:
                due, over = due or batch.agreed.due, over or bool(batch.agreed.over)
                self.ends.obey(batch.agreed.end)
                if batch.left and not over:
                    self.passes.refuse_lone(batch.left, [self.place.rank])
                self.ends.follow(batch.agreed.over, self.epoch)
                if self.stepper.between_global_batches:  # all ranks are, or none
                    if due and self.state.uncommitted:
                        self.committer.commit("interval")
                        due = False
                    if self.ends.reached_within(self.epoch, over=over):
                        self._tell_untrained(current)
                        break
                    if self.ends.await_schedule(self.epoch):
                        self.ends.obey(self.ends.agreed_orders())
                    self.progress.follow(batch.split, self.epoch)
                    self.stepper.begin_global_batch(batch.split)
                self.stepper.begin_batch(batch)
                self.rows = batch.rows
                yield shown_batch(batch.content)
                if not current.running:  # the epoch has ended
                    return
                self._settle()
            else:
                self._credit_untrainable(current)
        finally:
            if current.running:
                self._leave_pass()

    def _leave_pass(self) -> None:
        """End the training pass, if one is running."""
        current = self._pass
        if current is None or not current.running:
            return
        current.running = False
        if self.stepper.has_stepped:  # the loop broke off after its own step
            self._settle()
        current.close()
        # The next call raises the error: Python ignores an exception of an iterator that the loop drops.
        self.passes.went_on = current.went_on
        self.meter.restart()

    def _credit_untrainable(self, current: TrainingPass) -> None:
        """After a pass, count skipped samples as trained. Otherwise another pass would begin for them."""
        samples = self.setup.train.delivered
        if samples is not None:
            self.state.credit(current.untrained(samples))

    def _tell_untrained(self, current: TrainingPass) -> None:
        """Report the samples that the pass leaves untrained, since training ends in its middle."""
        samples = self.setup.train.delivered
        if samples is not None:
            self.progress.event(PassNotFinished(epoch=self.epoch, untrained=current.untrained(samples)))

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """See :meth:`Context.backward`."""
        self.stepper.backward(loss, self._has_another, retain_graph=retain_graph)

    def skip(self) -> None:
        """See :meth:`Context.skip`."""
        self.stepper.skip(self._has_another)

    def step(self, optimizers: Sequence[torch.optim.Optimizer], clip_norm: float | None) -> bool:
        """See :meth:`Context.step`."""
        known = {id(optimizer) for optimizer in self.state.optimizers}
        if any(id(optimizer) not in known for optimizer in optimizers):
            raise RunError(
                "ctx.step(optimizer) takes optimizers that ctx.prepare got. Pass this one to ctx.prepare, too."
            )
        rows = self.stepper.step(optimizers, clip_norm=clip_norm, passes=self._trained_passes())
        if rows and not optimizers:
            self._stepped(rows)
        return rows > 0

    def _has_another(self) -> bool:
        return self._pass is not None and self._pass.has_another()

    def _settle(self) -> None:
        """End the batch that the loop leaves, if ctx.step() has not."""
        rows = self.stepper.settle(self._trained_passes())
        if rows:
            self._stepped(rows)

    def _stepped(self, rows: int) -> None:
        """Note the end of a global batch."""
        if self._pass is not None:
            self._pass.rows += rows
        self.progress.tell(self.ends.useful_goal())
        self.progress.stepped()
        self.reporter.totals = self.meter.totals()

    def _trained_passes(self) -> float:
        """The number of passes trained so far."""
        samples = self.setup.train.delivered
        return self.state.progress.samples / samples if samples else float(self.epoch)

    # -- results ---------------------------------------------------------------------------------------------------

    def sum(self, values: list[float], what: str) -> list[float]:
        """Element-wise sums over all workers, for the user's call ``what``."""
        self.passes.check_company()
        with self.watchdog.waiting(what):
            return self.place.talk.sum(values, what)

    def gather(self, value: Any) -> list[Any]:
        """See :meth:`Context.gather`."""
        self.passes.check_company()
        what = "ctx.gather() or ctx.sum() of a tensor"
        with self.watchdog.waiting(what):
            return self.place.talk.gather_objects(value, what)

    def accumulated(self) -> dict[str, float]:
        """See :meth:`Context.accumulated`."""
        what = "ctx.accumulated()"
        with self.watchdog.waiting(what):
            return self.state.accumulated(what)

    def report(self, metrics: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """See :meth:`Context.report`."""
        names = sorted(metrics)
        with self.meter.outside():
            sums = self.sum([metrics[name] for name in names], f"ctx.report({', '.join(names)})")
        means = {name: total / self.place.world_size for name, total in zip(names, sums, strict=True)}
        self.progress.metrics(means, texts, epoch=self.epoch, within_step=self.stepper.within_global_batch)

    # -- the end of the user's function ----------------------------------------------------------------------------

    def out_of_memory(self, error: BaseException) -> None:
        """The user's function ran out of device memory. Raises DeviceMemoryError if smaller batches may fit:
        the workers then start again with those."""
        batch = self.stepper.batch
        if batch is None:
            return
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
        # A single worker loses nothing: the model is as the last step left it. With others, their state is unknown.
        if self.place.world_size == 1 and self.state.uncommitted and not self.stepper.stepping:
            self.committer.commit("out_of_memory")
        if self.setup.hub.out_of_memory(self.place.rank, batch.split):
            self.reporter.flush()
            raise DeviceMemoryError(
                f"local batches of {batch.split.local_batch_size} samples do not fit: {error}"
            ) from error

    def commit_rest(self) -> None:
        """Commit what was trained since the last checkpoint, and wait until all checkpoints are stored."""
        self._leave_pass()
        self.passes.check_company()
        self.committer.finish()

    def finish(self) -> None:
        """Push the last measurements. If the user's function has failed, wait a while for a checkpoint that is being written."""
        self.place.checkpoints.close()
        self.reporter.totals = self.meter.totals()
        self.reporter.close()
        self.passes.direct.close()
