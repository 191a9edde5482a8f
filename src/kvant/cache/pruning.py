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

from kvant.attention.store_rows import seal_pages
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL
from kvant.cache.advance import Pools, allocate_table
from kvant.cache.readable_rows import read_columns
from kvant.cache.state import PruningQueries
from kvant.cache.storage import Geometry
from kvant.contracts import Fields, LayerStats, Pruning, ScoreInput, View
from kvant.errors import CacheError
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    PRUNED_AT,
    STOP_SEALED,
    Bools,
    Ints,
    LayerGroup,
    PageTable,
)
from kvant.recipes import LayerSpec

Floats = NDArray[np.float64]
NUM_PROTECTED_ROWS = 32  # rows that stay, whatever a score says
PAGE_COLUMNS = [FIRST_SEALED, STOP_SEALED, FIRST_OPEN]  # of the numbers of an extent
MAX_DECODE_EXCESS = (
    128  # rows beyond what may be kept, while tokens are decoded, before they are pruned
)
MIN_HEAD_SHARE = 0.2  # of what a head keeps on average, it keeps this much where heads share


def mask_over_budget(pruning: Pruning, page_table: PageTable, slack: int = 0) -> Bools:
    """Which sequences hold more rows than they may keep, by more than `slack` a head?"""
    found: Bools = count_spare_rows(pruning, page_table) + slack < 0
    return found


def count_spare_rows(pruning: Pruning, page_table: PageTable) -> Floats:
    """How many rows more each sequence may hold, in the mean of its heads; below zero: fewer."""
    held = (
        (page_table.seq_lens - page_table.pruned_before)
        .reshape(-1, page_table.tables_per_sequence)
        .mean(1)
    )
    lengths = page_table.reduce_to_sequences(page_table.seq_lens).tolist()
    found: Floats = np.array([count_allowed_rows(pruning, length) for length in lengths]) - held
    return found


def count_allowed_rows(pruning: Pruning, length: int) -> int:
    """Rows that a head keeps of so many tokens."""
    return min(length, max(pruning.compute_budget(length), NUM_PROTECTED_ROWS))


class RetainedRows(NamedTuple):
    """The rows of a layer that stay: key head by key head of some sequences, in their order."""

    sequence_mask: Bools  # the sequences
    rows: Fields  # framed, [rows of all heads, D]
    counts: Ints  # rows of each head
    num_removed: int  # rows of all heads that do not stay


def select_retained_rows(
    spec: LayerSpec, view: View, pruning_queries: PruningQueries | None, sequence_mask: Bools
) -> RetainedRows:
    """The rows of a layer that stay in these sequences."""
    assert spec.prune is not None
    extent, heads, sequences = view.page_table, view.heads, np.flatnonzero(sequence_mask)
    there = _mask_present_rows(extent)[extent.expand_to_tables(sequences)].repeat(
        view.keys.heads, 0
    )
    first = int(there.any(0).argmax())
    held, last = torch.from_numpy(there[:, first:]), extent.num_columns
    index = torch.from_numpy(sequences)
    rows = {n: read_columns(view, n, first, last)[index].flatten(0, 1) for n in spec.sides}
    scores = _compute_scores(
        spec, rows, held, _select_queries(pruning_queries, sequences, first, last), heads
    )
    newest = held.long().flip(1).cumsum(1).flip(1)  # 1 is the newest row
    scores = scores.masked_fill(newest <= NUM_PROTECTED_ROWS, float("inf")).masked_fill(
        ~held, float("-inf")
    )
    lengths = extent.reduce_to_sequences(extent.seq_lens)[sequence_mask].tolist()
    keep = [count_allowed_rows(spec.prune, length) for length in lengths]
    stay = _mask_best_rows(scores, keep, heads, spec.prune.adaptive) & held
    kept = {n: one[stay.to(one.device)] for n, one in rows.items()}
    return RetainedRows(sequence_mask, kept, stay.sum(1).numpy(), int((held & ~stay).sum()))


