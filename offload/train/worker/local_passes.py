"""The passes of one rank over the run's data sets: which one comes next, how it is cut, and its batches as they come."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from offload.errors import RunError
from offload.measure.steps import StepMeter
from offload.model.batch_split import BatchSplit
from offload.pipeline.blocks.receiver import DirectBlocks
from offload.pipeline.feed.passes import PassKey, PassRequest
from offload.pipeline.order.shuffling import pass_number
from offload.report.events.faults import PassesDiffer
from offload.report.events.training import FirstBatch, SampleSkipped
from offload.train.messages import TRAIN
from offload.train.worker.data.batches import Batches, Cutting, LocalBatch
from offload.train.worker.data.cutting import Cut, Skipped
from offload.train.worker.data.delivery import Delivery
from offload.train.worker.data.feed_client import feed_of
from offload.train.worker.links.agreement import Agreement, NoAgreement
from offload.train.worker.links.hang_watchdog import Watchdog
from offload.train.worker.links.reporter import Reporter
from offload.train.worker.rank_place import RankPlace
from offload.train.worker.saving.training_state import TrainingState
from offload.train.worker.setup import WorkerSetup
from offload.train.worker.steps.batch_scaling import BatchScaling

OUTSIDE = -1  # stands for the number of an epoch, in passes before and after the epochs


class LocalPass:
    """One rank's part of a pass: its batches, as the training thread takes them.

    Args:
        batches: the batches, which other threads prepare.
        name: the name of the data set.
        epoch: the epoch within which it began, or :data:`OUTSIDE`.
        reporter: hears of each skipped sample.
        watchdog: hears of every wait.
    """

    def __init__(self, batches: Batches, name: str, *, epoch: int, reporter: Reporter, watchdog: Watchdog) -> None:
        self.name, self.epoch = name, epoch
        self._batches, self._reporter, self._watchdog = batches, reporter, watchdog

    def __iter__(self) -> Iterator[LocalBatch]:
        while (batch := self._get()) is not None:
            self._note_skipped(batch.skipped)
            yield batch
        self._note_skipped(self._batches.leftover)

    def close(self) -> None:
        """End the threads that prepare batches."""
        self._batches.close()

    @property
    def went_on(self) -> tuple[int, ...]:
        """The ranks that have gone on with a training pass, after this one has closed it before its end."""
        return self._batches.went_on

    def _get(self) -> LocalBatch | None:
        with self._watchdog.waiting():
            return self._batches.get()

    def _note_skipped(self, skipped: Sequence[Skipped]) -> None:
        for sample in skipped:
            self._reporter.event(
                SampleSkipped(
                    dataset=self.name, sample_id=sample.sample_id, reason=sample.reason, epoch=self._reporter.epoch
                )
            )


_Arrival = tuple[LocalBatch | None, float, float]
"""(the next batch, None at the end; seconds waited for this rank's samples; seconds waited for other ranks')"""


class TrainingPass(LocalPass):
    """A pass over the training data. The waits for its batches are a part of the steps' times.

    Args:
        meter: measures the steps.
        scaling: gets the gradients' measurements that travel with batches; None if batches are fixed.
        done: the number of samples of the epoch that were trained before the pass, by a run that this one resumes.
        began: when this rank asked for the pass.

    Attributes:
        rows: the samples trained so far, on all ranks.
        completed: whether the pass has delivered all its batches.
        running: whether the loop goes on with it. A loop that breaks off may keep the iterator until a later epoch.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        epoch: int,
        reporter: Reporter,
        watchdog: Watchdog,
        meter: StepMeter,
        scaling: BatchScaling | None,
        done: int,
        began: float,
    ) -> None:
        super().__init__(batches, TRAIN, epoch=epoch, reporter=reporter, watchdog=watchdog)
        self.rows = 0
        self.completed, self.running = False, True
        self._meter, self._scaling, self._done, self._began = meter, scaling, done, began
        self._delivered = False
        self._ahead: _Arrival | None = None  # a batch that has come while the one before it was under way

    def __iter__(self) -> Iterator[LocalBatch]:
        # From the request of the pass on: preprocessing starts then, and its first wait is set apart in the meter.
        batch = self._start(self._arrival(since=self._began), first=True)
        if batch is not None:
            self._delivered = True
            seconds = round(time.monotonic() - self._began, 3)
            self._reporter.event(FirstBatch(epoch=self.epoch, seconds=seconds))
        while batch is not None:
            yield batch
            arrival, self._ahead = self._ahead or self._arrival(), None
            batch = self._start(arrival)
        self._end()

    def has_another(self) -> bool:
        """Return whether the pass has another micro-batch. Called only while gradients accumulate."""
        if self._ahead is None:
            with self._meter.paused():
                self._ahead = self._arrival()
        batch = self._ahead[0]
        return batch is not None and not batch.agreed.end

    def untrained(self, samples: int) -> int:
        """The samples that the pass has not trained, of an epoch with so many."""
        return samples - self._done - self.rows

    def _arrival(self, since: float | None = None) -> _Arrival:
        """Wait for the next batch. The wait counts from now, or from ``since``."""
        asked = time.monotonic() if since is None else since
        batch = self._get()
        waited = time.monotonic() - asked
        # The cutting thread waits for the other ranks' samples once this rank's own are ready.
        own = waited if batch is None else min(max(batch.own_ready_s - asked, 0.0), waited)
        return batch, own, waited - own

    def _start(self, arrival: _Arrival, *, first: bool = False) -> LocalBatch | None:
        batch, own_s, peers_s = arrival
        if batch is not None:
            self._meter.waited(own_s, peers_s, batch.rows, first=first)
            self._note_skipped(batch.skipped)
            if self._scaling is not None:
                self._scaling.add(batch.agreed.measured)
        return batch

    def _end(self) -> None:
        """Raises RunError if the epoch has delivered no batch at all: such a run must not look as if it had finished."""
        leftover = self._batches.leftover
        self._note_skipped(leftover)
        if not self._done and not self._delivered:
            _refuse_empty_pass(leftover, self.epoch)
        if self._scaling is not None:
            self._scaling.add(self._batches.last_agreed.measured)
        self.completed = True


