"""Private, contiguous memory for the units (rows or pages) of one layer.

Concat (step 1), stepped (256) and preallocated (capacity) are this one class with other numbers.
Units are numbered from 0 on; the first unit kept lies in slot 0, so letting old units go is
arithmetic until room is needed. On a CPU a growing buffer reserves twice what it needs: memory
that is never touched costs nothing, and growth seldom copies.

A buffer does not know what its units mean, nor which of them are alive: a `Span` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvant.arenas.reserve import reserved
from kvant.contracts import Fields
from kvant.native import check_room, put

GROWING = -1  # marks the axis along which units lie in a slab's shape


@dataclass(frozen=True)
class Slab:
    """One tensor of a buffer; its shape says `GROWING` where the units lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def axis(self) -> int:
        return self.shape.index(GROWING)

    @property
    def unit_nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= 1 if size == GROWING else size
        return count * self.dtype.itemsize

    def empty(self, slots: int, device: torch.device) -> Tensor:
        shape = tuple(slots if size == GROWING else size for size in self.shape)
        return reserved(shape, self.dtype, device)


@dataclass(frozen=True)
class Growth:
    """How many slots a buffer takes for the units it needs."""

    step: int
    at_once: int | None = None  # taken with the first unit, and never more is asked for
    bound: int | None = None  # what steady use never passes

    def slots(self, need: int) -> int:
        if need == 0:
            return 0
        rounded = -(-need // self.step) * self.step if self.at_once is None else self.at_once
        return rounded if self.bound is None else max(need, min(rounded, self.bound))


class Buffer:
    """Slabs that grow together."""

    def __init__(self, slabs: Mapping[str, Slab], growth: Growth, device: torch.device) -> None:
        self.slabs = dict(slabs)
        self.growth = growth
        self.device = device
        self.base = 0  # the unit in slot 0
        self.taken = 0  # slots that count
        self.reserved = 0  # slots that there are: the stride between sequences
        self._tensors = {name: slab.empty(0, device) for name, slab in self.slabs.items()}
        # Units are rows [B, H, slots, D], which is all that `put` copies.
        self._of_rows = {slab.axis for slab in self.slabs.values()} == {2}

    @property
    def unit_nbytes(self) -> int:
        return sum(slab.unit_nbytes for slab in self.slabs.values())

    @property
    def nbytes(self) -> int:
        return self.taken * self.unit_nbytes

    def slots(self) -> Fields:
        """Every slot, whatever sequence it belongs to; units lie along the second dimension."""
        return {name: tensor.flatten(0, 1) for name, tensor in self._tensors.items()}

    def table(self, first: int, stop: int) -> Tensor:
        """The slots of units [first, stop) of every sequence, [B, n]."""
        batch = next((slab.shape[0] for slab in self.slabs.values()), 1)
        if first == stop:  # rows that never are sealed ask for this at every token
            return torch.empty(batch, 0, dtype=torch.int64, device=self.device)
        unit = torch.arange(first - self.base, stop - self.base, device=self.device)
        return torch.arange(batch, device=self.device)[:, None] * self.reserved + unit

    def tensors(self, first: int, stop: int) -> Fields:
        """Units [first, stop) without a copy; none of them may lie anywhere."""
        slot = first - self.base if first < stop else 0
        return {
            name: tensor.narrow(self.slabs[name].axis, slot, stop - first)
            for name, tensor in self._tensors.items()
        }

    def located(self, first: int) -> tuple[Fields, int]:
        """The tensors that units lie in, and the slot of unit `first`."""
        return self._tensors, first - self.base

    def write(self, first: int, units: Fields) -> None:
        self._put(self._tensors, first - self.base, units)

    def allocate(self, first: int, live: int, stop: int) -> None:
        """Make room for units [first, stop), keeping what [first, live) holds."""
        base, taken = self._room(first, live, stop)
        if live <= first:  # nothing to keep: units may begin anywhere
            self.base = base
        if base != self.base or stop - base > self.reserved:
            self._move(first, live, taken, base)
        self.taken = taken

    def close_up(self, first: int, live: int, stop: int) -> None:
        """Move [first, live) within the same memory where that makes room up to `stop`."""
        base, slots = self._room(first, live, stop)
        if base == self.base or slots > self.reserved:
            return
        kept = {name: units.clone() for name, units in self.tensors(first, live).items()}
        self.base = base
        self.write(first, kept)

    def nbytes_for(self, first: int, live: int, stop: int) -> int:
        return self._room(first, live, stop)[1] * self.unit_nbytes

    def adopt(self, first: int, units: Fields, stop: int) -> None:
        """Hold [first, stop) in the room it would have taken to grow there from nothing."""
        bound = self.growth.bound
        grown = stop if bound is None else max(stop, first + min(stop, bound))
        self.allocate(first, first, grown)
        self.write(first, units)

    def hold(self, first: int, units: Fields, stop: int) -> None:
        """Hold [first, stop) in exactly their room; the next units take what growing takes."""
        self._lie(first, stop - first, stop - first, first, units)

    def share(self, first: int, stop: int) -> Buffer:
        """A private arena cannot share: a copy of units [first, stop)."""
        return self._copy(self.slabs, first, self.tensors(first, stop), self.taken)

    def select(self, index: Tensor, first: int, stop: int) -> Buffer:
        """The sequences `index` of every slab, as a new buffer."""
        slabs = {
            name: replace(slab, shape=(len(index), *slab.shape[1:]))
            for name, slab in self.slabs.items()
        }
        picked = {k: t.index_select(0, index) for k, t in self.tensors(first, stop).items()}
        return self._copy(slabs, first, picked, self.taken)

    def moved(self, device: torch.device, first: int, stop: int) -> Buffer:
        return self._copy(self.slabs, first, self.tensors(first, stop), self.taken, device)

    def release(self, first: int, stop: int) -> Buffer:
        """Only [first, stop) is needed: give back what a long chunk took beyond the bound."""
        bound = self.growth.bound
        if bound is None or self.taken <= bound:
            return self
        return self._copy(self.slabs, first, self.tensors(first, stop), bound)

    def _copy(
        self,
        slabs: Mapping[str, Slab],
        first: int,
        units: Fields,
        slots: int,
        device: torch.device | None = None,
    ) -> Buffer:
        twin = Buffer(slabs, self.growth, device or self.device)
        twin.allocate(first, first, first + slots)
        twin.write(first, units)
        return twin

    def _room(self, first: int, live: int, stop: int) -> tuple[int, int]:
        """The unit to lie in slot 0, and the slots that will count, for units [first, stop)."""
        base, bound = first if live <= first else self.base, self.growth.bound
        if bound is not None and stop - base > max(bound, self.taken):  # close the gap in front
            return first, max(bound, self.growth.slots(stop - first))
        return base, max(self.taken, self.growth.slots(stop - base))

    def _move(self, first: int, live: int, slots: int, base: int) -> None:
        """Units [first, live) in new tensors: whoever reads the old ones is not disturbed."""
        self._lie(base, slots, self._reserve(slots), first, self.tensors(first, live))

    def _lie(self, base: int, taken: int, slots: int, first: int, units: Fields) -> None:
        """Units from `first` on in new tensors, whose first slot is that of `base`."""
        tensors = {name: slab.empty(slots, self.device) for name, slab in self.slabs.items()}
        self._put(tensors, first - base, units)
        # In one call: an interrupt finds the old tensors with their numbers, or the new ones.
        self.__dict__.update(base=base, taken=taken, reserved=slots, _tensors=tensors)

    def _put(self, tensors: Fields, slot: int, units: Fields) -> None:
        if self._of_rows and put(units, tensors, slot):
            return
        for name, tensor in units.items():
            axis = self.slabs[name].axis
            count = tensor.shape[axis]
            check_room(slot, count, tensors[name].shape[axis])
            tensors[name].narrow(axis, slot, count).copy_(tensor)

    def _reserve(self, slots: int) -> int:
        grows = self.growth.bound is None and self.growth.at_once is None and self.growth.step > 1
        if grows and self.device.type == "cpu":
            return 2 * slots
        return slots
