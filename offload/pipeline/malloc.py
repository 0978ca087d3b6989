"""The C library's treatment of memory that a preprocessing process has freed.

Transforms allocate and free image-sized buffers for every sample. glibc returns such memory to the kernel and requests it again,
cleared page by page. For ten blurs of a 224² float image, that took a fifth of the CPU time.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # the largest value that glibc accepts on 64-bit machines
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Make this process keep up to ``KEPT_BYTES`` of the memory that it frees. Affects only glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
