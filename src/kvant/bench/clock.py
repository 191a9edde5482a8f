"""Measure the time of calls, by the wall clock or by CUDA events, and their peak memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch

TimedCall = Callable[[], Any]
HOLD_CYCLES = 50_000_000  # 25 ms of a GPU: longer than Python takes to launch a turn of calls


@dataclass(frozen=True)
class Lap:
    """The time of one call."""

    host_seconds: float  # until the call returned
    events: tuple[Any, Any] | None = None  # CUDA events before and after the call

    @property
    def seconds(self) -> float:
        """Seconds of the call; waits for the GPU, so read it after all laps have run."""
        if self.events is None:
            return self.host_seconds
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Clock(Protocol):
    """Times calls on a device."""

    def start_turn(self) -> None:
        """Prepare a turn of independent calls."""

    def synchronize(self) -> None:
        """Wait for all previous calls, so that the next call starts alone."""

    def time_call(self, call: TimedCall) -> Lap: ...
    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        """Return further figures of the laps."""


class WallClock:
    """The wall clock: a call is done when it returns."""

    def start_turn(self) -> None: ...
    def synchronize(self) -> None: ...

    def time_call(self, call: TimedCall) -> Lap:
        begin = time.perf_counter()
        call()
        return Lap(time.perf_counter() - begin)

    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {}


class CudaClock:
    """CUDA events: a call is done when the GPU has finished it."""

    def start_turn(self) -> None:
        torch.cuda.synchronize()  # the queue holds about a thousand launches
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time_call(self, call: TimedCall) -> Lap:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        return Lap(time.perf_counter() - start, (begin, end))

    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {"host_ms": statistics.median(lap.host_seconds for lap in laps) * 1e3}


def run_in_process(function: Callable[..., int | None], *args: Any) -> int | None:
    """Run a measurement of a peak in a new process, as an allocator keeps freed memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_resident_peak(work: Callable[[], None]) -> int | None:
    """Return the bytes that `work` needs beyond resident memory; None if unknown."""
    resident_nbytes = reset_resident_peak()
    work()
    if resident_nbytes is None:
        return None
    return max(0, read_resident_nbytes("VmHWM") - resident_nbytes)


def reset_resident_peak() -> int | None:
    """Reset the peak to the resident memory, and return that; None if the system cannot."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # decoding could otherwise reuse memory that was freed before
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return read_resident_nbytes("VmRSS")


def read_resident_nbytes(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
