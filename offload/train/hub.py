"""The run's one actor beside the driver: it feeds the workers and hears from them. (Each process more would cost a start
some seconds.)

A module of its own that imports neither torch nor Ray Train: on a host with few cores this process starts beside the
workers, which do import them.
"""

from __future__ import annotations

from offload.pipeline.feed import Cores, Feed, Stream
from offload.train.monitor import Monitor


class Hub(Feed, Monitor):
    """What workers take from and push to, and what the driver reads."""

    def __init__(self, streams: dict[str, Stream], cores: Cores) -> None:
        Feed.__init__(self, streams, cores)
        Monitor.__init__(self, self.rates)
