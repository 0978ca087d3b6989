"""Turn the workers' reports into decisions: in each interval an observation, a decision, and events for the state machine.

Where it stops: :mod:`offload.adapt.decide` decides, and :mod:`offload.train.driver.fleet` changes the run accordingly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from offload.adapt.cores import CoresLearned, InputSeen, count_cores
from offload.adapt.decide import Decision, Keep, Resize, State, cores_meanwhile, decide
from offload.adapt.observe import LEAST_STEPS, SETTLED_S, Seen, StepInterval
from offload.adapt.situation import DecisionBounds, Option, Situation
from offload.measure.steps import INPUT_BOUND, Totals
from offload.model.batch_split import BatchSplit
from offload.model.noise import GradientNoise
from offload.model.overlap import LEAST_VARIATION, overlap_of_queue
from offload.report.events import Decided, GainMeasured, RunEvent
from offload.train.config import Adaptation, BatchSize
from offload.train.driver.fleet.messages import (
    CoresWanted,
    EntriesFollowed,
    Event,
    Learned,
    ResizeDecided,
    SplitDecided,
    WorkersWanted,
)
from offload.train.driver.fleet.state import Fleet
from offload.train.messages import TRAIN, News, sum_of
from offload.train.worker.data.slice_fetcher import PREFETCH_BLOCKS


class Tuner:
    """The decisions of one run.

    Args:
        batch_size: the user's range of batch sizes.
        adaptation: the user's rules.
        core_bounds: the least and the most preprocessing cores, if the run asks the cluster for them.
    """

    def __init__(
        self, batch_size: BatchSize, adaptation: Adaptation, core_bounds: tuple[int, int] | None = None
    ) -> None:
        self.seen = Seen()
        self._batch_size, self._adaptation, self._core_bounds = batch_size, adaptation, core_bounds
        self._state = State()
        self._looked: tuple[float, News] | None = None
        self._expected: tuple[BatchSplit, float] | None = None
        self._cores = CoresLearned()

    def look(self, news: News, fleet: Fleet, now_s: float) -> list[Event | RunEvent]:
        """The events that follow from the news, with a decision if an interval has passed since the last one."""
        split = news.group.split
        # Between groups, times describe neither the old size nor the new one.
        if not news.running or fleet.busy or split is None:
            self._looked = None
            return []
        if self._looked is None or _restarted(self._looked[1], news):
            self._looked = now_s, news
        since, before = self._looked
        # At every look, not once an interval: a schedule names the moment of the change.
        events = self._follow_schedule(news, split, fleet)
        if any(isinstance(event, ResizeDecided) for event in events):
            return events
        events += self._entries_followed(news, fleet)
        if now_s - since < self._interval_s(before, news, split, fleet):
            return events
        self._looked = now_s, news
        options = fleet.options()
        option = next((o for o in options if o.workers == news.group.workers), None)
        nodes = option.nodes if option is not None else 1
        interval = interval_of(before, news, split, nodes=nodes, cores=fleet.cores)
        # A resumed run begins with what its checkpoint has learned, but never overwrites what it has measured itself.
        if not self.seen.steps and news.group.learned:
            self.seen = Seen.from_state(news.group.learned)
        self.seen = self.seen.with_interval(interval, fleet.cores)
        rules = self._rules(news)
        cores = self._cores_wanted(interval, news, fleet, rules)
        if self._cores.enough is not None:  # more cores are known to bring nothing
            enough = float(self._cores.enough)
            options = [dataclasses.replace(o, cores=min(o.cores, enough)) if o.elastic else o for o in options]
        events += self._compared(interval)
        scheduled = self._scheduled(news) is not None
        if scheduled:
            # A schedule chooses the workers, and the batch may still adapt for them.
            options = [option] if option is not None else []
        remembered = self._state
        self._state, decision = decide(remembered, self._situation(news, split, options, fleet), rules)
        if cores is not None:
            present = fleet.cores if fleet.cores_goal is None else fleet.cores_goal
            wanted = cores_meanwhile(cores.cores, present, self._state, decision, rules)
            events.append(dataclasses.replace(cores, cores=wanted))
        if isinstance(decision, Resize) and not fleet.fits(decision.split.workers):
            events.append(WorkersWanted(workers=decision.split.workers))
            # The change happens once there is room, if it is still wanted then.
            agreed = remembered.agreeing(rules, grows=decision.split.workers > split.workers)
            self._state = dataclasses.replace(
                remembered, wanted_workers=decision.split.workers, wanted_cores=decision.cores, asked=agreed
            )
            decision = Keep(reason=f"{decision.reason}; the run asks for nodes")
        elif self._state.wanted_workers is None and not isinstance(decision, Resize) and not scheduled:
            events.append(WorkersWanted(workers=split.workers))
        return events + self._decided(decision, interval)

    def _interval_s(self, before: News, news: News, split: BatchSplit, fleet: Fleet) -> float:
        """Seconds from one decision to the next. An arbiter waits for the first measurement of a number of workers."""
        interval_s = self._adaptation.interval_s
        known = any(workers == split.workers for _, workers, _ in self.seen.steps)
        if fleet.lease is None or (known and self.seen.ceiling_samples_per_s is not None):
            return interval_s
        enough = LEAST_STEPS * split.workers
        return min(interval_s, SETTLED_S) if _steps(news) - _steps(before) >= enough else interval_s

    def _follow_schedule(self, news: News, split: BatchSplit, fleet: Fleet) -> list[Event | RunEvent]:
        """The events that follow the user's schedule: a change to the allowed worker count nearest to the scheduled one, or a request
        for room."""
        scheduled = self._scheduled(news)
        options = {option.workers: option for option in fleet.options()} if scheduled is not None else {}
        if scheduled is None or not options:
            return []
        fitting = min(options, key=lambda count: (abs(count - scheduled), count))
        if not fleet.fits(fitting):
            return [WorkersWanted(workers=fitting)]
        if fitting == split.workers:
            return []
        batch = self._batch_size.carried_over(split, fitting)
        when = (
            f"at {_progress(news):.0%} of the training"
            if self._adaptation.by_progress
            else f"in epoch {news.epoch + 1}"
        )
        decided = Decided(
            decision="resize",
            reason=f"the schedule asks for {scheduled} workers {when}",
            nodes=options[fitting].nodes,
            workers=batch.workers,
            local_batch_size=batch.local_batch_size,
            accum_steps=batch.accum_steps,
        )
        return [decided, ResizeDecided(split=batch)]

    def _entries_followed(self, news: News, fleet: Fleet) -> list[Event | RunEvent]:
        """Release workers that wait for the scheduled count: they have reached it, or it does not fit."""
        begun = self._adaptation.entries_begun(news.epoch, _progress(news))
        return [EntriesFollowed(entries=begun)] if begun > fleet.entries_followed else []

    def _scheduled(self, news: News) -> int | None:
        return self._adaptation.scheduled(news.epoch, _progress(news))

    def _cores_wanted(
        self, interval: StepInterval, news: News, fleet: Fleet, rules: DecisionBounds
    ) -> CoresWanted | None:
        """The number of cores that the present workers and batch need, if the cluster can grow or shrink.

        It follows from the last intervals alone. The model of all sizes adapts more slowly if the step time of one size changes.
        """
        bounds = self._core_bounds
        pace, cores = news.rates.get(TRAIN, {}).get("input_pace_samples_per_s"), news.cores[0]
        paced = pace / cores if pace and cores else math.inf
        # Tasks that wait for storage deliver less than their CPU time suggests. Their pace by the clock shows it.
        per_core = min(self.seen.input_samples_per_s(1.0), paced)
        device = interval.device_samples_per_s
        # New cores that do not preprocess yet would look slow.
        settled = self.seen.recent is not None and self.seen.recent.settled
        if bounds is None or device is None or math.isinf(per_core) or not settled:
            return None
        observed = InputSeen(
            cores=cores,
            complete=interval.busy_ceiling_samples_per_s is not None,
            samples_per_s=interval.samples_per_s,
            bound=interval.stall >= INPUT_BOUND,
            device_samples_per_s=device,
            core_samples_per_s=per_core,
            core_pace_samples_per_s=paced,
            busy_core_samples_per_s=(self.seen.ceiling_samples_per_s or 1.0) / max(self.seen.cores, 1.0),
            conditions=(interval.nodes, interval.split),
        )
        price = fleet.room.core_price(fleet.placement) if rules.objective == "cost" else None
        self._cores, wanted = count_cores(
            self._cores, observed, bounds=bounds, before=fleet.cores_goal, overlap=rules.overlap, price=price
        )
        capped = self._cores.enough is not None and wanted < (fleet.cores_goal or 0)
        return CoresWanted(
            cores=wanted,
            device_samples_per_s=device,
            core_samples_per_s=per_core,
            capped_samples_per_s=interval.samples_per_s if capped else None,
        )

    def _situation(self, news: News, split: BatchSplit, options: Sequence[Option], fleet: Fleet) -> Situation:
        known, goal = news.group.noise, news.group.goal
        noise = None
        if known is not None:
            noise = GradientNoise(known[0], known[1], batch_size=self._batch_size.initial, sqr_error=known[2])
        return Situation(
            split=split,
            seen=self.seen,
            noise=noise,
            options=options,
            work_left=math.inf if goal is None else max(goal - news.group.useful, 0.0),
            restart_s=fleet.restart.cost_s,
        )

    def _rules(self, news: News) -> DecisionBounds:
        sizes = self._batch_size
        largest = sizes.max or sizes.initial
        least, most = sizes.local or (1, largest)
        # Three limits: the user's, the one that the present group has found, and the one that memory errors have
        # left.
        known = [bound for bound in (most, news.group.most_local, news.most_local) if bound is not None]
        variation = max(news.rates.get(TRAIN, {}).get("variation", 0.0), LEAST_VARIATION)
        return DecisionBounds(
            initial_batch_size=sizes.initial,
            max_batch_size=largest,
            local_batch_size=(least, max(min(known), least)),
            objective=self._adaptation.objective,
            overlap=overlap_of_queue(PREFETCH_BLOCKS, variation),
        )

    def _compared(self, interval: StepInterval) -> list[Event | RunEvent]:
        """The comparison of a change's predicted throughput with the measured one, once after each change."""
        if self._expected is None or self._expected[0] != interval.split:
            return []
        predicted = self._expected[1]
        self._expected = None
        return [GainMeasured(predicted_samples_per_s=predicted, measured_samples_per_s=interval.samples_per_s)]

    def _decided(self, decision: Decision, interval: StepInterval) -> list[Event | RunEvent]:
        decided = Decided(
            decision=type(decision).__name__.lower(),
            reason=decision.reason,
            samples_per_s=interval.samples_per_s,
            stall=interval.stall,
        )
        learned = Learned(state=self.seen.to_state())
        if isinstance(decision, Keep):
            return [decided, learned]
        split = decision.split
        decided = dataclasses.replace(
            decided,
            nodes=decision.nodes,
            workers=split.workers,
            local_batch_size=split.local_batch_size,
            accum_steps=split.accum_steps,
            global_batch_size=split.global_batch_size,
            predicted_samples_per_s=decision.predicted_samples_per_s,
            predicted_goodput=decision.predicted_goodput,
        )
        self._expected = split, decision.predicted_samples_per_s
        change = ResizeDecided(split=split) if isinstance(decision, Resize) else SplitDecided(split=split)
        return [decided, learned, change]


