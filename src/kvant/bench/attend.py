"""What attention of the newest tokens over N stored rows costs, beside torch and a plain pass.

All of a length are run in turn, so what else the machine does hits all. `torch` is what it has to
say it over the same bf16 rows (device.py). `stream` moves as many bytes as the raw rows have: on a
CPU it adds them up, on a GPU it copies half of them. `share` is the time of a plain pass over a
format's bytes, by that figure, over the time taken. Of several `--backend`s each reads them all.

On a GPU everything is there often enough that what a call reads has left the cache before it comes
again; a figure is what the GPU does, and `host_ms` what Python takes to ask for it.
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

APPEND_CHUNK = 4096  # rows put into a cache at once
ResultKey = tuple[str, str]  # a format, or another way, and the backend that reads it


def store_rows(name: str, keys: Tensor, values: Tensor, queries: int) -> tuple[View, int]:
    """What the newest tokens see of these rows in a format, and their bytes."""
    cache = Cache(1, name)
    state: Any = cache[0]
    before = keys.shape[2] - queries
    for first in range(0, before, APPEND_CHUNK):
        part = slice(first, min(first + APPEND_CHUNK, before))
        state.append(keys[:, :, part], values[:, :, part], prefill="stored")
    return state.append(keys[:, :, before:], values[:, :, before:]), cache.nbytes_used


def store_copies(
    name: str, keys: Tensor, values: Tensor, queries: int, device: BenchDevice
) -> list[tuple[View, int]]:
    """The same rows in a format, as often as the device needs them, and the bytes of each."""
    first = store_rows(name, keys, values, queries)
    more = range(1, count_copies(first[1], device.cache_nbytes))
    return [first, *(store_rows(name, keys, values, queries) for _ in more)]


def count_copies(nbytes: int, cache_nbytes: int) -> int:
    """How many inputs of so many bytes it takes, so that all but one fill a cache."""
    return 1 + -(-cache_nbytes // nbytes)


def rotate_calls(calls: Sequence[TimedCall]) -> TimedCall:
    """One after the other."""
    following = cycle(calls)
    return lambda: next(following)()


def time_calls_in_turn(
    calls: Mapping[ResultKey, TimedCall], repeats: int, clock: Clock
) -> dict[ResultKey, list[Lap]]:
    laps: dict[ResultKey, list[Lap]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        clock.start_turn()
        for name, call in calls.items():
            lap = clock.time_call(call)
            if turn:  # the first finds nothing in the caches
                laps[name].append(lap)
    return laps


@dataclass(frozen=True)
class AttendTask:
    """What is asked of every way, and how often."""

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
    """A row for each way and backend, and a line for each way of torch that does not run."""
    shape = task.batch, task.heads, length, task.dim
    keys, values = torch.randn(2, *shape, device=device.name).bfloat16()
    asked = task.batch, task.heads * task.group, task.queries, task.dim
    q = torch.randn(asked, device=device.name).bfloat16()
    held = {
        name: store_copies(name, keys, values, task.queries, device) for name in ["raw", *names]
    }
    nbytes_of = {name: found[0][1] for name, found in held.items()}
    moved = nbytes_of["raw"]
    calls, skipped = make_torch_calls(q, keys, values, device)
    passes = range(count_copies(moved, device.cache_nbytes))
    calls["stream", ""] = rotate_calls([device.make_stream(moved) for _ in passes])
    calls |= make_kvant_calls(
        q, {name: [view for view, _ in found] for name, found in held.items()}, task
    )
    laps = time_calls_in_turn(calls, task.repeats, device.clock)
    nbytes = {name: nbytes_of.get(name[0], moved) for name in laps}
    return [{"rows": length} | row for row in summarize_laps(laps, nbytes, device.clock)], skipped


def make_torch_calls(
    q: Tensor, keys: Tensor, values: Tensor, device: BenchDevice
) -> tuple[dict[ResultKey, TimedCall], list[str]]:
    """All ways of torch read the same inputs, each the one after that of the call before."""
    ways, skipped = device.list_torch_attention(q, keys, values)
    more = count_copies(keys.nbytes + values.nbytes, device.cache_nbytes) - 1
    inputs = cycle([(keys, values), *((keys.clone(), values.clone()) for _ in range(more))])

    def call(name: str) -> TimedCall:
        way = ways[name]
        return lambda: way(*next(inputs))

    return {(name, ""): call(name) for name in ways}, skipped


def make_kvant_calls(
    q: Tensor, views: Mapping[str, list[View]], task: AttendTask
) -> dict[ResultKey, TimedCall]:
    calls = {}
    for backend in task.backends:
        for name, same in views.items():
            runs = backend or explain(same[0]).backend
            calls[name, runs] = rotate_calls([partial(attend, q, v, backend=backend) for v in same])
    return calls


def summarize_laps(
    laps: Mapping[ResultKey, Sequence[Lap]], nbytes: Mapping[ResultKey, int], clock: Clock
) -> list[dict[str, Any]]:
    seconds = {name: [lap.seconds for lap in found] for name, found in laps.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(median for (way, _), median in medians.items() if way.startswith("torch"))
    raw = next(median for (way, _), median in medians.items() if way == "raw")
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
    lengths: Annotated[str, typer.Option(help="rows stored")] = "1024,8192,32768,131072",
    formats: Annotated[
        str, typer.Option(help="of the spec language, beside raw")
    ] = "affine8,fp8,affine8v4,affine6,affine4,turbo4v4,turbo3v3,turbo4v2",
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences, each of so many rows")] = 1,
    heads: int = 8,
    group: Annotated[int, typer.Option(min=1, help="queries that share a key head")] = 4,
    dim: int = 128,
    queries: Annotated[int, typer.Option(min=1, help="tokens, the newest of the rows")] = 1,
    backend: Annotated[
        str | None, typer.Option(help="that reads the pages, or several; the preferred one")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="calls a figure")] = 25,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="also draw the medians: F.png")] = None,
    json: Json = False,
) -> None:
    """Attention of the newest tokens, one layer, bf16."""
    where = choose_device(device)
    check_files(plot=plot)
    check_plot(plot)
    points = parse_numbers("lengths", lengths)
    if min(points) < queries:
        raise ValueError(f"--lengths {lengths}: as many rows as queries ({queries}) or more")
    if threads is not None:
        torch.set_num_threads(threads)
    task = AttendTask(batch, heads, group, dim, queries, repeats, backend)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for length in points:
        show_progress(f"{length} rows")
        found, lacking = measure_attention(length, split_specs(formats), task, where)
        rows += found
        skipped += [f"{length} rows, {line}" for line in lacking]
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
    print_report("attend", rows, facts, quiet=json, device=where)


def make_attention_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Way to rows to median milliseconds."""
    found: dict[str, dict[int, float]] = {}
    first = next(row["backend"] for row in rows if row["way"] == "raw")
    for row in rows:
        way = row["way"] if row["backend"] in ("", first) else f"{row['way']}, {row['backend']}"
        found.setdefault(way, {})[row["rows"]] = row["median_ms"]
    return found


if __name__ == "__main__":
    run(main)
