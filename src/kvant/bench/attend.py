"""What attention of one token costs over N stored rows, by format, beside torch and a plain read.

All of a length are run in turn, so what else the machine does hits all. `torch` is three ways to
say it over the same bf16 rows: SDPA with enable_gqa, SDPA with the queries of a group folded into
their length, and softmax(q k) v by hand. `stream` adds up as many bytes as the raw rows have.
`share` is the time of a plain read of a format's bytes, by that figure, over the time taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant.attention import attend, explain
from kvant.bench.report import progress, run, show
from kvant.cache import Cache
from kvant.contracts import View

CHUNK = 4096  # rows put into a cache at once
Call = Callable[[], Any]


def stored(name: str, keys: Tensor, values: Tensor) -> tuple[View, int]:
    """What the newest token sees of these rows in a format, and their bytes."""
    cache = Cache(1, name)
    state: Any = cache[0]
    for first in range(0, keys.shape[2], CHUNK):
        part = slice(first, first + CHUNK)
        state.append(keys[:, :, part], values[:, :, part], prefill="stored")
    return state.view(), cache.nbytes_used


def torch_ways(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    heads, dim = keys.shape[1], keys.shape[3]
    folded = q.view(1, heads, -1, dim)

    def by_hand() -> Any:
        weights = (folded @ keys.transpose(2, 3) * dim**-0.5).softmax(-1)
        return weights @ values

    return {
        "torch gqa": lambda: sdpa(q, keys, values, enable_gqa=True),
        "torch folded": lambda: sdpa(folded, keys, values),
        "torch by hand": by_hand,
    }


def in_turn(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:  # the first finds nothing in the caches
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def measure(
    length: int, names: list[str], heads: int, group: int, dim: int, repeats: int
) -> list[dict[str, Any]]:
    keys, values = torch.randn(2, 1, heads, length, dim).bfloat16()
    q = torch.randn(1, heads * group, 1, dim).bfloat16()
    views = {name: stored(name, keys, values) for name in ["raw", *names]}
    raw = torch.ones(views["raw"][1] // 4)
    calls: dict[str, Call] = torch_ways(q, keys, values) | {"stream": raw.sum}
    for name, (view, _) in views.items():
        calls[name] = partial(attend, q, view)
    seconds = in_turn(calls, repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(medians[name] for name in calls if name.startswith("torch"))
    rows = []
    for name, median in medians.items():
        nbytes = views[name][1] if name in views else raw.nbytes
        rows.append(
            {
                "rows": length,
                "way": name,
                "backend": explain(views[name][0]).backend if name in views else "",
                "median_ms": median * 1e3,
                "best_ms": min(seconds[name]) * 1e3,
                "gb_s": nbytes / median / 1e9,
                "share": medians["stream"] * nbytes / raw.nbytes / median,
                "against_torch": best / median,
                "against_raw": medians["raw"] / median,
            }
        )
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="rows stored")] = "1024,8192,32768,131072",
    formats: Annotated[
        str, typer.Option(help="of the spec language, beside raw")
    ] = "affine8,affine8v4,affine6,affine4,turbo4v4,turbo3v3,turbo4v2",
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    heads: int = 8,
    group: Annotated[int, typer.Option(min=1, help="queries that share a key head")] = 4,
    dim: int = 128,
    repeats: Annotated[int, typer.Option(min=1, help="calls a figure")] = 25,
    json: Annotated[Path | None, typer.Option(help="also write the JSON line here")] = None,
) -> None:
    """Decode attention, one layer, bf16, batch 1."""
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    for length in map(int, lengths.split(",")):
        progress(f"{length} rows")
        rows += measure(length, formats.split(","), heads, group, dim, repeats)
    progress("")
    facts = {"heads": heads, "group": group, "dim": dim, "dtype": "bfloat16"}
    show("attend", rows, facts, json)


if __name__ == "__main__":
    run(main)
