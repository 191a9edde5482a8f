"""Tune the C libraries of kvant's own processes: glibc's allocator, and torch's OpenMP threads.

A forward allocates and frees tensors of megabytes. Outside the main thread, glibc may return them
to the system at once. The next allocation then gets new pages, which the kernel zeroes on first
write: 5,000 pages for a token of 16 sequences. Commands and servers retain the memory of their
peak; a program that imports kvant decides for itself.

glibc also creates heaps per thread, up to eight per processor. Each retains its own peak, and
long-lived blocks are spread over all of them, so a server grows as long as new threads start. Two
heaps are enough, since Python's lock lets one thread allocate at a time.

Every Python thread that computes gets a team of OpenMP threads. With more threads than processors,
they sleep after each loop and must be woken for the next one, instead of spinning: a token takes a
third longer. So a thread releases its team when it is done, and a thread that works concurrently
with another uses one thread.
"""

from __future__ import annotations

import os
import sys
from ctypes import CDLL
from functools import cache

# Constants of <malloc.h>. A thread's heap has 64 MiB; it is unmapped if the rest exceeds TOP_PAD.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
MALLOC_OPTIONS = {TRIM_THRESHOLD: 1 << 30, TOP_PAD: 1 << 26, MMAP_THRESHOLD: 1 << 26, ARENA_MAX: 2}
IMPORT_PID = os.getpid()
OMP_PAUSE_SOFT = 1  # omp_pause_soft: retains the settings of the program


def keep_freed_memory() -> None:
    """Make glibc retain freed memory from now on; no effect with other C libraries."""
    if (glibc := _find_library("gnu_get_libc_version")) is not None:
        for name, value in MALLOC_OPTIONS.items():
            glibc.mallopt(name, value)


def trim_heap() -> None:
    """Return freed memory to the system, after work that needed far more than a forward."""
    if (glibc := _find_library("gnu_get_libc_version")) is not None:
        glibc.malloc_trim(0)


def release_threads() -> None:
    """Release the OpenMP team of the calling thread, until it computes again."""
    runtime = _load_openmp()
    if runtime is not None and os.getpid() == IMPORT_PID:  # a forked process has no such threads
        runtime.omp_pause_resource_all(OMP_PAUSE_SOFT)


def use_one_thread() -> None:
    """Make the calling thread compute single-threaded; other threads are unaffected."""
    import torch

    runtime = _load_openmp()
    if runtime is not None:
        torch.get_num_threads()  # torch sets a thread's default on the first call
        runtime.omp_set_num_threads(1)


@cache
def _load_openmp() -> CDLL | None:
    """Return the OpenMP runtime of torch; None if it is unknown."""
    import torch  # noqa: F401  loads OpenMP globally

    return _find_library("omp_pause_resource_all")


def _find_library(function: str) -> CDLL | None:
    """Return the libraries of this process if one has `function`; None elsewhere than on Linux."""
    process = CDLL(None) if sys.platform == "linux" else None
    return process if hasattr(process, function) else None
