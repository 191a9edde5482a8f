"""A cache of one sequence as immutable pages plus a tail state, for prefix stores.

A page holds P positions of all layers of a group. It is a sealed page, or a full open page if the
group never seals. The tail state is everything else: the numbers of page tables, recurrent states,
and rows of the other open pages. Pages and tail state together are a snapshot. What a store
returns is untrusted: restore_buffer.py validates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvant.cache.cache import Cache
from kvant.cache.layout import AttentionLeaf
from kvant.cache.snapshot import NUMBERS_KEY, canonicalize_numbers, gather_open_rows, take_snapshot
from kvant.cache.state import CacheState
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    PADDING,
    PRUNED_AT,
    STOP_SEALED,
    Ints,
    LayerGroup,
)
from kvant.pages.storage import Storage, find_runs, retile

PageId = tuple[int, int]  # layer group, page number
TensorShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a page


class PageSet:
    """The pages of a cache of one sequence; the cache must not change while it is in use."""

    def __init__(self, cache: Cache) -> None:
        if cache.batch != 1 or not cache.length:
            raise ValueError(f"a page set of {cache.batch} sequences: one with tokens is needed")
        cache.rollback()
        self.cache = cache
        self._state = cache.state
        self._page_tables = cache.state.page_tables
        self.layer_groups = cache.state.layout.layer_groups
        self.page_ranges = tuple(
            _find_full_pages(table.layer_group, table.numbers[0]) for table in self._page_tables
        )

    def nbytes(self, page_id: PageId | None) -> int:
        """Return the bytes of a page; for None, the approximate bytes of the tail state."""
        state, total = self._state, 0
        for leaf in state.layout.attention:
            storage, group = state.storages.get(leaf.index), self.layer_groups[leaf.group]
            if storage is None or (page_id is not None and leaf.group != page_id[0]):
                continue
            if page_id is not None:
                total += storage.sealed_nbytes if group.seals else storage.open_nbytes
            else:
                num_open = len(self._page_tables[leaf.group].list_open_pages()[0])
                num_full = 0 if group.seals else len(self.page_ranges[leaf.group])
                total += (num_open - num_full) * storage.open_nbytes
        if page_id is None:
            total += sum(history.nbytes for history in state.histories)
            total += sum(external.nbytes for external in self.cache.holder.external_states.values())
        return total

    def copy_pages(self, group: int, page_numbers: Sequence[int], into: Fields) -> None:
        """Copy pages of a group into the tensors `into`, one page per entry."""
        page_table = self._page_tables[group]
        slots = (
            page_table.sealed_table if page_table.layer_group.seals else page_table.open_table
        )[0, list(page_numbers)]
        for source, target in find_runs(slots, np.arange(len(slots))):
            for name, storage in iterate_storages(self._state, group):
                for side, stored in storage.sides.items():
                    if not page_table.layer_group.seals:
                        rows = into[f"{name}/{side}.open"][target]
                        rows.copy_(stored.open[source].transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        buffer = into[f"{name}/{key}"][target]
                        retile(key, tensor[source], stored.tiles, None, buffer)

    def snapshot_tail_state(self) -> Snapshot:
        """Return the state that is in none of the pages."""
        external_states = self.cache.holder.external_states
        return take_snapshot(self._state, external_states, self._snapshot_open_rows)

    def _snapshot_open_rows(self, leaf: AttentionLeaf) -> Snapshot:
        page_table = self._page_tables[leaf.group]
        page_numbers = page_table.list_open_pages()[1]
        full_pages = self.page_ranges[leaf.group]
        in_tail = np.ones(len(page_numbers), bool)
        if not page_table.layer_group.seals:
            in_tail = (page_numbers < full_pages.start) | (page_numbers >= full_pages.stop)
        tensors: dict[str, Tensor] = {
            NUMBERS_KEY: torch.from_numpy(canonicalize_numbers(page_table))
        }
        for side, stored in self._state.storages[leaf.index].sides.items():
            tensors[f"{side}.open"] = gather_open_rows(stored.open, page_table, in_tail)
            for field, tensor in stored.sealed.items():
                key = f"{side}.{field}"
                tensors[key] = retile(key, tensor[:0], stored.tiles, None)
        return Snapshot(tensors, {})


def list_page_sizes(cache: Cache) -> tuple[int, ...]:
    """Return the number of positions in a page, by layer group."""
    return tuple(group.page for group in cache.state.layout.layer_groups)


def list_required_pages(cache: Cache, length: int, tail_state: Snapshot) -> dict[int, range]:
    """Return the pages, by group, that complete a tail state of `length` tokens to a snapshot.

    Any `cache` with these layers will do. Raise SnapshotMismatch if the tail state does not fit.
    """
    required: dict[int, range] = {}
    for leaf in cache.state.layout.attention:
        group = cache.state.layout.layer_groups[leaf.group]
        numbers = tail_state.tensors.get(f"{leaf.name}/{NUMBERS_KEY}")
        if numbers is None or numbers.shape != (1, PRUNED_AT) or numbers.dtype != torch.int64:
            raise SnapshotMismatch(
                f"layer {leaf.name}: {NUMBERS_KEY} is missing, or not of one sequence"
            )
        row = numbers[0].numpy()
        in_range = (row[1:] >= 0).all() and (row[1:] <= length).all()
        if int(row[LENGTH]) != length or row[PADDING] or not in_range:
            raise SnapshotMismatch(f"layer {leaf.name}: numbers {row.tolist()} of {length} tokens")
        pages = _find_full_pages(group, row)
        if pages.stop * group.page > length:
            raise SnapshotMismatch(
                f"layer {leaf.name}: pages up to {pages.stop} of {length} tokens"
            )
        if required.setdefault(leaf.group, pages) != pages:
            raise SnapshotMismatch(f"layer {leaf.name}: other pages than a layer of the same kind")
    return required


def make_empty_tail_state(
    cache: Cache, length: int, page_shapes: Mapping[int, TensorShapes]
) -> Snapshot:
    """Return the tail state of a cache that consists of full pages only.

    `page_shapes` gives the tensors of a page, by group.
    """
    tensors: dict[str, Tensor] = {}
    for leaf in cache.state.layout.attention:
        tensors[f"{leaf.name}/{NUMBERS_KEY}"] = _make_full_page_numbers(
            cache.state.layout.layer_groups[leaf.group], length
        )
    for shapes in page_shapes.values():
        for key, (dtype, shape) in shapes.items():
            row_shape = shape[1:] if key.endswith(".open") else shape
            tensors[key] = torch.empty(0, *row_shape, dtype=dtype)
    return Snapshot(tensors, {})


def check_tail_shapes(tail_state: Snapshot, page_shapes: Mapping[int, TensorShapes]) -> None:
    """Refuse a tail state whose tensors differ from those of pages.

    A tensor without rows could otherwise have any shape.
    """
    for shapes in page_shapes.values():
        for key, (dtype, shape) in shapes.items():
            tensor = tail_state.tensors.get(key)
            row_shape = shape[1:] if key.endswith(".open") else shape
            if tensor is None or (tensor.dtype, tuple(tensor.shape[1:])) != (dtype, row_shape):
                raise SnapshotMismatch(f"{key} is not {dtype} {list(row_shape)}, as in the pages")


def iterate_storages(state: CacheState, group: int) -> Iterator[tuple[str, Storage]]:
    """Yield the name and storage of each layer of a group that has a storage."""
    for leaf in state.layout.attention:
        if leaf.group == group and leaf.index in state.storages:
            yield leaf.name, state.storages[leaf.index]


def get_page_shapes(cache: Cache, group: int) -> TensorShapes:
    """Return dtype and shape of the tensors of a page, over all layers of a group."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    layer_group = cache.state.layout.layer_groups[group]
    for name, storage in iterate_storages(cache.state, group):
        for side, stored in storage.sides.items():
            num_rows = 0 if layer_group.seals else layer_group.page
            shapes[f"{name}/{side}.open"] = stored.open.dtype, (num_rows, stored.heads, stored.dim)
            for field, tensor in stored.sealed.items():
                shapes[f"{name}/{side}.{field}"] = tensor.dtype, tuple(tensor.shape[1:])
    return shapes


def _find_full_pages(layer_group: LayerGroup, numbers: Ints) -> range:
    """Return the full pages of a sequence, which are never written again."""
    if layer_group.seals:
        first, stop = int(numbers[FIRST_SEALED]), int(numbers[STOP_SEALED])
    else:
        first, stop = int(numbers[FIRST_OPEN]), int(numbers[LENGTH]) // layer_group.page
    return range(first, stop) if first < stop else range(0)


def _make_full_page_numbers(layer_group: LayerGroup, length: int) -> Tensor:
    """Return the row of `PageTable.numbers` for a sequence of full pages only."""
    pages = length // layer_group.page
    row = [length, 0, 0, pages, pages, 0] if layer_group.seals else [length, 0, 0, 0, 0, 0]
    return torch.tensor([row])
