"""How sealed bytes lie for the native kernels, whose vector lanes are rows or channels.

Codes of keys: tiles of 16 rows x 4 bytes. Codes of values: 4 rows of one byte after another. Scales
and biases: 16 rows of one group after another. Raw rows stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILES = {  # of a field: rows and values that lie together
    "keys.codes": (16, 4),
    "values.codes": (4, 1),
    "keys.scale": (16, 1),
    "keys.bias": (16, 1),
    "values.scale": (16, 1),
    "values.bias": (16, 1),
}


@dataclass(frozen=True)
class Lanes:
    """Fields that their tile does not divide stay as they are, and are not read natively."""

    def pack(self, name: str, field: Tensor) -> Tensor:
        return _swapped(field, name, packed=False)

    def unpack(self, name: str, field: Tensor) -> Tensor:
        return _swapped(field, name, packed=True)


def _swapped(field: Tensor, name: str, packed: bool) -> Tensor:
    *lead, height, wide = field.shape
    rows, width = TILES.get(name, (1, 1))
    if rows == 1 or height % rows or wide % width:
        return field
    inner = (wide // width, rows) if packed else (rows, wide // width)
    tiles = field.reshape(*lead, height // rows, *inner, width).transpose(-3, -2)
    return tiles.reshape(field.shape)
