"""How the C library's allocator treats memory that a preprocessing process has freed.

Transforms allocate and free buffers of image size for every sample. glibc gives such memory back to the kernel and takes
it anew, cleared page by page: on ten blurs of a 224² float image that was a fifth of the CPU time.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc accepts at most on 64-bit machines
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """From now on this process keeps up to ``KEPT_BYTES`` of the memory that it frees. Has an effect on glibc only."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
