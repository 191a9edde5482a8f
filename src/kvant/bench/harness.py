"""Benchmarks as commands: options, calls that take turns, peak memory, a table, JSON and a plot."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from kvant.platform import c_libraries
from kvant.platform.devices import describe_processor, parse_device
from kvant.platform.paths import check_writable
from kvant.platform.terminal import make_table, run_app

TimedCall = Callable[[], Any]
Name = TypeVar("Name")
Result = TypeVar("Result")
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


def run_in_process(function: Callable[..., Result], *args: Any) -> Result:
    """Run a measurement in a new process, as an allocator keeps freed memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def reset_resident_peak() -> int | None:
    """Reset the peak to the resident memory, and return that; None if the system cannot."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    c_libraries.trim_heap()  # decoding could otherwise reuse memory that was freed before
    Path("/proc/self/clear_refs").write_text("5")
    return read_resident_nbytes("VmRSS")


def read_resident_nbytes(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


NUM_COLOURS = 10  # of matplotlib's colour cycle
PLOT_SUFFIX = ".png"
LINE_STYLES = ("-", "--", ":")
# To the right of the plot, where it hides nothing.
LEGEND_OPTIONS: Mapping[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "fontsize": "small",
}
Json = Annotated[bool, typer.Option("--json", help="Print only the JSON line")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")
]
Plot = Annotated[Path | None, typer.Option(help="Plot the medians to F.png")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch")]
Model = Annotated[str | None, typer.Option(help="Folder, or name on the hub")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of the model")]
KVCache = Annotated[str, typer.Option(help="Spec of the cache")]
Store = Annotated[str | None, typer.Option(help="Store URL; default: a temporary folder")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark as a command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_app(app)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def describe_machine(gpu: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the hardware and software that the figures depend on."""
    return {
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(gpu or {}),
    }


def show_progress(text: str) -> None:
    """Show one line of progress on a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def parse_numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Parse whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--{option} {text}: whole numbers separated by commas are needed")
    if min(map(int, words)) < least:
        raise ValueError(f"--{option} {text}: each must be {least} or more")
    return [int(word) for word in words]


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, which all have the keys of the first."""
    show_progress("")
    console, table = make_table()
    table.title, table.title_justify = title, "left"
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(format_figure(value) for value in row.values()))
    console.print(table)


def print_json(
    title: str,
    facts: Mapping[str, Any],
    *,
    quiet: bool = False,
    gpu: Mapping[str, Any] | None = None,
) -> None:
    """Print everything as one JSON line; skip it below a table on a terminal."""
    if quiet or not sys.stdout.isatty():
        print(format_report(title, facts, gpu))


def format_report(
    title: str, facts: Mapping[str, Any], gpu: Mapping[str, Any] | None = None
) -> str:
    """Format everything as one JSON line."""
    return json.dumps({"bench": title, "machine": describe_machine(gpu), **facts})


def print_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    *,
    quiet: bool,
    gpu: Mapping[str, Any] | None = None,
) -> None:
    """Print what was skipped, the table unless quiet, and the JSON line."""
    print_skipped(facts.get("skipped", ()))
    if not quiet:
        print_table(title, rows)
    print_json(title, {**facts, "rows": rows}, quiet=quiet, gpu=gpu)


def print_skipped(reasons: Iterable[str]) -> None:
    show_progress("")
    for reason in reasons:
        print(f"skipped: {reason}", file=sys.stderr)


def format_figure(value: Any) -> str:
    """Format one figure."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"  # ratios near 1 need 2 digits


def check_plot(file: Path | None) -> None:
    """Raise before a measurement if a plot is requested that cannot be drawn."""
    if file is None:
        return
    check_writable(file, "--plot")
    if file.suffix.lower() != PLOT_SUFFIX:
        raise ValueError(f"--plot {file}: a name that ends in {PLOT_SUFFIX} is needed")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or 'kvant[plot]'")


def group_curves(
    rows: Iterable[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str], length: str
) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by label and length."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        curves.setdefault(label(row), {})[row[length]] = row["median_ms"]
    return curves


def draw_curves(
    curves: Mapping[str, Mapping[int, float]], title: str, file: Path, label: str
) -> None:
    """Plot curves on two logarithmic axes, where linear growth is a straight line."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        # The colours repeat, with another line style.
        dashes = LINE_STYLES[number // NUM_COLOURS % len(LINE_STYLES)]
        axes.plot(*zip(*curve.items(), strict=True), dashes, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="tokens in the cache", ylabel=label)
    lengths = sorted({length for curve in curves.values() for length in curve})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend(**LEGEND_OPTIONS)
    figure.savefig(file, dpi=90, pil_kwargs={"optimize": True})
