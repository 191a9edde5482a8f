"""An attention layer as canonical rows and integers, and back; what does not fit is refused.

Anybody can write a file, so nothing of a snapshot is believed: all of its integers, and the shapes
of all of its tensors, are compared with each other and with the recipe before anything is taken.
What a restored layer takes is then bounded by the tensors themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.cache.rows import stores
from kvant.cache.storage import Geometry, Storage, retiled
from kvant.contracts import Snapshot, Tiles
from kvant.errors import SnapshotMismatch
from kvant.extent import (
    BEGINS,
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    PADDING,
    PRUNED,
    STOP_SEALED,
    Bools,
    Extent,
    Ints,
    Kind,
)
from kvant.recipes import LayerSpec

NUMBERS = "numbers"  # the tensor of integers: one row a table, as an Extent has them
HEADS = "heads"  # tables of a sequence, where a layer prunes
MAX_PLACE = 1 << 53  # no overflow where positions are counted
MAX_PAGES = 1 << 24  # entries of a table of pages, which has one for those that are gone, too


def shared_snapshot(storage: Storage | None, extent: Extent | None) -> Snapshot:
    """The rows and pages of a layer, in the order of their sequences and positions."""
    if storage is None or extent is None or not extent.columns:
        return Snapshot({}, {})
    tensors: dict[str, Tensor] = {NUMBERS: torch.from_numpy(canonical(extent))}
    sealed = _there(extent.sealed_slots(), storage.geometry.device)
    for name, stored in storage.sides.items():
        tensors[f"{name}.open"] = open_rows(stored.open, extent)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            tensors[key] = retiled(key, tensor[sealed], stored.tiles, None)
    return Snapshot(tensors, {HEADS: extent.heads} if extent.kind.own is not None else {})


class Told(NamedTuple):
    """What a snapshot says of an attention layer, once all of it was compared."""

    numbers: Ints  # of the tables
    heads: int  # tables of a sequence
    geometry: Geometry
    opened: list[int]  # the rows of each open page
    sealed: int  # pages

    def agrees(self, other: Told) -> bool:
        """Are these the same sequences?"""
        return self.heads == other.heads and np.array_equal(self.numbers, other.numbers)


def told_by(spec: LayerSpec, kind: Kind, snapshot: Snapshot, apart: int = 0) -> Told | None:
    """What a snapshot holds, or an error; so many of its pages come apart. None: no tokens."""
    if not snapshot.tensors and not snapshot.numbers:
        return None
    expected_numbers = {HEADS} if kind.own is not None else set[str]()
    if snapshot.numbers.keys() != expected_numbers:
        raise SnapshotMismatch(f"numbers {sorted(snapshot.numbers)}: {sorted(expected_numbers)}")
    heads = snapshot.numbers.get(HEADS, 1)
    numbers = _numbers(snapshot, spec, kind)
    _check_heads(numbers, heads)
    geometry = _geometry(spec, snapshot)
    if kind.own is not None and geometry.heads != 1:
        raise SnapshotMismatch(f"{geometry.heads} key heads in the pages of one")
    rows_apart, sealed_apart = (0, apart) if kind.seals else (apart * kind.page, 0)
    opened, sealed = _pages(numbers, kind, len(snapshot.tensors["keys.open"]) + rows_apart)
    rows = sum(opened) - rows_apart
    expected = {NUMBERS}
    for name, dim in geometry.dims.items():
        expected.add(f"{name}.open")
        _check(snapshot, f"{name}.open", (rows, geometry.heads, dim), geometry.dtypes[name])
        for field, (shape, dtype) in geometry.fields(spec, name).items():
            expected.add(f"{name}.{field}")
            _check(snapshot, f"{name}.{field}", (sealed - sealed_apart, *shape), dtype)
    if extra := set(snapshot.tensors) - expected:
        raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
    for name, codec in spec.sides.items():  # refuses another width
        codec.frame.rows(snapshot.tensors[f"{name}.open"][None, :0].transpose(1, 2))
    return Told(numbers, heads, geometry, opened, sealed)


def restored(spec: LayerSpec, found: Told, snapshot: Snapshot, tiles: Tiles | None) -> Storage:
    """A storage of its own with what a snapshot holds, pages in order."""
    storage = Storage(spec, found.geometry, tiles)
    storage.fit(len(found.opened), found.sealed)
    for name, stored in storage.sides.items():
        _fill(stored.open, snapshot.tensors[f"{name}.open"], found.opened)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            retiled(key, snapshot.tensors[key], None, stored.tiles, tensor[: found.sealed])
    return storage


def open_rows(stored: Tensor, extent: Extent, wanted: Bools | None = None) -> Tensor:
    """The rows [n, H, D] of open pages, of all or of those that are wanted."""
    which, number = extent.open_pages()
    if wanted is not None:
        which, number = which[wanted], number[wanted]
    page = extent.kind.page
    count = np.minimum(extent.rows[which] - number * page, page)
    filled = torch.from_numpy(np.arange(page) < count[:, None]).to(stored.device)
    return stored[_there(extent.open[which, number], stored.device)].transpose(1, 2)[filled]


def canonical(extent: Extent) -> Ints:
    """The numbers, without what an empty range happens to begin at.

    The last one is left out where no rows were pruned, as it was before there was one.
    """
    numbers = extent.numbers.copy()
    empty = numbers[:, FIRST_SEALED] >= numbers[:, STOP_SEALED]
    numbers[empty, FIRST_SEALED : STOP_SEALED + 1] = 0
    idle = (
        numbers[:, BEGINS]
        <= np.where(empty, numbers[:, FIRST_OPEN], numbers[:, FIRST_SEALED]) * extent.kind.page
    )
    numbers[idle & (extent.pruned == 0), BEGINS] = 0
    return numbers if extent.pruned.any() else numbers[:, :PRUNED]


def _check_heads(numbers: Ints, heads: int) -> None:
    """Are the tables of a sequence equally far?"""
    if heads < 1 or len(numbers) % heads:
        raise SnapshotMismatch(f"{len(numbers)} tables of {heads} a sequence")
    alike = numbers[:, (LENGTH, PADDING, PRUNED)].reshape(-1, heads, 3)
    if (alike != alike[:, :1]).any():
        raise SnapshotMismatch(f"heads of one sequence at lengths {alike[:, :, 0].tolist()}")


def _numbers(snapshot: Snapshot, spec: LayerSpec, kind: Kind) -> Ints:
    """The integers, each within what the others and the recipe allow."""
    tensor = snapshot.tensors.get(NUMBERS)
    widths = (PRUNED,) if kind.prune is None else (PRUNED, PRUNED + 1)
    if tensor is None or tensor.ndim != 2 or tensor.shape[1] not in widths or not len(tensor):
        raise SnapshotMismatch(f"{NUMBERS} is missing, or not [sequences, {PRUNED}]")
    if tensor.dtype != torch.int64:
        raise SnapshotMismatch(f"{NUMBERS} is {tensor.dtype}, torch.int64 is needed")
    numbers = np.zeros((len(tensor), PRUNED + 1), np.int64)
    numbers[:, : tensor.shape[1]] = tensor.cpu().numpy()
    for row in numbers.tolist():
        _check_sequence(row, spec, kind)
    longest = int(numbers[:, LENGTH].max())
    if (pages := len(numbers) * -(-longest // kind.page)) > MAX_PAGES:
        raise SnapshotMismatch(
            f"{len(numbers)} sequences of up to {longest} tokens need tables of {pages} pages, "
            f"{MAX_PAGES} at most: larger pages, or fewer sequences at once, need less"
        )
    return numbers


def _check_sequence(row: list[int], spec: LayerSpec, kind: Kind) -> None:
    """Are the rows that the next query needs all there, and nothing else?"""
    length, padding, first, stop, opened, begins, pruned = row
    if not all(0 <= n <= MAX_PLACE for n in row[1:]) or not -padding <= length <= MAX_PLACE:
        raise SnapshotMismatch(f"numbers {row}: 0 to {MAX_PLACE} is needed, padding aside")
    rows, page = max(length, 0), kind.page
    due, low = kind.paging.due(rows), spec.retention.keep(rows)
    if pruned:
        if kind.prune is None or not begins < pruned <= rows:
            raise SnapshotMismatch(f"rows from {begins} on, pruned at {pruned} of {rows} tokens")
        low = begins
    if spec.capacity is not None and rows > spec.capacity:
        raise SnapshotMismatch(f"{rows} tokens for a capacity of {spec.capacity}")
    if (first or stop) and (first >= stop or stop != due):
        raise SnapshotMismatch(f"sealed pages from {first} to {stop}, {due} are due at {rows}")
    if first == stop and due > max(low // page, kind.sink_pages):
        raise SnapshotMismatch(f"no sealed pages, {due} are due at {rows}")
    if opened > max(due, low // page) or opened * page > rows:
        raise SnapshotMismatch(f"open pages from {opened} on, {due} are due at {rows}")
    given = max((first if first < stop else opened) * page, begins)
    if given > low and given > kind.sinks:  # sinks are there, and may reach to the others
        raise SnapshotMismatch(f"rows from {given} on, those from {low} on are needed")


def _pages(numbers: Ints, kind: Kind, rows: int) -> tuple[list[int], int]:
    """The rows of each open page, which are so many in all, and the number of sealed pages."""
    counts: list[int] = []
    sealed = 0
    for length, _, first, stop, begin, *_ in numbers.tolist():
        sealed += stop - first
        end = -(-max(length, 0) // kind.page)
        sinks = min(kind.sink_pages, begin, end)
        if (sinks + end - begin - 1) * kind.page > rows:  # before they are listed
            raise SnapshotMismatch(f"{rows} open rows, of {sinks + end - begin} pages and more")
        pages = [*range(sinks), *range(begin, end)]
        counts += [min(length - number * kind.page, kind.page) for number in pages]
    return counts, sealed


def _fill(to: Tensor, rows: Tensor, counts: list[int]) -> None:
    """Rows [R, H, D] that follow one another, into pages [slots, H, P, D]."""
    place = 0
    for slot, count in enumerate(counts):
        to[slot, :, :count] = rows[place : place + count].transpose(0, 1)
        place += count


def _geometry(spec: LayerSpec, snapshot: Snapshot) -> Geometry:
    """What the open rows say of all others."""
    rows = {}
    for name in spec.sides:
        tensor = snapshot.tensors.get(f"{name}.open")
        if tensor is None or tensor.ndim != 3 or not stores(tensor.dtype):
            raise SnapshotMismatch(f"{name}.open is missing or no [rows, H, D] of floats")
        if 0 in tensor.shape[1:]:
            raise SnapshotMismatch(f"{name}.open is {list(tensor.shape)}: only rows may be 0")
        if spec.dtype not in (None, tensor.dtype):
            raise SnapshotMismatch(f"{name}.open is {tensor.dtype}, the spec says {spec.dtype}")
        rows[name] = tensor.transpose(0, 1)[None]
    width = rows["keys"].shape[3]
    if spec.value_dim is not None and spec.value_dim > width:
        raise SnapshotMismatch(f"values of {spec.value_dim} channels inside keys of {width}")
    return Geometry.of(rows)


def _check(snapshot: Snapshot, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = snapshot.tensors.get(name)
    if tensor is None:
        raise SnapshotMismatch(f"{name} is missing")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SnapshotMismatch(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {dtype} {list(shape)} is needed"
        )


def _there(slots: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(slots).to(device)
