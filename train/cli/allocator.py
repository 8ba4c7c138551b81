"""The C library's allocator, set for programs that allocate the same large arrays again and again."""

from __future__ import annotations

import contextlib
import ctypes

# <malloc.h> of glibc: parameters of mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system. Does nothing with other C libraries.

    On a CPU, JAX allocates a program's temporary arrays again in every call. By default glibc maps
    allocations larger than 32 MiB from the system and unmaps them afterwards, and in threads those larger than their
    heaps of 64 MiB, so that each call pays for every page again: a third of the time of a layer over 8192 tokens.
    Arrays of 1 GiB and more are still returned. Must be called before other threads allocate."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
