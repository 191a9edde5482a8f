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

from kvant.attention import arrangement
from kvant.contracts import Fields, Stored, Summary, Tiles
from kvant.extent import Extent, Ints
from kvant.modes import no_inference_mode
from kvant.recipes import LayerSpec

OWN = 1 << 17  # bytes from which on a tensor is a mapping, which is a whole number of pages
LARGE = 1 << 27  # bytes from which on it lies in large pages of the system, which are found sooner
FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # 0: not on this system


def reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose values are to be written yet."""
    with no_inference_mode():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        large = FLAGS and device.type == "cpu" and nbytes >= OWN
        if large and type(torch.empty(0, device=device)) is Tensor:  # not in a mode of fake ones
            return torch.frombuffer(_mapping(nbytes), dtype=dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        found = mmap.mmap(-1, nbytes, flags=FLAGS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{nbytes} bytes for a cache are not to be had: a smaller format, "
            "a window or a shorter context takes less (kvant.plan)"
        ) from error
    if nbytes >= LARGE and (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # a system that has none
            found.madvise(huge)
    return found


def retiled(
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


MOVED_AT_ONCE = 32  # pages: bounds the scratch of a move
RESERVED = 4  # times what is needed: address space costs nothing on a CPU


@dataclass(frozen=True)
class Geometry:
    """What all rows of a layer have in common once the first ones came."""

    heads: int
    dims: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    device: torch.device

    @classmethod
    def of(cls, rows: Fields) -> Geometry:
        keys = rows["keys"]
        dims = {name: tensor.shape[3] for name, tensor in rows.items()}
        dtypes = {name: tensor.dtype for name, tensor in rows.items()}
        return cls(keys.shape[1], dims, dtypes, keys.device)

    def of_dtype(self, dtype: torch.dtype | None) -> Geometry:
        """The same in the dtype that a recipe asks for, if it asks for one."""
        return self if dtype is None else replace(self, dtypes=dict.fromkeys(self.dims, dtype))

    def fits(self, rows: Fields) -> bool:
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
        self.tiles = arrangement(geometry.device) if tiles is None else tiles
        self.used = self.room = (0, 0)  # slots, open and sealed: needed so far, and there
        self.sides: dict[str, Stored] = {}
        self._lie((0, 0))

    @cached_property
    def open_nbytes(self) -> int:
        return self.geometry.open_nbytes(self.spec)

    @cached_property
    def sealed_nbytes(self) -> int:
        return self.geometry.sealed_nbytes(self.spec)

    def fit(self, opened: int, sealed: int) -> None:
        """Have room for so many slots, keeping what is in those that there are."""
        if opened > self.room[0] or sealed > self.room[1]:
            need = max(opened, self.used[0]), max(sealed, self.used[1])
            try:
                self._lie((self._room(need[0], self.room[0]), self._room(need[1], self.room[1])))
            except MemoryError:
                self._lie(need)
        self.used = max(opened, self.used[0]), max(sealed, self.used[1])

    def moved(self, device: torch.device, tiles: Tiles | None) -> Storage:
        """The same slots in the memory of another device, pages in these tiles or as it likes."""
        twin = Storage(self.spec, replace(self.geometry, device=device), tiles)
        if (device, twin.tiles) == (self.geometry.device, self.tiles):
            return self
        twin.fit(*self.used)
        by = twin if device.type != "cpu" else self  # a GPU swaps bytes faster than they are sent
        for name, stored in self.sides.items():
            other, (opened, sealed) = twin.sides[name], self.used
            other.open[:opened].copy_(stored.open[:opened])
            for field, pages in stored.sealed.items():
                for first in range(0, sealed, MOVED_AT_ONCE):
                    some = slice(first, min(first + MOVED_AT_ONCE, sealed))
                    part = pages[some].to(by.geometry.device)
                    part = retiled(f"{name}.{field}", part, self.tiles, twin.tiles)
                    other.sealed[field][some].copy_(part)
        return twin

    def moved_to(self, was: Extent, now: Extent, slots: tuple[int, int]) -> Storage:
        """A storage of so many slots with the pages of one extent, where another says.

        Pages whose slots stay lie where they lay.
        """
        twin = Storage(self.spec, self.geometry, self.tiles)
        stay = was.open is now.open, was.sealed is now.sealed
        twin.fit(*(0 if stays else n for stays, n in zip(stay, slots, strict=True)))
        if not stay[0]:
            twin._take_open(self, was, now)
        if not stay[1]:
            twin._take_sealed(self, was, now)
        sides = {
            name: replace(
                stored,
                open=self.sides[name].open if stay[0] else stored.open,
                sealed=self.sides[name].sealed if stay[1] else stored.sealed,
                summary=self.sides[name].summary if stay[1] else stored.summary,
                memo={},
            )
            for name, stored in twin.sides.items()
        }
        room, used = (
            (old[0] if stay[0] else new[0], old[1] if stay[1] else new[1])
            for old, new in ((self.room, twin.room), (self.used, twin.used))
        )
        twin.__dict__.update(sides=sides, room=room, used=used)
        return twin

    def take(
        self, other: Storage, was: Extent, now: Extent, taken: tuple[Ints, Ints] | None = None
    ) -> None:
        """Copy the pages that lie in another storage where one extent says, as the other does.

        All of them, or those to whose slots, open and sealed, nobody else looks.
        """
        opened, sealed = (None, None) if taken is None else taken
        self._take_open(other, was, now, opened)
        self._take_sealed(other, was, now, sealed)

    def _take_open(
        self, other: Storage, was: Extent, now: Extent, taken: Ints | None = None
    ) -> None:
        slots = _pairs(was.open_slots(), now.open_slots(), taken)
        for name, stored in self.sides.items():
            copy_pages({"open": other.sides[name].open}, {"open": stored.open}, *slots)

    def _take_sealed(
        self, other: Storage, was: Extent, now: Extent, taken: Ints | None = None
    ) -> None:
        slots = _pairs(was.sealed_slots(), now.sealed_slots(), taken)
        for name, stored in self.sides.items():
            copy_pages(other.sides[name].sealed, stored.sealed, *slots)

    def _room(self, need: int, have: int) -> int:
        if need <= have:
            return have
        return RESERVED * need if self.geometry.device.type == "cpu" else need + need // 8

    def _lie(self, room: tuple[int, int]) -> None:
        """Lie in tensors of so many slots."""
        sides, geometry = {}, self.geometry
        for name, codec in self.spec.sides.items():
            shape = (geometry.heads, self.spec.page, geometry.dims[name])
            old = self.sides.get(name)
            rows = self._grown(
                None if old is None else old.open, shape, geometry.dtypes[name], room, 0
            )
            fields = {
                part: self._grown(None if old is None else old.sealed[part], shape, dtype, room, 1)
                for part, (shape, dtype) in geometry.fields(self.spec, name).items()
            }
            summary = self._summary(old, room) if name == "keys" else None
            sides[name] = Stored(codec, rows, fields, self.tiles, summary)
        # In one call: an interrupt finds the old tensors with their numbers, or the new ones.
        self.__dict__.update(sides=sides, room=room)

    def _summary(self, stored: Stored | None, room: tuple[int, int]) -> Summary | None:
        """Of the keys, where pages are selected."""
        if self.spec.select is None:
            return None
        old = None if stored is None else stored.summary
        shape = (self.geometry.heads, 2, self.geometry.dims["keys"])
        of = np.zeros(room[1], np.int64)
        if old is not None:  # before the bounds: who works one out writes it, and then here
            of[: self.used[1]] = old.of[: self.used[1]]
        bounds = self._grown(
            None if old is None else old.bounds, shape, self.geometry.dtypes["keys"], room, 1
        )
        return old if old is not None and old.bounds is bounds else Summary(bounds, of)

    def _grown(
        self,
        old: Tensor | None,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        room: tuple[int, int],
        which: int,
    ) -> Tensor:
        if old is not None and room[which] == self.room[which]:
            return old
        new = reserved((room[which], *shape), dtype, self.geometry.device)
        if old is not None:
            used = self.used[which]
            new[:used] = old[:used]
        return new


def _pairs(old: Ints, new: Ints, taken: Ints | None) -> tuple[Ints, Ints]:
    """Slots from which to copy, and to which: all, or those that were taken for it."""
    if taken is None:
        return old, new
    lacking = np.isin(new, taken)
    return old[lacking], new[lacking]


def in_runs(old: Ints, new: Ints) -> list[tuple[slice, slice]]:
    """Slots that lie one behind the other, here and there: they are copied together."""
    ends = np.flatnonzero((np.diff(old) != 1) | (np.diff(new) != 1)) + 1
    first, stop = [0, *ends.tolist()], [*ends.tolist(), len(old)]
    return [
        (slice(int(old[i]), int(old[i]) + n), slice(int(new[i]), int(new[i]) + n))
        for i, n in ((i, j - i) for i, j in zip(first, stop, strict=True))
        if n
    ]


def copy_pages(source: Fields, target: Fields, old: Ints, new: Ints) -> None:
    """Pages from slots to slots, field by field, and no tensor in between."""
    runs = in_runs(old, new)
    for name, tensor in target.items():
        for there, here in runs:
            tensor[here].copy_(source[name][there])
