"""Operations on cache states. Those that allocate slots return them with the next state.

The old state stays valid: a cache that does not adopt the next one is unchanged. Call these
operations within `guard_counts` of the pools: after an error, `guard_counts` frees their slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from kvant.attention.write_rows import reopen_pages
from kvant.cache.layout import AttentionLeaf
from kvant.cache.recurrent import StateHistory, concat_histories
from kvant.cache.state import CacheState, PruningQueries
from kvant.contracts import ExternalState, LayerStats
from kvant.errors import RewindError
from kvant.lazy import Derived
from kvant.page_table import LENGTH, NO_SLOTS, PADDING, Ints, PageTable
from kvant.pages.advance import (
    allocate_table,
    concat_tables,
    is_exact_rewind,
    list_allocated_slots,
    mask_reachable,
    relocate_table,
    rewind_table,
    select_sequences,
    share_prefix_pages,
)
from kvant.pages.pool import GroupSlots, Pools, bound_slots, reserve_capacity
from kvant.pages.storage import copy_sides, pair_slots

ExternalStates = Mapping[str, ExternalState]  # by leaf name


class Transition(NamedTuple):
    """The next state of a cache."""

    state: CacheState
    allocated_slots: Sequence[GroupSlots] = ()


def compute_rewound_lengths(page_table: PageTable, to: int) -> Ints:
    """Return the `lengths` of a table once the longest sequence has `to` tokens, padding included.

    A negative length counts padding columns that are still to be appended.
    """
    lengths: Ints = np.maximum(
        page_table.lengths - (page_table.num_columns - to), -page_table.padding
    )
    return lengths


def find_reachable(state: CacheState, external_states: ExternalStates, to: int) -> int:
    """Return the longest length <= `to` that every layer can rewind to."""
    while to > 0:
        longest = min(
            _find_reachable_in_layer(state, external_states, name, to)
            for name in state.layout.names
        )
        if longest == to:
            return to
        to = longest
    return max(to, 0)


def is_exact_length(state: CacheState, to: int) -> bool:
    """Return whether a rewind to `to` decodes no sealed page."""
    return all(
        is_exact_rewind(page_table, compute_rewound_lengths(page_table, to))
        for page_table in state.page_tables
    )


def check_reachable(
    state: CacheState, external_states: ExternalStates, to: int, length: int
) -> None:
    """Refuse a rewind from `length` to `to` that a layer cannot serve."""
    if 0 <= to <= length and find_reachable(state, external_states, to) == to:
        return
    for name in state.layout.names:
        longest = _find_reachable_in_layer(state, external_states, name, to)
        if not 0 <= to <= length or longest != to:
            raise RewindError(
                f"layer {name.partition('/')[0]}: cannot rewind from {length} to {to}: "
                f"the longest length it can reach is {max(longest, 0)} (a window retains "
                "`slack` more rows: give the spec a larger slack=N; a recurrent layer rewinds "
                "to its checkpoints; pruned rows are lost)"
            )
    raise RewindError(
        f"length {to}: the longest that all layers can reach is "
        f"{find_reachable(state, external_states, min(to, length))}"
    )


def _find_reachable_in_layer(
    state: CacheState, external_states: ExternalStates, name: str, to: int
) -> int:
    """Return the longest length <= `to` that one layer can rewind to."""
    leaf = state.layout.leaves.get(name)
    if leaf is None:
        return external_states[name].reachable(to)
    if not isinstance(leaf, AttentionLeaf):
        return state.histories[leaf.history].reachable(to)
    page_table = state.page_tables[leaf.group] if state.page_tables else None
    if page_table is None or to >= page_table.num_columns:
        return 0 if page_table is None else page_table.num_columns
    is_reachable = mask_reachable(page_table, compute_rewound_lengths(page_table, to)).all()
    return to if is_reachable else 0


def check_each_reachable(
    state: CacheState, external_states: ExternalStates, lengths: Sequence[int]
) -> None:
    """Refuse a rewind of each sequence to its own length that a layer cannot serve."""
    if state.layout.recurrent or external_states or state.pruning_queries:
        raise RewindError(
            "recurrent layers, and queries retained for a prune, can only be rewound by the same "
            "number of tokens in all sequences: extract each sequence, and rewind it alone"
        )
    for page_table in state.page_tables:
        current, rewound = page_table.reduce_to_sequences(page_table.seq_lens), np.array(lengths)
        reachable = mask_reachable(page_table, page_table.repeat_for_tables(rewound))
        refused = np.flatnonzero(~reachable.reshape(len(current), -1).all(1))
        if refused.size:
            index = int(refused[0])
            raise RewindError(
                f"sequence {index}: cannot rewind from {int(current[index])} to {lengths[index]}: "
                "a window retains `slack` more rows (give the spec a larger slack=N), and pruned "
                "rows are lost"
            )


def rewind(state: CacheState, to: int, stats: Mapping[str, LayerStats]) -> Transition:
    """Shorten all sequences so that the longest has `to` tokens, which all layers can reach."""
    lengths = [compute_rewound_lengths(page_table, to) for page_table in state.page_tables]
    return _rewind_tables(state, lengths, to, stats)


def rewind_each(
    state: CacheState, lengths: Sequence[int], stats: Mapping[str, LayerStats]
) -> Transition:
    """Shorten each sequence to its own length, which all layers can reach."""
    by_group, page_tables = list[Ints](), list[PageTable]()
    for page_table in state.page_tables:
        rewound = page_table.repeat_for_tables(np.array(lengths))
        # A sequence of unchanged length keeps its pending padding, a negative `lengths` entry.
        is_same = rewound == page_table.seq_lens
        by_group.append(np.where(is_same, page_table.lengths, rewound))
        page_tables.append(_drop_passed_padding(page_table, by_group[-1]))
    return _rewind_tables(
        replace(state, page_tables=tuple(page_tables)), by_group, max(lengths), stats
    )


def _drop_passed_padding(page_table: PageTable, lengths: Ints) -> PageTable:
    """Return the table without the padding of sequences that will end before the newest column.

    Their next tokens follow their rows. With padding, a later rewind could give them a negative
    length, and the next tokens would be dropped as padding.
    """
    if not page_table.has_padding:
        return page_table
    columns, numbers = lengths + page_table.padding, page_table.numbers.copy()
    numbers[columns < columns.max(initial=0), PADDING] = 0
    return replace(page_table, numbers=numbers, derived=Derived())


def _rewind_tables(
    state: CacheState, lengths: Sequence[Ints], to: int, stats: Mapping[str, LayerStats]
) -> Transition:
    """Shorten the tables of each group to `lengths`; the longest sequence then has `to` tokens."""
    plans = [
        rewind_table(page_table, group_lengths, pools)
        for page_table, group_lengths, pools in zip(
            state.page_tables, lengths, state.pools, strict=True
        )
    ]
    for leaf in state.layout.attention:
        plan, pools = plans[leaf.group], state.pools[leaf.group]
        if (storage := state.storages.get(leaf.index)) is not None:
            storage.ensure_slots(pools.open.size, pools.sealed.size)
            reopen_pages(plan, storage.sides)
        is_decoded = len(plan.reopens) > 0
        stats[leaf.name].rewinds_exact += not is_decoded
        stats[leaf.name].rewinds_decoded += is_decoded
    for recurrent_leaf in state.layout.recurrent:
        stats[recurrent_leaf.name].rewinds_exact += 1
    truncated = {leaf: old.truncate(to) for leaf, old in state.pruning_queries.items()}
    queries = {leaf: remaining for leaf, remaining in truncated.items() if remaining is not None}
    next_state = replace(
        state,
        page_tables=tuple(plan.new_table for plan in plans),
        histories=tuple(history.rewind(to) for history in state.histories),
        pruning_queries=queries,
        has_unpruned_prompt=state.has_unpruned_prompt and len(queries) == len(truncated),
    )
    return Transition(next_state, [(i, plan.allocated_slots) for i, plan in enumerate(plans)])


def drop_tokens(state: CacheState) -> Transition:
    """Remove all tokens; the memory stays allocated."""
    return Transition(
        replace(
            CacheState.make_empty(state.layout, state.pools),
            storages=state.storages,
            page_tables=tuple(
                PageTable.make_empty(table.layer_group, [0] * table.batch)
                for table in state.page_tables
            ),
        )
    )


def drop_pending_padding(state: CacheState) -> CacheState:
    """Drop left padding that is still to be appended; the slots are unchanged."""
    if not any((page_table.lengths < 0).any() for page_table in state.page_tables):
        return state
    page_tables = []
    for page_table in state.page_tables:
        numbers = page_table.numbers.copy()
        numbers[:, PADDING] += np.minimum(numbers[:, LENGTH], 0)
        numbers[:, LENGTH] = page_table.seq_lens
        page_tables.append(replace(page_table, numbers=numbers, derived=Derived(), steady_tokens=0))
    return replace(state, page_tables=tuple(page_tables))


def fork(state: CacheState) -> Transition:
    """Return a copy with page tables of its own, because appends extend tables in place."""
    page_tables = tuple(
        select_sequences(page_table, np.arange(page_table.batch))
        for page_table in state.page_tables
    )
    return Transition(replace(state, page_tables=page_tables, unreported_length=None))


def select(state: CacheState, indices: Ints, *, drop_padding: bool = False) -> Transition:
    """Select the sequences `indices`, in this order, repeats allowed.

    `drop_padding` sets the left padding of each sequence to 0.
    """
    page_tables = [select_sequences(page_table, indices) for page_table in state.page_tables]
    if drop_padding:
        page_tables = [concat_tables([page_table]) for page_table in page_tables]
    queries = dict[int, PruningQueries]()
    for leaf, old_queries in state.pruning_queries.items():
        group = state.layout.leaf_groups[leaf]
        assert group is not None
        removed = state.page_tables[group].num_columns - page_tables[group].num_columns
        queries[leaf] = old_queries.select(indices, removed)
    histories = select_histories(state, state.histories, indices, page_tables)
    return Transition(
        replace(
            state,
            page_tables=tuple(page_tables),
            histories=histories,
            pruning_queries=queries,
        )
    )


def select_histories(
    state: CacheState,
    histories: Iterable[StateHistory],
    indices: Ints,
    page_tables: Sequence[PageTable],
) -> tuple[StateHistory, ...]:
    """Return the histories of the sequences `indices`, whose tables are now `page_tables`.

    The tables may have lost leading columns in which none of these sequences has a token.
    """
    removed_columns = (
        state.page_tables[0].num_columns - page_tables[0].num_columns if page_tables else 0
    )
    return tuple(
        history.select(torch.from_numpy(indices)).drop_columns(removed_columns)
        for history in histories
    )


def merge(
    states: Sequence[CacheState],
    target: CacheState,
    length: int,
    prefixes: Sequence[PageTable] = (),
) -> Transition:
    """Concatenate the sequences of `states` into one state, in the pools of `target`.

    The longest sequence has `length` tokens. `prefixes` are the tables of one prefix, by
    group: each state is then one sequence that starts with it, and shares its full pages.
    """
    imported, allocated = [], list[GroupSlots]()
    for state in states:
        page_tables, slots = _import_pages(state, target, prefixes)
        imported.append(page_tables)
        allocated += slots
    next_state = replace(
        target,
        page_tables=tuple(map(concat_tables, zip(*imported, strict=True))),
        histories=tuple(
            concat_histories(histories, length)
            for histories in zip(*(state.histories for state in states), strict=True)
        ),
        pruning_queries=_merge_queries(states),
        has_unpruned_prompt=False,
        unreported_length=None,
    )
    return Transition(next_state, allocated)


def _merge_queries(states: Sequence[CacheState]) -> dict[int, PruningQueries]:
    """Concatenate pruning queries; skip a layer if a state has none for its last column."""
    merged: dict[int, PruningQueries] = {}
    for leaf in set.intersection(*(set(state.pruning_queries) for state in states)):
        parts = [state.pruning_queries[leaf] for state in states]
        if all(part.num_columns == state.length for part, state in zip(parts, states, strict=True)):
            count = min(part.queries.shape[3] for part in parts)
            queries = torch.cat([part.queries[:, :, :, -count:] for part in parts])
            columns = max(part.num_columns for part in parts)
            merged[leaf] = replace(parts[0], queries=queries, num_columns=columns)
    return merged


def _import_pages(
    state: CacheState, target: CacheState, prefixes: Sequence[PageTable]
) -> tuple[Sequence[PageTable], list[GroupSlots]]:
    """Return the sequences of `state` as tables over the pools of `target`.

    Pages are shared if both states use the same storages, and copied otherwise. Also return the
    slots allocated for copies.
    """
    leaves = state.layout.attention
    if all(state.storages.get(x.index) is target.storages.get(x.index) for x in leaves):
        if not prefixes:
            return state.page_tables, []
        return [
            share_prefix_pages(*pair) for pair in zip(state.page_tables, prefixes, strict=True)
        ], []
    optional_prefixes = prefixes or (None,) * len(target.pools)
    parts = zip(state.page_tables, target.pools, optional_prefixes, strict=True)
    page_tables = [
        allocate_table(table.layer_group, table.numbers, pool, prefix, table.tables_per_sequence)
        for table, pool, prefix in parts
    ]
    allocated = [
        list_allocated_slots(table, prefix)
        for table, prefix in zip(page_tables, optional_prefixes, strict=True)
    ]
    for leaf in leaves:
        source, destination = state.storages.get(leaf.index), target.storages.get(leaf.index)
        if source is None or destination is None or source.geometry != destination.geometry:
            raise ValueError(f"layer {leaf.name}: rows of other shapes, or on another device")
        pools = target.pools[leaf.group]
        destination.ensure_slots(pools.open.size, pools.sealed.size)
        pairs = pair_slots(state.page_tables[leaf.group], page_tables[leaf.group])
        masks = [
            np.isin(new, slots)
            for (_, new), slots in zip(pairs, allocated[leaf.group], strict=True)
        ]
        selected = [(old[mask], new[mask]) for (old, new), mask in zip(pairs, masks, strict=True)]
        copy_sides(source.sides, destination.sides, *selected)
    return page_tables, list(enumerate(allocated))


def move(state: CacheState, device: torch.device) -> CacheState:
    """Move rows and recurrent states to another device; the slots are unchanged.

    Pruning queries stay where they are: a prune copies them to the device of the keys.
    """
    return replace(
        state,
        storages={leaf: old.copy_to_device(device) for leaf, old in state.storages.items()},
        histories=tuple(history.to_device(device) for history in state.histories),
    )


def shrink_pools(state: CacheState, group: int, *, after_prune: bool) -> CacheState | None:
    """Return the state with the pages of a group in smaller tensors; None: nothing to free.

    Pools with other holders are not shrunk. Readers of the old tensors are unaffected.
    """
    pools, old_table = state.pools[group], state.page_tables[group]
    layer_group = old_table.layer_group
    max_slots = bound_slots(layer_group, old_table.seq_lens.tolist())
    if after_prune and layer_group.capacity is None:
        num_open = len(np.unique(old_table.list_open_slots()))
        num_sealed = len(np.unique(old_table.list_sealed_slots()))
        step = pools.open.step
        max_slots = -(-num_open // step) * step, -(-num_sealed // step) * step
    is_oversized = pools.open.size > max_slots[0], pools.sealed.size > max_slots[1]
    if pools.is_shared or not any(is_oversized):
        return None
    empty_pools = Pools.make(layer_group)
    reserve_capacity(layer_group, old_table.num_tables, empty_pools)
    new_table = relocate_table(
        old_table,
        empty_pools.open if is_oversized[0] else None,
        empty_pools.sealed if is_oversized[1] else None,
    )
    new_pools = Pools(
        empty_pools.open if is_oversized[0] else pools.open,
        empty_pools.sealed if is_oversized[1] else pools.sealed,
    )
    num_slots = new_pools.open.size, new_pools.sealed.size
    moved = {
        leaf.index: state.storages[leaf.index].relocate_pages(old_table, new_table, num_slots)
        for leaf in state.layout.attention
        if leaf.group == group
    }
    retired = [entry for entry in state.retired_slots if entry[0] != group]
    no_slots = NO_SLOTS[0]
    retired += [  # slots of a pool that is not replaced
        (
            group,
            (no_slots if is_oversized[0] else slots[0], no_slots if is_oversized[1] else slots[1]),
        )
        for slots_group, slots in state.retired_slots
        if slots_group == group
    ]
    new_tables = (*state.page_tables[:group], new_table, *state.page_tables[group + 1 :])
    return replace(
        state,
        page_tables=new_tables,
        pools=state.pools.replace_group(group, new_pools),
        storages={**state.storages, **moved},
        retired_slots=tuple(retired),
    )
