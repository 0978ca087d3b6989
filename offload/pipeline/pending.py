"""What a caller sees of an answer that another process has yet to give."""

from __future__ import annotations

from typing import Protocol, TypeVar

_T_co = TypeVar("_T_co", covariant=True)


class Pending(Protocol[_T_co]):
    """An answer that is still to come."""

    def done(self) -> bool:
        """Whether it has arrived."""

    def result(self) -> _T_co:
        """Wait for it. Raises its error."""
