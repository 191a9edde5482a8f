"""What attention of the newest tokens over N stored rows costs, beside torch and a plain read.

All of a length are run in turn, so what else the machine does hits all. `torch` is three ways to
say it over the same bf16 rows: SDPA with enable_gqa, SDPA with the queries of a group folded into
their length, and softmax(q k) v by hand; of several tokens (`--queries`) each sees the rows up to
its own. `stream` adds up as many bytes as the raw rows have. `share` is the time of a plain read of
a format's bytes, by that figure, over the time taken. Of several `--backend`s each reads them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant.attention import attend, explain
from kvant.bench.picture import check_plot, draw
from kvant.bench.report import Json, check_files, numbers, progress, run, show
from kvant.cache import Cache
from kvant.contracts import View
from kvant.native import library

CHUNK = 4096  # rows put into a cache at once
Call = Callable[[], Any]
Way = tuple[str, str]  # a format, or another way, and the backend that reads it


def stored(name: str, keys: Tensor, values: Tensor, queries: int) -> tuple[View, int]:
    """What the newest tokens see of these rows in a format, and their bytes."""
    cache = Cache(1, name)
    state: Any = cache[0]
    before = keys.shape[2] - queries
    for first in range(0, before, CHUNK):
        part = slice(first, min(first + CHUNK, before))
        state.append(keys[:, :, part], values[:, :, part], prefill="stored")
    return state.append(keys[:, :, before:], values[:, :, before:]), cache.nbytes_used


def torch_ways(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    heads, length, dim = keys.shape[1:]
    queries, group = q.shape[2], q.shape[1] // heads
    folded = q.view(1, heads, -1, dim)
    mask = None
    if queries > 1:
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    folded_mask = None if mask is None else mask.repeat(group, 1)

    def by_hand() -> Any:
        scores = folded @ keys.transpose(2, 3) * dim**-0.5
        if folded_mask is not None:
            scores = scores.masked_fill(~folded_mask, -torch.inf)
        return scores.softmax(-1) @ values

    return {
        "torch gqa": lambda: sdpa(q, keys, values, attn_mask=mask, enable_gqa=True),
        "torch folded": lambda: sdpa(folded, keys, values, attn_mask=folded_mask),
        "torch by hand": by_hand,
    }


def in_turn(calls: dict[Way, Call], repeats: int) -> dict[Way, list[float]]:
    seconds: dict[Way, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:  # the first finds nothing in the caches
                seconds[name].append(time.perf_counter() - begin)
    return seconds


@dataclass(frozen=True)
class Task:
    """What is asked of every way, and how often."""

    heads: int
    group: int
    dim: int
    queries: int
    repeats: int
    backend: str | None

    @property
    def backends(self) -> list[str | None]:
        return [None] if self.backend is None else [*self.backend.split(",")]


def measure(length: int, names: list[str], task: Task) -> list[dict[str, Any]]:
    keys, values = torch.randn(2, 1, task.heads, length, task.dim).bfloat16()
    q = torch.randn(1, task.heads * task.group, task.queries, task.dim).bfloat16()
    views = {name: stored(name, keys, values, task.queries) for name in ["raw", *names]}
    nbytes_of = {name: nbytes for name, (_, nbytes) in views.items()}
    raw = torch.ones(nbytes_of["raw"] // 4)
    calls: dict[Way, Call] = {(n, ""): c for n, c in torch_ways(q, keys, values).items()}
    calls["stream", ""] = raw.sum
    for backend in task.backends:
        for name, (view, _) in views.items():
            runs = backend or explain(view).backend
            calls[name, runs] = partial(attend, q, view, backend=backend)
    seconds = in_turn(calls, task.repeats)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    best = min(median for (name, _), median in medians.items() if name.startswith("torch"))
    raw_median = next(median for (name, _), median in medians.items() if name == "raw")
    rows = []
    for (name, backend), median in medians.items():
        nbytes = nbytes_of.get(name, raw.nbytes)
        rows.append(
            {
                "rows": length,
                "way": name,
                "backend": backend,
                "median_ms": median * 1e3,
                "best_ms": min(seconds[name, backend]) * 1e3,
                "gb_s": nbytes / median / 1e9,
                "share": medians["stream", ""] * nbytes / raw.nbytes / median,
                "against_torch": best / median,
                "against_raw": raw_median / median,
            }
        )
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="rows stored")] = "1024,8192,32768,131072",
    formats: Annotated[
        str, typer.Option(help="of the spec language, beside raw")
    ] = "affine8,fp8,affine8v4,affine6,affine4,turbo4v4,turbo3v3,turbo4v2",
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    heads: int = 8,
    group: Annotated[int, typer.Option(min=1, help="queries that share a key head")] = 4,
    dim: int = 128,
    queries: Annotated[int, typer.Option(min=1, help="tokens, the newest of the rows")] = 1,
    backend: Annotated[
        str | None, typer.Option(help="that reads the pages, or several; the preferred one")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="calls a figure")] = 25,
    plot: Annotated[Path | None, typer.Option(help="also draw the medians: F.png")] = None,
    json: Json = False,
) -> None:
    """Attention of the newest tokens, one layer, bf16, batch 1."""
    check_files(plot=plot)
    check_plot(plot)
    points = numbers("lengths", lengths)
    if min(points) < queries:
        raise ValueError(f"--lengths {lengths}: as many rows as queries ({queries}) or more")
    if threads is not None:
        torch.set_num_threads(threads)
    task = Task(heads, group, dim, queries, repeats, backend)
    rows: list[dict[str, Any]] = []
    for length in points:
        progress(f"{length} rows")
        rows += measure(length, formats.split(","), task)
    progress("")
    facts = asdict(task) | {"dtype": "bfloat16", "isa": library().isa}
    if plot is not None:
        draw(_curves(rows), f"attention of {queries} over N rows", plot, "milliseconds (median)")
    show("attend", rows, facts, quiet=json)


def _curves(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    first = next(row["backend"] for row in rows if row["way"] == "raw")
    for row in rows:
        way = row["way"] if row["backend"] in ("", first) else f"{row['way']}, {row['backend']}"
        curves.setdefault(way, {})[row["rows"]] = row["median_ms"]
    return curves


if __name__ == "__main__":
    run(main)
