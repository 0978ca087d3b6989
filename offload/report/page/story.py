"""One run and everything that follows from its records: clock, nodes, cost, measurements and events in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from offload.model.catalog import Catalog
from offload.report.events import ClusterChanged, RunEvent, RunFinished, RunStarted
from offload.report.json_values import number, table
from offload.report.page.clock import RunClock
from offload.report.page.measured import Measurements, last_size, measured, usable
from offload.report.page.money import Prices, Spending
from offload.report.page.node_history import Node, nodes_of
from offload.report.page.records import Records
from offload.report.page.what_if import RunModel, model_of


@dataclass(frozen=True, kw_only=True)
class WordedEvent:
    """An event in words. ``at_s``: its second of the run."""

    event: RunEvent
    at_s: float
    words: str


@dataclass(frozen=True)
class Story:
    """A run and everything that follows from its records. ``own_prices``: the user's prices, see :class:`Prices`."""

    records: Records
    catalog: Catalog
    own_prices: Mapping[str, float]

    @cached_property
    def clock(self) -> RunClock:
        """The run's clock."""
        return RunClock.of(self.records)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes in the order in which they came."""
        return nodes_of(self.records, self.clock)

    @cached_property
    def prices(self) -> Prices:
        """The prices that hold for this run."""
        return Prices.of(self.records, self.catalog, self.own_prices)

    @cached_property
    def spending(self) -> Spending | None:
        """The dollars over time; None if a price is unknown."""
        return Spending.of(self.nodes, self.prices)

    @cached_property
    def worded_events(self) -> list[WordedEvent]:
        """The events in words."""
        return [self.worded(place) for place in range(len(self.records.events))]

    def worded(self, place: int) -> WordedEvent:
        """One event in words: those of a long run take a while."""
        event = self.records.events[place]
        return WordedEvent(event=event, at_s=self._seconds[place], words=event.words(self._node_names))

    @cached_property
    def _seconds(self) -> list[float]:
        return self.clock.seconds_of(self.records.events)

    @cached_property
    def _node_names(self) -> dict[str, str]:
        return {node.node_id: node.name for node in self.nodes}

    @cached_property
    def whole(self) -> Measurements | None:
        """The measurements over the whole run; None before the first step."""
        return measured(self.records.intervals, usable(self.records.intervals))

    @cached_property
    def last(self) -> Measurements | None:
        """The measurements at the run's last size. What intervals of earlier versions lack comes from the summary and the events."""
        newest = measured(self.records.intervals, last_size(self.records.intervals))
        if newest is None:
            return None
        rates = table(table(self.records.summary.get("input")).get("train"))

        def summed(name: str) -> float | None:
            value = number(rates.get(name))
            return value if value > 0 else None

        cores = [
            number(event.preprocessing_cores)
            for event in self.records.events
            if isinstance(event, RunStarted | ClusterChanged)
        ]
        cores = [count for count in cores if not math.isnan(count)]
        return replace(
            newest,
            cores=newest.cores if newest.cores is not None or not cores else int(cores[-1]),
            core_seconds_per_sample=newest.core_seconds_per_sample or summed("core_seconds_per_sample"),
            wire_bytes_per_sample=newest.wire_bytes_per_sample or summed("wire_bytes_per_sample"),
            input_pace=newest.input_pace or summed("input_pace_samples_per_s"),
        )

    @cached_property
    def model(self) -> RunModel | str:
        """The model at the run's last size, or the reason why there is none."""
        if self.last is None:
            return "no step was measured"
        at_s = self.measured_until_s
        return model_of(self.last, [node for node in self.nodes if node.there_up_to(at_s)], self.prices)

    @cached_property
    def measured_until_s(self) -> float:
        """The second of the run of the last measurement."""
        places = np.flatnonzero(usable(self.records.intervals))
        return (
            float(self.clock.seconds(self.records.intervals["at"][places[-1]])) if len(places) else self.clock.length_s
        )

    @property
    def device(self) -> str:
        """The accelerators' name: ``GPU``, or ``worker`` where CPUs stand in."""
        if any(node.gpus for node in self.nodes if node.training) or self.records.summary.get("device") == "GPU":
            return "GPU"
        return "worker"

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``interrupted``, or ``unfinished``: it is still running, or was killed."""
        last = self.clock.sessions[-1].status if self.clock.sessions else self.records.summary.get("status")
        return last if last in ("finished", "failed", "interrupted") else "unfinished"

    @property
    def usd(self) -> float | None:
        """Dollars spent so far."""
        return None if self.spending is None else float(self.spending.up_to(self.clock.length_s))

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars per hour at the last measurement."""
        return None if self.spending is None else self.spending.usd_per_hour(self.measured_until_s)

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million samples at the run's last size, while it steps."""
        if self.usd_per_hour is None or self.last is None:
            return None
        return self.usd_per_hour / 3600 / self.last.samples_per_s * 1e6

    @cached_property
    def mean_usd_per_hour(self) -> float | None:
        """Dollars per hour, the mean over the time from the first measurement to the last."""
        places = np.flatnonzero(usable(self.records.intervals))
        if self.spending is None or not len(places):
            return None
        began, ended = self.clock.seconds(self.records.intervals["at"][places[[0, -1]]])
        if ended <= began:
            return self.usd_per_hour
        low, high = self.spending.up_to([began, ended])
        return float(high - low) / float(ended - began) * 3600

    @property
    def mean_usd_per_million(self) -> float | None:
        """Dollars per million samples over the whole run, while it steps."""
        if self.mean_usd_per_hour is None or self.whole is None:
            return None
        return self.mean_usd_per_hour / 3600 / self.whole.samples_per_s * 1e6

    @cached_property
    def progress(self) -> tuple[float, float] | None:
        """The completed share of the training, and the seconds still to train at the last size's goodput; None if its end is unknown."""
        intervals = self.records.intervals
        known = np.flatnonzero((intervals["goal"] > 0) & (intervals["useful"] >= 0) & (intervals["goodput"] > 0))
        if not len(known):
            return None
        useful, goal = float(intervals["useful"][known[-1]]), float(intervals["goal"][known[-1]])
        pace = float(np.median(intervals["goodput"][known[-20:]]))
        return min(useful / goal, 1.0), max(goal - useful, 0.0) / pace

    @property
    def usd_at_end(self) -> float | None:
        """The expected dollars of the whole training; None for a run that has ended well, or whose end is unknown."""
        if self.status == "finished" or self.progress is None or self.usd is None or self.usd_per_hour is None:
            return None
        return self.usd + self.usd_per_hour * self.progress[1] / 3600

    @property
    def samples(self) -> int:
        """The trained samples. Training after a restart counts once in the run's own count, and twice in its intervals."""
        counts = [number(event.samples) for event in self.records.events if isinstance(event, RunFinished)]
        counts = [count for count in counts if not math.isnan(count)]
        if counts and self.status != "unfinished":
            return int(counts[-1])
        return int(self.whole.samples) if self.whole is not None else 0

    @property
    def steps(self) -> int:
        """The optimizer steps so far."""
        steps = self.records.intervals["step"]
        counts = [number(event.steps) for event in self.records.events if isinstance(event, RunFinished)]
        known = [count for count in (*steps[-1:], *counts[-1:]) if not math.isnan(count)]
        return int(max(known, default=0))
