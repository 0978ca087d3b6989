"""When and how training ends on one rank: the goal, a stop by the user's code, the driver's orders, the worker schedule.

Ranks act on an end only after they have agreed on it: with a batch (:meth:`Ends.agreement`), or in a call that all of them make.
"""

from __future__ import annotations

import time

from offload.model.batch_split import BatchSplit
from offload.report.events.decisions import ReadyToResize
from offload.report.events.training import StoppedEarly
from offload.train.messages import End
from offload.train.worker.goal import Goal
from offload.train.worker.links.agreement import Mailbox, Over, TrainingAgreement
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.committing import Committer
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.steps.batch_scaling import BatchScaling

RESIZE_DEADLINE_S = 600.0
WAIT_S = 0.2


class StopRun(BaseException):
    """Unwinds the user's function after the last commit of a group that was ordered to end. ``end``: for good, or for another group."""

    def __init__(self, end: End = "stop") -> None:
        super().__init__(end)
        self.end = end


class Ends:
    """The end of training, as one rank sees it.

    Args:
        setup, place: the driver's settings, and this rank's place in the group.
        state: the training state, with the progress towards the goal.
        reporter: brings the driver's orders.
        watchdog: hears of every wait.
        committer: commits before the group ends.
        scaling: tells the worth of a sample; None if batches are fixed.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        place: RankPlace,
        *,
        state: TrainingState,
        reporter: Reporter,
        watchdog: Watchdog,
        committer: Committer,
        scaling: BatchScaling | None,
    ) -> None:
        self._setup, self._place = setup, place
        self._state, self._reporter, self._watchdog = state, reporter, watchdog
        self._committer, self._scaling = committer, scaling
        self._goal = Goal(epochs=1)
        # Why training ends before its goal: the ranks have agreed on it, or this rank's code has asked for it.
        self._over: Over = ""
        self._scheduled: int | None = place.world_size

    # -- the goal --------------------------------------------------------------------------------------------------

    def aim(self, goal: Goal) -> None:
        """Train towards another goal. A loop whose time was up does not end the loop after it."""
        self._goal = goal
        self._over = "" if self._over == "time" else self._over

    def reached(self, epoch: int) -> bool:
        """Return whether training is over before this epoch."""
        return self._over == "time" or self._goal.reached(
            self._state.progress,
            epoch,
            samples=self._samples,
            initial=self._setup.batch_size.initial,
            adaptive=self._scaling is not None,
        )

    def reached_within(self, epoch: int, *, over: bool) -> bool:
        """Return whether training is over within the pass of this epoch. ``over``: whether the ranks have agreed to end before the goal.

        Epochs of fixed batches end with their pass: only that trains the rest of its samples.
        """
        return self.reached(epoch) and (over or self._scaling is not None or not self._goal.by_epochs)

    def useful_goal(self) -> float | None:
        """The progress at which training ends, in samples of initial batches; None if unknown."""
        return self._goal.useful(samples=self._samples, initial=self._setup.batch_size.initial)

    def followed(self, epoch: int, split: BatchSplit) -> bool:
        """Return whether another pass will follow that of this epoch, so that its preprocessing may begin early."""
        size = split.global_batch_size
        return self._goal.followed(
            self._state.progress,
            epoch,
            samples=self._samples,
            batch=size,
            initial=self._setup.batch_size.initial,
            worth=None if self._scaling is None else self._scaling.useful(size) / size,
        )

    @property
    def _samples(self) -> int | None:
        return self._setup.train.delivered

    # -- the agreement of ranks ------------------------------------------------------------------------------------

    def agreement(self) -> TrainingAgreement:
        """What this rank and the others tell each other with every batch of a training pass."""
        return TrainingAgreement(
            self._place.rank,
            self._place.world_size,
            end=lambda: self._reporter.end,
            split=lambda: self._reporter.split,
            due=self._committer.due,
            over=self.over_here,
            mail=self._scaling.mail if self._scaling is not None else Mailbox(0),
        )

    def agreed_orders(self) -> End:
        """How the driver's orders end the group, as rank 0 knows them: they reach the ranks at different times."""
        agreed: End = self._place.talk.broadcast(self._reporter.end, 0)
        return agreed

    def stop(self) -> None:
        """End training early, for good: the user's code asks for it. The other ranks hear of it with a batch, or after the epoch."""
        self._over = "stop"

    def over_here(self) -> Over:
        """Why training is over before its goal, as this rank sees it. Rank 0's clock decides on time."""
        seconds = self._goal.seconds
        late = self._place.rank == 0 and seconds is not None and self._state.seconds >= seconds
        # One clock: the ranks' clocks started at different moments, and all must end at the same batch.
        return self._over or ("time" if late else "")

    def follow(self, over: Over, epoch: int) -> None:
        """Follow the ranks' agreement that training is over."""
        self._over = self._over or over
        if over == "stop" and not self._state.progress.stopped:
            self._state.stop()
            if self._place.rank == 0:
                self._reporter.event(StoppedEarly(epoch=epoch, step=self._state.progress.step))

    # -- the driver's orders ---------------------------------------------------------------------------------------

    def await_schedule(self, epoch: int) -> bool:
        """If the schedule changes the number of workers here, let rank 0 wait for the driver's orders, or for its answer that there is
        no room. Return whether the schedule changes it, the same on all ranks."""
        adaptation, goal = self._setup.adaptation, self.useful_goal()
        if not adaptation.schedule:
            return False
        progress = min(self._state.progress.useful / goal, 1.0) if goal else 0.0
        before, self._scheduled = self._scheduled, adaptation.scheduled(epoch, progress)
        if self._scheduled is None or self._scheduled == before:
            return False
        if self._place.rank == 0:
            begun = adaptation.entries_begun(epoch, progress)
            self._reporter.epoch = epoch
            until = time.monotonic() + RESIZE_DEADLINE_S
            with self._watchdog.waiting():
                self._reporter.flush()
                # Otherwise the driver would hear of it only at its next look, and all workers wait meanwhile.
                self._setup.hub.call_driver()
                while time.monotonic() < until:
                    self._reporter.flush()
                    if self._reporter.end or self._reporter.orders.entries_followed >= begun:
                        break
                    self._place.sleep(WAIT_S)
        return True

    def obey(self, end: End) -> None:
        """Commit and end if the driver ordered it: for good, or until a group with another number of workers starts.

        Raises StopRun if so.
        """
        if not end:
            return
        # A commit that was still being written counts only once it is complete.
        if self._state.uncommitted or not self._state.settled:
            self._committer.commit(end)
        if end == "resize" and self._place.rank == 0:
            self._reporter.event(ReadyToResize(step=self._state.progress.step))
        raise StopRun(end)
