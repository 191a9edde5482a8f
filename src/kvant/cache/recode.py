"""The rows of an attention layer under another recipe, and which recipe that is.

What is no attention stays as it is, and so does whatever follows from the model: values inside the
keys, and the dtype that rows are stored in unless another is asked for.
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

LayerRule = Callable[[LayerSpec, LayerSpec], LayerSpec]  # (present, asked) -> the one after


def list_attention_layers(spec: CacheSpec) -> list[int]:
    """The layers that a recode concerns."""
    return [index for index, recipe in enumerate(spec.layers) if any(iterate_attention(recipe))]


def replace_formats(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """Every attention layer as it is asked for, or an error."""
    return _combine_specs(current, requested, _check_layer_change)


def constrain_spec(current: CacheSpec, requested: CacheSpec) -> CacheSpec:
    """What one recipe for all layers comes to: as a rule, a narrower window that is there stays.

    Where no window is asked for, each layer keeps its own retention, and its prune. Where layers
    differ in a window, those narrower than the widest have that from the model, and keep it too.
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
            "a recode keeps the rows, so it has to stay"
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
        new = GroupSpec(tuple((n, new if any(iterate_attention(p)) else p) for n, p in old.parts))
    if type(old) is not type(new):
        raise SpecError(f"{new} for a layer of {old}: a recode keeps the kind of a layer")
    if not (isinstance(old, GroupSpec) and isinstance(new, GroupSpec)):
        return old
    told = dict(new.parts)
    if told.keys() != dict(old.parts).keys():
        raise SpecError(f"parts {sorted(told)} for a layer of {sorted(dict(old.parts))}")
    return GroupSpec(
        tuple((name, _combine_recipes(part, told[name], rule)) for name, part in old.parts)
    )


def check_recodable(page_table: PageTable, layer_group: LayerGroup) -> None:
    """Refuse to bring back what was let go, and more tokens than a capacity has room for."""
    if page_table.layer_group.per_head_layer != layer_group.per_head_layer:
        raise SpecError(
            "key heads lie apart where they share what they keep (prune=...:adaptive), and "
            "together elsewhere: reset the cache, and read the prompt by the other spec"
        )
    if page_table.pruned_at.any() and layer_group.pruning is None:
        raise SpecError(
            "all rows, where some were pruned: what is gone does not come back; ask for a spec "
            "with a prune, or reset first"
        )
    longest = int(page_table.seq_lens.max(initial=0))
    if layer_group.capacity is not None and longest > layer_group.capacity:
        raise CapacityError(
            f"{longest} tokens for a capacity of {layer_group.capacity}: rewind first, or give "
            "the spec "
            f"capacity={longest} or none"
        )
    held, asked = (
        _find_first_promised(page_table),
        np.maximum(_find_first_seen(layer_group, page_table.seq_lens), page_table.pruned_before),
    )
    worst = int((held - asked).argmax())
    if held[worst] > asked[worst]:
        length, there = (
            int(page_table.seq_lens[worst]),
            int(page_table.seq_lens[worst] - held[worst]),
        )
        said = "all rows" if layer_group.window is None else f"window={layer_group.window}"
        raise SpecError(
            f"{said} of {length} tokens, but the last {there} are held: what a window let go does "
            f"not come back; ask for at most window={there}, or reset first"
        )
    if (
        layer_group.sinks > page_table.layer_group.sinks
        and (page_table.layer_group.sinks < np.minimum(held, page_table.seq_lens)).any()
    ):
        raise SpecError(
            f"sinks={layer_group.sinks}, but of the first rows {page_table.layer_group.sinks} are "
            "held: what a window "
            f"let go does not come back; ask for at most sinks={page_table.layer_group.sinks}, or "
            "reset first"
        )


def find_first_rows(page_table: PageTable) -> Ints:
    """The first positions that there are rows of."""
    first: Ints = np.minimum(
        _extend_to_sinks(page_table, page_table.first_row), page_table.seq_lens
    )
    return first


def allocate_recoded(
    page_table: PageTable, first_visible: Ints, layer_group: LayerGroup, pools: Pools
) -> PageTable:
    """Where the same sequences lie in pages of another kind, from their first rows on."""
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
    """Store what one layer reads in the slots of another."""
    for which in range(old_table.num_tables):
        recoding = SequenceRecoder(old, old_table, new, new_table, which, stats)
        for name in new.sides:
            recoding.fill_open_pages(name)
            recoding.fill_sealed_pages(name)


