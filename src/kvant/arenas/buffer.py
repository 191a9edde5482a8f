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

import torch
from torch import Tensor

from kvant.contracts import Fields

GROWING = -1  # marks the axis along which units lie in a slab's shape


@dataclass(frozen=True)
class Slab:
    """One tensor of a buffer; its shape says `GROWING` where the units lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
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
        # A tensor born in inference mode could never be written outside it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Growth:
    """How many slots a buffer takes for the units it needs."""

    step: int
    at_once: int | None = None  # taken with the first unit, and never more is asked for
    bound: int | None = None  # what steady use never passes

    def slots(self, need: int) -> int:
        rounded = -(-need // self.step) * self.step if self.at_once is None else self.at_once
        return rounded if self.bound is None else max(need, min(rounded, self.bound))


class Buffer:
    """Slabs that grow together."""

    def __init__(self, slabs: Mapping[str, Slab], growth: Growth, device: torch.device) -> None:
        self.slabs = dict(slabs)
        self.growth = growth
        self.device = device
        self.base = 0  # the unit in slot 0
        self.slots = 0  # taken, and counted
        self._reserved = 0
        self._tensors = {name: slab.empty(0, device) for name, slab in self.slabs.items()}

    @property
    def unit_nbytes(self) -> int:
        return sum(slab.unit_nbytes for slab in self.slabs.values())

    @property
    def nbytes(self) -> int:
        return self.slots * self.unit_nbytes

    @property
    def reserved(self) -> int:
        """Slots that a tensor has, taken or not: the stride between sequences."""
        return self._reserved

    def whole(self) -> Fields:
        """The tensors with every slot, as kernels address them."""
        return self._tensors

    def tensors(self, first: int, stop: int) -> Fields:
        """Units [first, stop) without a copy; none of them may lie anywhere."""
        slot = first - self.base if first < stop else 0
        return {
            name: tensor.narrow(self.slabs[name].axis, slot, stop - first)
            for name, tensor in self._tensors.items()
        }

    def write(self, first: int, units: Fields) -> None:
        for name, tensor in units.items():
            axis = self.slabs[name].axis
            self._tensors[name].narrow(axis, first - self.base, tensor.shape[axis]).copy_(tensor)

    def allocate(self, first: int, live: int, stop: int) -> None:
        """Make room for units [first, stop), keeping what [first, live) holds."""
        if live <= first:
            self.base = first
        bound = self.growth.bound
        if bound is not None and stop - self.base > bound:
            slots = max(self.growth.slots(stop - first), min(self.slots, bound))
            self._settle(first, live, slots)
        need = stop - self.base
        if need > self._reserved:
            self._settle(first, live, self.growth.slots(need), base=self.base)
        self.slots = max(self.slots, self.growth.slots(need))

    def share(self, first: int, stop: int) -> Buffer:
        """A private arena cannot share: a copy of units [first, stop)."""
        return self._copy(self.slabs, first, self.tensors(first, stop), self.slots)

    def select(self, index: Tensor, first: int, stop: int) -> Buffer:
        """The sequences `index` of every slab, as a new buffer."""
        slabs = {
            name: replace(slab, shape=(len(index), *slab.shape[1:]))
            for name, slab in self.slabs.items()
        }
        picked = {k: t.index_select(0, index) for k, t in self.tensors(first, stop).items()}
        return self._copy(slabs, first, picked, self.slots)

    def release(self, first: int, stop: int) -> Buffer:
        """Only [first, stop) is needed: give back what a long chunk took beyond the bound."""
        bound = self.growth.bound
        if bound is None or self.slots <= bound:
            return self
        return self._copy(self.slabs, first, self.tensors(first, stop), bound)

    def _copy(self, slabs: Mapping[str, Slab], first: int, units: Fields, slots: int) -> Buffer:
        twin = Buffer(slabs, self.growth, self.device)
        twin.allocate(first, first, first + slots)
        twin.write(first, units)
        return twin

    def _settle(self, first: int, live: int, slots: int, base: int | None = None) -> None:
        """Move units [first, live) to tensors of at least `slots` slots, or to their front."""
        base = first if base is None else base
        if slots > self._reserved or slots < self.slots:
            self._move(first, live, base, self._reserve(slots))
            self.slots = slots
        else:
            kept = {name: tensor.clone() for name, tensor in self.tensors(first, live).items()}
            self.base = base
            self.write(first, kept)

    def _move(self, first: int, live: int, base: int, reserved: int) -> None:
        kept = self.tensors(first, live)
        self._tensors = {n: slab.empty(reserved, self.device) for n, slab in self.slabs.items()}
        self.base, self._reserved = base, reserved
        self.write(first, kept)

    def _reserve(self, slots: int) -> int:
        grows = self.growth.bound is None and self.growth.at_once is None and self.growth.step > 1
        if grows and self.device.type == "cpu":
            return 2 * slots
        return slots


@dataclass(frozen=True)
class Span:
    """The units [first, stop) of a buffer: what is alive in it, as an immutable value.

    Appending writes behind `stop` or into a new buffer, so an older span of the same buffer
    still reads what it read. That is how an append is undone.
    """

    buffer: Buffer
    first: int = 0
    stop: int = 0

    def __len__(self) -> int:
        return self.stop - self.first

    @classmethod
    def at(cls, buffer: Buffer, first: int, units: Fields, count: int) -> Span:
        """A span of `count` units in a new buffer, which takes what it would have grown to."""
        bound = buffer.growth.bound
        stop = first + count
        buffer.allocate(first, first, stop if bound is None else first + min(stop, bound))
        return cls(buffer, first, first).extended(units, count)

    @property
    def nbytes_used(self) -> int:
        return len(self) * self.buffer.unit_nbytes

    def tensors(self) -> Fields:
        return self.buffer.tensors(self.first, self.stop)

    def extended(self, units: Fields, count: int) -> Span:
        self.buffer.allocate(self.first, self.stop, self.stop + count)
        self.buffer.write(self.stop, units)
        return Span(self.buffer, self.first, self.stop + count)

    def cut(self, first: int, stop: int) -> Span:
        """The part inside [first, stop); empty where they do not meet."""
        first = min(max(first, self.first), self.stop)
        return Span(self.buffer, first, max(first, min(stop, self.stop)))

    def settled(self) -> Span:
        return Span(self.buffer.release(self.first, self.stop), self.first, self.stop)

    def shared(self) -> Span:
        return Span(self.buffer.share(self.first, self.stop), self.first, self.stop)

    def selected(self, index: Tensor) -> Span:
        return Span(self.buffer.select(index, self.first, self.stop), self.first, self.stop)
