"""What the C library does with memory that is freed: in a process of our own, it keeps it.

A forward takes and frees tensors of megabytes. In a thread that is not the first, glibc may give
them back to the system at once, however soon they are asked for again; then each page is new, and
zeroed when it is first written to: 5,000 pages for a token of 16 sequences. Commands and servers
keep what they had at their peak; a program that imports the library decides by itself.

glibc also gives threads heaps of their own, up to eight a processor. Each keeps its own peak, and
blocks that live long are spread over all of them, so a server grows for as long as new threads
start. Two heaps are enough: Python's lock lets one thread allocate at a time.
"""

from __future__ import annotations

import sys
from ctypes import CDLL

# Of <malloc.h>. A heap of a thread has 64 MiB, and goes where less than a pad is left without it.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
MALLOC_OPTIONS = {TRIM_THRESHOLD: 1 << 30, TOP_PAD: 1 << 26, MMAP_THRESHOLD: 1 << 26, ARENA_MAX: 2}


def keep_freed_memory() -> None:
    """Keep memory that is freed, from now on; another C library than glibc does as it did."""
    if (glibc := _load_glibc()) is not None:
        for name, value in MALLOC_OPTIONS.items():
            glibc.mallopt(name, value)


def trim_heap() -> None:
    """Give freed memory back to the system: after work that took far more than a forward does."""
    if (glibc := _load_glibc()) is not None:
        glibc.malloc_trim(0)


def _load_glibc() -> CDLL | None:
    runtime = CDLL(None) if sys.platform == "linux" else None
    return runtime if hasattr(runtime, "gnu_get_libc_version") else None
