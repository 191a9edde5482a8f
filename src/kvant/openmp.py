"""The threads with which torch computes on a CPU: OpenMP gives every thread that computes its own.

Where there are more of them than processors, each sleeps at the end of a loop and has to be woken
for the next one, in place of waiting for it: a token takes a third longer then. So a thread that is
done gives its own back, and one that works beside another computes without any.
"""

from __future__ import annotations

import os
import sys
from ctypes import CDLL
from functools import cache

import torch

IMPORT_PID = os.getpid()
OMP_PAUSE_SOFT = 1  # of OpenMP: what a program set stays as it is


def release_threads() -> None:
    """Give back the threads that the calling thread computes with, until it computes again."""
    runtime = _load_runtime()
    if runtime is not None and os.getpid() == IMPORT_PID:  # a fork has none of them to wait for
        runtime.omp_pause_resource_all(OMP_PAUSE_SOFT)


def use_one_thread() -> None:
    """Let the calling thread compute without others from now on; they compute as before."""
    runtime = _load_runtime()
    if runtime is not None:
        torch.get_num_threads()  # the first time, torch sets what a thread begins with
        runtime.omp_set_num_threads(1)


@cache
def _load_runtime() -> CDLL | None:
    """The OpenMP that torch computes with; None where we do not know it."""
    found = CDLL(None) if sys.platform == "linux" else None  # torch loads it for everybody
    return found if hasattr(found, "omp_pause_resource_all") else None
