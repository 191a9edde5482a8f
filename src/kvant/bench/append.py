"""What one appended token costs, against the rows already there and the way memory grows.

`concat` is what a cache without pages does, torch.cat of all rows for every token, and the
baseline. `paged` (by a page), `stepped` (step 256) and `reserved` (capacity) are ours, which must
not. `copied` counts what really moved: rows that an append carried to other memory, a token on
average.
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
MAX_COPIED_BYTES = 4e9  # bytes that the baseline may copy for one figure


class RowStore(Protocol):
    """What rows are appended to."""

    def append(self, rows: Tensor) -> None: ...
    def locate_rows(self) -> tuple[int, int]:
        """Where its dense rows lie, and how many there is room for."""


class ConcatStore:
    """Keys and values as one tensor each, which every append makes anew."""

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
    """One way, and what each token appended to it took."""

    store: RowStore
    tokens: int
    seconds: list[float] = field(default_factory=list)
    num_copied: int = 0

    def append(self, row: Tensor) -> None:
        place, rows = self.store.locate_rows()
        begin = time.perf_counter()
        self.store.append(row)
        self.seconds.append(time.perf_counter() - begin)
        self.num_copied += rows if self.store.locate_rows()[0] != place else 0

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
    """Append to each in turn; the baseline stops when its budget is spent."""
    affordable = int(
        MAX_COPIED_BYTES / (length * heads * dim * 8)
    )  # keys and values, read and written
    rows = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
    row = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16)
    runs = {"concat": AppendRun(ConcatStore(rows), max(1, min(tokens, max(8, affordable))))}
    for way, option in GROWTH_OPTIONS.items():
        spec = spec_text + option.format(capacity=length + tokens)
        runs[way] = AppendRun(PagedStore(spec, rows), tokens)
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
    for length in parse_numbers("lengths", lengths):
        runs = measure_appends(kv_cache, length, tokens, heads, dim)
        base = runs["concat"].summarize()["median_us"]
        for way, one in runs.items():
            figures = one.summarize()
            ratio = base / figures["median_us"]
            rows.append({"rows": length, "growth": way, **figures, "ratio": ratio})
    facts = {"kv_cache": kv_cache, "heads": heads, "dim": dim, "dtype": "bfloat16"}
    print_report("append", rows, facts, quiet=json)


if __name__ == "__main__":
    run(main)
