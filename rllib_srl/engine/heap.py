"""Keep freed host memory in the process, for weights that an engine on a CPU replaces after every update.

Each update frees and allocates all packed matrices. glibc returns freed memory to the kernel, which then clears every
page again: a fifth of the time of a load. The next load uses kept memory again.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
LARGEST_KEPT = 32 * 2**20  # bytes of one allocation, glibc's maximum; larger ones are mapped on their own
KEPT_BYTES = 2**30  # free memory at the heap's end that stays


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory of this process, at most `KEPT_BYTES`; return False where it has no such option."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
