"""Time one appended token against the rows already stored and the growth of the cache.

`concat` is a cache without pages: torch.cat of all rows for every token, the baseline. `paged` (by
a page), `stepped` (step=256) and `reserved` (capacity) are kvant's; their time must not grow with
the rows. `copied` is the mean number of rows that an append moved to other memory.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch
import typer
from torch import Tensor

from kvant.bench.report import Json, parse_numbers, print_report, run
from kvant.cache import Cache

GROWTH_OPTIONS = {"paged": "", "stepped": ",step=256", "reserved": ",capacity={capacity}"}
MAX_COPIED_BYTES = 4e9  # by the baseline, per figure


class RowStore(Protocol):
    """A store that rows are appended to."""

    def append(self, rows: Tensor) -> None: ...
    def locate_rows(self) -> tuple[int, int]:
        """Return the address of the dense rows, and how many rows are allocated."""


class ConcatStore:
    """Keys and values as one tensor each, reallocated by every append."""

    def __init__(self, rows: Tensor) -> None:
        self.keys, self.values = rows.clone(), rows.clone()

    def append(self, rows: Tensor) -> None:
        self.keys = torch.cat([self.keys, rows], 2)
        self.values = torch.cat([self.values, rows], 2)

    def locate_rows(self) -> tuple[int, int]:
        return self.keys.data_ptr(), self.keys.shape[2]


class PagedStore:
    """One layer of a cache."""

    def __init__(self, spec: str, rows: Tensor) -> None:
        self.layer: Any = Cache(1, spec)[0]
        self.append(rows)

    def append(self, rows: Tensor) -> None:
        self.layer.append(rows, rows)

    def locate_rows(self) -> tuple[int, int]:
        slots = self.layer.storage.used_slots[0]
        return self.layer.storage.sides["keys"].open.data_ptr(), slots * self.layer.spec.page


@dataclass
class AppendRun:
    """A store, and the time of each token appended to it."""

    store: RowStore
    tokens: int
    seconds: list[float] = field(default_factory=list)
    num_copied: int = 0

    def append(self, row: Tensor) -> None:
        address, rows = self.store.locate_rows()
        start = time.perf_counter()
        self.store.append(row)
        self.seconds.append(time.perf_counter() - start)
        self.num_copied += rows if self.store.locate_rows()[0] != address else 0

    def summarize(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "median_us": statistics.median(self.seconds) * 1e6,
            "mean_us": statistics.fmean(self.seconds) * 1e6,
            "copied": self.num_copied / self.tokens,
        }


def measure_appends(
    spec_text: str, length: int, tokens: int, heads: int, dim: int
) -> dict[str, AppendRun]:
    """Append to each store in turn; the baseline stops when its byte budget is spent."""
    # Keys and values, read and written, 2 bytes each.
    affordable = int(MAX_COPIED_BYTES / (length * heads * dim * 8))
    rows = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
    row = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16)
    runs = {"concat": AppendRun(ConcatStore(rows), max(1, min(tokens, max(8, affordable))))}
    for growth, option in GROWTH_OPTIONS.items():
        spec = spec_text + option.format(capacity=length + tokens)
        runs[growth] = AppendRun(PagedStore(spec, rows), tokens)
    for index in range(tokens):
        for store_run in runs.values():
            if index < store_run.tokens:
                store_run.append(row)
    return runs


def main(
    kv_cache: Annotated[str, typer.Option(help="Format of the spec language")] = "raw",
    lengths: Annotated[str, typer.Option(help="Rows already stored")] = "1024,8192,32768,131072",
    heads: int = 8,
    dim: int = 128,
    tokens: Annotated[int, typer.Option(help="Appends per figure")] = 512,
    json: Json = False,
) -> None:
    """Time one appended token: one layer, bf16, batch 1."""
    rows: list[dict[str, Any]] = []
    for length in parse_numbers("lengths", lengths):
        runs = measure_appends(kv_cache, length, tokens, heads, dim)
        baseline = runs["concat"].summarize()["median_us"]
        for growth, append_run in runs.items():
            figures = append_run.summarize()
            ratio = baseline / figures["median_us"]
            rows.append({"rows": length, "growth": growth, **figures, "ratio": ratio})
    facts = {"kv_cache": kv_cache, "heads": heads, "dim": dim, "dtype": "bfloat16"}
    print_report("append", rows, facts, quiet=json)


if __name__ == "__main__":
    run(main)
