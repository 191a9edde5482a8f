"""The tensors of one layer, indexed by slot.

Large tensors on a CPU are memory mappings of their own. Untouched memory of a mapping costs
nothing, up to one huge page (2 MiB) after the last row. Freed memory returns to the system. A
process allocator guarantees neither: it reuses touched memory and retains gaps between live blocks.
With it, a cache of hundreds of MiB took half as much memory again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvant.contracts import Fields, PagedTensors, PageSummary, Tiles
from kvant.lazy import Derived
from kvant.page_table import NO_SLOTS, Ints, LayerGroup, PageTable
from kvant.pages.pool import bound_slots
from kvant.platform.torch_runtime import no_inference_mode
from kvant.recipes import LayerSpec

MIN_MAPPING_BYTES = 1 << 17  # smaller tensors use the allocator: a mapping is rounded up to pages
MIN_HUGE_PAGE_BYTES = 1 << 27  # larger mappings ask for huge pages, which need fewer TLB entries
# 0: this system has no anonymous mappings.
MMAP_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)

SideTensors = Mapping[str, PagedTensors]  # keys and values of one layer
SlotPairs = tuple[Ints, Ints]  # old slots, new slots
TileSelector = Callable[[torch.device], Tiles | None]  # the byte order of sealed pages on a device


def reserve_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor."""
    with no_inference_mode():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        large = MMAP_FLAGS and device.type == "cpu" and nbytes >= MIN_MAPPING_BYTES
        if large and type(torch.empty(0, device=device)) is Tensor:  # not a fake tensor
            return torch.frombuffer(_map_memory(nbytes), dtype=dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _map_memory(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, nbytes, flags=MMAP_FLAGS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{nbytes} bytes for a cache cannot be allocated: use a smaller format, a window or a "
            "shorter context (kvant.plan)"
        ) from error
    if nbytes >= MIN_HUGE_PAGE_BYTES and (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # huge pages are disabled
            mapping.madvise(huge)
    return mapping


def retile(
    name: str, field: Tensor, old: Tiles | None, new: Tiles | None, into: Tensor | None = None
) -> Tensor:
    """Convert a field of sealed pages from `old` to `new` tiles; None: canonical order.

    The result is written to `into`, if given.
    """
    if old == new:
        return field if into is None else into.copy_(field)
    if old is None or new is None:
        convert = new.pack if new is not None else old.unpack  # type: ignore[union-attr]
        return convert(name, field, into)
    return new.pack(name, old.unpack(name, field), into)


MAX_PAGES_PER_MOVE = 32  # bounds the scratch of a move
RESERVE_FACTOR = 4  # over-allocation on a CPU, where address space costs nothing


@dataclass(frozen=True)
class Geometry:
    """The heads, widths, dtypes and device of all rows of a layer."""

    heads: int
    dims: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    device: torch.device

    @classmethod
    def from_rows(cls, rows: Fields) -> Geometry:
        keys = rows["keys"]
        dims = {name: tensor.shape[3] for name, tensor in rows.items()}
        dtypes = {name: tensor.dtype for name, tensor in rows.items()}
        return cls(keys.shape[1], dims, dtypes, keys.device)

    def with_dtype(self, dtype: torch.dtype | None) -> Geometry:
        """Return the geometry in the dtype of a recipe, if it sets one."""
        return self if dtype is None else replace(self, dtypes=dict.fromkeys(self.dims, dtype))

    def matches(self, rows: Fields) -> bool:
        """Return whether `rows` have this geometry; called for every token."""
        shape = rows["keys"].shape
        if len(shape) != 4 or len(rows) != len(self.dims):
            return False
        batch, _, count, _ = shape
        for name, tensor in rows.items():
            if tensor.shape != (batch, self.heads, count, self.dims[name]):
                return False
            if tensor.dtype != self.dtypes[name] or tensor.device != self.device:
                return False
            if tensor.requires_grad:  # rows are detached before they are stored
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{name} {self.dims[name]} wide in {self.dtypes[name]}" for name in self.dims]
        return f"{self.heads} heads, {', '.join(parts)} on {self.device}"

    def open_nbytes(self, spec: LayerSpec) -> int:
        """Return the bytes of one open page."""
        return sum(
            self.heads * spec.page * dim * self.dtypes[name].itemsize
            for name, dim in self.dims.items()
        )

    def sealed_nbytes(self, spec: LayerSpec) -> int:
        """Return the bytes of one sealed page, and of its key bounds if pages are selected."""
        bounds = 2 * self.heads * self.dims["keys"] * self.dtypes["keys"].itemsize
        return (0 if spec.select is None else bounds) + sum(
            shape[0] * shape[1] * shape[2] * dtype.itemsize
            for name in self.dims
            for shape, dtype in self.fields(spec, name).values()
        )

    def fields(
        self, spec: LayerSpec, name: str
    ) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
        """Return shape and dtype of each field of a sealed page of one side."""
        if not spec.seals:
            return {}
        return {
            field_name: (
                (self.heads, field.height(spec.page), field.width),
                field.dtype or self.dtypes[name],
            )
            for field_name, field in spec.sides[name].fields(self.dims[name]).items()
        }


def pages_nbytes(
    geometry: Geometry, spec: LayerSpec, layer_group: LayerGroup, lengths: Sequence[int]
) -> int:
    """Return the bytes of the pages of sequences of these lengths."""
    max_open, max_sealed = bound_slots(layer_group, lengths)
    return int(max_open * geometry.open_nbytes(spec) + max_sealed * geometry.sealed_nbytes(spec))


class Storage:
    """The tensors of a layer, shared by caches that share pages."""

    def __init__(self, spec: LayerSpec, geometry: Geometry, select_tiles: TileSelector) -> None:
        self.spec = spec
        self.geometry = geometry
        self.select_tiles = select_tiles
        self.tiles = select_tiles(geometry.device)
        self.num_slots = 0, 0  # allocated, of open and of sealed pages
        self.used_slots = 0, 0  # requested so far
        self.sides: dict[str, PagedTensors] = {}
        self._allocate_tensors((0, 0))

    @cached_property
    def open_nbytes(self) -> int:
        return self.geometry.open_nbytes(self.spec)

    @cached_property
    def sealed_nbytes(self) -> int:
        return self.geometry.sealed_nbytes(self.spec)

    def ensure_slots(self, num_open: int, num_sealed: int) -> None:
        """Allocate at least this many slots; pages in present slots are preserved."""
        if num_open > self.num_slots[0] or num_sealed > self.num_slots[1]:
            needed = max(num_open, self.used_slots[0]), max(num_sealed, self.used_slots[1])
            grown = (
                self._grow_size(needed[0], self.num_slots[0]),
                self._grow_size(needed[1], self.num_slots[1]),
            )
            with suppress(MemoryError, torch.OutOfMemoryError):
                self._allocate_tensors(grown)
            # Outside of a handler, whose traceback would keep the tensors of the failed attempt.
            if self.num_slots[0] < needed[0] or self.num_slots[1] < needed[1]:
                self._allocate_tensors(needed)
        self.used_slots = max(num_open, self.used_slots[0]), max(num_sealed, self.used_slots[1])

    def copy_to_device(self, device: torch.device) -> Storage:
        """Return a copy on `device`, with the same slots; itself if it is there already."""
        copy = Storage(self.spec, replace(self.geometry, device=device), self.select_tiles)
        if (device, copy.tiles) == (self.geometry.device, self.tiles):
            return self
        copy.ensure_slots(*self.used_slots)
        retiling = copy if device.type != "cpu" else self  # a GPU retiles faster than the transfer
        for name, source in self.sides.items():
            target, (num_open, num_sealed) = copy.sides[name], self.used_slots
            target.open[:num_open].copy_(source.open[:num_open])
            for field, pages in source.sealed.items():
                for first in range(0, num_sealed, MAX_PAGES_PER_MOVE):
                    batch = slice(first, min(first + MAX_PAGES_PER_MOVE, num_sealed))
                    field_batch = pages[batch].to(retiling.geometry.device)
                    field_batch = retile(f"{name}.{field}", field_batch, self.tiles, copy.tiles)
                    target.sealed[field][batch].copy_(field_batch)
        return copy

    def relocate_pages(
        self, old_table: PageTable, new_table: PageTable, num_slots: tuple[int, int]
    ) -> Storage:
        """Return a storage with the pages of `old_table` in the slots of `new_table`.

        If a table is unchanged, its tensors are shared.
        """
        copy = Storage(self.spec, self.geometry, self.select_tiles)
        shares_open = old_table.open_table is new_table.open_table
        shares_sealed = old_table.sealed_table is new_table.sealed_table
        copy.ensure_slots(0 if shares_open else num_slots[0], 0 if shares_sealed else num_slots[1])
        open_source, sealed_source = self if shares_open else copy, self if shares_sealed else copy
        open_slots, sealed_slots = pair_slots(old_table, new_table)
        copy_sides(
            self.sides,
            copy.sides,
            NO_SLOTS if shares_open else open_slots,
            NO_SLOTS if shares_sealed else sealed_slots,
        )
        sides = {
            name: replace(
                stored,
                open=open_source.sides[name].open,
                sealed=sealed_source.sides[name].sealed,
                summary=sealed_source.sides[name].summary,
                derived=Derived(),
            )
            for name, stored in copy.sides.items()
        }
        allocated = open_source.num_slots[0], sealed_source.num_slots[1]
        used = open_source.used_slots[0], sealed_source.used_slots[1]
        copy.__dict__.update(sides=sides, num_slots=allocated, used_slots=used)
        return copy

    def _grow_size(self, needed: int, current: int) -> int:
        if needed <= current:
            return current
        return (
            RESERVE_FACTOR * needed if self.geometry.device.type == "cpu" else needed + needed // 8
        )

    def _allocate_tensors(self, num_slots: tuple[int, int]) -> None:
        """Reallocate the tensors with `num_slots` slots."""
        sides, geometry = {}, self.geometry
        for name, codec in self.spec.sides.items():
            shape = (geometry.heads, self.spec.page, geometry.dims[name])
            old = self.sides.get(name)
            rows = self._grow_tensor(
                None if old is None else old.open, shape, geometry.dtypes[name], num_slots, 0
            )
            fields = {
                field_name: self._grow_tensor(
                    None if old is None else old.sealed[field_name], shape, dtype, num_slots, 1
                )
                for field_name, (shape, dtype) in geometry.fields(self.spec, name).items()
            }
            summary = self._make_summary(old, num_slots) if name == "keys" else None
            sides[name] = PagedTensors(codec, rows, fields, self.tiles, summary)
        # One call, so that an interrupt cannot separate the tensors from their sizes.
        self.__dict__.update(sides=sides, num_slots=num_slots)

    def _make_summary(
        self, old_tensors: PagedTensors | None, num_slots: tuple[int, int]
    ) -> PageSummary | None:
        """Return the key bounds, if the layer selects pages."""
        if self.spec.select is None:
            return None
        old = None if old_tensors is None else old_tensors.summary
        shape = (self.geometry.heads, 2, self.geometry.dims["keys"])
        slot_versions = np.zeros(num_slots[1], np.int64)
        if old is not None:  # before the bounds: writers write bounds first
            slot_versions[: self.used_slots[1]] = old.slot_versions[: self.used_slots[1]]
        bounds = self._grow_tensor(
            None if old is None else old.bounds, shape, self.geometry.dtypes["keys"], num_slots, 1
        )
        return (
            old if old is not None and old.bounds is bounds else PageSummary(bounds, slot_versions)
        )

    def _grow_tensor(
        self,
        old: Tensor | None,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        num_slots: tuple[int, int],
        pool_index: int,
    ) -> Tensor:
        if old is not None and num_slots[pool_index] == self.num_slots[pool_index]:
            return old
        new = reserve_tensor((num_slots[pool_index], *shape), dtype, self.geometry.device)
        if old is not None:
            used = self.used_slots[pool_index]
            new[:used] = old[:used]
        return new


def find_runs(old_slots: Ints, new_slots: Ints) -> list[tuple[slice, slice]]:
    """Return slices of slots that are consecutive on both sides, to copy them together."""
    ends = np.flatnonzero((np.diff(old_slots) != 1) | (np.diff(new_slots) != 1)) + 1
    first, stop = [0, *ends.tolist()], [*ends.tolist(), len(old_slots)]
    return [
        (
            slice(int(old_slots[i]), int(old_slots[i]) + n),
            slice(int(new_slots[i]), int(new_slots[i]) + n),
        )
        for i, n in ((i, j - i) for i, j in zip(first, stop, strict=True))
        if n
    ]


def copy_pages(source: Fields, target: Fields, old_slots: Ints, new_slots: Ints) -> None:
    """Copy pages from slots to slots, field by field, without temporary tensors."""
    runs = find_runs(old_slots, new_slots)
    for name, tensor in target.items():
        for source_slots, target_slots in runs:
            tensor[target_slots].copy_(source[name][source_slots])


def pair_slots(old_table: PageTable, new_table: PageTable) -> tuple[SlotPairs, SlotPairs]:
    """Return the slots of the same open, and of the same sealed, pages in two tables."""
    return (
        (old_table.list_open_slots(), new_table.list_open_slots()),
        (old_table.list_sealed_slots(), new_table.list_sealed_slots()),
    )


def copy_sides(
    source: SideTensors, target: SideTensors, open_slots: SlotPairs, sealed_slots: SlotPairs
) -> None:
    """Copy pages of keys and values from slots to slots, of open and of sealed pages."""
    for name, stored in target.items():
        copy_pages({"open": source[name].open}, {"open": stored.open}, *open_slots)
        copy_pages(source[name].sealed, stored.sealed, *sealed_slots)
