"""A cache of one sequence in pieces: pages that nobody writes to any more, and all the rest.

A page is what the layers of a kind have of P positions: sealed, or full of rows where a kind never
seals. The rest is numbers, states, and the rows of open pages. Together they are a snapshot, and as
little is believed of them: `Cache.restore` compares all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvant.cache.cache import Cache
from kvant.cache.layer import Attention
from kvant.cache.recurrent import Recurrent
from kvant.cache.recurrent import shared_snapshot as past_snapshot
from kvant.cache.snapshot import NUMBERS, canonical, open_rows
from kvant.cache.storage import retiled
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.extent import FIRST_OPEN, FIRST_SEALED, LENGTH, STOP_SEALED, Extent, Ints, Kind

Page = tuple[int, int]  # the kind of its layers, and its number


class Pieces:
    """A cache of one sequence, which is not to change while they are taken."""

    def __init__(self, cache: Cache) -> None:
        if cache.batch != 1 or not cache.length:
            raise ValueError(f"pieces of {cache.batch} sequences: one with tokens is needed")
        cache.rollback()
        self._cache = cache
        self._extents = cache._ledger.book.extents
        self.kinds = cache._ledger.kinds
        self.ranges = tuple(_whole(one.kind, one.numbers[0]) for one in self._extents)

    def nbytes(self, page: Page | None) -> int:
        """Of a page; about those of the rest without one."""
        contents = self._cache.contents
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

    def page(self, kind: int, number: int) -> Fields:
        """What the layers of a kind have of a page."""
        found: dict[str, Tensor] = {}
        extent = self._extents[kind]
        for name, leaf in self._cache.contents.attention():
            storage = leaf.storage
            if leaf.kind != kind or storage is None:
                continue
            for side, stored in storage.sides.items():
                if not extent.kind.seals:
                    slot = int(extent.open[0, number])
                    found[f"{name}/{side}.open"] = stored.open[slot].transpose(0, 1)
                    continue
                slot = int(extent.sealed[0, number])
                found[f"{name}/{side}.open"] = stored.open[0, :, :0].transpose(0, 1)
                for field, tensor in stored.sealed.items():
                    key = f"{side}.{field}"
                    found[f"{name}/{key}"] = retiled(
                        key, tensor[slot : slot + 1], stored.tiles, None
                    )
        return found

    def rest(self) -> Snapshot:
        """All that is in none of the pages."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, int] = {}
        for name, leaf in self._cache.contents.leaves.items():
            if isinstance(leaf, Attention):
                piece = self._rows(leaf, self._extents[leaf.kind])
            elif isinstance(leaf, Recurrent):
                piece = past_snapshot(leaf.past)
            else:
                piece = leaf.shared_snapshot()
            tensors |= {f"{name}/{key}": tensor for key, tensor in piece.tensors.items()}
            numbers |= {f"{name}/{key}": number for key, number in piece.numbers.items()}
        return Snapshot(tensors, numbers)

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


def pages_of(cache: Cache, length: int, rest: Snapshot | None) -> dict[int, range]:
    """The pages, by kind, that a cache like this one needs to have so many tokens.

    Without a rest, all that it may need is pages.
    """
    found: dict[int, range] = {}
    for name, leaf in cache.contents.attention():
        kind = cache._ledger.kinds[leaf.kind]
        numbers = _at(kind, length) if rest is None else rest.tensors.get(f"{name}/{NUMBERS}")
        if numbers is None or numbers.shape != (1, 6) or numbers.dtype != torch.int64:
            raise SnapshotMismatch(f"layer {name}: {NUMBERS} is missing, or not of one sequence")
        row = numbers[0].numpy()
        if int(row[LENGTH]) != length or not (row[1:] >= 0).all() or (row[1:] > length).any():
            raise SnapshotMismatch(f"layer {name}: numbers {row.tolist()} of {length} tokens")
        if found.setdefault(leaf.kind, _whole(kind, row)) != _whole(kind, row):
            raise SnapshotMismatch(f"layer {name}: other pages than a layer of the same kind")
    return found


def together(
    cache: Cache, length: int, rest: Snapshot | None, pages: Mapping[Page, Fields]
) -> Snapshot:
    """The snapshot of a cache like this one, from `pages_of` it and the rest."""
    ranges = pages_of(cache, length, rest)
    tensors = {} if rest is None else dict(rest.tensors)
    keys: dict[tuple[int, str], dict[str, None]] = {}  # of each leaf, by its kind and name
    for (kind_of, _), page in pages.items():
        for key in page:
            keys.setdefault((kind_of, key.rpartition("/")[0]), {})[key] = None
    for name, leaf in cache.contents.attention():
        kind = cache._ledger.kinds[leaf.kind]
        mine = [pages[leaf.kind, number] for number in ranges[leaf.kind]]
        if rest is None:
            tensors[f"{name}/{NUMBERS}"] = _at(kind, length)
        for key in keys.get((leaf.kind, name), ()):
            parts = [_part(page, key, kind) for page in mine]
            if rest is not None and key.endswith(".open"):
                if (others := tensors.get(key)) is None:
                    raise SnapshotMismatch(f"{key} is missing")
                first = min(kind.sink_pages * kind.page, ranges[leaf.kind].start * kind.page)
                parts = [others[:first], *parts, others[first:]]
            tensors[key] = _joined(key, parts)
    return Snapshot(tensors, {} if rest is None else rest.numbers)


def _part(page: Fields, key: str, kind: Kind) -> Tensor:
    """What a page has under a name: one sealed page, or rows, as many as it is to have."""
    tensor = page.get(key)
    count = 1 if not key.endswith(".open") else 0 if kind.seals else kind.page
    if tensor is None or not tensor.ndim or len(tensor) != count:
        raise SnapshotMismatch(f"{key} is missing, or not of one page")
    return tensor


def _joined(key: str, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        raise SnapshotMismatch(f"{key} has other shapes in other pages")
    return torch.cat(parts)


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
