"""Devices to measure on: the time of calls that take turns, and peak memory."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvant.bench.report import show_progress
from kvant.platform import malloc
from kvant.platform.devices import parse_device

TimedCall = Callable[[], Any]
Name = TypeVar("Name")
DYNAMIC, STATIC = "dynamic", "static"  # caches of transformers
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


class Laps(list[Lap]):
    """The laps of one of the calls that took turns."""

    @property
    def seconds(self) -> list[float]:
        return [lap.seconds for lap in self]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def summarize(self) -> dict[str, float]:
        """Return figures of a row; `host_ms` only where Python's time is not in the others."""
        figures = {"median_ms": self.median * 1e3, "best_ms": min(self.seconds) * 1e3}
        if any(lap.events for lap in self):
            figures["host_ms"] = statistics.median(lap.host_seconds for lap in self) * 1e3
        return figures


class BenchDevice:
    """A CPU, timed by the wall clock: a call is done when it returns."""

    name = "cpu"  # for torch and `--device`
    baseline = DYNAMIC  # the transformers cache that decodes fastest on this device

    def queue_turn(self) -> None:
        """Prepare a turn of independent calls, which are queued before the first one starts."""

    def make_flush(self) -> TimedCall:
        """Return a call after which the device's cache holds no input; a CPU is not flushed."""
        return lambda: None

    def synchronize(self) -> None:
        """Wait for all previous calls, so that the next call starts alone."""

    def time_call(self, call: TimedCall) -> Lap:
        begin = time.perf_counter()
        call()
        return Lap(time.perf_counter() - begin)

    def make_stream(self, nbytes: int) -> TimedCall:
        """Return a plain pass over memory that moves `nbytes` bytes."""
        return torch.ones(nbytes // 4).sum

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        """Return the bytes that `work` needs at its peak beyond those in use; None if unknown."""
        resident_nbytes = reset_resident_peak()
        work()
        if resident_nbytes is None:
            return None
        return max(0, read_resident_nbytes("VmHWM") - resident_nbytes)

    def describe(self) -> dict[str, Any]:
        """Return what a report tells about the device, besides the processor."""
        return {}


class CudaDevice(BenchDevice):
    """The current GPU of torch, timed by events: a call is done when the GPU has finished it."""

    name = "cuda"
    baseline = STATIC

    def queue_turn(self) -> None:
        torch.cuda.synchronize()  # the queue holds about a thousand launches
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]

    def make_flush(self) -> TimedCall:
        nbytes = 2 * torch.cuda.get_device_properties(self.name).L2_cache_size
        return torch.zeros(nbytes // 4, device=self.name).sum  # a write would still be under way

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

    def make_stream(self, nbytes: int) -> TimedCall:
        source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=self.name)
        return partial(target.copy_, source)  # half of the bytes read, half written

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.name)
        return {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "gpu_l2": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _read_driver_version(),
        }


CPU = BenchDevice()
DEVICES: dict[str, BenchDevice] = {"cpu": CPU, "cuda": CudaDevice()}


def choose_device(name: str | None) -> BenchDevice:
    """Return the device that `--device` names; the default is a GPU if there is one."""
    if name is not None and name.partition(":")[0] not in DEVICES:
        raise ValueError(f"--device {name}: known are {', '.join(DEVICES)}")
    torch_device = parse_device(name)
    if torch_device.index is not None:
        torch.cuda.set_device(torch_device)
    return DEVICES[torch_device.type]


def _read_driver_version() -> str | None:
    """Return the driver's version from nvidia-smi; torch does not tell it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(process.stdout.split()), None)


def time_in_turn(
    calls: Mapping[Name, TimedCall],
    repeats: int,
    label: str,
    *,
    warmup: int = 1,
    device: BenchDevice = CPU,
    queued: bool = False,
) -> dict[Name, Laps]:
    """Time `repeats` turns of all calls, so that other load on the machine affects all of them.

    The first `warmup` turns are not counted. Each call waits for the one before, unless the calls
    of a turn are independent (`queued`): then a GPU runs them without waiting for Python, and each
    finds none of its inputs in the GPU's cache.
    """
    laps = {name: Laps() for name in calls}
    prepare = device.make_flush() if queued else device.synchronize
    for turn in range(warmup + repeats):
        show_progress(f"{label}: turn {turn + 1} of {warmup + repeats}")
        if queued:
            device.queue_turn()
        for name, call in calls.items():
            prepare()
            lap = device.time_call(call)
            if turn >= warmup:
                laps[name].append(lap)
    return laps


def run_in_process(function: Callable[..., int | None], *args: Any) -> int | None:
    """Run a measurement of a peak in a new process, as an allocator keeps freed memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def reset_resident_peak() -> int | None:
    """Reset the peak to the resident memory, and return that; None if the system cannot."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    malloc.trim_heap()  # decoding could otherwise reuse memory that was freed before
    Path("/proc/self/clear_refs").write_text("5")
    return read_resident_nbytes("VmRSS")


def read_resident_nbytes(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
