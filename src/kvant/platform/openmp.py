"""Limit torch's OpenMP threads: every Python thread that computes gets a team of its own.

With more threads than processors, OpenMP threads sleep after each loop and must be woken for the
next one, instead of spinning: a token takes a third longer. So a thread releases its team when it
is done, and a thread that works concurrently with another uses one thread.
"""

from __future__ import annotations

import os
import sys
from ctypes import CDLL
from functools import cache

import torch

IMPORT_PID = os.getpid()
OMP_PAUSE_SOFT = 1  # omp_pause_soft: retains the settings of the program


def release_threads() -> None:
    """Release the OpenMP team of the calling thread, until it computes again."""
    runtime = _load_runtime()
    if runtime is not None and os.getpid() == IMPORT_PID:  # a forked process has no such threads
        runtime.omp_pause_resource_all(OMP_PAUSE_SOFT)


def use_one_thread() -> None:
    """Make the calling thread compute single-threaded; other threads are unaffected."""
    runtime = _load_runtime()
    if runtime is not None:
        torch.get_num_threads()  # torch sets a thread's default on the first call
        runtime.omp_set_num_threads(1)


@cache
def _load_runtime() -> CDLL | None:
    """Return the OpenMP runtime of torch; None if it is unknown."""
    process = CDLL(None) if sys.platform == "linux" else None  # torch loads OpenMP globally
    return process if hasattr(process, "omp_pause_resource_all") else None
