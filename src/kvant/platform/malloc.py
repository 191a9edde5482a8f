"""Tune glibc's allocator for kvant's own processes: retain freed memory, and limit the heaps.

A forward allocates and frees tensors of megabytes. Outside the main thread, glibc may return them
to the system at once. The next allocation then gets new pages, which the kernel zeroes on first
write: 5,000 pages for a token of 16 sequences. Commands and servers retain the memory of their
peak; a program that imports kvant decides for itself.

glibc also creates heaps per thread, up to eight per processor. Each retains its own peak, and
long-lived blocks are spread over all of them, so a server grows as long as new threads start. Two
heaps are enough, since Python's lock lets one thread allocate at a time.
"""

from __future__ import annotations

import sys
from ctypes import CDLL

# Constants of <malloc.h>. A thread's heap has 64 MiB; it is unmapped if the rest exceeds TOP_PAD.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
MALLOC_OPTIONS = {TRIM_THRESHOLD: 1 << 30, TOP_PAD: 1 << 26, MMAP_THRESHOLD: 1 << 26, ARENA_MAX: 2}


def keep_freed_memory() -> None:
    """Make glibc retain freed memory from now on; no effect with other C libraries."""
    if (glibc := _load_glibc()) is not None:
        for name, value in MALLOC_OPTIONS.items():
            glibc.mallopt(name, value)


def trim_heap() -> None:
    """Return freed memory to the system, after work that needed far more than a forward."""
    if (glibc := _load_glibc()) is not None:
        glibc.malloc_trim(0)


def _load_glibc() -> CDLL | None:
    runtime = CDLL(None) if sys.platform == "linux" else None
    return runtime if hasattr(runtime, "gnu_get_libc_version") else None
