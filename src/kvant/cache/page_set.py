"""A cache of one sequence in pieces: pages that nobody writes to any more, and all the rest.

A page is what the layers of a kind have of P positions: sealed, or full of rows where a kind never
seals. The rest is numbers, states, and the rows of open pages. Together they are a snapshot, and as
little is believed of them: whoever puts them together (arrival.py) compares all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvant.cache.cache import Cache
from kvant.cache.layer import PagedLayer
from kvant.cache.snapshot import NUMBERS_KEY, canonicalize_numbers, gather_open_rows
from kvant.cache.storage import Storage, find_runs, retile
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    PADDING,
    STOP_SEALED,
    Ints,
    LayerGroup,
    PageTable,
)

PageId = tuple[int, int]  # the kind of its layers, and its number
TensorShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a page


class PageSet:
    """A cache of one sequence, which is not to change while they are taken."""

    def __init__(self, cache: Cache) -> None:
        if cache.batch != 1 or not cache.length:
            raise ValueError(f"pieces of {cache.batch} sequences: one with tokens is needed")
        cache.rollback()
        self.cache = cache
        self._page_tables = cache._tracker.state.page_tables
        self.layer_groups = cache._tracker.layer_groups
        self.page_ranges = tuple(
            _find_full_pages(one.layer_group, one.numbers[0]) for one in self._page_tables
        )

    def nbytes(self, page_id: PageId | None) -> int:
        """Of a page; about those of the rest without one."""
        contents = self.cache.contents
        total = 0
        for _, leaf in contents.list_attention():
            storage, kind = leaf.storage, self.layer_groups[leaf.group]
            if storage is None or (page_id is not None and leaf.group != page_id[0]):
                continue
            if page_id is not None:
                total += storage.sealed_nbytes if kind.seals else storage.open_nbytes
            else:
                opened = len(self._page_tables[leaf.group].list_open_pages()[0])
                whole = 0 if kind.seals else len(self.page_ranges[leaf.group])
                total += (opened - whole) * storage.open_nbytes
        if page_id is None:
            total += sum(leaf.nbytes for _, leaf in contents.list_recurrent())
            total += sum(state.nbytes for state in contents.collect_external_states().values())
        return total

    def copy_pages(self, group: int, page_numbers: Sequence[int], into: Fields) -> None:
        """Pages of a kind, one an entry of every tensor, to where they are wanted."""
        extent = self._page_tables[group]
        slots = (extent.sealed_table if extent.layer_group.seals else extent.open_table)[
            0, list(page_numbers)
        ]
        for there, here in find_runs(slots, np.arange(len(slots))):
            for name, storage in iterate_storages(self.cache, group):
                for side, stored in storage.sides.items():
                    if not extent.layer_group.seals:
                        rows = into[f"{name}/{side}.open"][here]
                        rows.copy_(stored.open[there].transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        some = into[f"{name}/{key}"][here]
                        retile(key, tensor[there], stored.tiles, None, some)

    def snapshot_tail_state(self) -> Snapshot:
        """All that is in none of the pages."""
        return self.cache.contents.gather_snapshot(
            lambda leaf: self._snapshot_open_rows(leaf, self._page_tables[leaf.group])
        )

    def _snapshot_open_rows(self, leaf: PagedLayer, page_table: PageTable) -> Snapshot:
        assert leaf.storage is not None
        number = page_table.list_open_pages()[1]
        pages = self.page_ranges[leaf.group]
        wanted = np.ones(len(number), bool)
        if not page_table.layer_group.seals:
            wanted = (number < pages.start) | (number >= pages.stop)
        tensors: dict[str, Tensor] = {
            NUMBERS_KEY: torch.from_numpy(canonicalize_numbers(page_table))
        }
        for side, stored in leaf.storage.sides.items():
            tensors[f"{side}.open"] = gather_open_rows(stored.open, page_table, wanted)
            for field, tensor in stored.sealed.items():
                key = f"{side}.{field}"
                tensors[key] = retile(key, tensor[:0], stored.tiles, None)
        return Snapshot(tensors, {})


def list_page_sizes(cache: Cache) -> tuple[int, ...]:
    """The positions of a page of each kind."""
    return tuple(kind.page for kind in cache._tracker.layer_groups)


def list_required_pages(cache: Cache, length: int, tail_state: Snapshot) -> dict[int, range]:
    """The pages, by kind, that a cache like this one needs besides a rest of so many tokens."""
    found: dict[int, range] = {}
    for name, leaf in cache.contents.list_attention():
        kind = cache._tracker.layer_groups[leaf.group]
        numbers = tail_state.tensors.get(f"{name}/{NUMBERS_KEY}")
        if numbers is None or numbers.shape != (1, 6) or numbers.dtype != torch.int64:
            raise SnapshotMismatch(
                f"layer {name}: {NUMBERS_KEY} is missing, or not of one sequence"
            )
        row = numbers[0].numpy()
        within = (row[1:] >= 0).all() and (row[1:] <= length).all()
        if int(row[LENGTH]) != length or row[PADDING] or not within:
            raise SnapshotMismatch(f"layer {name}: numbers {row.tolist()} of {length} tokens")
        pages = _find_full_pages(kind, row)
        if pages.stop * kind.page > length:
            raise SnapshotMismatch(f"layer {name}: pages up to {pages.stop} of {length} tokens")
        if found.setdefault(leaf.group, pages) != pages:
            raise SnapshotMismatch(f"layer {name}: other pages than a layer of the same kind")
    return found


def make_empty_tail_state(
    cache: Cache, length: int, page_shapes: Mapping[int, TensorShapes]
) -> Snapshot:
    """The rest of a cache like this one that is whole pages alone, of such tensors by kind."""
    tensors: dict[str, Tensor] = {}
    for name, leaf in cache.contents.list_attention():
        tensors[f"{name}/{NUMBERS_KEY}"] = _make_page_end_numbers(
            cache._tracker.layer_groups[leaf.group], length
        )
    for some in page_shapes.values():
        for key, (dtype, shape) in some.items():
            side = shape[1:] if key.endswith(".open") else shape
            tensors[key] = torch.empty(0, *side, dtype=dtype)
    return Snapshot(tensors, {})


def check_tail_shapes(tail_state: Snapshot, page_shapes: Mapping[int, TensorShapes]) -> None:
    """Is a rest of the tensors that pages are of? It may claim anything where it has no rows."""
    for some in page_shapes.values():
        for key, (dtype, shape) in some.items():
            tensor, side = (
                tail_state.tensors.get(key),
                shape[1:] if key.endswith(".open") else shape,
            )
            if tensor is None or (tensor.dtype, tuple(tensor.shape[1:])) != (dtype, side):
                raise SnapshotMismatch(f"{key} is not {dtype} {list(side)}, as it is in pages")


def iterate_storages(cache: Cache, group: int) -> Iterator[tuple[str, Storage]]:
    """The layers of a kind that have storages, by name."""
    for name, leaf in cache.contents.list_attention():
        if leaf.group == group and leaf.storage is not None:
            yield name, leaf.storage


def get_page_shapes(cache: Cache, group: int) -> TensorShapes:
    """The tensors of a page: what the layers of a kind have of it."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    one = cache._tracker.layer_groups[group]
    for name, storage in iterate_storages(cache, group):
        for side, stored in storage.sides.items():
            rows = 0 if one.seals else one.page
            found[f"{name}/{side}.open"] = stored.open.dtype, (rows, stored.heads, stored.dim)
            for field, tensor in stored.sealed.items():
                found[f"{name}/{side}.{field}"] = tensor.dtype, tuple(tensor.shape[1:])
    return found


def _find_full_pages(layer_group: LayerGroup, numbers: Ints) -> range:
    """The pages of a sequence that nobody writes to any more."""
    if layer_group.seals:
        first, stop = int(numbers[FIRST_SEALED]), int(numbers[STOP_SEALED])
    else:
        first, stop = int(numbers[FIRST_OPEN]), int(numbers[LENGTH]) // layer_group.page
    return range(first, stop) if first < stop else range(0)


def _make_page_end_numbers(layer_group: LayerGroup, length: int) -> Tensor:
    """The numbers of a sequence that ends with a page, and has nothing but pages."""
    pages = length // layer_group.page
    row = [length, 0, 0, pages, pages, 0] if layer_group.seals else [length, 0, 0, 0, 0, 0]
    return torch.tensor([row])
