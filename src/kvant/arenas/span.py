"""What is alive in an arena, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvant.contracts import Arena, Fields


@dataclass(frozen=True)
class Placed:
    """Where units lie: every slot, the fields `side.name` by side, and the table into them."""

    sides: dict[str, dict[str, Tensor]]
    table: Tensor

    @classmethod
    def of(cls, span: Span) -> Placed:
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in span.arena.slots().items():
            side, _, field = name.partition(".")
            sides.setdefault(side, {})[field] = tensor
        return cls(sides, span.arena.table(span.first, span.stop))


@dataclass(frozen=True)
class Span:
    """The units [first, stop) of an arena.

    Appending writes behind `stop` or into another arena, so an older span still reads what it
    read. That is how an append is undone.
    """

    arena: Arena
    first: int = 0
    stop: int = 0

    @classmethod
    def adopted(cls, arena: Arena, first: int, units: Fields, stop: int) -> Span:
        """Units in a new arena, which takes what it would have grown to."""
        arena.adopt(first, units, stop)
        return cls(arena, first, stop)

    @classmethod
    def tight(cls, arena: Arena, first: int, units: Fields, stop: int) -> Span:
        """Units in a new arena, which takes no more than they need until more come."""
        arena.hold(first, units, stop)
        return cls(arena, first, stop)

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def nbytes_used(self) -> int:
        return len(self) * self.arena.unit_nbytes

    @cached_property
    def placed(self) -> Placed:
        """Worked out once: a page falls due seldom, and this is asked for at every token."""
        return Placed.of(self)

    def tensors(self) -> Fields:
        return self.arena.tensors(self.first, self.stop)

    def make_room(self, stop: int) -> None:
        """Let the arena have room up to `stop`.

        What was worked out is forgotten: it would hold the memory that the units have left, in
        every layer until all commit.
        """
        self.arena.allocate(self.first, self.stop, stop)
        self.__dict__.pop("placed", None)

    def extended(self, units: Fields, count: int) -> Span:
        self.make_room(self.stop + count)
        self.arena.write(self.stop, units)
        return Span(self.arena, self.first, self.stop + count)

    def cut(self, first: int, stop: int) -> Span:
        """The part inside [first, stop); empty where they do not meet."""
        if first <= self.first and self.stop <= stop:
            return self
        first = min(max(first, self.first), self.stop)
        return Span(self.arena, first, max(first, min(stop, self.stop)))

    def settled(self) -> Span:
        arena = self.arena.release(self.first, self.stop)
        return self if arena is self.arena else Span(arena, self.first, self.stop)

    def shared(self) -> Span:
        return Span(self.arena.share(self.first, self.stop), self.first, self.stop)

    def moved(self, device: torch.device) -> Span:
        return Span(self.arena.moved(device, self.first, self.stop), self.first, self.stop)

    def selected(self, index: Tensor) -> Span:
        return Span(self.arena.select(index, self.first, self.stop), self.first, self.stop)
