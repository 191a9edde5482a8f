"""A scale for each channel that is still to be fitted to a model: what `smooth` in a spec says.

It holds the place of a Diagonal. Which one that is follows from a model, so it is put there where
the model is known; before that it serves no row, and no file has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from torch import Tensor

from kvant.contracts import Frame
from kvant.errors import SpecError
from kvant.frames.product import Product


@dataclass(frozen=True)
class Smooth:
    """A Diagonal to be."""

    trivial: ClassVar[bool] = False

    def rows(self, x: Tensor) -> Tensor:
        self.refuse()

    def queries(self, q: Tensor) -> Tensor:
        self.refuse()

    def outputs(self, x: Tensor) -> Tensor:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise SpecError(
            "smooth needs channel scales, which are fitted to a model: take the cache, or its "
            "spec, from kvant.cache_for(model, ...)"
        )


def smoothed(frame: Frame) -> Frame:
    """The same behind a scale that is to be fitted."""
    return Smooth() if frame.trivial else Product((Smooth(), frame))


def waits(frame: Frame) -> bool:
    """Is a scale still to be fitted?"""
    if isinstance(frame, Product):
        return any(waits(part) for part in frame.frames)
    return isinstance(frame, Smooth)


def fitted(frame: Frame, scale: Frame) -> Frame:
    """The same with `scale` where one was to be fitted."""
    if isinstance(frame, Product):
        return Product(tuple(fitted(part, scale) for part in frame.frames))
    return scale if isinstance(frame, Smooth) else frame
