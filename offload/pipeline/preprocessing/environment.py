"""The environment of a preprocessing process: its number, and its use of freed memory.

It needs no torch: :mod:`offload.pipeline.preprocessing.worker_role` shows the number to data sets that use torch.
"""

from __future__ import annotations

import ctypes
import sys
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


def lowest_free(taken: set[int], planned: int, first: int = 0) -> Ordinal:
    """The lowest number from ``first`` on that none of the live processes has taken."""
    number = next(i for i in range(first, first + len(taken) + 1) if i not in taken)
    return Ordinal(number, max(planned, number + 1))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # the largest value that glibc accepts on 64-bit machines
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Make this process keep up to ``KEPT_BYTES`` of the memory that it frees. Affects only glibc.

    Transforms allocate and free image-sized buffers for every sample. glibc returns such memory to the kernel and requests it again,
    cleared page by page: for ten blurs of a 224² float image, a fifth of the CPU time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return
    # Larger buffers would be mapped and unmapped one by one, whatever the other threshold says.
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def hold_to_one_core() -> None:
    """Limit this process's libraries to one thread: the other cores have processes of their own."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