class Passes:
    """Opens the passes of one rank.

    Args:
        setup, place: the driver's settings, and this rank's place in the group.
        attempt: the number of the worker group.
        state: the training state, with what the epoch has trained.
        reporter, watchdog, meter: receivers of what happens in passes.
        scaling: gets the measurements that travel with training batches; None if batches are fixed.

    Attributes:
        attempt: the number of the worker group.
        direct: brings blocks of other nodes.
        epoch: the epoch under way, from 0, or the last one.
        in_epoch: whether an epoch is under way.
        others: the passes over other data sets than the training data.
        went_on: the ranks that have gone on with a training pass which this rank has left.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        place: RankPlace,
        *,
        attempt: int,
        state: TrainingState,
        reporter: Reporter,
        watchdog: Watchdog,
        meter: StepMeter,
        scaling: BatchScaling | None,
    ) -> None:
        self.attempt, self.direct = attempt, DirectBlocks(setup.hub, home=place.node)
        self.epoch, self.in_epoch = 0, False
        self.others = OtherPasses(setup, reporter, rank=place.rank)
        self.went_on: tuple[int, ...] = ()
        self._setup, self._place, self._state = setup, place, state
        self._reporter, self._watchdog, self._meter, self._scaling = reporter, watchdog, meter, scaling
        self._visited = -1  # the last epoch with a training pass
        self._visits: Counter[str] = Counter()
        self._fillers: dict[str, Cut] = {}

    # -- epochs ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, perhaps in its middle."""
        self.epoch, self.in_epoch = epoch, True
        self._reporter.epoch = epoch
        self.others.begin_epoch(self._state.progress.passes)

    def left_within(self, epoch: int) -> bool:
        """Return whether a loop has left this epoch, and has begun its training pass: nothing of the epoch is left for another loop."""
        return self.in_epoch and self._visited == epoch

    # -- passes ----------------------------------------------------------------------------------------------------

    def open_training(
        self, split: BatchSplit, *, followed: bool, drop_last: bool, least: int, agreement: Agreement
    ) -> TrainingPass:
        """Open the training pass of the epoch.

        Args:
            split: the present split of global batches.
            followed: whether another training pass will follow.
            drop_last: leave out the last batches, which are not full.
            least: the fewest rows of a batch, where that can be had.
            agreement: the messages of ranks that travel with batches.
        """
        if self._visited == self.epoch:
            raise RunError(
                f"ctx.batches({TRAIN!r}) was called twice in epoch {self.epoch + 1}, and an epoch delivers every sample once. "
                "Call it once in each round of: for epoch in ctx.epochs(n)."
            )
        self._visited = self.epoch
        done = self._state.progress.trained
        began = time.monotonic()
        self._meter.restart()  # the user's work between two passes belongs to no step
        batches = self._batches(
            TRAIN,
            PassRequest(
                world_size=self._place.world_size,
                first_rows=split.local_batch_size * self._place.world_size,
                epoch=self.epoch,
                done=done.pairs,
                followed=followed,
                batch=split.global_batch_size if self._setup.deterministic else None,
            ),
            visit=self.epoch,
            split=split,
            least=least,
            drop_last=drop_last,
            agreement=agreement,
        )
        return TrainingPass(
            batches,
            epoch=self.epoch,
            reporter=self._reporter,
            watchdog=self._watchdog,
            meter=self._meter,
            scaling=self._scaling,
            done=len(done),
            began=began,
        )

    def open_other(self, name: str, split: BatchSplit, *, drop_last: bool, least: int) -> LocalPass:
        """Open the next pass over another data set. The arguments are those of :meth:`open_training`."""
        # Counted by each rank for itself: equal calls give equal numbers, by which the ranks meet in the same pass.
        visit = self._visits[name]
        self._visits[name] += 1
        within = self.epoch if self.in_epoch else OUTSIDE
        batches = self._batches(
            name,
            PassRequest(
                world_size=self._place.world_size,
                first_rows=split.local_batch_size * self._place.world_size,
                epoch=self.others.begin(name, within),
            ),
            visit=visit,
            split=split,
            least=least,
            drop_last=drop_last,
            agreement=NoAgreement(),
        )
        return LocalPass(batches, name, epoch=within, reporter=self._reporter, watchdog=self._watchdog)

    def close_other(self, other: LocalPass) -> None:
        """End a pass over another data set. A resumed run does not repeat it if it ends in its own epoch."""
        other.close()
        if self.in_epoch and self.epoch == other.epoch:
            self._state.ended_pass(other.name)

    def _batches(
        self,
        name: str,
        request: PassRequest,
        *,
        visit: int,
        split: BatchSplit,
        least: int,
        drop_last: bool,
        agreement: Agreement,
    ) -> Batches:
        setup, dataset = self._setup, self._setup.datasets[name]
        key = PassKey(attempt=self.attempt, name=name, number=visit)
        opened = setup.hub.open(key, request, self._place.rank, self._place.node)
        return Batches(
            feed_of(opened, setup.hub, self.direct, self._place.feed),
            key,
            peers=self._place.peers[name],
            split=split,
            delivery=self.delivery(name),
            cutting=Cutting(
                padded=name == TRAIN,
                # A batch's samples then depend on the number of ranks, and a deterministic run's must not.
                least=1 if setup.deterministic else least,
                drop_last=drop_last,
                budget=dataset.budget,
                ordered=setup.deterministic or dataset.ordered,
            ),
            agreement=agreement,
            template=self._fillers,
            total=opened.samples,
        )

    def delivery(self, name: str) -> Delivery:
        """What makes the batches of a data set on the device."""
        dataset = self._setup.datasets[name]
        return Delivery(self._place.device, collate_fn=dataset.collate_fn, on_device=dataset.on_device)

    def expected_batches(self, name: str, split: BatchSplit, *, drop_last: bool) -> int | None:
        """The number of this worker's batches in a pass over a data set; None if only the pass tells: the number of samples is unknown,
        a generator makes them, or tokens limit the batches.

        After a restart within an epoch, that epoch's pass has the rest of the batches. Before a loop has begun an epoch, the number is
        that of a whole one: schedulers of learning rates multiply it by the number of epochs.
        """
        dataset = self._setup.datasets[name]
        samples = dataset.delivered
        if samples is None or dataset.budget is not None:
            return None
        at_once = split.local_batch_size * self._place.world_size
        part = math.floor if drop_last else math.ceil
        if name != TRAIN:
            return part(samples / at_once)
        done = len(self._state.progress.trained) if self.in_epoch else 0
        whole, rest = divmod(samples - done, split.global_batch_size)
        return whole * (split.accum_steps + 1) + part(rest / at_once)

    # -- passes that ranks leave -----------------------------------------------------------------------------------

    def check_company(self) -> None:
        """Raise RunError if this rank has left a pass in which others went on: they wait for it, and it would wait for them."""
        if self.went_on:
            self.refuse_lone([self._place.rank], self.went_on)

    def refuse_lone(self, left: Sequence[int], went_on: Sequence[int]) -> NoReturn:
        """Raise the error of ranks that train on after others have left the pass."""
        raise RunError(
            f"{_workers(left)} left the loop over ctx.batches('train') in epoch {self.epoch + 1}, at step "
            f"{self._state.progress.step}, and {_workers(went_on)} went on. All workers must leave it at the same batch. To end training "
            "early, call ctx.stop(), which ends all of them."
        )


