"""A benchmark's rows in several processes, a few at a time, so that it can end in order after a while and go on later."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

Key = TypeVar("Key")
Row = TypeVar("Row")


def in_processes(
    function: Callable[[Key], Row], keys: Sequence[Key], processes: int, minutes: float | None = None
) -> Iterator[tuple[Key, Row]]:
    """Yield each key with ``function(key)``, as they come. After ``minutes``, no more begin, and those under way end.

    With one process, this one does the work.
    """
    began = time.monotonic()
    left = list(reversed(keys))

    def next_key() -> Key | None:
        over = minutes is not None and time.monotonic() - began >= 60 * minutes
        return None if over or not left else left.pop()

    if processes == 1:
        while (key := next_key()) is not None:
            yield key, function(key)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Future[Row], Key] = {}
        while True:
            while len(waiting) < processes and (key := next_key()) is not None:
                waiting[pool.submit(function, key)] = key
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
