"""This process's reads since the last report: bytes through caches, the wait for a task's first file, and why a cache has failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Account:
    """The bytes that came from caches and from storage.

    Args:
        first_wait_s: the seconds until a task's first file had come from storage.
        problem: the reason, if a cache has begun to fail.
    """

    cache_bytes: int = 0
    storage_bytes: int = 0
    first_wait_s: float = 0.0
    problem: str | None = None


_lock = threading.Lock()
_since = Account()


def count(*, cache_bytes: int = 0, storage_bytes: int = 0, first_wait_s: float = 0.0) -> None:
    """Count bytes or seconds, on any thread."""
    global _since
    with _lock:
        _since = replace(
            _since,
            cache_bytes=_since.cache_bytes + cache_bytes,
            storage_bytes=_since.storage_bytes + storage_bytes,
            first_wait_s=_since.first_wait_s + first_wait_s,
        )


def tell(problem: str) -> None:
    """Note why a cache stores nothing any more."""
    global _since
    with _lock:
        _since = replace(_since, problem=problem)


def collect() -> Account:
    """The account since the last call."""
    global _since
    with _lock:
        since, _since = _since, Account()
    return since
