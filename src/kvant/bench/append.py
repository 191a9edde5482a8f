"""What one appended token costs, against the rows already there and the way memory grows.

`concat` (step 1) copies everything for every token and is the baseline; `stepped` (step 256) and
`reserved` (capacity) must not. `copied` counts what was really moved: rows of old memory that a
token's append copied elsewhere, on average.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvant.bench.report import show
from kvant.cache import Cache

WAYS = {"concat": "step=1", "stepped": "step=256", "reserved": "capacity={capacity}"}
BUDGET = 2e9  # bytes that the baseline may copy for one figure


def measure(
    format: str,  # noqa: A002
    length: int,
    tokens: int,
    heads: int,
    dim: int,
) -> dict[str, dict[str, float]]:
    """Microseconds a token (median, mean) and rows copied a token, each way, in turn."""
    caches = {way: _filled(format, way, length, tokens, heads, dim) for way in WAYS}
    row = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    copied = dict.fromkeys(WAYS, 0)
    for _ in range(tokens):
        for way, cache in caches.items():
            before, held = _addresses(cache), cache.held
            begin = time.perf_counter()
            cache[0].append(row, row)
            seconds[way].append(time.perf_counter() - begin)
            copied[way] += held if _addresses(cache) != before else 0
    return {
        way: {
            "median_us": statistics.median(seconds[way]) * 1e6,
            "mean_us": statistics.fmean(seconds[way]) * 1e6,
            "copied": copied[way] / tokens,
        }
        for way in WAYS
    }


def _filled(format: str, way: str, length: int, tokens: int, heads: int, dim: int) -> Cache:  # noqa: A002
    options = WAYS[way].format(capacity=length + tokens)
    cache = Cache(1, f"{format},{options}")
    rows = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
    cache[0].append(rows, rows)
    return cache


def _addresses(cache: Cache) -> list[int]:
    """Where the dense and the sealed rows lie: a move is a copy."""
    exposed = cache.exposed().tensors
    return [tensor.data_ptr() for name, tensor in exposed.items() if _is_kept(name, tensor)]


def _is_kept(name: str, tensor: Tensor) -> bool:
    return name.endswith("keys.dense") and tensor.numel() > 0


def main(
    format: Annotated[str, typer.Option(help="a format of the spec language")] = "raw",  # noqa: A002
    lengths: Annotated[str, typer.Option(help="rows already there")] = "1024,8192,32768,131072",
    heads: int = 8,
    dim: int = 128,
    tokens: Annotated[int, typer.Option(help="appends a figure")] = 512,
) -> None:
    """The cost of one appended token, one layer, bf16, batch 1."""
    rows: list[dict[str, Any]] = []
    for length in map(int, lengths.split(",")):
        affordable = int(BUDGET / (length * heads * dim * 4))
        count = max(8, min(tokens, affordable))
        for way, figures in measure(format, length, count, heads, dim).items():
            rows.append({"rows": length, "growth": way, "tokens": count, **figures})
    facts = {"format": format, "heads": heads, "dim": dim, "dtype": "bfloat16"}
    show("append", rows, facts)


if __name__ == "__main__":
    typer.run(main)