def _steps(news: News) -> int:
    return sum_of(news.totals).steps


def _progress(news: News) -> float:
    """The completed share of the training; 0 if its end is unknown."""
    return min(news.group.useful / news.group.goal, 1.0) if news.group.goal else 0.0


def _restarted(before: News, now: News) -> bool:
    """Return whether the workers or the batch have changed. Measurements across the change describe neither."""
    return (before.attempts, before.group.changes, before.group.split) != (
        now.attempts, now.group.changes, now.group.split
    )  # fmt: skip


def interval_of(before: News, now: News, split: BatchSplit, *, nodes: int, cores: int) -> StepInterval:
    """The interval between two looks, with global batches split by ``split``, on ``nodes`` nodes.

    Times exclude the wait for a pass's first batch, which does not depend on the batch size and says nothing about the input's rate.
    The input's ceiling is missing unless all ``cores`` preprocessed throughout.
    """
    since: Totals = sum_of(now.totals).minus(sum_of(before.totals))
    ceiling = now.rates.get(TRAIN, {}).get("input_ceiling_samples_per_s")
    return StepInterval(
        nodes=nodes,
        split=split,
        steps=since.steps,
        samples=since.samples,
        step_time_s=since.step_time_s - since.pass_start_s,
        data_wait_s=since.data_wait_s - since.pass_start_s,
        compute_s=since.compute_s,
        sync_s=since.sync_s,
        busy_ceiling_samples_per_s=ceiling if before.cores == now.cores == (cores, 0) else None,
    )
