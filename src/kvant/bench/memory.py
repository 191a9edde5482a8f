"""The highest memory of a process while it works, over what it had just before.

The mark is the kernel's own (VmHWM of Linux, set back first), so nothing falls between two samples;
other systems have no such mark, and there is no figure.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def alone(measured: Callable[..., int | None], *task: Any) -> int | None:
    """A peak, in a new process: an allocator keeps what earlier work left."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, *task).result()


def resident_peak(work: Callable[[], None]) -> int | None:
    """Bytes that `work` needs beside what is resident; None where a system has no such mark."""
    before = mark()
    work()
    return None if before is None else max(0, resident("VmHWM") - before)


def mark() -> int | None:
    """Set the peak back to what is resident now; None where a system has no such mark."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # or decoding would find memory that filling has not given back
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """Bytes, as Linux tells them under that name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
