"""Time attention of the newest tokens over N stored rows, against torch and a plain memory pass.

All methods of a length run in turn, so that other load on the machine affects all of them. `torch`
methods attend over the same bf16 rows (device.py). `stream` moves as many bytes as the raw rows
have: on a CPU it sums them, on a GPU it copies half of them. `share` is the time of such a pass
over a format's bytes, relative to the time measured. Each of several `--backend`s reads all
formats.

On a GPU there are several copies of each input, so that a call finds none in the GPU's cache. A
figure is the GPU's time; `host_ms` is the time that Python takes to launch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvant.attention import attend, explain
from kvant.bench.clock import Clock, Lap, TimedCall
from kvant.bench.device import BenchDevice, choose_device
from kvant.bench.report import (
    Json,
    check_files,
    check_plot,
    draw_curves,
    parse_numbers,
    print_report,
    run,
    show_progress,
)
from kvant.cache import Cache
from kvant.contracts import View
from kvant.native import get_library
from kvant.spec import split_specs

APPEND_CHUNK = 4096  # rows appended at once
ResultKey = tuple[str, str]  # a spec or another method, and the backend that reads it


def store_rows(name: str, keys: Tensor, values: Tensor, queries: int) -> tuple[View, int]:
    """Store the rows in a cache; return the view of the newest tokens, and the bytes."""
    cache = Cache(1, name)
    state: Any = cache[0]
    num_old = keys.shape[2] - queries
    for start in range(0, num_old, APPEND_CHUNK):
        part = slice(start, min(start + APPEND_CHUNK, num_old))
        state.append(keys[:, :, part], values[:, :, part], prefill="stored")
    return state.append(keys[:, :, num_old:], values[:, :, num_old:]), cache.nbytes_used


def store_copies(
    name: str, keys: Tensor, values: Tensor, queries: int, device: BenchDevice
) -> list[tuple[View, int]]:
    """Store as many copies of the rows as the device needs; return views and bytes."""
    first = store_rows(name, keys, values, queries)
    num_more = count_copies(first[1], device.cache_nbytes) - 1
    return [first, *(store_rows(name, keys, values, queries) for _ in range(num_more))]


def count_copies(nbytes: int, cache_nbytes: int) -> int:
    """Return how many copies of an input make a turn of all others fill the cache."""
    return 1 + -(-cache_nbytes // nbytes)


def rotate_calls(calls: Sequence[TimedCall]) -> TimedCall:
    """Return a call that runs the calls one after the other, over and over."""
    rotation = cycle(calls)
    return lambda: next(rotation)()


def time_calls_in_turn(
    calls: Mapping[ResultKey, TimedCall], repeats: int, clock: Clock
) -> dict[ResultKey, list[Lap]]:
    laps: dict[ResultKey, list[Lap]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        clock.start_turn()
        for name, call in calls.items():
            lap = clock.time_call(call)
            if turn:  # the first turn is a warm-up
                laps[name].append(lap)
    return laps


@dataclass(frozen=True)
class AttendTask:
    """The shapes, the backends and the number of repeats of a measurement."""

    batch: int
    heads: int
    group: int
    dim: int
    queries: int
    repeats: int
    backend: str | None

    @property
    def backends(self) -> list[str | None]:
        return [None] if self.backend is None else [*self.backend.split(",")]


def measure_attention(
    length: int, names: list[str], task: AttendTask, device: BenchDevice
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each method and backend, and a line for each skipped torch method."""
    shape = task.batch, task.heads, length, task.dim
    keys, values = torch.randn(2, *shape, device=device.name).bfloat16()
    query_shape = task.batch, task.heads * task.group, task.queries, task.dim
    q = torch.randn(query_shape, device=device.name).bfloat16()
    copies_by_name = {
        name: store_copies(name, keys, values, task.queries, device) for name in ["raw", *names]
    }
    nbytes_by_name = {name: copies[0][1] for name, copies in copies_by_name.items()}
    raw_nbytes = nbytes_by_name["raw"]
    calls, skipped = make_torch_calls(q, keys, values, device)
    num_passes = count_copies(raw_nbytes, device.cache_nbytes)
    calls["stream", ""] = rotate_calls([device.make_stream(raw_nbytes) for _ in range(num_passes)])
    calls |= make_kvant_calls(
        q, {name: [view for view, _ in copies] for name, copies in copies_by_name.items()}, task
    )
    laps = time_calls_in_turn(calls, task.repeats, device.clock)
    nbytes = {name: nbytes_by_name.get(name[0], raw_nbytes) for name in laps}
    return [{"rows": length} | row for row in summarize_laps(laps, nbytes, device.clock)], skipped


