"""Answers of Ray's actors."""

from __future__ import annotations

from typing import Any

import ray


def answer(ref: Any) -> Any:
    """Wait for an actor's answer. Raises the original error of its method, without Ray's wrapper."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, BaseException) else error from None


class PendingAnswer:
    """An actor's answer that may not have arrived yet."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def done(self) -> bool:
        """Return whether it has arrived."""
        return bool(ray.wait([self._ref], timeout=0)[0])

    def result(self) -> Any:
        """Wait for it. Raises as :func:`answer` does."""
        return answer(self._ref)
