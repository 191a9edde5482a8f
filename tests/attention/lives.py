"""Sequences of different lengths in shared pages, stored by the backend under test, with the
expected attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native.structs import NativeTiles
from kvant.contracts import Codec, Fields, LayerStats, Mask, PagedTensors, View
from kvant.page_table import AppendPlan, LayerGroup, PageTable
from kvant.pages.advance import Pools, advance, concat_tables, select_sequences
from laws.oracle import visible_positions

SLOTS = 160  # of each page type
HEADS, SCALE = 2, 0.3
Storer = Callable[[AppendPlan, Fields, Mapping[str, PagedTensors]], object]


def make_nan_storage(codec: Codec, dim: int, dtype: torch.dtype, page: int) -> PagedTensors:
    """Return slots filled with NaN, so that a read before a write shows."""
    opened = torch.full((SLOTS, HEADS, page, dim), float("nan"), dtype=dtype)
    sealed = {
        name: torch.zeros(
            (SLOTS, HEADS, field.height(page), field.width), dtype=field.dtype or dtype
        )
        for name, field in codec.fields(dim).items()
    }
    return PagedTensors(codec, opened, sealed, NativeTiles())


def store_with_torch(plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """Apply an append plan with plain torch indexing, in the order of its rows."""
    for name, stored in sides.items():
        opened, page = stored.open, stored.open.shape[2]
        for source, target in plan.copies.tolist():
            opened[target] = opened[source].clone()
        for sequence, slot, row, count, column in plan.writes.tolist():
            new_part = rows[name][sequence, :, column : column + count]
            opened[slot, :, row : row + count] = new_part
        for sequence, slot, source, column in plan.seals.tolist():
            new_part = rows[name][sequence, :, column : column + page]
            units = stored.codec.seal(opened[source] if source >= 0 else new_part)
            for part, units_of in units.items():
                assert stored.tiles is not None
                stored.sealed[part][slot] = stored.tiles.pack(f"{name}.{part}", units_of)


@dataclass
class PagedSequences:
    """B sequences in one page table, all rows they ever had, and two copies of their storage."""

    group: LayerGroup
    codecs: Mapping[str, Codec]
    dims: Mapping[str, int]
    dtype: torch.dtype
    storers: tuple[Storer, ...]
    seed: int
    rows: list[dict[str, Tensor]] = field(default_factory=list)  # per sequence [H, n, D]

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pools = Pools.make(self.group)
        self.sides = [
            {
                name: make_nan_storage(c, self.dims[name], self.dtype, self.group.page)
                for name, c in items
            }
            for items in [self.codecs.items()] * len(self.storers)
        ]
        self.page_table = PageTable.make_empty(self.group, [])
        self.plan: AppendPlan | None = None
        self.new_rows: Fields = {}

    def make_rows(self, count: int) -> dict[str, Tensor]:
        batch = self.page_table.batch
        return {
            name: torch.randn(batch, HEADS, count, dim).to(self.dtype)
            for name, dim in self.dims.items()
        }

    def begin(self, lengths: list[int], padding: list[int]) -> None:
        """Build a batch from sequences of different lengths; padded sequences are appended
        together.
        """
        tables, rows = [], []
        for length in lengths:
            self.page_table, self.rows = PageTable.make_empty(self.group, [0]), [self.empty_rows()]
            self.append(length)
            tables.append(self.page_table)
            rows += self.rows
        if padding:
            self.page_table = PageTable.make_empty(self.group, padding)
            self.rows = [self.empty_rows() for _ in padding]
        else:
            self.page_table, self.rows = concat_tables(tables), rows

    def empty_rows(self) -> dict[str, Tensor]:
        return {n: torch.zeros(HEADS, 0, d, dtype=self.dtype) for n, d in self.dims.items()}

    def fork_sequences(self) -> None:
        """Fork each sequence, so that open pages are shared."""
        self.release_freed()
        index = [self.random.randrange(self.page_table.batch) for _ in range(self.page_table.batch)]
        before = self.page_table
        self.page_table = select_sequences(before, np.array(index))
        self.pools.add_references(self.page_table)
        self.pools.drop_references(before.list_open_slots(), before.list_sealed_slots())
        self.rows = [dict(self.rows[i]) for i in index]

    def append(self, count: int, *, dense: bool = False) -> AppendPlan:
        """Append rows like a cache does; drop old page contents only after the next append."""
        self.release_freed()
        plan = self.plan = advance(self.page_table, count, self.pools, new_rows_dense=dense)
        self.new_rows = self.make_rows(count)
        assert max(self.pools.open.size, self.pools.sealed.size) <= SLOTS
        for storer, sides in zip(self.storers, self.sides, strict=True):
            storer(plan, self.new_rows, sides)
        for b, length in enumerate(plan.new_table.seq_lens.tolist()):
            sequence_rows = self.rows[b]
            new = length - sequence_rows["keys"].shape[1]
            self.rows[b] = {
                name: torch.cat([rows, self.new_rows[name][b, :, count - new :]], 1)
                for name, rows in sequence_rows.items()
            }
        self.page_table = plan.new_table
        return plan

    def release_freed(self) -> None:
        """Release the pages that the last plan freed."""
        if self.plan is not None:
            self.pools.drop_references(*self.plan.freed_slots)
        self.plan = None

    def make_view(self, mask: Mask, new_rows_dense: bool, storage_index: int = 0) -> View:
        assert self.plan is not None
        sides, plan = self.sides[storage_index], self.plan
        return View(
            keys=sides["keys"],
            values=sides["values"],
            new_rows=self.new_rows if new_rows_dense else None,
            page_table=plan.read_table,
            new_rows_dense=plan.new_rows_dense and new_rows_dense,
            mask=mask,
            batch=plan.read_table.batch,
            heads=sides["keys"].heads,
            value_dim=self.dims["values"],
            stats=LayerStats(),
        )

    def expected_attention(
        self, q: Tensor, mask: Mask, num_new: int, logits: Tensor | None, positions: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute attention in float64, query by query, from the mask rule alone.

        The newest `num_new` columns are dense to all queries.
        """
        batch, heads, queries, _ = q.shape
        out = torch.zeros(batch, heads, len(positions), self.dims["values"], dtype=torch.float64)
        lse = torch.full((batch, heads, len(positions)), float("-inf"), dtype=torch.float64)
        for b in range(batch):
            dense = {name: rows.double() for name, rows in self.rows[b].items()}
            stored = {name: self.stored_rows(name, rows) for name, rows in self.rows[b].items()}
            length = dense["keys"].shape[1]
            position = torch.arange(length)
            for i, t in enumerate(positions):
                index = int(self.page_table.lengths[b]) - queries + t
                if index < 0:
                    if logits is not None:
                        lse[b, :, i] = logits.double()
                    continue
                seam = self.group.paging.count_due_pages(index + 1) * self.group.page
                sealed = (position >= self.group.sinks) & (position < seam)
                sealed &= position < length - num_new
                visible = visible_positions(mask, torch.tensor(index), position)
                keys, values = (
                    torch.where(sealed[:, None], stored[name], dense[name])[:, visible]
                    for name in ("keys", "values")
                )
                group = heads // HEADS
                scores = q[b, :, t].double().view(HEADS, group, 1, -1) * SCALE
                scores = (scores @ keys[:, None].transpose(-1, -2)).view(heads, -1)
                if logits is not None:
                    scores = torch.cat([scores, logits.double()[:, None]], 1)
                lse[b, :, i] = scores.logsumexp(-1)
                weights = scores.softmax(-1)[:, : keys.shape[1]].view(HEADS, group, -1)
                out[b, :, i] = (weights @ values).reshape(heads, -1)
        return out, lse

    def stored_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows as stored: whole pages decoded by the codec, the others unchanged."""
        codec, page = self.codecs[name], self.group.page
        stored = rows.double()
        for first in range(0, rows.shape[1] - page + 1, page):
            decoded = codec.open(codec.seal(rows[:, first : first + page]))
            stored[:, first : first + page] = decoded.double()
        return stored


def assert_same_bytes(first: PagedTensors, second: PagedTensors) -> None:
    for name, x in {"open": first.open, **first.sealed}.items():
        y = second.open if name == "open" else second.sealed[name]
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
