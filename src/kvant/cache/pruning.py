"""Rows that go for good: which of them each key head keeps, and the pages that these make.

What is kept is packed, in its order, before the newest token: K of L rows lie at positions L - K to
L - 1, as if all before them had left a window. So lengths stay what they are, and so do masks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.attention.storing import seal_into
from kvant.attention.writing import SEAL_AT_ONCE
from kvant.cache.book import Asked
from kvant.cache.changes import Pools, placed
from kvant.cache.reading import columns
from kvant.cache.storage import Geometry
from kvant.contracts import Fields, Pruning, Rows, Tally, View
from kvant.errors import CacheError
from kvant.extent import (
    BEGINS,
    FIRST_OPEN,
    FIRST_SEALED,
    PRUNED,
    STOP_SEALED,
    Bools,
    Extent,
    Ints,
    Kind,
)
from kvant.recipes import LayerSpec

NEWEST = 32  # rows that stay, whatever a score says
PAGES = [FIRST_SEALED, STOP_SEALED, FIRST_OPEN]  # of the numbers of an extent
LATE = 128  # rows beyond what may be kept, while tokens are decoded, before they are pruned
SAFE = 0.2  # of what a head keeps on average, it keeps this much where heads share


def over(pruning: Pruning, extent: Extent, slack: int = 0) -> Bools:
    """Which sequences hold more rows than they may keep, by more than `slack` a head?"""
    held = (extent.rows - extent.missing).reshape(-1, extent.heads).mean(1)
    lengths = extent.of_sequences(extent.rows).tolist()
    allowed = np.array([max(pruning.keep(length), NEWEST) for length in lengths])
    found: Bools = held > allowed + slack
    return found


class Kept(NamedTuple):
    """What a prune makes of a layer: the rows of some tables, in pages that are still to come."""

    tables: Ints
    rows: Fields  # framed, [tables, n, D]: the columns that there are
    mask: Tensor  # [tables, n]: those of them that stay
    extent: Extent  # with numbers alone


def chosen(spec: LayerSpec, view: View, asked: Asked | None, which: Bools) -> Kept:
    """The rows of a layer that stay in these sequences."""
    pruning, extent = spec.prune, view.extent
    assert pruning is not None
    tables = extent.tables_of(np.flatnonzero(which))
    there = _there(extent)[tables]
    first = int(there.any(0).argmax())
    last = extent.columns
    rows = {n: columns(view, n, first, last).flatten(0, 1)[tables] for n in spec.sides}
    held = torch.from_numpy(there[:, first:])
    scores = _scores(spec, rows, held, asked, tables, extent, first)
    newest = held.long().flip(1).cumsum(1).flip(1)  # 1 is the newest row
    scores = scores.masked_fill(newest <= NEWEST, float("inf")).masked_fill(~held, float("-inf"))
    lengths = extent.of_sequences(extent.rows)[which].tolist()
    keep = torch.tensor([max(pruning.keep(length), NEWEST) for length in lengths])
    mask = _best(scores, keep, extent.heads, pruning.adaptive) & held
    numbers, lengths = extent.numbers.copy(), extent.rows[tables]
    numbers[tables, BEGINS] = begins = lengths - mask.sum(1).numpy()
    numbers[tables, PRUNED] = lengths
    numbers[tables[:, None], PAGES] = pages_from(extent.kind, lengths, begins)
    after = Extent(extent.kind, numbers, extent.sealed, extent.open, extent.heads)
    return Kept(tables, rows, mask, after)


def pages_from(kind: Kind, lengths: Ints, begins: Ints) -> Ints:
    """The pages of sequences of these lengths, with rows from these positions on: [n, PAGES]."""
    first = begins // kind.page
    stop = np.maximum(first, kind.paging.all_due(lengths))
    return np.stack([first, stop, np.maximum(kind.first_open(lengths), first)], 1)


def kept_nbytes(geometry: Geometry, spec: LayerSpec, kind: Kind, length: int) -> int:
    """Bytes of the pages that one head keeps of a prompt."""
    assert spec.prune is not None
    begins = length - min(length, max(spec.prune.keep(length), NEWEST))
    [[first, stop, opened]] = pages_from(kind, *(np.array([n]) for n in (length, begins))).tolist()
    pages = -(-length // kind.page) - opened
    nbytes: int = pages * geometry.open_nbytes(spec) + (stop - first) * geometry.sealed_nbytes(spec)
    return nbytes


def packed(kept: Kept, pools: Pools) -> tuple[Extent, tuple[Ints, Ints]]:
    """Where the rows that stay are to lie, and the slots that were taken for them."""
    told, at = kept.extent, kept.tables
    mine = placed(told.kind, told.numbers[at], pools)
    sealed, opened = (
        _put(table, own, at) for table, own in ((told.sealed, mine.sealed), (told.open, mine.open))
    )
    extent = Extent(told.kind, told.numbers, sealed, opened, told.heads)
    return extent, (mine.open_slots(), mine.sealed_slots())


def fill(kept: Kept, extent: Extent, view: View, tally: Tally) -> None:
    """Write the rows that stay into the slots of their pages."""
    page, at = extent.kind.page, kept.tables
    begins, lengths = extent.begins[at], extent.rows[at]
    first = begins // page
    width = int((-(-lengths // page) - first).max(initial=1)) * page
    place = np.arange(width) + (first * page)[:, None]
    to = torch.from_numpy((place >= begins[:, None]) & (place < lengths[:, None]))
    number_of = np.zeros(extent.tables, np.int64)
    number_of[at] = np.arange(len(at))
    mine = np.isin(np.arange(extent.tables), at)
    for name, rows in kept.rows.items():
        stored = view.keys if name == "keys" else view.values
        laid = rows.new_zeros(len(at), width, rows.shape[2])
        laid[to.to(rows.device)] = rows[kept.mask.to(rows.device)]
        pages = laid.view(len(at), -1, page, rows.shape[2])

        def taken(which: Ints, number: Ints, pages: Tensor = pages) -> Tensor:
            """These pages, [n, 1, P, D]."""
            table = number_of[which]
            return pages[torch.from_numpy(table), torch.from_numpy(number - first[table])][:, None]

        which, number = (part[mine[extent.open_pages()[0]]] for part in extent.open_pages())
        opened = torch.from_numpy(extent.open[which, number]).to(rows.device)
        stored.open[opened] = taken(which, number)
        which, number = (part[mine[extent.sealed_pages()[0]]] for part in extent.sealed_pages())
        slots = extent.sealed[which, number]
        for start in range(0, len(slots), SEAL_AT_ONCE):
            some = slice(start, start + SEAL_AT_ONCE)
            sealing = taken(which[some], number[some])
            seal_into(stored, name, sealing, slots[some], number[some] * page, 0, tally)


def _there(extent: Extent) -> Bools:
    """The columns at which each table has a row."""
    column = np.arange(extent.columns)
    position = column - (extent.columns - extent.lengths)[:, None]
    found: Bools = (position >= 0) & (position >= extent.missing[:, None])
    return found


def _scores(
    spec: LayerSpec,
    rows: Fields,
    there: Tensor,
    asked: Asked | None,
    tables: Ints,
    extent: Extent,
    first: int,
) -> Tensor:
    assert spec.prune is not None
    score = spec.prune.score
    plain = {n: spec.sides[n].frame.outputs(rows[n].unsqueeze(1)).squeeze(1).float() for n in rows}
    keys = plain["keys"]
    given = Rows(keys, plain["values"], there.to(keys.device), None, None, 1.0, extent.heads)
    if score.queries:
        end = 0 if asked is None else min(asked.columns, extent.columns)
        # Of a prompt that was taken back in part; what came behind it was no prompt.
        count = 0 if asked is None else asked.queries.shape[2] - (asked.columns - end)
        if asked is None or count <= 0:
            raise CacheError(
                f"{type(score).__name__} chooses rows by what the newest tokens of a prompt asked, "
                "and nobody saw that: kvant.attach the model, call prune() before a cache is "
                "merged, or take keydiff, which needs keys alone"
            )
        mine = asked.queries[torch.from_numpy(tables)]
        at = torch.arange(end - count, end) - first
        at = at.expand(len(tables), -1).to(keys.device)
        seen = there.to(keys.device).gather(1, at.clamp(0, there.shape[1] - 1))
        queries = mine[:, :, :count].float()
        given = given._replace(
            queries=queries, asked=at.masked_fill(~seen | (at < 0), -1), scale=asked.scale
        )
    return score.of(given).cpu()


def _best(scores: Tensor, keep: Tensor, heads: int, adaptive: bool) -> Tensor:
    """[N, n] booleans: the best of each head, or of all heads of a sequence."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for i, count in enumerate(keep.tolist()):
        mine = scores[i * heads : (i + 1) * heads]
        count = min(count, scores.shape[1])
        part = mask[i * heads : (i + 1) * heads]
        safe = max(min(NEWEST, count), int(SAFE * count)) if adaptive else count
        part.scatter_(1, mine.topk(safe, dim=1).indices, True)
        if adaptive and (rest := (count - safe) * heads):
            others = mine.masked_fill(part, float("-inf"))
            part.view(-1)[others.flatten().topk(min(rest, others.numel())).indices] = True
    return mask


def _put(table: Ints, own: Ints, at: Ints) -> Ints:
    """A table of pages with other rows for some."""
    wide = np.zeros((len(table), max(table.shape[1], own.shape[1])), np.int64)
    wide[:, : table.shape[1]] = table
    wide[at] = 0
    wide[at, : own.shape[1]] = own
    return wide
