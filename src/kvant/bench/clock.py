"""How long calls take, by this machine or by events in the stream of a GPU, and how much memory."""

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
HOLD_CYCLES = 50_000_000  # cycles, 25 ms of a GPU: longer than Python takes for a turn of calls


@dataclass(frozen=True)
class Lap:
    """What one call took."""

    host_seconds: float  # seconds until it returned
    events: tuple[Any, Any] | None = None  # before and after it, in the stream of a GPU

    @property
    def seconds(self) -> float:
        """Waits for the GPU: to be asked when all laps were run."""
        if self.events is None:
            return self.host_seconds
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Clock(Protocol):
    def start_turn(self) -> None:
        """Calls follow that need nothing of each other."""

    def synchronize(self) -> None:
        """The call that follows begins when all before it is done."""

    def time_call(self, call: TimedCall) -> Lap: ...
    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        """What else it tells of laps."""


class WallClock:
    """The clock of this machine, where a call is done when it returns."""

    def start_turn(self) -> None: ...
    def synchronize(self) -> None: ...

    def time_call(self, call: TimedCall) -> Lap:
        begin = time.perf_counter()
        call()
        return Lap(time.perf_counter() - begin)

    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {}


class CudaClock:
    """The stream of a GPU."""

    def start_turn(self) -> None:
        torch.cuda.synchronize()  # or the queue, of about a thousand launches, would fill up
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time_call(self, call: TimedCall) -> Lap:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        asked = time.perf_counter()
        begin.record()
        call()
        end.record()
        return Lap(time.perf_counter() - asked, (begin, end))

    def describe_laps(self, laps: Sequence[Lap]) -> dict[str, float]:
        return {"host_ms": statistics.median(lap.host_seconds for lap in laps) * 1e3}


def run_in_process(function: Callable[..., int | None], *args: Any) -> int | None:
    """A peak, in a new process: an allocator keeps what earlier work left."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_resident_peak(work: Callable[[], None]) -> int | None:
    """Bytes that `work` needs beside what is resident; None where a system has no such mark."""
    before = reset_resident_peak()
    work()
    return None if before is None else max(0, read_resident_nbytes("VmHWM") - before)


def reset_resident_peak() -> int | None:
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
    return read_resident_nbytes("VmRSS")


def read_resident_nbytes(name: str) -> int:
    """Bytes, as Linux tells them under that name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
