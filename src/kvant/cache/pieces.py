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
from kvant.cache.layer import Attention
from kvant.cache.snapshot import NUMBERS, canonical, open_rows
from kvant.cache.storage import Storage, in_runs, retiled
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.extent import FIRST_OPEN, FIRST_SEALED, LENGTH, PADDING, STOP_SEALED, Extent, Ints, Kind

Page = tuple[int, int]  # the kind of its layers, and its number
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a page


class Pieces:
    """A cache of one sequence, which is not to change while they are taken."""

    def __init__(self, cache: Cache) -> None:
        if cache.batch != 1 or not cache.length:
            raise ValueError(f"pieces of {cache.batch} sequences: one with tokens is needed")
        cache.rollback()
        self.cache = cache
        self._extents = cache._ledger.book.extents
        self.kinds = cache._ledger.kinds
        self.ranges = tuple(_whole(one.kind, one.numbers[0]) for one in self._extents)

    def nbytes(self, page: Page | None) -> int:
        """Of a page; about those of the rest without one."""
        contents = self.cache.contents
        total = 0
        for _, leaf in contents.attention():
            storage, kind = leaf.storage, self.kinds[leaf.kind]
            if storage is None or (page is not None and leaf.kind != page[0]):
                continue
            if page is not None:
                total += storage.sealed_nbytes if kind.seals else storage.open_nbytes
            else:
                opened = len(self._extents[leaf.kind].open_pages()[0])
                whole = 0 if kind.seals else len(self.ranges[leaf.kind])
                total += (opened - whole) * storage.open_nbytes
        if page is None:
            total += sum(leaf.nbytes for _, leaf in contents.recurrent())
            total += sum(state.nbytes for state in contents.host_states().values())
        return total

    def copy(self, kind: int, numbers: Sequence[int], into: Fields) -> None:
        """Pages of a kind, one an entry of every tensor, to where they are wanted."""
        extent = self._extents[kind]
        slots = (extent.sealed if extent.kind.seals else extent.open)[0, list(numbers)]
        for there, here in in_runs(slots, np.arange(len(slots))):
            for name, storage in layers_of(self.cache, kind):
                for side, stored in storage.sides.items():
                    if not extent.kind.seals:
                        rows = into[f"{name}/{side}.open"][here]
                        rows.copy_(stored.open[there].transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        some = into[f"{name}/{key}"][here]
                        retiled(key, tensor[there], stored.tiles, None, some)

    def rest(self) -> Snapshot:
        """All that is in none of the pages."""
        return self.cache.contents.gathered(lambda leaf: self._rows(leaf, self._extents[leaf.kind]))

    def _rows(self, leaf: Attention, extent: Extent) -> Snapshot:
        assert leaf.storage is not None
        number = extent.open_pages()[1]
        pages = self.ranges[leaf.kind]
        wanted = np.ones(len(number), bool)
        if not extent.kind.seals:
            wanted = (number < pages.start) | (number >= pages.stop)
        tensors: dict[str, Tensor] = {NUMBERS: torch.from_numpy(canonical(extent))}
        for side, stored in leaf.storage.sides.items():
            tensors[f"{side}.open"] = open_rows(stored.open, extent, wanted)
            for field, tensor in stored.sealed.items():
                key = f"{side}.{field}"
                tensors[key] = retiled(key, tensor[:0], stored.tiles, None)
        return Snapshot(tensors, {})


def page_sizes(cache: Cache) -> tuple[int, ...]:
    """The positions of a page of each kind."""
    return tuple(kind.page for kind in cache._ledger.kinds)


def pages_of(cache: Cache, length: int, rest: Snapshot) -> dict[int, range]:
    """The pages, by kind, that a cache like this one needs besides a rest of so many tokens."""
    found: dict[int, range] = {}
    for name, leaf in cache.contents.attention():
        kind = cache._ledger.kinds[leaf.kind]
        numbers = rest.tensors.get(f"{name}/{NUMBERS}")
        if numbers is None or numbers.shape != (1, 6) or numbers.dtype != torch.int64:
            raise SnapshotMismatch(f"layer {name}: {NUMBERS} is missing, or not of one sequence")
        row = numbers[0].numpy()
        within = (row[1:] >= 0).all() and (row[1:] <= length).all()
        if int(row[LENGTH]) != length or row[PADDING] or not within:
            raise SnapshotMismatch(f"layer {name}: numbers {row.tolist()} of {length} tokens")
        pages = _whole(kind, row)
        if pages.stop * kind.page > length:
            raise SnapshotMismatch(f"layer {name}: pages up to {pages.stop} of {length} tokens")
        if found.setdefault(leaf.kind, pages) != pages:
            raise SnapshotMismatch(f"layer {name}: other pages than a layer of the same kind")
    return found


def bare(cache: Cache, length: int, shapes: Mapping[int, Shapes]) -> Snapshot:
    """The rest of a cache like this one that is whole pages alone, of such tensors by kind."""
    tensors: dict[str, Tensor] = {}
    for name, leaf in cache.contents.attention():
        tensors[f"{name}/{NUMBERS}"] = _at(cache._ledger.kinds[leaf.kind], length)
    for some in shapes.values():
        for key, (dtype, shape) in some.items():
            side = shape[1:] if key.endswith(".open") else shape
            tensors[key] = torch.empty(0, *side, dtype=dtype)
    return Snapshot(tensors, {})


def check_alike(rest: Snapshot, shapes: Mapping[int, Shapes]) -> None:
    """Is a rest of the tensors that pages are of? It may claim anything where it has no rows."""
    for some in shapes.values():
        for key, (dtype, shape) in some.items():
            tensor, side = rest.tensors.get(key), shape[1:] if key.endswith(".open") else shape
            if tensor is None or (tensor.dtype, tuple(tensor.shape[1:])) != (dtype, side):
                raise SnapshotMismatch(f"{key} is not {dtype} {list(side)}, as it is in pages")


def layers_of(cache: Cache, kind: int) -> Iterator[tuple[str, Storage]]:
    """The layers of a kind that have storages, by name."""
    for name, leaf in cache.contents.attention():
        if leaf.kind == kind and leaf.storage is not None:
            yield name, leaf.storage


def shapes_of(cache: Cache, kind: int) -> Shapes:
    """The tensors of a page: what the layers of a kind have of it."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    one = cache._ledger.kinds[kind]
    for name, storage in layers_of(cache, kind):
        for side, stored in storage.sides.items():
            rows = 0 if one.seals else one.page
            found[f"{name}/{side}.open"] = stored.open.dtype, (rows, stored.heads, stored.dim)
            for field, tensor in stored.sealed.items():
                found[f"{name}/{side}.{field}"] = tensor.dtype, tuple(tensor.shape[1:])
    return found


def _whole(kind: Kind, numbers: Ints) -> range:
    """The pages of a sequence that nobody writes to any more."""
    if kind.seals:
        first, stop = int(numbers[FIRST_SEALED]), int(numbers[STOP_SEALED])
    else:
        first, stop = int(numbers[FIRST_OPEN]), int(numbers[LENGTH]) // kind.page
    return range(first, stop) if first < stop else range(0)


def _at(kind: Kind, length: int) -> Tensor:
    """The numbers of a sequence that ends with a page, and has nothing but pages."""
    pages = length // kind.page
    row = [length, 0, 0, pages, pages, 0] if kind.seals else [length, 0, 0, 0, 0, 0]
    return torch.tensor([row])
