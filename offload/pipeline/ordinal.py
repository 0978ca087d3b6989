"""The number of this preprocessing process among those of its run, for data sets that ask for it.

It needs no torch: :mod:`offload.pipeline.worker_role` shows it to data sets that use torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ordinal:
    """Process ``number`` of ``of``. No two processes that live at the same time in one run share a number, wherever they run.

    ``of`` counts the processes that the run had planned when this one started; a run that grows later starts higher numbers.
    """

    number: int = 0
    of: int = 1


_here = Ordinal()


def here() -> Ordinal:
    """The number of this process; 0 of 1 in a process that no pool started."""
    return _here


def begin(ordinal: Ordinal) -> None:
    """Give this process its number."""
    global _here
    _here = ordinal


def lowest_free(taken: set[int], planned: int) -> Ordinal:
    """The lowest number that none of the live processes has taken."""
    number = next(i for i in range(len(taken) + 1) if i not in taken)
    return Ordinal(number, max(planned, number + 1))