@dataclass(frozen=True)
class SequenceRecoder:
    """One sequence in two storages, the second still without it."""

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
        """Are the pages and rows of this side taken over as they are?"""
        old, new = self.old, self.new
        same = old.spec.page == new.spec.page and old.spec.seals == new.spec.seals
        same = same and old.spec.sides[name] == new.spec.sides[name]
        return same and old.geometry.dtypes[name] == new.geometry.dtypes[name]

    def fill_open_pages(self, name: str) -> None:
        """Fill the open pages."""
        page, stored = self.new_table.layer_group.page, self.new.sides[name]
        which, numbers = self.new_table.list_open_pages()
        for number in numbers[which == self.table_index].tolist():
            slot = int(self.new_table.open_table[self.table_index, number])
            start, stop = (
                number * page,
                min((number + 1) * page, int(self.old_table.seq_lens[self.table_index])),
            )
            opened = (
                number >= self.old_table.first_open[self.table_index]
                or number < self.old_table.layer_group.num_sink_pages
            )
            if self.is_unchanged(name) and opened:
                there = int(self.old_table.open_table[self.table_index, number])
                rows = self.old.sides[name].open[there : there + 1, :, : stop - start]
            else:
                rows = self.read_rows(name, start, stop)
            stored.open[slot, :, : stop - start] = rows[0]

    def fill_sealed_pages(self, name: str) -> None:
        """Fill the sealed pages, a few at a time."""
        page, stored = self.new_table.layer_group.page, self.new.sides[name]
        which, numbers = self.new_table.list_sealed_pages()
        numbers = numbers[which == self.table_index]
        if self.is_unchanged(name):
            there = numbers >= self.old_table.first_sealed[self.table_index]
            there &= numbers < self.old_table.stop_sealed[self.table_index]
            self._copy_sealed_pages(name, numbers[there])
            numbers = numbers[~there]
        for first in range(0, len(numbers), MAX_PAGES_PER_SEAL):
            some = numbers[first : first + MAX_PAGES_PER_SEAL]
            pages = [self.read_rows(name, n * page, (n + 1) * page) for n in some.tolist()]
            slots = self.new_table.sealed_table[self.table_index, some]
            sinks = self.new_table.layer_group.sinks
            seal_pages(stored, name, torch.cat(pages), slots, some * page, sinks, self.stats)

    def _copy_sealed_pages(self, name: str, numbers: Ints) -> None:
        old, new = (s.sides[name].sealed for s in (self.old, self.new))
        slots = (
            e.sealed_table[self.table_index, numbers] for e in (self.old_table, self.new_table)
        )
        copy_pages(old, new, *slots)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) in the frame and dtype of the new layer, [1, H, n, D]."""
        rows = read_visible_rows(self.length_group, name, start, stop)  # type: ignore[arg-type]
        frames = [side.spec.sides[name].frame for side in (self.old, self.new)]
        dtype = self.new.geometry.dtypes[name]
        if frames[0] == frames[1]:
            return rows.to(dtype)
        return frames[1].transform_rows(frames[0].restore_outputs(rows).to(dtype))


def make_storage(old: Storage, spec: LayerSpec) -> Storage:
    """An empty storage for the rows of another."""
    return Storage(spec, old.geometry.with_dtype(spec.dtype), old.tiles)


def _find_first_seen(layer_group: LayerGroup, rows: Ints) -> Ints:
    """The first positions that the newest tokens see, sinks aside."""
    return (
        np.zeros_like(rows)
        if layer_group.window is None
        else np.maximum(rows - layer_group.window, 0)
    )


def _find_first_promised(page_table: PageTable) -> Ints:
    """The first positions that were promised to stay, and did."""
    return _extend_to_sinks(
        page_table,
        np.maximum(
            page_table.first_row, _find_first_seen(page_table.layer_group, page_table.seq_lens)
        ),
    )


def _extend_to_sinks(page_table: PageTable, first: Ints) -> Ints:
    """The first positions there are: sinks count where they touch the others."""
    return np.where(first <= page_table.layer_group.sinks, 0, first)
