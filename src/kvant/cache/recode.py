"""Recode attention layers: combine their recipes, and copy the rows to new storages.

A recode keeps recurrent layers, `value_dim` (values that are part of the keys), and the dtype of
rows unless the new spec sets one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.length_groups import LengthGroup, read_visible_rows
from kvant.attention.store_rows import seal_pages
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL
from kvant.cache.layout import CacheLayout
from kvant.cache.state import CacheState
from kvant.cache.transitions import Transition
from kvant.contracts import LayerStats, Mask, View
from kvant.errors import CacheError, CapacityError, SpecError
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    STOP_SEALED,
    Ints,
    LayerGroup,
    PageTable,
)
from kvant.pages.advance import allocate_table
from kvant.pages.pool import CachePools, Pools
from kvant.pages.storage import Storage, copy_pages
from kvant.recipes import AnySpec, CacheSpec, GroupSpec, LayerSpec, Recipe, iterate_attention
from kvant.spec import as_spec

LayerRule = Callable[[LayerSpec, LayerSpec], LayerSpec]  # (current, requested) -> result


def list_attention_layers(spec: CacheSpec) -> list[int]:
    """Return the indices of the layers that contain attention, which a recode changes."""
    return [index for index, recipe in enumerate(spec.layers) if any(iterate_attention(recipe))]


def replace_formats(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """Return `current` with all attention layers as requested, or raise SpecError."""
    return _combine_specs(current, requested, _check_layer_change)


def resolve_spec(current: CacheSpec, spec: AnySpec) -> CacheSpec:
    """Return a spec with one recipe per layer of `current`.

    `spec` has one per layer, one per attention layer, or one for all attention layers.
    """
    if isinstance(spec, CacheSpec) and len(spec.layers) == len(current.layers):
        return as_spec(spec, len(current.layers))
    attention_layers = list_attention_layers(current)
    # `or 1`: a spec is validated even if no layer has attention.
    recipes = as_spec(spec, len(attention_layers) or 1).layers
    by_layer = dict(enumerate(current.layers)) | dict(zip(attention_layers, recipes, strict=False))
    full = CacheSpec(tuple(by_layer.values()))
    return full if isinstance(spec, CacheSpec) else constrain_spec(current, full)


def constrain_spec(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """Return `current` changed to `requested`, within the limits of the model.

    `requested` was made from a spec string or a LayerSpec, which need not state these limits.
    Without a requested window, layers keep their retention and their prune. If the windows of
    layers differ, the narrower ones are assumed to be set by the model. A recode may then narrow
    these, but not widen them.
    """
    widest = max(
        (layer.effective_window for layer in iterate_attention(*current.layers)), default=0.0
    )

    def constrain_layer(old: LayerSpec, new: LayerSpec) -> LayerSpec:
        window = old.retention.window
        model_wins = old.effective_window < widest and old.effective_window <= new.effective_window
        if window is not None and (new.retention.window is None or model_wins):
            new = replace(new, retention=old.retention)
        if new.prune is None and new.retention.window is None:
            new = replace(new, prune=old.prune)
        return replace(new, chunk=old.chunk, value_dim=old.value_dim)

    return _combine_specs(current, requested, constrain_layer)


def _check_layer_change(old: LayerSpec, new: LayerSpec) -> LayerSpec:
    if old.value_dim != new.value_dim:
        raise SpecError(
            f"value_dim={new.value_dim} for rows that were stored with value_dim={old.value_dim}: "
            "a recode keeps the rows, so it cannot change"
        )
    return replace(new, dtype=new.dtype or old.dtype)


def _combine_specs(current: CacheSpec, requested: CacheSpec, rule: LayerRule) -> CacheSpec:
    layers = []
    for index, (old, new) in enumerate(zip(current.layers, requested.layers, strict=True)):
        try:
            layers.append(_combine_recipes(old, new, rule))
        except SpecError as error:
            raise SpecError(f"layer {index}: {error}") from None
    return CacheSpec(tuple(layers))


def _combine_recipes(old: Recipe, new: Recipe, rule: LayerRule) -> Any:
    """Return the new recipe of a layer by `rule`; a layer without rows keeps its recipe."""
    if isinstance(old, LayerSpec) and isinstance(new, LayerSpec):
        return rule(old, new)
    if isinstance(old, GroupSpec) and isinstance(new, LayerSpec):
        new = GroupSpec(
            tuple((n, new if any(iterate_attention(part)) else part) for n, part in old.parts)
        )
    if type(old) is not type(new):
        raise SpecError(f"{new} for a layer of {old}: a recode cannot change the kind of a layer")
    if not (isinstance(old, GroupSpec) and isinstance(new, GroupSpec)):
        return old
    new_parts = dict(new.parts)
    if new_parts.keys() != dict(old.parts).keys():
        raise SpecError(f"parts {sorted(new_parts)} for a layer of {sorted(dict(old.parts))}")
    return GroupSpec(
        tuple((name, _combine_recipes(part, new_parts[name], rule)) for name, part in old.parts)
    )


def check_recodable(page_table: PageTable, layer_group: LayerGroup) -> None:
    """Refuse a recode that needs released rows, or exceeds the new capacity."""
    if page_table.layer_group.per_head_layer != layer_group.per_head_layer:
        raise SpecError(
            "prune=...:adaptive stores key heads separately, which a recode cannot change: reset "
            "the cache, and prefill the prompt with the new spec"
        )
    if page_table.pruned_at.any() and layer_group.pruning is None:
        raise SpecError(
            "a spec without a prune, but rows were pruned and cannot be restored: use a spec with "
            "a prune, or reset first"
        )
    longest = int(page_table.seq_lens.max(initial=0))
    if layer_group.capacity is not None and longest > layer_group.capacity:
        raise CapacityError(
            f"{longest} tokens for a capacity of {layer_group.capacity}: rewind first, or give "
            f"the spec capacity={longest} or none"
        )
    first_in_windows = [
        _find_first_in_window(group, page_table.seq_lens)
        for group in (page_table.layer_group, layer_group)
    ]
    # The first position that is stored and that the retention promises to keep.
    first_held = _extend_to_sinks(page_table, np.maximum(page_table.first_row, first_in_windows[0]))
    first_needed = np.maximum(first_in_windows[1], page_table.pruned_before)
    worst = int((first_held - first_needed).argmax())
    if first_held[worst] > first_needed[worst]:
        length = int(page_table.seq_lens[worst])
        num_held = int(page_table.seq_lens[worst] - first_held[worst])
        request = "all rows" if layer_group.window is None else f"window={layer_group.window}"
        raise SpecError(
            f"{request} of {length} tokens, but only the last {num_held} are held, and released "
            f"rows cannot be restored: use at most window={num_held}, or reset first"
        )
    if (
        layer_group.sinks > page_table.layer_group.sinks
        and (page_table.layer_group.sinks < np.minimum(first_held, page_table.seq_lens)).any()
    ):
        raise SpecError(
            f"sinks={layer_group.sinks}, but only the first {page_table.layer_group.sinks} rows "
            "are held, and released rows cannot be restored: use at most "
            f"sinks={page_table.layer_group.sinks}, or reset first"
        )


def allocate_recoded(
    page_table: PageTable, first_visible: Ints, layer_group: LayerGroup, pools: Pools
) -> PageTable:
    """Allocate pages of another group for the same sequences, and return their table.

    `first_visible` is, for each sequence, the first position with a row, sinks aside.
    """
    numbers = page_table.numbers.copy()
    first_sealed = np.maximum(
        layer_group.find_first_sealed(page_table.lengths), first_visible // layer_group.page
    )
    due = layer_group.paging.count_due_pages_each(page_table.seq_lens)
    numbers[:, FIRST_VISIBLE] = first_visible
    numbers[:, FIRST_SEALED] = first_sealed
    numbers[:, STOP_SEALED] = np.maximum(first_sealed, due)
    numbers[:, FIRST_OPEN] = np.maximum(
        layer_group.find_first_open(page_table.lengths), first_visible // layer_group.page
    )
    return allocate_table(
        layer_group, numbers, pools, tables_per_sequence=page_table.tables_per_sequence
    )


def recode_rows(
    old: Storage, old_table: PageTable, new: Storage, new_table: PageTable, stats: LayerStats
) -> None:
    """Copy the rows of one storage, as attention reads them, into the slots of another."""
    for table_index in range(old_table.num_tables):
        recoder = SequenceRecoder(old, old_table, new, new_table, table_index, stats)
        for name in new.sides:
            recoder.fill_open_pages(name)
            recoder.fill_sealed_pages(name)


@dataclass(frozen=True)
class SequenceRecoder:
    """The recode of one sequence (or of one head's table) from one storage to another."""

    old: Storage
    old_table: PageTable
    new: Storage
    new_table: PageTable
    table_index: int
    stats: LayerStats

    @cached_property
    def length_group(self) -> LengthGroup:
        keys = self.old.sides["keys"]
        values = self.old.sides.get("values", keys)
        table = self.old_table
        shape = table.batch, keys.heads * table.tables_per_sequence, 0
        view = View(keys, values, None, table, False, Mask(), *shape, self.stats)
        return LengthGroup(view, np.array([self.table_index]))

    def is_unchanged(self, name: str) -> bool:
        """Return whether pages of this side are copied without decoding."""
        old, new = self.old, self.new
        same = old.spec.page == new.spec.page and old.spec.seals == new.spec.seals
        same = same and old.spec.sides[name] == new.spec.sides[name]
        return same and old.geometry.dtypes[name] == new.geometry.dtypes[name]

    def fill_open_pages(self, name: str) -> None:
        """Write the open pages of one side."""
        page, stored = self.new_table.layer_group.page, self.new.sides[name]
        tables, numbers = self.new_table.list_open_pages()
        for number in numbers[tables == self.table_index].tolist():
            slot = int(self.new_table.open_table[self.table_index, number])
            start = number * page
            stop = min((number + 1) * page, int(self.old_table.seq_lens[self.table_index]))
            is_open = (
                number >= self.old_table.first_open[self.table_index]
                or number < self.old_table.layer_group.num_sink_pages
            )
            if self.is_unchanged(name) and is_open:
                old_slot = int(self.old_table.open_table[self.table_index, number])
                rows = self.old.sides[name].open[old_slot : old_slot + 1, :, : stop - start]
            else:
                rows = self.read_rows(name, start, stop)
            stored.open[slot, :, : stop - start] = rows[0]

    def fill_sealed_pages(self, name: str) -> None:
        """Write the sealed pages of one side, in batches."""
        page, stored = self.new_table.layer_group.page, self.new.sides[name]
        tables, numbers = self.new_table.list_sealed_pages()
        numbers = numbers[tables == self.table_index]
        if self.is_unchanged(name):
            is_sealed = numbers >= self.old_table.first_sealed[self.table_index]
            is_sealed &= numbers < self.old_table.stop_sealed[self.table_index]
            slots = (
                table.sealed_table[self.table_index, numbers[is_sealed]]
                for table in (self.old_table, self.new_table)
            )
            copy_pages(self.old.sides[name].sealed, stored.sealed, *slots)
            numbers = numbers[~is_sealed]
        for first in range(0, len(numbers), MAX_PAGES_PER_SEAL):
            batch = numbers[first : first + MAX_PAGES_PER_SEAL]
            pages = [self.read_rows(name, n * page, (n + 1) * page) for n in batch.tolist()]
            slots = self.new_table.sealed_table[self.table_index, batch]
            sinks = self.new_table.layer_group.sinks
            seal_pages(stored, name, torch.cat(pages), slots, batch * page, sinks, self.stats)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return positions [start, stop) as the new codec stores them, [1, H, n, D].

        Rows are in the frame of the new codec (its rotation or scaling), and of its dtype.
        """
        rows = read_visible_rows(self.length_group, name, start, stop)  # type: ignore[arg-type]
        frames = [side.spec.sides[name].frame for side in (self.old, self.new)]
        dtype = self.new.geometry.dtypes[name]
        if frames[0] == frames[1]:
            return rows.to(dtype)
        return frames[1].transform_rows(frames[0].restore_outputs(rows).to(dtype))


def recode_state(
    state: CacheState, layout: CacheLayout, stats: Mapping[str, LayerStats]
) -> Transition:
    """Return a state with the same rows, stored by the recipes of `layout` in new pools.

    The new memory is complete before the old one is freed, so that an error changes nothing. Peak
    memory is both, plus scratch for a few pages of one layer.
    """
    first_rows: dict[int, Ints] = {}  # by group: the first row that all its layers have
    first_tables: dict[int, PageTable] = {}  # of the first layer of each group, before
    page_tables: dict[int, PageTable] = {}
    storages: dict[int, Storage] = {}
    pools = CachePools(layout.layer_groups)
    pairs = list(zip(state.layout.attention, layout.attention, strict=True))
    for old_leaf, leaf in pairs if state.page_tables else ():
        with _name_layer_in_errors(leaf.name):
            old_table = state.page_tables[old_leaf.group]
            check_recodable(old_table, layout.layer_groups[leaf.group])
            first_row = _extend_to_sinks(old_table, old_table.first_row)
            first = np.minimum(first_row, old_table.seq_lens)
            first_rows[leaf.group] = np.maximum(first_rows.get(leaf.group, first), first)
    for old_leaf, leaf in pairs if state.page_tables else ():
        with _name_layer_in_errors(leaf.name):
            old_table, group = state.page_tables[old_leaf.group], layout.layer_groups[leaf.group]
            if leaf.group not in page_tables:
                first_tables[leaf.group] = old_table
                page_tables[leaf.group] = allocate_recoded(
                    old_table, first_rows[leaf.group], group, pools[leaf.group]
                )
            elif (page_tables[leaf.group].lengths != old_table.lengths).any():
                raise CacheError(
                    f"{old_table.num_columns} tokens, {page_tables[leaf.group].num_columns} in an "
                    "earlier layer: rewind to a length that all layers have"
                )
            elif not _dropped_same_rows(first_tables[leaf.group], old_table):
                raise SpecError(
                    "one prune for layers that dropped different rows: keep a prune of its own for "
                    "each layer, or reset first"
                )
            source = state.storages.get(old_leaf.index)
            if source is None:
                continue
            storage = leaf.make_storage(source.geometry.with_dtype(leaf.spec.dtype))
            storage.ensure_slots(pools[leaf.group].open.size, pools[leaf.group].sealed.size)
            new_table = page_tables[leaf.group]
            recode_rows(source, old_table, storage, new_table, stats[leaf.name])
            storages[leaf.index] = storage
    new_state = replace(
        state,
        layout=layout,
        pools=pools,
        page_tables=tuple(page_tables[group] for group in sorted(page_tables)),
        storages=storages,
    )
    return Transition(new_state, new_state.list_table_slots())


@contextmanager
def _name_layer_in_errors(layer: str) -> Iterator[None]:
    """Prefix errors with the name of the layer."""
    try:
        yield
    except (CacheError, ValueError) as error:
        raise type(error)(f"layer {layer}: {error}") from error


def _find_first_in_window(layer_group: LayerGroup, lengths: Ints) -> Ints:
    """Return the first position in the window of the newest token; sinks are not considered."""
    return (
        np.zeros_like(lengths)
        if layer_group.window is None
        else np.maximum(lengths - layer_group.window, 0)
    )


def _dropped_same_rows(first: PageTable, second: PageTable) -> bool:
    """Whether prunes of two layers dropped the same leading rows."""
    pairs = (first.pruned_at, second.pruned_at), (first.pruned_before, second.pruned_before)
    return all(np.array_equal(*pair) for pair in pairs)


def _extend_to_sinks(page_table: PageTable, first: Ints) -> Ints:
    """Return `first`, or 0 if sinks reach up to it."""
    return np.where(first <= page_table.layer_group.sinks, 0, first)