class OtherPasses:
    """Counts one rank's passes over the data sets beside the training data: each over a shuffled one has an order of its own."""

    def __init__(self, setup: WorkerSetup, reporter: Reporter, *, rank: int) -> None:
        self._datasets, self._reporter, self._rank = setup.datasets, reporter, rank
        self._in_epoch: Counter[str] = Counter()  # begun in this epoch, with those before a restart
        self._outside: Counter[str] = Counter()  # begun outside of epochs
        self._entered: Counter[str] = Counter()  # of which the loop has asked for batches, since the last epoch ended
        self._told = False

    def begin_epoch(self, ended: Mapping[str, int]) -> None:
        """Begin an epoch. ``ended``: the passes that it had ended before a restart."""
        self._in_epoch = Counter(ended)

    def begin(self, name: str, within: int) -> int:
        """Begin a pass within an epoch, or :data:`OUTSIDE`. Return what stands for the epoch in its order and random numbers.

        A resumed run counts from where its checkpoint is. Passes outside of epochs count from the start of each run: a script repeats
        those before its loop.
        """
        begun = self._outside if within == OUTSIDE else self._in_epoch
        begun[name] += 1
        return pass_number(name, within, begun[name] - 1) if self._datasets[name].varied else 0

    def enter(self, name: str) -> None:
        """Note that the loop takes batches of a pass."""
        self._entered[name] += 1

    def end_epoch(self) -> Counter[str]:
        """Return this rank's passes since the last epoch ended, and count anew."""
        entered, self._entered = self._entered, Counter()
        return entered

    def compare(self, entered: Sequence[Counter[str]], epoch: int) -> None:
        """Report once that the ranks, in their order, took different passes: each sees its share alone."""
        if self._rank or self._told:
            return
        mine = entered[0]
        differ = (
            (rank, name) for rank, theirs in enumerate(entered) for name in theirs | mine if theirs[name] != mine[name]
        )
        if difference := next(differ, None):
            rank, name = difference
            self._told = True
            passes = [mine[name], entered[rank][name]]
            self._reporter.event(PassesDiffer(dataset=name, epoch=epoch, other=rank, passes=passes))


def _refuse_empty_pass(leftover: Sequence[Skipped], epoch: int) -> NoReturn:
    """Raise RunError for a pass without a batch, of which this rank skipped these samples. Storage may refuse every read."""
    if not leftover:
        raise RunError(
            f"epoch {epoch + 1} delivered no batch: drop_last, filters or transforms left no training samples, or another worker "
            "skipped them (skipped.jsonl in the run directory)."
        )
    raise RunError(
        f"epoch {epoch + 1} delivered no batch, since training samples were skipped, such as sample {leftover[0].sample_id} "
        f"({leftover[0].reason}). skipped.jsonl in the run directory names each. Correct the cause; with on_error='raise', a run "
        "ends at the first such sample."
    )


def _workers(ranks: Sequence[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