def compute_page_numbers(layer_group: LayerGroup, lengths: Ints, first_visible: Ints) -> Ints:
    """The pages of sequences of these lengths, with rows from these positions on: [n, PAGES]."""
    first = first_visible // layer_group.page
    stop = np.maximum(first, layer_group.paging.count_due_pages_each(lengths))
    return np.stack([first, stop, np.maximum(layer_group.find_first_open(lengths), first)], 1)


def count_retained_nbytes(
    geometry: Geometry, spec: LayerSpec, layer_group: LayerGroup, length: int, num_tables: int
) -> int:
    """Bytes of the pages that so many tables keep of prompts of one length."""
    assert spec.prune is not None
    begins = length - count_allowed_rows(spec.prune, length)
    [[first, stop, opened]] = compute_page_numbers(
        layer_group, *(np.array([n]) for n in (length, begins))
    ).tolist()
    step = Pools.make(layer_group).open.step
    counts = (-(-length // layer_group.page) - opened) * num_tables, (stop - first) * num_tables
    pages, sealed = (-(-count // step) * step for count in counts)
    nbytes: int = pages * geometry.open_nbytes(spec) + sealed * geometry.sealed_nbytes(spec)
    return nbytes


def pack_table(
    page_table: PageTable, retained: RetainedRows, pools: Pools
) -> tuple[PageTable, tuple[Ints, Ints]]:
    """Where the rows that stay are to lie, and the slots that were taken for them."""
    tables = page_table.expand_to_tables(np.flatnonzero(retained.sequence_mask))
    counts = retained.counts.reshape(len(tables), -1)[:, 0]  # heads of one table keep as many
    numbers, lengths = page_table.numbers.copy(), page_table.seq_lens[tables]
    numbers[tables, FIRST_VISIBLE] = begins = lengths - counts
    numbers[tables, PRUNED_AT] = lengths
    numbers[tables[:, None], PAGE_COLUMNS] = compute_page_numbers(
        page_table.layer_group, lengths, begins
    )
    mine = allocate_table(page_table.layer_group, numbers[tables], pools)
    sealed, opened = (
        _replace_table_rows(page_table.sealed_table, mine.sealed_table, tables),
        _replace_table_rows(page_table.open_table, mine.open_table, tables),
    )
    after = PageTable(
        page_table.layer_group, numbers, sealed, opened, page_table.tables_per_sequence
    )
    return after, (mine.list_open_slots(), mine.list_sealed_slots())


def write_retained_rows(retained: RetainedRows, view: View, stats: LayerStats) -> None:
    """Write the rows that stay into the slots of their pages."""
    extent, page = view.page_table, view.page_table.layer_group.page
    tables = extent.expand_to_tables(np.flatnonzero(retained.sequence_mask))
    begins, lengths = extent.first_visible[tables], extent.seq_lens[tables]
    first = begins // page
    width = int((-(-lengths // page) - first).max(initial=1)) * page
    place = np.arange(width) + (first * page)[:, None]
    there = (place >= begins[:, None]) & (place < lengths[:, None])
    to = torch.from_numpy(there.repeat(view.keys.heads, 0))
    number_of = np.full(extent.num_tables, -1)
    number_of[tables] = np.arange(len(tables))
    for name, rows in retained.rows.items():
        stored = view.keys if name == "keys" else view.values
        laid = rows.new_zeros(*to.shape, rows.shape[1])
        laid[to.to(rows.device)] = rows
        pages = laid.view(len(tables), stored.heads, -1, page, rows.shape[1])

        def gather_pages(which: Ints, number: Ints, pages: Tensor = pages) -> Tensor:
            """These pages, [n, H, P, D]."""
            table = number_of[which]
            return pages[torch.from_numpy(table), :, torch.from_numpy(number - first[table])]

        which, number = _filter_pages(extent.list_open_pages(), number_of)
        opened = torch.from_numpy(extent.open_table[which, number]).to(rows.device)
        stored.open[opened] = gather_pages(which, number)
        which, number = _filter_pages(extent.list_sealed_pages(), number_of)
        slots = extent.sealed_table[which, number]
        for start in range(0, len(slots), MAX_PAGES_PER_SEAL):
            some = slice(start, start + MAX_PAGES_PER_SEAL)
            sealing = gather_pages(which[some], number[some])
            seal_pages(stored, name, sealing, slots[some], number[some] * page, 0, stats)


def _filter_pages(page_list: tuple[Ints, Ints], row_by_table: Ints) -> tuple[Ints, Ints]:
    mine = row_by_table[page_list[0]] >= 0
    return page_list[0][mine], page_list[1][mine]


def _mask_present_rows(page_table: PageTable) -> Bools:
    """The columns at which each table has a row."""
    position = (
        np.arange(page_table.num_columns) - (page_table.num_columns - page_table.lengths)[:, None]
    )
    found: Bools = (position >= 0) & (position >= page_table.pruned_before[:, None])
    return found


def _select_queries(
    queries: PruningQueries | None, sequences: Ints, first_column: int, last_column: int
) -> PruningQueries | None:
    """What these sequences asked, its columns counted from `first`."""
    found = None if queries is None else queries.truncate(last_column)
    return None if found is None else found.select(sequences, first_column)


def _compute_scores(
    spec: LayerSpec, rows: Fields, valid: Tensor, pruning_queries: PruningQueries | None, heads: int
) -> Tensor:
    assert spec.prune is not None
    score = spec.prune.score
    plain = {
        n: spec.sides[n].frame.restore_outputs(one.unsqueeze(1)).squeeze(1)
        for n, one in rows.items()
    }
    keys, values = plain["keys"].float(), plain["values"].float()
    given = ScoreInput(keys, values, valid.to(keys.device), None, None, 1.0, heads)
    if score.num_queries:
        if pruning_queries is None:
            raise CacheError(
                f"{score.name} chooses rows by what the newest tokens of a prompt ask, and nobody "
                "saw that: kvant.attach the model, or take keydiff, which needs keys alone"
            )
        queries = pruning_queries.queries[:, :, :, -score.num_queries :].flatten(0, 1).to(keys)
        at = torch.arange(
            pruning_queries.num_columns - queries.shape[2],
            pruning_queries.num_columns,
            device=keys.device,
        )
        at = at.expand(len(keys), -1)
        seen = (at >= 0) & given.valid.gather(1, at.clamp(min=0))
        at = at.masked_fill(~seen, -1)
        given = given._replace(queries=queries, query_rows=at, scale=pruning_queries.scale)
    return score.score_rows(given).cpu()


def _mask_best_rows(scores: Tensor, budgets: Sequence[int], heads: int, adaptive: bool) -> Tensor:
    """[N, n] booleans: the best of each head, or of all heads of a sequence."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for i, count in enumerate(budgets):
        mine = scores[i * heads : (i + 1) * heads]
        count = min(count, scores.shape[1])
        part = mask[i * heads : (i + 1) * heads]
        safe = (
            max(min(NUM_PROTECTED_ROWS, count), int(MIN_HEAD_SHARE * count)) if adaptive else count
        )
        part.scatter_(1, mine.topk(safe, dim=1).indices, True)
        if adaptive and (rest := (count - safe) * heads):
            others = mine.masked_fill(part, float("-inf"))
            part.view(-1)[others.flatten().topk(min(rest, others.numel())).indices] = True
    return mask


def _replace_table_rows(table: Ints, new_rows: Ints, indices: Ints) -> Ints:
    """A table of pages with other rows for some."""
    wide = np.zeros((len(table), max(table.shape[1], new_rows.shape[1])), np.int64)
    wide[:, : table.shape[1]] = table
    wide[indices] = 0
    wide[indices, : new_rows.shape[1]] = new_rows
    return wide
