"""Sequences of different lengths that live in pages: stored by whom you like, and what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native.structs import NativeTiles
from kvant.cache.advance import Pools, advance, concat_tables, select_sequences
from kvant.contracts import Codec, Fields, LayerStats, Mask, PagedTensors, View
from kvant.page_table import AppendPlan, LayerGroup, PageTable
from laws.oracle import sees

SLOTS = 160  # of each kind
HEADS, SCALE = 2, 0.3
Storer = Callable[[AppendPlan, Fields, Mapping[str, PagedTensors]], object]


def storage(codec: Codec, dim: int, dtype: torch.dtype, page: int) -> PagedTensors:
    """Slots full of what is no number: nobody may read a row before it is written."""
    opened = torch.full((SLOTS, HEADS, page, dim), float("nan"), dtype=dtype)
    sealed = {
        name: torch.zeros((SLOTS, HEADS, one.height(page), one.width), dtype=one.dtype or dtype)
        for name, one in codec.fields(dim).items()
    }
    return PagedTensors(codec, opened, sealed, NativeTiles())


def by_torch(change: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> None:
    """What a change says, in its own order, as plainly as possible."""
    for name, stored in sides.items():
        opened, page = stored.open, stored.open.shape[2]
        for source, to in change.copies.tolist():
            opened[to] = opened[source].clone()
        for which, slot, row, count, column in change.writes.tolist():
            came = rows[name][which, :, column : column + count]
            opened[slot, :, row : row + count] = came
        for which, slot, source, column in change.seals.tolist():
            came = rows[name][which, :, column : column + page]
            units = stored.codec.seal(opened[source] if source >= 0 else came)
            for part, units_of in units.items():
                assert stored.tiles is not None
                stored.sealed[part][slot] = stored.tiles.pack(f"{name}.{part}", units_of)


@dataclass
class Life:
    """B sequences in one extent, all rows that they ever had, and their storage twice."""

    kind: LayerGroup
    codecs: Mapping[str, Codec]
    dims: Mapping[str, int]
    dtype: torch.dtype
    storers: tuple[Storer, ...]
    seed: int
    rows: list[dict[str, Tensor]] = field(default_factory=list)  # of each sequence [H, n, D]

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pools = Pools.make(self.kind)
        self.sides = [
            {name: storage(c, self.dims[name], self.dtype, self.kind.page) for name, c in items}
            for items in [self.codecs.items()] * len(self.storers)
        ]
        self.extent = PageTable.make_empty(self.kind, [])
        self.change: AppendPlan | None = None
        self.own: Fields = {}

    def made(self, count: int) -> dict[str, Tensor]:
        batch = self.extent.batch
        return {
            name: torch.randn(batch, HEADS, count, dim).to(self.dtype)
            for name, dim in self.dims.items()
        }

    def begin(self, lengths: list[int], padding: list[int]) -> None:
        """Sequences that came one by one, side by side; those padded come together."""
        extents, rows = [], []
        for length in lengths:
            self.extent, self.rows = PageTable.make_empty(self.kind, [0]), [self.nothing()]
            self.append(length)
            extents.append(self.extent)
            rows += self.rows
        if padding:
            self.extent = PageTable.make_empty(self.kind, padding)
            self.rows = [self.nothing() for _ in padding]
        else:
            self.extent, self.rows = concat_tables(extents), rows

    def nothing(self) -> dict[str, Tensor]:
        return {n: torch.zeros(HEADS, 0, d, dtype=self.dtype) for n, d in self.dims.items()}

    def twins(self) -> None:
        """Sequences twice, so that open pages are shared."""
        self.settle()
        index = [self.random.randrange(self.extent.batch) for _ in range(self.extent.batch)]
        before, self.extent = self.extent, select_sequences(self.extent, np.array(index))
        self.pools.add_references(self.extent)
        self.pools.drop_references(before.list_open_slots(), before.list_sealed_slots())
        self.rows = [dict(self.rows[i]) for i in index]

    def append(self, count: int, *, dense: bool = False) -> AppendPlan:
        """As a cache does it; what the pages held before is dropped after the next one."""
        self.settle()
        change = self.change = advance(self.extent, count, self.pools, new_rows_dense=dense)
        self.own = self.made(count)
        assert max(self.pools.open.size, self.pools.sealed.size) <= SLOTS
        for storer, sides in zip(self.storers, self.sides, strict=True):
            storer(change, self.own, sides)
        for b, length in enumerate(change.new_table.seq_lens.tolist()):
            held = self.rows[b]
            new = length - held["keys"].shape[1]
            self.rows[b] = {
                name: torch.cat([rows, self.own[name][b, :, count - new :]], 1)
                for name, rows in held.items()
            }
        self.extent = change.new_table
        return change

    def settle(self) -> None:
        """Let go what the last change did."""
        if self.change is not None:
            self.pools.drop_references(*self.change.freed_slots)
        self.change = None

    def pages(self, mask: Mask, own: bool, which: int = 0) -> View:
        assert self.change is not None
        sides, change = self.sides[which], self.change
        return View(
            keys=sides["keys"],
            values=sides["values"],
            new_rows=self.own if own else None,
            page_table=change.read_table,
            new_rows_dense=change.new_rows_dense and own,
            mask=mask,
            value_dim=self.dims["values"],
            stats=LayerStats(),
        )

    def right(
        self, q: Tensor, mask: Mask, came: int, logits: Tensor | None, asked: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Float64, one query that is asked for after the other, by the rule alone.

        `came` columns are dense to all.
        """
        batch, heads, queries, _ = q.shape
        out = torch.zeros(batch, heads, len(asked), self.dims["values"], dtype=torch.float64)
        lse = torch.full((batch, heads, len(asked)), float("-inf"), dtype=torch.float64)
        for b in range(batch):
            dense = {name: rows.double() for name, rows in self.rows[b].items()}
            opened = {name: self.opened(name, rows) for name, rows in self.rows[b].items()}
            length = dense["keys"].shape[1]
            position = torch.arange(length)
            for i, t in enumerate(asked):
                at = int(self.extent.lengths[b]) - queries + t
                if at < 0:
                    if logits is not None:
                        lse[b, :, i] = logits.double()
                    continue
                seam = self.kind.paging.count_due_pages(at + 1) * self.kind.page
                sealed = (position >= self.kind.sinks) & (position < seam)
                sealed &= position < length - came
                visible = sees(mask, torch.tensor(at), position)
                keys, values = (
                    torch.where(sealed[:, None], opened[name], dense[name])[:, visible]
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

    def opened(self, name: str, rows: Tensor) -> Tensor:
        """Every whole page as it comes back from the codec, the rest as it went in."""
        codec, page = self.codecs[name], self.kind.page
        found = rows.double()
        for first in range(0, rows.shape[1] - page + 1, page):
            back = codec.open(codec.seal(rows[:, first : first + page]))
            found[:, first : first + page] = back.double()
        return found


def same_bytes(one: PagedTensors, other: PagedTensors) -> None:
    for name, x in {"open": one.open, **one.sealed}.items():
        y = other.open if name == "open" else other.sealed[name]
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
