"""The driver's side of adaptation: what the workers told becomes an observation, a decision is made of it, and orders go
back.

Where it stops: the decision itself is :mod:`offload.adapt.decide`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from offload.adapt.decide import Decision, Keep, Option, Resize, Rules, Situation, State, decide
from offload.adapt.demand import wanted_cores
from offload.adapt.observe import Interval, Seen, Size
from offload.measure.steps import Totals
from offload.model.noise import GradientNoise
from offload.model.overlap import overlap_of_queue
from offload.train.batches import PREFETCH_BLOCKS
from offload.train.config import Adaptation, BatchSize, BatchSplit
from offload.train.context import TRAIN
from offload.train.monitor import News, Orders, sum_of
from offload.train.resizing import Workers

LOOKED_BACK = 2  # intervals that must agree before cores are given back
LEAST_VARIATION = 0.1  # of tasks: a machine that others use varies at least so much


class Adaptor:
    """Of one run.

    Args:
        batch_size: the range that the user gave.
        adaptation: how to choose.
        workers: how many train, and which counts fit.
        order: sends orders to the workers.
        tell: writes an event: its kind and values.
    """

    def __init__(
        self,
        batch_size: BatchSize,
        adaptation: Adaptation,
        *,
        workers: Workers,
        order: Callable[[Orders], None],
        tell: Callable[..., None],
    ) -> None:
        self.seen = Seen()
        self.orders = Orders()
        self._batch_size, self._adaptation, self._workers = batch_size, adaptation, workers
        self._order, self._tell = order, tell
        self._state = State()
        self._looked: tuple[float, News] | None = None
        self._expected: tuple[Size, float] | None = None
        self._device: deque[float] = deque(maxlen=LOOKED_BACK)  # samples/s that the workers would have trained at

    def look(self, news: News, now_s: float) -> None:
        """Decide, if an interval has passed since the last time."""
        if not news.running or self._workers.busy:
            self._looked = None
            self._device.clear()
            return
        if self._looked is None or _restarted(self._looked[1], news):
            self._looked = now_s, news
        since, before = self._looked
        if self._follow_schedule(news):
            return
        self._tell_followed(news)
        if now_s - since < self._adaptation.interval_s:
            return
        self._looked = now_s, news
        options = self._workers.options()
        option = next((o for o in options if o.workers == news.adapted.workers), None)
        cores = self._workers.cores
        interval = interval_of(before, news, nodes=option.nodes if option is not None else 1, cores=cores)
        if not self.seen.steps and news.adapted.learned:
            self.seen = Seen.from_state(news.adapted.learned)
        self.seen = self.seen.with_interval(interval, cores)
        self._want_cores(interval, news)
        self._compare(interval)
        if self._scheduled(news) is not None:
            options = [option] if option is not None else []
        situation = self._situation(news, interval.size, options)
        rules = self._rules(news)
        self._state, decision = decide(self._state, situation, rules)
        if isinstance(decision, Resize) and not self._workers.fits(decision.size.workers):
            self._workers.want_workers(decision.size.workers)
            # Once there is room it is done at once, if it is still wanted then.
            self._state = State(wanted_workers=decision.size.workers, asked=rules.agreeing)
            decision = Keep(reason=f"{decision.reason}; nodes for them are asked for")
        elif self._state.wanted_workers is None and not isinstance(decision, Resize) and self._scheduled(news) is None:
            self._workers.want_workers(interval.size.workers)
        self._act(decision, interval, news)

    def _follow_schedule(self, news: News) -> bool:
        """Begin the change that the user's schedule asks for. Returns whether there is one."""
        asked = self._scheduled(news)
        options = {option.workers: option for option in self._workers.options()} if asked is not None else {}
        if asked is None or not options:
            return False
        fitting = min(options, key=lambda count: (abs(count - asked), count))
        if not self._workers.fits(fitting):
            self._workers.want_workers(fitting)
            return False
        if fitting == news.adapted.workers:
            return False
        local, accum = news.adapted.batch
        now = BatchSplit(local_batch_size=local, accum_steps=accum, workers=news.adapted.workers)
        batch = self._batch_size.carried_over(now, fitting)
        size = Size(
            nodes=options[fitting].nodes,
            workers=fitting,
            local_batch_size=batch.local_batch_size,
            accum_steps=batch.accum_steps,
        )
        when = (
            f"at {_progress(news):.0%} of the training"
            if self._adaptation.by_progress
            else f"in epoch {news.epoch + 1}"
        )
        reason = f"the schedule asks for {asked} workers {when}"
        self._tell("decided", decision="resize", reason=reason, **dataclasses.asdict(size))
        self._workers.change(size, self.orders, news)
        return True

    def _tell_followed(self, news: News) -> None:
        """Let workers go on that wait for what the schedule asks for: they are as many, or there is no room for that."""
        begun = self._adaptation.entries_begun(news.epoch, _progress(news))
        if begun > self.orders.entries_followed:
            self.orders = dataclasses.replace(self.orders, entries_followed=begun)
            self._order(self.orders)

    def _scheduled(self, news: News) -> int | None:
        return self._adaptation.scheduled(news.epoch, _progress(news))

    def _want_cores(self, interval: Interval, news: News) -> None:
        """As many cores as the workers are worth, where the cluster can have more or fewer. By what these intervals showed: the
        model of all sizes is slower to follow where the same size takes another time than before."""
        bounds, each = self._adaptation.preprocessing_cores, self.seen.input_samples_per_s(1.0)
        pace, cores = news.rates.get(TRAIN, {}).get("input_pace_samples_per_s"), news.cores[0]
        if pace and cores:
            # Tasks that wait for storage deliver less than the CPU time says, and by the clock that is known while it does not bind.
            each = min(each, pace / cores)
        if interval.device_samples_per_s is not None:
            self._device.append(interval.device_samples_per_s)
        # Cores that have just come may not preprocess yet, and would seem slow.
        settled = self.seen.recent is not None and self.seen.recent.settled
        if bounds is None or not self._device or math.isinf(each) or not settled:
            return
        fastest = max(self._device)
        cores = wanted_cores(fastest, each, bounds=bounds, before=self._workers.cores_wanted)
        self._workers.want_cores(cores, device_samples_per_s=fastest, core_samples_per_s=each)

    def _situation(self, news: News, size: Size, options: Sequence[Option]) -> Situation:
        noise, goal = news.adapted.noise, news.adapted.goal
        return Situation(
            size=size,
            seen=self.seen,
            noise=None if noise is None else GradientNoise(*noise, batch_size=self._batch_size.initial),
            options=options,
            work_left=math.inf if goal is None else max(goal - news.adapted.useful, 0.0),
            restart_s=self._workers.restart_s,
        )

    def _rules(self, news: News) -> Rules:
        sizes = self._batch_size
        largest = sizes.max or sizes.initial
        least, most = sizes.local or (1, largest)
        known = [bound for bound in (most, news.adapted.most_local, news.most_local) if bound is not None]
        variation = max(news.rates.get(TRAIN, {}).get("variation", 0.0), LEAST_VARIATION)
        return Rules(
            initial_batch_size=sizes.initial,
            max_batch_size=largest,
            local_batch_size=(least, max(min(known), least)),
            objective=self._adaptation.objective,
            overlap=overlap_of_queue(PREFETCH_BLOCKS, variation),
        )

    def _compare(self, interval: Interval) -> None:
        """What a change was expected to bring, and what it brought."""
        if self._expected is None or self._expected[0] != interval.size:
            return
        predicted = self._expected[1]
        self._expected = None
        self._tell("measured", predicted_samples_per_s=predicted, measured_samples_per_s=interval.samples_per_s)

    def _act(self, decision: Decision, interval: Interval, news: News) -> None:
        told: dict[str, Any] = {
            "decision": type(decision).__name__.lower(),
            "reason": decision.reason,
            "samples_per_s": interval.samples_per_s,
            "stall": interval.stall,
        }
        if not isinstance(decision, Keep):
            told |= {
                **dataclasses.asdict(decision.size),
                "global_batch_size": decision.size.global_batch_size,
                "predicted_samples_per_s": decision.predicted_samples_per_s,
                "predicted_goodput": decision.predicted_goodput,
            }
        self._tell("decided", **told)
        self.orders = dataclasses.replace(self.orders, learned=self.seen.to_state())
        if not isinstance(decision, Keep):
            size = decision.size
            self._expected = size, decision.predicted_samples_per_s
            self.orders = dataclasses.replace(
                self.orders, batch=(size.workers, size.local_batch_size, size.accum_steps)
            )
        if isinstance(decision, Resize):
            self._workers.change(decision.size, self.orders, news)
        else:
            self._order(self.orders)


