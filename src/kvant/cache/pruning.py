"""Pruning after a prompt: choose the rows that each key head retains, and pack them into new pages.

Of L rows, a head retains K. They move, in order, to positions L - K to L - 1; earlier positions
have no rows, like those outside a sliding window. So the length stays L, and positional masks
apply unchanged:

    position    0                       L - K             L
    before      | a b c d e f g h i j k l m n o p q r s t u |
    after       | (no rows)             | b e h k q r s t u |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.store_rows import seal_pages
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL
from kvant.cache.layout import AttentionLeaf
from kvant.cache.readable_rows import mask_present_rows, read_columns
from kvant.cache.row_attention import RowAttention
from kvant.cache.state import CacheState, PruningQueries
from kvant.contracts import Fields, LayerStats, View
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
from kvant.pages.advance import allocate_table
from kvant.pages.pool import GroupSlots, Pools
from kvant.pages.storage import Geometry
from kvant.recipes import LayerSpec
from kvant.retention import Pruning, Score, ScoreInput

Floats = NDArray[np.float64]
NUM_PROTECTED_ROWS = 32  # newest rows that are always retained
PAGE_COLUMNS = [FIRST_SEALED, STOP_SEALED, FIRST_OPEN]  # of `PageTable.numbers`
MAX_DECODE_EXCESS = 128  # rows over budget during decoding; one more triggers a prune
MIN_HEAD_SHARE = 0.2  # if `adaptive`: the least fraction of its budget that a head retains


def count_spare_rows(pruning: Pruning, page_table: PageTable) -> Floats:
    """Return the allowed minus the stored rows of each sequence, averaged over its heads.

    The result is negative for a sequence over budget. It is 0 for one that retains all its tokens,
    even if its budget is larger: at most its own length is allowed.
    """
    num_rows = (
        (page_table.seq_lens - page_table.pruned_before)
        .reshape(-1, page_table.tables_per_sequence)
        .mean(1)
    )
    lengths = page_table.reduce_to_sequences(page_table.seq_lens).tolist()
    spare: Floats = np.array([count_allowed_rows(pruning, length) for length in lengths]) - num_rows
    return spare


def count_allowed_rows(pruning: Pruning, length: int) -> int:
    """Return the number of rows that a head may retain of `length` tokens."""
    return min(length, max(pruning.compute_budget(length), NUM_PROTECTED_ROWS))


def prune_state(
    state: CacheState, stats: Mapping[str, LayerStats], row_attention: RowAttention | None = None
) -> tuple[CacheState, list[GroupSlots], int]:
    """Return the state after a prune, the slots allocated for it, and the rows dropped per head.

    `row_attention` has the weights of a second pass over all tokens, which then count as an
    unpruned prompt. The number of dropped rows is the average over all heads. Retained rows are
    copied to new slots before any old slot is freed, so an error loses no row. Call this within
    `guard_counts`, which after an error frees the new slots.
    """
    if row_attention is not None:
        if row_attention.num_columns != state.length:
            raise CacheError(
                f"attention weights of {row_attention.num_columns} rows for a cache of "
                f"{state.length} tokens: run the second pass over all tokens"
            )
        state = replace(state, has_unpruned_prompt=True)
    sequence_masks = {i: _find_sequences_to_prune(state, i) for i in range(len(state.page_tables))}
    leaves = [leaf for leaf in state.layout.attention if sequence_masks.get(leaf.group) is not None]
    check_recorded(leaves, row_attention)
    page_tables, allocated = list(state.page_tables), list[GroupSlots]()
    num_removed = num_heads = 0
    for leaf in leaves:
        sequence_mask, old_table = sequence_masks[leaf.group], state.page_tables[leaf.group]
        storage, pools = state.storages[leaf.index], state.pools[leaf.group]
        assert sequence_mask is not None
        retained = select_retained_rows(
            leaf.spec,
            leaf.make_view(state.pools, storage, old_table, stats[leaf.name]),
            state.pruning_queries.get(leaf.index),
            None if row_attention is None else row_attention.by_leaf.get(leaf.index),
            sequence_mask,
        )
        if page_tables[leaf.group] is old_table:
            page_tables[leaf.group], slots = pack_table(old_table, retained, pools)
            allocated.append((leaf.group, slots))
        storage.ensure_slots(pools.open.size, pools.sealed.size)
        new_view = leaf.make_view(state.pools, storage, page_tables[leaf.group], stats[leaf.name])
        write_retained_rows(retained, new_view, stats[leaf.name])
        num_removed += retained.num_removed
        num_heads += len(retained.counts)
    if not (leaves or state.has_unpruned_prompt):
        return state, [], 0
    prunes_during_decode = {
        leaf.index
        for leaf in leaves
        if leaf.spec.prune is not None and leaf.spec.prune.score.prunes_during_decode
    }
    queries = {
        index: old for index, old in state.pruning_queries.items() if index in prunes_during_decode
    }
    pruned = replace(
        state,
        page_tables=tuple(page_tables),
        pruning_queries=queries,
        has_unpruned_prompt=False,
    )
    return pruned, allocated, round(num_removed / num_heads) if num_heads else 0


def _find_sequences_to_prune(state: CacheState, group: int) -> Bools | None:
    """Return a mask of the sequences of a group to prune now, or None if there are none.

    After a prompt, these are all sequences over budget. During decoding, they are the sequences
    more than `MAX_DECODE_EXCESS` rows over budget, if the score supports it.
    """
    rule: Pruning | None = state.layout.layer_groups[group].pruning
    if rule is None or not (state.has_unpruned_prompt or rule.score.prunes_during_decode):
        return None
    excess = 0 if state.has_unpruned_prompt else MAX_DECODE_EXCESS
    mask: Bools = count_spare_rows(rule, state.page_tables[group]) + excess < 0
    leaves = {leaf.index for leaf in state.layout.attention if leaf.group == group}
    has_queries = not rule.score.num_queries or state.pruning_queries.keys() >= leaves
    return mask if mask.any() and (state.has_unpruned_prompt or has_queries) else None


def check_recorded(leaves: Iterable[AttentionLeaf], row_attention: RowAttention | None) -> None:
    """Raise unless the attention weights that the scores of these layers need were recorded."""
    recorded = set() if row_attention is None else row_attention.by_leaf.keys()
    for leaf in leaves:
        rule = leaf.spec.prune
        if rule is not None and rule.score.repeats_prompt and leaf.index not in recorded:
            raise CacheError(
                f"{rule.score.name} needs the attention weights of a second pass over the prompt, "
                "which were not recorded: use kvant.generate, kvant.Session or kvant.Engine with "
                "an attached model (kvant.attach), or keydiff, which needs keys only"
            )


def needs_second_pass(state: CacheState) -> bool:
    """Return whether the score of a due prune needs a second pass over the prompt."""
    return state.has_unpruned_prompt and any(
        rule is not None
        and rule.score.repeats_prompt
        and bool((count_spare_rows(rule, page_table) < 0).any())
        for page_table in state.page_tables
        for rule in (page_table.layer_group.pruning,)
    )


def count_tokens_until_prune(state: CacheState) -> int | None:
    """Return how many tokens certainly fit before a prune during decoding; None: any number.

    This is a lower bound: a sequence far below its budget has room for more.
    """
    spare_tokens = list[float]()
    for page_table in state.page_tables:
        rule: Pruning | None = page_table.layer_group.pruning
        if rule is not None and rule.score.prunes_during_decode:
            spare_rows = count_spare_rows(rule, page_table)
            spare_rows = np.maximum(spare_rows, 0) if state.has_unpruned_prompt else spare_rows
            spare_tokens.append(MAX_DECODE_EXCESS + 1 + float(spare_rows.min(initial=0)))
    return max(0, int(min(spare_tokens))) if spare_tokens else None


class RetainedRows(NamedTuple):
    """The retained rows of a layer, ordered by sequence, then by head, then by position."""

    sequence_mask: Bools  # the pruned sequences
    rows: Fields  # as transformed by the frame, [rows of all heads, D]
    counts: Ints  # per head
    num_removed: int  # over all heads


def select_retained_rows(
    spec: LayerSpec,
    view: View,
    pruning_queries: PruningQueries | None,
    max_attention: Tensor | None,
    sequence_mask: Bools,
) -> RetainedRows:
    """Select the rows of a layer to retain in the sequences of `sequence_mask`.

    `max_attention` [heads, columns] has the weights of a second pass; there is then one sequence.
    """
    assert spec.prune is not None
    page_table, heads, sequences = view.page_table, view.heads, np.flatnonzero(sequence_mask)
    has_row = mask_present_rows(page_table)[page_table.expand_to_tables(sequences)].repeat(
        view.keys.heads, 0
    )
    first_column = int(has_row.any(0).argmax())
    valid, stop_column = torch.from_numpy(has_row[:, first_column:]), page_table.num_columns
    sequence_index = torch.from_numpy(sequences)
    rows = {
        n: read_columns(view, n, first_column, stop_column)[sequence_index].flatten(0, 1)
        for n in spec.sides
    }
    score_input = _make_score_input(spec, rows, valid, heads)
    score = spec.prune.score
    if score.num_queries:
        queries = _select_queries(pruning_queries, sequences, first_column, stop_column)
        score_input = _add_queries(score, score_input, queries)
    if max_attention is not None:
        score_input = score_input._replace(max_attention=max_attention[:, first_column:])
    scores = score.score_rows(score_input).cpu()
    rank = valid.long().flip(1).cumsum(1).flip(1)  # 1: the newest row
    scores = scores.masked_fill(rank <= NUM_PROTECTED_ROWS, float("inf")).masked_fill(
        ~valid, float("-inf")
    )
    lengths = page_table.reduce_to_sequences(page_table.seq_lens)[sequence_mask].tolist()
    budgets = [count_allowed_rows(spec.prune, length) for length in lengths]
    retained_mask = _mask_best_rows(scores, budgets, heads, spec.prune.adaptive) & valid
    retained = {n: tensor[retained_mask.to(tensor.device)] for n, tensor in rows.items()}
    return RetainedRows(
        sequence_mask, retained, retained_mask.sum(1).numpy(), int((valid & ~retained_mask).sum())
    )


def compute_page_numbers(layer_group: LayerGroup, lengths: Ints, first_visible: Ints) -> Ints:
    """Return the values of PAGE_COLUMNS for tables whose rows start at `first_visible`, [n, 3]."""
    first = first_visible // layer_group.page
    stop = np.maximum(first, layer_group.paging.count_due_pages_each(lengths))
    return np.stack([first, stop, np.maximum(layer_group.find_first_open(lengths), first)], 1)


def count_retained_nbytes(
    geometry: Geometry, spec: LayerSpec, layer_group: LayerGroup, length: int, num_tables: int
) -> int:
    """Return the bytes of the pages of `num_tables` tables after a prune at `length` tokens."""
    assert spec.prune is not None
    first_visible = length - count_allowed_rows(spec.prune, length)
    [[first, stop, first_open]] = compute_page_numbers(
        layer_group, *(np.array([n]) for n in (length, first_visible))
    ).tolist()
    step = Pools.make(layer_group).open.step
    counts = (-(-length // layer_group.page) - first_open) * num_tables, (stop - first) * num_tables
    num_open, num_sealed = (-(-count // step) * step for count in counts)
    nbytes: int = num_open * geometry.open_nbytes(spec) + num_sealed * geometry.sealed_nbytes(spec)
    return nbytes


def pack_table(
    page_table: PageTable, retained: RetainedRows, pools: Pools
) -> tuple[PageTable, tuple[Ints, Ints]]:
    """Return the table of the packed rows, and the slots allocated for it."""
    tables = page_table.expand_to_tables(np.flatnonzero(retained.sequence_mask))
    counts = retained.counts.reshape(len(tables), -1)[:, 0]  # equal for the heads of one table
    numbers, lengths = page_table.numbers.copy(), page_table.seq_lens[tables]
    numbers[tables, FIRST_VISIBLE] = first_visible = lengths - counts
    numbers[tables, PRUNED_AT] = lengths
    numbers[tables[:, None], PAGE_COLUMNS] = compute_page_numbers(
        page_table.layer_group, lengths, first_visible
    )
    packed = allocate_table(page_table.layer_group, numbers[tables], pools)
    sealed_table = _replace_table_rows(page_table.sealed_table, packed.sealed_table, tables)
    open_table = _replace_table_rows(page_table.open_table, packed.open_table, tables)
    new_table = PageTable(
        page_table.layer_group, numbers, sealed_table, open_table, page_table.tables_per_sequence
    )
    return new_table, (packed.list_open_slots(), packed.list_sealed_slots())


def write_retained_rows(retained: RetainedRows, view: View, stats: LayerStats) -> None:
    """Write the retained rows into the slots of their new pages."""
    page_table, page = view.page_table, view.page_table.layer_group.page
    tables = page_table.expand_to_tables(np.flatnonzero(retained.sequence_mask))
    first_visible, lengths = page_table.first_visible[tables], page_table.seq_lens[tables]
    first_page = first_visible // page
    width = int((-(-lengths // page) - first_page).max(initial=1)) * page
    position = np.arange(width) + (first_page * page)[:, None]
    has_row = (position >= first_visible[:, None]) & (position < lengths[:, None])
    row_mask = torch.from_numpy(has_row.repeat(view.keys.heads, 0))
    index_by_table = np.full(page_table.num_tables, -1)
    index_by_table[tables] = np.arange(len(tables))

    def locate_pages(
        page_list: tuple[Ints, Ints],
    ) -> tuple[tuple[Ints, Ints], tuple[Tensor, Tensor]]:
        """Return the pages of `page_list` that belong to pruned sequences.

        Also return their indices in `pages` [tables, pages, ...], which the loop below makes.
        """
        in_pruned = index_by_table[page_list[0]] >= 0
        tables_of_pages, numbers = page_list[0][in_pruned], page_list[1][in_pruned]
        index = index_by_table[tables_of_pages]
        number = torch.from_numpy(numbers - first_page[index])
        return (tables_of_pages, numbers), (torch.from_numpy(index), number)

    open_pages, open_index = locate_pages(page_table.list_open_pages())
    sealed_pages, sealed_index = locate_pages(page_table.list_sealed_pages())
    open_slots = torch.from_numpy(page_table.open_table[open_pages])
    slots, starts = page_table.sealed_table[sealed_pages], sealed_pages[1] * page
    for name, rows in retained.rows.items():
        stored = view.keys if name == "keys" else view.values
        padded = rows.new_zeros(*row_mask.shape, rows.shape[1])
        padded[row_mask.to(rows.device)] = rows
        pages = padded.view(len(tables), stored.heads, -1, page, rows.shape[1]).transpose(1, 2)
        stored.open[open_slots.to(rows.device)] = pages[open_index]
        for start in range(0, len(slots), MAX_PAGES_PER_SEAL):
            batch = slice(start, start + MAX_PAGES_PER_SEAL)
            sealing = pages[sealed_index[0][batch], sealed_index[1][batch]]
            seal_pages(stored, name, sealing, slots[batch], starts[batch], 0, stats)


def _select_queries(
    queries: PruningQueries | None, sequences: Ints, first_column: int, stop_column: int
) -> PruningQueries | None:
    """Return the queries of `sequences` before `stop_column`.

    Column 0 of the result is `first_column` of the cache.
    """
    truncated = None if queries is None else queries.truncate(stop_column)
    return None if truncated is None else truncated.select(sequences, first_column)


def _make_score_input(spec: LayerSpec, rows: Fields, valid: Tensor, heads: int) -> ScoreInput:
    """Return the rows to score, in float32 and without their frames.

    Scores of a second pass do not read keys or values: then rows stay as stored.
    """
    valid = valid.to(rows["keys"].device)
    assert spec.prune is not None
    if spec.prune.score.repeats_prompt:
        return ScoreInput(rows["keys"], rows["values"], valid, None, None, 1.0, heads)
    by_sequence = {n: tensor.reshape(-1, heads, *tensor.shape[1:]) for n, tensor in rows.items()}
    unframed = {
        name: spec.sides[name].frame.restore_outputs(tensor).flatten(0, 1)
        for name, tensor in by_sequence.items()
    }
    keys, values = unframed["keys"].float(), unframed["values"].float()
    return ScoreInput(keys, values, valid, None, None, 1.0, heads)


def _add_queries(
    score: Score, score_input: ScoreInput, pruning_queries: PruningQueries | None
) -> ScoreInput:
    """Return the input of a score with the newest queries of the prompt."""
    if pruning_queries is None:
        raise CacheError(
            f"{score.name} needs the newest queries of the prompt, which were not recorded: "
            "kvant.attach the model, or use keydiff, which needs keys only"
        )
    keys = score_input.keys
    queries = pruning_queries.queries[:, :, :, -score.num_queries :].flatten(0, 1).to(keys)
    columns = torch.arange(
        pruning_queries.num_columns - queries.shape[2],
        pruning_queries.num_columns,
        device=keys.device,
    )
    columns = columns.expand(len(keys), -1)
    has_row = (columns >= 0) & score_input.valid.gather(1, columns.clamp(min=0))
    columns = columns.masked_fill(~has_row, -1)
    return score_input._replace(queries=queries, query_rows=columns, scale=pruning_queries.scale)


def _mask_best_rows(scores: Tensor, budgets: Sequence[int], heads: int, adaptive: bool) -> Tensor:
    """Return a mask of the rows with the best scores; mask and scores are [key heads, rows].

    `budgets` has one budget per sequence: the rows that each of its `heads` heads retains. If
    `adaptive`, a head is sure of a minimum only; the best other rows of all heads share the rest.
    """
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for i, count in enumerate(budgets):
        head_scores = scores[i * heads : (i + 1) * heads]
        count = min(count, scores.shape[1])
        head_mask = mask[i * heads : (i + 1) * heads]
        num_per_head = (
            max(min(NUM_PROTECTED_ROWS, count), int(MIN_HEAD_SHARE * count)) if adaptive else count
        )
        head_mask.scatter_(1, head_scores.topk(num_per_head, dim=1).indices, True)
        if adaptive and (num_shared := (count - num_per_head) * heads):
            other_scores = head_scores.masked_fill(head_mask, float("-inf"))
            head_mask.view(-1)[
                other_scores.flatten().topk(min(num_shared, other_scores.numel())).indices
            ] = True
    return mask


def _replace_table_rows(table: Ints, new_rows: Ints, indices: Ints) -> Ints:
    """Return a page table with the rows `indices` replaced by `new_rows`."""
    wide = np.zeros((len(table), max(table.shape[1], new_rows.shape[1])), np.int64)
    wide[:, : table.shape[1]] = table
    wide[indices] = 0
    wide[indices, : new_rows.shape[1]] = new_rows
    return wide