def make_torch_calls(
    q: Tensor, keys: Tensor, values: Tensor, device: BenchDevice
) -> tuple[dict[ResultKey, TimedCall], list[str]]:
    """Return calls of torch's attention methods, which share rotating inputs."""
    methods, skipped = device.list_torch_attention(q, keys, values)
    num_more = count_copies(keys.nbytes + values.nbytes, device.cache_nbytes) - 1
    inputs = cycle([(keys, values), *((keys.clone(), values.clone()) for _ in range(num_more))])

    def make_call(name: str) -> TimedCall:
        method = methods[name]
        return lambda: method(*next(inputs))

    return {(name, ""): make_call(name) for name in methods}, skipped


def make_kvant_calls(
    q: Tensor, views: Mapping[str, list[View]], task: AttendTask
) -> dict[ResultKey, TimedCall]:
    calls = {}
    for backend in task.backends:
        for name, copies in views.items():
            reader = backend or explain(copies[0]).backend
            calls[name, reader] = rotate_calls(
                [partial(attend, q, view, backend=backend) for view in copies]
            )
    return calls


def summarize_laps(
    laps: Mapping[ResultKey, Sequence[Lap]], nbytes: Mapping[ResultKey, int], clock: Clock
) -> list[dict[str, Any]]:
    seconds = {name: [lap.seconds for lap in method_laps] for name, method_laps in laps.items()}
    medians = {name: statistics.median(laps_s) for name, laps_s in seconds.items()}
    best = min(median for (method, _), median in medians.items() if method.startswith("torch"))
    raw = next(median for (method, _), median in medians.items() if method == "raw")
    stream = medians["stream", ""] / nbytes["stream", ""]  # seconds a byte
    return [
        {
            "way": name[0],
            "backend": name[1],
            "median_ms": median * 1e3,
            "best_ms": min(seconds[name]) * 1e3,
            "gb_s": nbytes[name] / median / 1e9,
            "share": stream * nbytes[name] / median,
            "against_torch": best / median,
            "against_raw": raw / median,
            **clock.describe_laps(laps[name]),
        }
        for name, median in medians.items()
    ]


def main(
    lengths: Annotated[str, typer.Option(help="Rows stored")] = "1024,8192,32768,131072",
    formats: Annotated[
        str, typer.Option(help="Specs to measure, besides raw")
    ] = "affine8,fp8,affine8v4,affine6,affine4,turbo4v4,turbo3v3,turbo4v2",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences")] = 1,
    heads: int = 8,
    group: Annotated[int, typer.Option(min=1, help="Query heads per key head")] = 4,
    dim: int = 128,
    queries: Annotated[int, typer.Option(min=1, help="Newest tokens that attend")] = 1,
    backend: Annotated[
        str | None, typer.Option(help="Backends to measure; default: the preferred one")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per figure")] = 25,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the medians to F.png")] = None,
    json: Json = False,
) -> None:
    """Time attention of the newest tokens: one layer, bf16."""
    bench_device = choose_device(device)
    check_files(plot=plot)
    check_plot(plot)
    row_counts = parse_numbers("lengths", lengths)
    if min(row_counts) < queries:
        raise ValueError(f"--lengths {lengths}: as many rows as queries ({queries}) or more")
    if threads is not None:
        torch.set_num_threads(threads)
    task = AttendTask(batch, heads, group, dim, queries, repeats, backend)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for length in row_counts:
        show_progress(f"{length} rows")
        length_rows, length_skipped = measure_attention(
            length, split_specs(formats), task, bench_device
        )
        rows += length_rows
        skipped += [f"{length} rows, {line}" for line in length_skipped]
    show_progress("")
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    facts = asdict(task) | {"dtype": "bfloat16", "isa": get_library().isa, "skipped": skipped}
    if plot is not None:
        draw_curves(
            make_attention_curves(rows),
            f"attention of {queries} over N rows",
            plot,
            "milliseconds (median)",
        )
    print_report("attend", rows, facts, quiet=json, device=bench_device)


def make_attention_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by method and rows."""
    curves: dict[str, dict[int, float]] = {}
    preferred = next(row["backend"] for row in rows if row["way"] == "raw")
    for row in rows:
        label, backend = row["way"], row["backend"]
        if backend not in ("", preferred):
            label = f"{label}, {backend}"
        curves.setdefault(label, {})[row["rows"]] = row["median_ms"]
    return curves


if __name__ == "__main__":
    run(main)
