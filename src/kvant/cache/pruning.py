"""Rows that go for good: which of them each key head keeps, and the pages that these make.

What is kept is packed, in its order, before the newest token: K of L rows lie at positions L - K to
L - 1, as if all before them had left a window. So lengths stay what they are, and so do masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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

Floats = NDArray[np.float64]
NEWEST = 32  # rows that stay, whatever a score says
PAGES = [FIRST_SEALED, STOP_SEALED, FIRST_OPEN]  # of the numbers of an extent
LATE = 128  # rows beyond what may be kept, while tokens are decoded, before they are pruned
SAFE = 0.2  # of what a head keeps on average, it keeps this much where heads share


def over(pruning: Pruning, extent: Extent, slack: int = 0) -> Bools:
    """Which sequences hold more rows than they may keep, by more than `slack` a head?"""
    found: Bools = room(pruning, extent) + slack < 0
    return found


def room(pruning: Pruning, extent: Extent) -> Floats:
    """How many rows more each sequence may hold, in the mean of its heads; below zero: fewer."""
    held = (extent.rows - extent.missing).reshape(-1, extent.heads).mean(1)
    lengths = extent.of_sequences(extent.rows).tolist()
    found: Floats = np.array([allowed(pruning, length) for length in lengths]) - held
    return found


def allowed(pruning: Pruning, length: int) -> int:
    """Rows that a head keeps of so many tokens."""
    return min(length, max(pruning.keep(length), NEWEST))


class Kept(NamedTuple):
    """The rows of a layer that stay: key head by key head of some sequences, in their order."""

    which: Bools  # the sequences
    rows: Fields  # framed, [rows of all heads, D]
    counts: Ints  # rows of each head
    gone: int  # rows of all heads that do not stay


def chosen(spec: LayerSpec, view: View, asked: Asked | None, which: Bools) -> Kept:
    """The rows of a layer that stay in these sequences."""
    assert spec.prune is not None
    extent, heads, sequences = view.extent, view.heads, np.flatnonzero(which)
    there = _there(extent)[extent.tables_of(sequences)].repeat(view.keys.heads, 0)
    first = int(there.any(0).argmax())
    held, last = torch.from_numpy(there[:, first:]), extent.columns
    index = torch.from_numpy(sequences)
    rows = {n: columns(view, n, first, last)[index].flatten(0, 1) for n in spec.sides}
    scores = _scores(spec, rows, held, _of(asked, sequences, first, last), heads)
    newest = held.long().flip(1).cumsum(1).flip(1)  # 1 is the newest row
    scores = scores.masked_fill(newest <= NEWEST, float("inf")).masked_fill(~held, float("-inf"))
    lengths = extent.of_sequences(extent.rows)[which].tolist()
    keep = [allowed(spec.prune, length) for length in lengths]
    stay = _best(scores, keep, heads, spec.prune.adaptive) & held
    kept = {n: one[stay.to(one.device)] for n, one in rows.items()}
    return Kept(which, kept, stay.sum(1).numpy(), int((held & ~stay).sum()))


def pages_from(kind: Kind, lengths: Ints, begins: Ints) -> Ints:
    """The pages of sequences of these lengths, with rows from these positions on: [n, PAGES]."""
    first = begins // kind.page
    stop = np.maximum(first, kind.paging.all_due(lengths))
    return np.stack([first, stop, np.maximum(kind.first_open(lengths), first)], 1)


def kept_nbytes(geometry: Geometry, spec: LayerSpec, kind: Kind, length: int, tables: int) -> int:
    """Bytes of the pages that so many tables keep of prompts of one length."""
    assert spec.prune is not None
    begins = length - allowed(spec.prune, length)
    [[first, stop, opened]] = pages_from(kind, *(np.array([n]) for n in (length, begins))).tolist()
    step = Pools.of(kind).open.step
    counts = (-(-length // kind.page) - opened) * tables, (stop - first) * tables
    pages, sealed = (-(-count // step) * step for count in counts)
    nbytes: int = pages * geometry.open_nbytes(spec) + sealed * geometry.sealed_nbytes(spec)
    return nbytes


def packed(extent: Extent, kept: Kept, pools: Pools) -> tuple[Extent, tuple[Ints, Ints]]:
    """Where the rows that stay are to lie, and the slots that were taken for them."""
    tables = extent.tables_of(np.flatnonzero(kept.which))
    counts = kept.counts.reshape(len(tables), -1)[:, 0]  # heads of one table keep as many
    numbers, lengths = extent.numbers.copy(), extent.rows[tables]
    numbers[tables, BEGINS] = begins = lengths - counts
    numbers[tables, PRUNED] = lengths
    numbers[tables[:, None], PAGES] = pages_from(extent.kind, lengths, begins)
    mine = placed(extent.kind, numbers[tables], pools)
    sealed, opened = _put(extent.sealed, mine.sealed, tables), _put(extent.open, mine.open, tables)
    after = Extent(extent.kind, numbers, sealed, opened, extent.heads)
    return after, (mine.open_slots(), mine.sealed_slots())


def fill(kept: Kept, view: View, tally: Tally) -> None:
    """Write the rows that stay into the slots of their pages."""
    extent, page = view.extent, view.extent.kind.page
    tables = extent.tables_of(np.flatnonzero(kept.which))
    begins, lengths = extent.begins[tables], extent.rows[tables]
    first = begins // page
    width = int((-(-lengths // page) - first).max(initial=1)) * page
    place = np.arange(width) + (first * page)[:, None]
    there = (place >= begins[:, None]) & (place < lengths[:, None])
    to = torch.from_numpy(there.repeat(view.keys.heads, 0))
    number_of = np.full(extent.tables, -1)
    number_of[tables] = np.arange(len(tables))
    for name, rows in kept.rows.items():
        stored = view.keys if name == "keys" else view.values
        laid = rows.new_zeros(*to.shape, rows.shape[1])
        laid[to.to(rows.device)] = rows
        pages = laid.view(len(tables), stored.heads, -1, page, rows.shape[1])

        def taken(which: Ints, number: Ints, pages: Tensor = pages) -> Tensor:
            """These pages, [n, H, P, D]."""
            table = number_of[which]
            return pages[torch.from_numpy(table), :, torch.from_numpy(number - first[table])]

        which, number = _of_tables(extent.open_pages(), number_of)
        opened = torch.from_numpy(extent.open[which, number]).to(rows.device)
        stored.open[opened] = taken(which, number)
        which, number = _of_tables(extent.sealed_pages(), number_of)
        slots = extent.sealed[which, number]
        for start in range(0, len(slots), SEAL_AT_ONCE):
            some = slice(start, start + SEAL_AT_ONCE)
            sealing = taken(which[some], number[some])
            seal_into(stored, name, sealing, slots[some], number[some] * page, 0, tally)


def _of_tables(pages: tuple[Ints, Ints], number_of: Ints) -> tuple[Ints, Ints]:
    mine = number_of[pages[0]] >= 0
    return pages[0][mine], pages[1][mine]


def _there(extent: Extent) -> Bools:
    """The columns at which each table has a row."""
    position = np.arange(extent.columns) - (extent.columns - extent.lengths)[:, None]
    found: Bools = (position >= 0) & (position >= extent.missing[:, None])
    return found


def _of(asked: Asked | None, sequences: Ints, first: int, last: int) -> Asked | None:
    """What these sequences asked, its columns counted from `first`."""
    found = None if asked is None else asked.cut(last)
    return None if found is None else found.of(sequences, first)


def _scores(
    spec: LayerSpec, rows: Fields, there: Tensor, asked: Asked | None, heads: int
) -> Tensor:
    assert spec.prune is not None
    score = spec.prune.score
    plain = {n: spec.sides[n].frame.outputs(one.unsqueeze(1)).squeeze(1) for n, one in rows.items()}
    keys, values = plain["keys"].float(), plain["values"].float()
    given = Rows(keys, values, there.to(keys.device), None, None, 1.0, heads)
    if score.queries:
        if asked is None:
            raise CacheError(
                f"{score.name} chooses rows by what the newest tokens of a prompt ask, and nobody "
                "saw that: kvant.attach the model, or take keydiff, which needs keys alone"
            )
        queries = asked.queries[:, :, :, -score.queries :].flatten(0, 1).to(keys)
        at = torch.arange(asked.columns - queries.shape[2], asked.columns, device=keys.device)
        at = at.expand(len(keys), -1)
        seen = (at >= 0) & given.there.gather(1, at.clamp(min=0))
        at = at.masked_fill(~seen, -1)
        given = given._replace(queries=queries, asked=at, scale=asked.scale)
    return score.of(given).cpu()


def _best(scores: Tensor, keep: Sequence[int], heads: int, adaptive: bool) -> Tensor:
    """[N, n] booleans: the best of each head, or of all heads of a sequence."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for i, count in enumerate(keep):
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
