"""Time one appended token against the rows already stored and the growth of the cache.

`concat` is a cache without pages: torch.cat of all rows for every token, the baseline. `paged` (by
a page), `stepped` (step=256) and `reserved` (capacity) are kvant's; their time must not grow with
the rows. `copied` is the mean number of rows that an append moved to other memory.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvant.bench import harness
from kvant.bench.harness import CPU, Laps
from kvant.cache import Cache

GROWTH_OPTIONS = {"paged": "", "stepped": ",step=256", "reserved": ",capacity={capacity}"}
MAX_COPIED_BYTES = 4e9  # by the baseline, per figure


class ConcatStore:
    """Keys and values as one tensor each, reallocated by every append."""

    def __init__(self, rows: Tensor) -> None:
        self.keys, self.values = rows.clone(), rows.clone()

    def append(self, rows: Tensor) -> None:
        self.keys = torch.cat([self.keys, rows], 2)
        self.values = torch.cat([self.values, rows], 2)

    def locate_rows(self) -> tuple[int, int]:
        """Return the address of the dense rows, and how many rows are allocated."""
        return self.keys.data_ptr(), self.keys.shape[2]


class PagedStore:
    """One layer of a cache."""

    def __init__(self, spec: str, rows: Tensor) -> None:
        self.layer: Any = Cache(1, spec)[0]
        self.append(rows)

    def append(self, rows: Tensor) -> None:
        self.layer.append(rows, rows)

    def locate_rows(self) -> tuple[int, int]:
        """Return the address of the dense rows, and how many rows are allocated."""
        slots = self.layer.storage.used_slots[0]
        return self.layer.storage.sides["keys"].open.data_ptr(), slots * self.layer.spec.page


def measure_appends(
    spec_text: str, length: int, tokens: int, heads: int, dim: int
) -> list[dict[str, Any]]:
    """Append to each store in turn; the baseline stops when its byte budget is spent."""
    rows = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
    row = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16)
    stores: dict[str, ConcatStore | PagedStore] = {"concat": ConcatStore(rows)}
    for growth, option in GROWTH_OPTIONS.items():
        stores[growth] = PagedStore(spec_text + option.format(capacity=length + tokens), rows)
    # Keys and values, read and written, 2 bytes each.
    affordable = int(MAX_COPIED_BYTES / (length * heads * dim * 8))
    limits = dict.fromkeys(stores, tokens) | {"concat": max(1, min(tokens, max(8, affordable)))}
    laps = {growth: Laps() for growth in stores}
    num_copied = dict.fromkeys(stores, 0)
    for index in range(tokens):
        for growth, store in stores.items():
            if index < limits[growth]:
                address, num_rows = store.locate_rows()
                laps[growth].append(CPU.time_call(partial(store.append, row)))
                num_copied[growth] += num_rows if store.locate_rows()[0] != address else 0
    return [
        {
            "rows": length,
            "growth": growth,
            "tokens": limits[growth],
            "median_us": laps[growth].median * 1e6,
            "mean_us": statistics.fmean(laps[growth].seconds) * 1e6,
            "copied": num_copied[growth] / limits[growth],
            "ratio": laps["concat"].median / laps[growth].median,
        }
        for growth in stores
    ]


def main(
    kv_cache: Annotated[str, typer.Option(help="Format of the spec language")] = "raw",
    lengths: Annotated[str, typer.Option(help="Rows already stored")] = "1024,8192,32768,131072",
    heads: int = 8,
    dim: int = 128,
    tokens: Annotated[int, typer.Option(help="Appends per figure")] = 512,
    json: harness.Json = False,
) -> None:
    """Time one appended token: one layer, bf16, batch 1."""
    rows: list[dict[str, Any]] = []
    for length in harness.parse_numbers("lengths", lengths):
        harness.show_progress(f"{length} rows")
        rows += measure_appends(kv_cache, length, tokens, heads, dim)
    facts = {"kv_cache": kv_cache, "heads": heads, "dim": dim, "dtype": "bfloat16"}
    harness.print_report("append", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
