"""Recoding of attention layers: the recipes that result, and the copy of rows to new storages.

Recurrent layers are unchanged. So is what the model determines: `value_dim`, if values are part of
the keys, and the dtype of rows unless the new spec sets one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.reference import LengthGroup, read_visible_rows
from kvant.attention.store_rows import seal_pages
from kvant.attention.write_rows import MAX_PAGES_PER_SEAL
from kvant.cache.advance import Pools, allocate_table
from kvant.cache.storage import Storage, copy_pages
from kvant.contracts import LayerStats, Mask, View
from kvant.errors import CapacityError, SpecError
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    STOP_SEALED,
    Ints,
    LayerGroup,
    PageTable,
)
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, iterate_attention

LayerRule = Callable[[LayerSpec, LayerSpec], LayerSpec]  # (current, requested) -> result


def list_attention_layers(spec: CacheSpec) -> list[int]:
    """Return the numbers of the layers that a recode changes."""
    return [index for index, recipe in enumerate(spec.layers) if any(iterate_attention(recipe))]


def replace_formats(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """Return `current` with all attention layers as requested, or raise SpecError."""
    return _combine_specs(current, requested, _check_layer_change)


def constrain_spec(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """Return `current` changed by a single recipe for all layers, within the limits of the model.

    Without a requested window, layers keep their retention and their prune. If windows differ, any
    but the widest is taken to come from the model: a recode may narrow it, but not widen it.
    """
    widest = max(
        (layer.effective_window for layer in iterate_attention(*current.layers)), default=0.0
    )

    def constrain_layer(old: LayerSpec, new: LayerSpec) -> LayerSpec:
        window = old.retention.window
        from_model = old.effective_window < widest and old.effective_window <= new.effective_window
        if window is not None and (new.retention.window is None or from_model):
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
    first_held = _find_first_guaranteed(page_table)
    first_needed = np.maximum(
        _find_first_seen(layer_group, page_table.seq_lens), page_table.pruned_before
    )
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


def find_first_rows(page_table: PageTable) -> Ints:
    """Return, for each sequence, the first position with a row."""
    first: Ints = np.minimum(
        _extend_to_sinks(page_table, page_table.first_row), page_table.seq_lens
    )
    return first


def allocate_recoded(
    page_table: PageTable, first_visible: Ints, layer_group: LayerGroup, pools: Pools
) -> PageTable:
    """Return the table of the same sequences in pages of another group, from `first_visible` on."""
    numbers = page_table.numbers.copy()
    first = np.maximum(
        layer_group.find_first_sealed(page_table.lengths), first_visible // layer_group.page
    )
    due = layer_group.paging.count_due_pages_each(page_table.seq_lens)
    numbers[:, FIRST_VISIBLE] = first_visible
    numbers[:, FIRST_SEALED] = first
    numbers[:, STOP_SEALED] = np.maximum(first, due)
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
        pages = View(keys, values, None, self.old_table, False, Mask(), 0, self.stats)
        return LengthGroup(pages, np.array([self.table_index]))

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
            self._copy_sealed_pages(name, numbers[is_sealed])
            numbers = numbers[~is_sealed]
        for first in range(0, len(numbers), MAX_PAGES_PER_SEAL):
            batch = numbers[first : first + MAX_PAGES_PER_SEAL]
            pages = [self.read_rows(name, n * page, (n + 1) * page) for n in batch.tolist()]
            slots = self.new_table.sealed_table[self.table_index, batch]
            sinks = self.new_table.layer_group.sinks
            seal_pages(stored, name, torch.cat(pages), slots, batch * page, sinks, self.stats)

    def _copy_sealed_pages(self, name: str, numbers: Ints) -> None:
        old, new = (storage.sides[name].sealed for storage in (self.old, self.new))
        slots = (
            table.sealed_table[self.table_index, numbers]
            for table in (self.old_table, self.new_table)
        )
        copy_pages(old, new, *slots)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return positions [start, stop) in the new frame and dtype, [1, H, n, D]."""
        rows = read_visible_rows(self.length_group, name, start, stop)  # type: ignore[arg-type]
        frames = [side.spec.sides[name].frame for side in (self.old, self.new)]
        dtype = self.new.geometry.dtypes[name]
        if frames[0] == frames[1]:
            return rows.to(dtype)
        return frames[1].transform_rows(frames[0].restore_outputs(rows).to(dtype))


def make_storage(old: Storage, spec: LayerSpec) -> Storage:
    """Return an empty storage for the rows of `old` under another recipe."""
    return Storage(spec, old.geometry.with_dtype(spec.dtype), old.tiles)


def _find_first_seen(layer_group: LayerGroup, lengths: Ints) -> Ints:
    """Return the first position that the newest token sees, sinks aside."""
    return (
        np.zeros_like(lengths)
        if layer_group.window is None
        else np.maximum(lengths - layer_group.window, 0)
    )


def _find_first_guaranteed(page_table: PageTable) -> Ints:
    """Return the first position that has a row and that the retention rule guarantees."""
    return _extend_to_sinks(
        page_table,
        np.maximum(
            page_table.first_row, _find_first_seen(page_table.layer_group, page_table.seq_lens)
        ),
    )


def _extend_to_sinks(page_table: PageTable, first: Ints) -> Ints:
    """Return `first`, or 0 if sinks reach up to it."""
    return np.where(first <= page_table.layer_group.sinks, 0, first)
