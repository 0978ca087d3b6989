"""Read files, or parts of files, before their turn, many at a time.

A request to an object store takes tens of milliseconds, whatever its size. A core that waits for each file in turn would do nothing else.
The order of a task's files is known, so their requests can overlap. The task still waits for the first file, and reports that time, so
that tasks become long enough for the wait to matter little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from offload.pipeline.cache import accounts

REQUESTS = 32  # requests in flight at once, for each core
BUFFERED_BYTES = 64 << 20  # bytes of files that wait for their turn, for each core, estimated by their mean size


Place = TypeVar("Place", bound=Hashable)
"""A file, or a part of one."""
Content = TypeVar("Content", bound=Sized)


class ReadAhead(Generic[Place, Content]):
    """The files of a process's present task. Use it from one thread.

    Args:
        read: a function that reads a place, on any thread. :meth:`get` raises its exceptions.
        size: a function that returns the bytes of a content.
        at_first: the places to read at once until sizes are known.
    """

    def __init__(
        self, read: Callable[[Place], Content], *, size: Callable[[Content], int] = len, at_first: int = REQUESTS
    ) -> None:
        self._read, self._size, self._at_first = read, size, at_first
        self._threads: ThreadPoolExecutor | None = None
        self._coming: deque[Place] = deque()
        self._under_way: deque[tuple[Place, Future[Content]]] = deque()
        self._files = self._bytes = 0
        self._began = False  # whether a file of this task has come

    def begin(self, places: Sequence[Place]) -> None:
        """Begin a task that reads these places in this order. Those of an earlier task are forgotten."""
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
        self._coming = deque(places)
        self._began = False
        self._request()

    def get(self, place: Place) -> Content:
        """The content of a place. A place out of turn, such as one that is read again, is read right here."""
        # A list, since few are under way, and the wanted one is almost always the first.
        if place not in [known for known, _ in self._under_way]:
            return self._read(place)
        while (head := self._under_way.popleft())[0] != place:
            head[1].cancel()  # the caller has left it out
        future = head[1]
        self._request()
        content = future.result() if self._began else self._first(future)
        self._files += 1
        self._bytes += self._size(content)
        return content

    def _first(self, future: Future[Content]) -> Content:
        """Wait for the task's first file, and note the time."""
        self._began, began = True, time.perf_counter()
        try:
            return future.result()
        finally:
            accounts.count(first_wait_s=time.perf_counter() - began)

    def _request(self) -> None:
        """Request more files, up to the limits."""
        mean = self._bytes / self._files if self._files else 0.0
        # Two at least, however large files are: one that is being used and one that comes.
        most = self._at_first if not mean else max(2, min(REQUESTS, int(BUFFERED_BYTES / mean)))
        while self._coming and len(self._under_way) < most:
            if self._threads is None:
                # In the process that reads, at its first file: threads do not travel with a pickled reader.
                self._threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="read-ahead")
            place = self._coming.popleft()
            self._under_way.append((place, self._threads.submit(self._read, place)))
