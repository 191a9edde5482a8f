"""What one appended token costs, against the rows already there and the way memory grows.

`concat` (step 1) copies everything for every token and is the baseline; `stepped` (step 256) and
`reserved` (capacity) must not. `copied` counts what really moved: dense rows that an append carried
to other memory, a token on average.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from kvant.bench.report import Json, numbers, run, show
from kvant.cache import Cache

WAYS = {"concat": "step=1", "stepped": "step=256", "reserved": "capacity={capacity}"}
BUDGET = 4e9  # bytes that the baseline may copy for one figure


@dataclass
class Run:
    """One cache, and what each token appended to it took."""

    cache: Cache
    tokens: int
    seconds: list[float] = field(default_factory=list)
    copied: int = 0

    def append(self, row: torch.Tensor) -> None:
        place, rows = self.storage()
        begin = time.perf_counter()
        self.cache[0].append(row, row)
        self.seconds.append(time.perf_counter() - begin)
        self.copied += rows if self.storage()[0] != place else 0

    def storage(self) -> tuple[int, int]:
        """Where the dense rows lie, and how many they are."""
        keys = self.cache[0].view().keys  # type: ignore[attr-defined]
        return keys.room.data_ptr(), keys.count

    def figures(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "median_us": statistics.median(self.seconds) * 1e6,
            "mean_us": statistics.fmean(self.seconds) * 1e6,
            "copied": self.copied / self.tokens,
        }


def measure(text: str, length: int, tokens: int, heads: int, dim: int) -> dict[str, Run]:
    """Append to a cache of each way in turn; the baseline stops when its budget is spent."""
    affordable = int(BUDGET / (length * heads * dim * 8))  # keys and values, read and written
    counts = dict.fromkeys(WAYS, tokens) | {"concat": max(8, min(tokens, affordable))}
    rows = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
    row = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16)
    runs = {}
    for way, option in WAYS.items():
        cache = Cache(1, f"{text},{option.format(capacity=length + tokens)}")
        cache[0].append(rows, rows)
        runs[way] = Run(cache, counts[way])
    for done in range(tokens):
        for one in runs.values():
            if done < one.tokens:
                one.append(row)
    return runs


def main(
    kv_cache: Annotated[str, typer.Option(help="a format of the spec language")] = "raw",
    lengths: Annotated[str, typer.Option(help="rows already there")] = "1024,8192,32768,131072",
    heads: int = 8,
    dim: int = 128,
    tokens: Annotated[int, typer.Option(help="appends a figure")] = 512,
    json: Json = False,
) -> None:
    """The cost of one appended token, one layer, bf16, batch 1."""
    rows: list[dict[str, Any]] = []
    for length in numbers("lengths", lengths):
        runs = measure(kv_cache, length, tokens, heads, dim)
        base = runs["concat"].figures()["median_us"]
        for way, one in runs.items():
            figures = one.figures()
            ratio = base / figures["median_us"]
            rows.append({"rows": length, "growth": way, **figures, "ratio": ratio})
    facts = {"kv_cache": kv_cache, "heads": heads, "dim": dim, "dtype": "bfloat16"}
    show("append", rows, facts, quiet=json)


if __name__ == "__main__":
    run(main)
