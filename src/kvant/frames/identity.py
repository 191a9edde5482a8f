"""Rows stored as they come, and several frames one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvant.contracts import Frame


@dataclass(frozen=True)
class Identity:
    """A = 1."""

    name: ClassVar[str] = "identity"
    trivial: ClassVar[bool] = True

    def rows(self, x: Tensor) -> Tensor:
        return x

    def queries(self, q: Tensor) -> Tensor:
        return q

    def outputs(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Product:
    """A = A_n ... A_1: the first frame meets the rows first, and leaves them last."""

    frames: tuple[Frame, ...]
    name: ClassVar[str] = "product"

    @property
    def trivial(self) -> bool:
        return all(frame.trivial for frame in self.frames)

    def rows(self, x: Tensor) -> Tensor:
        for frame in self.frames:
            x = frame.rows(x)
        return x

    def queries(self, q: Tensor) -> Tensor:
        for frame in self.frames:
            q = frame.queries(q)
        return q

    def outputs(self, x: Tensor) -> Tensor:
        for frame in reversed(self.frames):
            x = frame.outputs(x)
        return x
