"""The tensors of one layer, by slot: what a slot number means in memory.

Memory is reserved: what is never touched costs nothing (but for what a large page of the system,
2 MiB, takes behind the last row of a large tensor), what is freed is given back. An allocator
of the process may do neither. It hands out room that earlier work has touched, and keeps what lies
between pieces that are still in use: a cache of hundreds of MiB was seen to take half as much
again. So large tensors on a CPU are mappings of their own.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvant.attention import select_tiles
from kvant.contracts import Fields, PagedTensors, PageSummary, Tiles
from kvant.page_table import Ints, PageTable
from kvant.recipes import LayerSpec
from kvant.torch_modes import no_inference_mode

MIN_MAPPING_BYTES = (
    1 << 17
)  # bytes from which on a tensor is a mapping, which is a whole number of pages
MIN_HUGE_PAGE_BYTES = (
    1 << 27
)  # bytes from which on it lies in large pages of the system, which are found sooner
MMAP_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(
    mmap, "MAP_ANONYMOUS", 0
)  # 0: not on this system


def reserve_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose values are to be written yet."""
    with no_inference_mode():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        large = MMAP_FLAGS and device.type == "cpu" and nbytes >= MIN_MAPPING_BYTES
        if large and type(torch.empty(0, device=device)) is Tensor:  # not in a mode of fake ones
            return torch.frombuffer(_map_memory(nbytes), dtype=dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _map_memory(nbytes: int) -> mmap.mmap:
    try:
        found = mmap.mmap(-1, nbytes, flags=MMAP_FLAGS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{nbytes} bytes for a cache are not to be had: a smaller format, "
            "a window or a shorter context takes less (kvant.plan)"
        ) from error
    if nbytes >= MIN_HUGE_PAGE_BYTES and (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a system that has none
            found.madvise(huge)
    return found


def retile(
    name: str, field: Tensor, old: Tiles | None, new: Tiles | None, into: Tensor | None = None
) -> Tensor:
    """A field of sealed pages, from the old tiles to the new ones; None is rows as they are.

    With `into` it is put there.
    """
    if old == new:
        return field if into is None else into.copy_(field)
    if old is None or new is None:
        one = new.pack if new is not None else old.unpack  # type: ignore[union-attr]
        return one(name, field, into)
    return new.pack(name, old.unpack(name, field), into)


MAX_PAGES_PER_MOVE = 32  # pages: bounds the scratch of a move
RESERVE_FACTOR = 4  # times what is needed: address space costs nothing on a CPU


@dataclass(frozen=True)
class Geometry:
    """What all rows of a layer have in common once the first ones came."""

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
        """The same in the dtype that a recipe asks for, if it asks for one."""
        return self if dtype is None else replace(self, dtypes=dict.fromkeys(self.dims, dtype))

    def matches(self, rows: Fields) -> bool:
        """Is this the geometry of these rows? Asked at every token."""
        shape = rows["keys"].shape
        if len(shape) != 4:
            return False
        batch, _, count, _ = shape
        for name, tensor in rows.items():
            if tensor.shape != (batch, self.heads, count, self.dims[name]):
                return False
            if tensor.dtype != self.dtypes[name] or tensor.device != self.device:
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{name} {self.dims[name]} wide in {self.dtypes[name]}" for name in self.dims]
        return f"{self.heads} heads, {', '.join(parts)} on {self.device}"

    def open_nbytes(self, spec: LayerSpec) -> int:
        """Bytes of one open page."""
        return sum(
            self.heads * spec.page * dim * self.dtypes[name].itemsize
            for name, dim in self.dims.items()
        )

    def sealed_nbytes(self, spec: LayerSpec) -> int:
        """Bytes of one sealed page, with what a selection asks of it."""
        bounds = 2 * self.heads * self.dims["keys"] * self.dtypes["keys"].itemsize
        return (0 if spec.select is None else bounds) + sum(
            shape[0] * shape[1] * shape[2] * dtype.itemsize
            for name in self.dims
            for shape, dtype in self.fields(spec, name).values()
        )

    def fields(
        self, spec: LayerSpec, name: str
    ) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
        """The shape and the dtype of each field of a sealed page of one side."""
        if not spec.seals:
            return {}
        return {
            part: (
                (self.heads, field.height(spec.page), field.width),
                field.dtype or self.dtypes[name],
            )
            for part, field in spec.sides[name].fields(self.dims[name]).items()
        }


class Storage:
    """What a layer stores; caches that share pages share it."""

    def __init__(self, spec: LayerSpec, geometry: Geometry, tiles: Tiles | None = None) -> None:
        self.spec = spec
        self.geometry = geometry
        self.tiles = select_tiles(geometry.device) if tiles is None else tiles
        self.used_slots = self.num_slots = (
            0,
            0,
        )  # slots, open and sealed: needed so far, and there
        self.sides: dict[str, PagedTensors] = {}
        self._allocate_tensors((0, 0))

    @cached_property
    def open_nbytes(self) -> int:
        return self.geometry.open_nbytes(self.spec)

    @cached_property
    def sealed_nbytes(self) -> int:
        return self.geometry.sealed_nbytes(self.spec)

    def ensure_slots(self, num_open: int, num_sealed: int) -> None:
        """Have room for so many slots, keeping what is in those that there are."""
        if num_open > self.num_slots[0] or num_sealed > self.num_slots[1]:
            need = max(num_open, self.used_slots[0]), max(num_sealed, self.used_slots[1])
            try:
                self._allocate_tensors(
                    (
                        self._grow_size(need[0], self.num_slots[0]),
                        self._grow_size(need[1], self.num_slots[1]),
                    )
                )
            except MemoryError:
                self._allocate_tensors(need)
        self.used_slots = max(num_open, self.used_slots[0]), max(num_sealed, self.used_slots[1])

    def copy_to_device(self, device: torch.device, tiles: Tiles | None) -> Storage:
        """The same slots in the memory of another device, pages in these tiles or as it likes."""
        twin = Storage(self.spec, replace(self.geometry, device=device), tiles)
        if (device, twin.tiles) == (self.geometry.device, self.tiles):
            return self
        twin.ensure_slots(*self.used_slots)
        by = twin if device.type != "cpu" else self  # a GPU swaps bytes faster than they are sent
        for name, stored in self.sides.items():
            other, (opened, sealed) = twin.sides[name], self.used_slots
            other.open[:opened].copy_(stored.open[:opened])
            for field, pages in stored.sealed.items():
                for first in range(0, sealed, MAX_PAGES_PER_MOVE):
                    some = slice(first, min(first + MAX_PAGES_PER_MOVE, sealed))
                    part = pages[some].to(by.geometry.device)
                    part = retile(f"{name}.{field}", part, self.tiles, twin.tiles)
                    other.sealed[field][some].copy_(part)
        return twin

    def relocate_pages(
        self, old_table: PageTable, new_table: PageTable, num_slots: tuple[int, int]
    ) -> Storage:
        """A storage of so many slots with the pages of one extent, where another says.

        Pages whose slots stay lie where they lay.
        """
        twin = Storage(self.spec, self.geometry, self.tiles)
        stay = (
            old_table.open_table is new_table.open_table,
            old_table.sealed_table is new_table.sealed_table,
        )
        twin.ensure_slots(*(0 if stays else n for stays, n in zip(stay, num_slots, strict=True)))
        if not stay[0]:
            twin._copy_open_from(self, old_table, new_table)
        if not stay[1]:
            twin._copy_sealed_from(self, old_table, new_table)
        sides = {
            name: replace(
                stored,
                open=self.sides[name].open if stay[0] else stored.open,
                sealed=self.sides[name].sealed if stay[1] else stored.sealed,
                summary=self.sides[name].summary if stay[1] else stored.summary,
                derived={},
            )
            for name, stored in twin.sides.items()
        }
        room, used = (
            (old[0] if stay[0] else new[0], old[1] if stay[1] else new[1])
            for old, new in ((self.num_slots, twin.num_slots), (self.used_slots, twin.used_slots))
        )
        twin.__dict__.update(sides=sides, num_slots=room, used_slots=used)
        return twin

    def copy_pages_from(
        self,
        other: Storage,
        old_table: PageTable,
        new_table: PageTable,
        only_slots: tuple[Ints, Ints] | None = None,
    ) -> None:
        """Copy the pages that lie in another storage where one extent says, as the other does.

        All of them, or those to whose slots, open and sealed, nobody else looks.
        """
        opened, sealed = (None, None) if only_slots is None else only_slots
        self._copy_open_from(other, old_table, new_table, opened)
        self._copy_sealed_from(other, old_table, new_table, sealed)

    def _copy_open_from(
        self,
        other: Storage,
        old_table: PageTable,
        new_table: PageTable,
        only_slots: Ints | None = None,
    ) -> None:
        slots = _select_slot_pairs(
            old_table.list_open_slots(), new_table.list_open_slots(), only_slots
        )
        for name, stored in self.sides.items():
            copy_pages({"open": other.sides[name].open}, {"open": stored.open}, *slots)

    def _copy_sealed_from(
        self,
        other: Storage,
        old_table: PageTable,
        new_table: PageTable,
        only_slots: Ints | None = None,
    ) -> None:
        slots = _select_slot_pairs(
            old_table.list_sealed_slots(), new_table.list_sealed_slots(), only_slots
        )
        for name, stored in self.sides.items():
            copy_pages(other.sides[name].sealed, stored.sealed, *slots)

    def _grow_size(self, needed: int, current: int) -> int:
        if needed <= current:
            return current
        return (
            RESERVE_FACTOR * needed if self.geometry.device.type == "cpu" else needed + needed // 8
        )

    def _allocate_tensors(self, num_slots: tuple[int, int]) -> None:
        """Lie in tensors of so many slots."""
        sides, geometry = {}, self.geometry
        for name, codec in self.spec.sides.items():
            shape = (geometry.heads, self.spec.page, geometry.dims[name])
            old = self.sides.get(name)
            rows = self._grow_tensor(
                None if old is None else old.open, shape, geometry.dtypes[name], num_slots, 0
            )
            fields = {
                part: self._grow_tensor(
                    None if old is None else old.sealed[part], shape, dtype, num_slots, 1
                )
                for part, (shape, dtype) in geometry.fields(self.spec, name).items()
            }
            summary = self._make_summary(old, num_slots) if name == "keys" else None
            sides[name] = PagedTensors(codec, rows, fields, self.tiles, summary)
        # In one call: an interrupt finds the old tensors with their numbers, or the new ones.
        self.__dict__.update(sides=sides, num_slots=num_slots)

    def _make_summary(
        self, old_tensors: PagedTensors | None, num_slots: tuple[int, int]
    ) -> PageSummary | None:
        """Of the keys, where pages are selected."""
        if self.spec.select is None:
            return None
        old = None if old_tensors is None else old_tensors.summary
        shape = (self.geometry.heads, 2, self.geometry.dims["keys"])
        of = np.zeros(num_slots[1], np.int64)
        if old is not None:  # before the bounds: who works one out writes it, and then here
            of[: self.used_slots[1]] = old.slot_versions[: self.used_slots[1]]
        bounds = self._grow_tensor(
            None if old is None else old.bounds, shape, self.geometry.dtypes["keys"], num_slots, 1
        )
        return old if old is not None and old.bounds is bounds else PageSummary(bounds, of)

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


def _select_slot_pairs(
    old_slots: Ints, new_slots: Ints, only_slots: Ints | None
) -> tuple[Ints, Ints]:
    """Slots from which to copy, and to which: all, or those that were taken for it."""
    if only_slots is None:
        return old_slots, new_slots
    lacking = np.isin(new_slots, only_slots)
    return old_slots[lacking], new_slots[lacking]


def find_runs(old_slots: Ints, new_slots: Ints) -> list[tuple[slice, slice]]:
    """Slots that lie one behind the other, here and there: they are copied together."""
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
    """Pages from slots to slots, field by field, and no tensor in between."""
    runs = find_runs(old_slots, new_slots)
    for name, tensor in target.items():
        for there, here in runs:
            tensor[here].copy_(source[name][there])