def _progress(news: News) -> float:
    """The share of the training that is done; 0 where its end is not known."""
    return min(news.adapted.useful / news.adapted.goal, 1.0) if news.adapted.goal else 0.0


def _restarted(before: News, now: News) -> bool:
    """Whether the workers or the batch are others than before: what is measured across that belongs to neither."""
    return (before.attempts, before.adapted.changes, before.adapted.batch) != (
        now.attempts, now.adapted.changes, now.adapted.batch
    )  # fmt: skip


def interval_of(before: News, now: News, *, nodes: int, cores: int) -> Interval:
    """What happened between two looks. The wait for a pass's first batch is left out: it is as long whatever the batch, and
    tells nothing of the rate at which the input delivers. Nor does what was delivered while ``cores`` did not all preprocess.
    """
    since: Totals = sum_of(now.totals).minus(sum_of(before.totals))
    local, accum = now.adapted.batch
    ceiling = now.rates.get(TRAIN, {}).get("input_ceiling_samples_per_s")
    return Interval(
        size=Size(nodes=nodes, workers=now.adapted.workers, local_batch_size=local, accum_steps=accum),
        steps=since.steps,
        samples=since.samples,
        step_time_s=since.step_time_s - since.pass_start_s,
        data_wait_s=since.data_wait_s - since.pass_start_s,
        compute_s=since.compute_s,
        sync_s=since.sync_s,
        busy_ceiling_samples_per_s=ceiling if before.cores == now.cores == (cores, 0) else None,
    )
