"""Sealed bytes in tiles: a few rows by a few bytes, tile after tile, as vector lanes like them.

Only the storage and a backend know of this; files and snapshots hold canonical rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvant.contracts import Tiles


def retiled(name: str, field: Tensor, old: Tiles | None, new: Tiles | None) -> Tensor:
    """A field of sealed pages, from the old tiles to the new ones; None is rows as they are."""
    if old == new:
        return field
    rows = field if old is None else old.unpack(name, field)
    return rows if new is None else new.pack(name, rows)


@dataclass(frozen=True)
class Tiled:
    """Tiles of `rows` rows x `width` values for every field that they divide."""

    rows: int = 16
    width: int = 4

    def pack(self, name: str, field: Tensor) -> Tensor:
        return self._swap(field, self.rows, self.width, packed=False)

    def unpack(self, name: str, field: Tensor) -> Tensor:
        return self._swap(field, self.rows, self.width, packed=True)

    def _swap(self, field: Tensor, rows: int, width: int, packed: bool) -> Tensor:
        *lead, height, wide = field.shape
        if height % rows or wide % width:
            return field
        inner = (wide // width, rows) if packed else (rows, wide // width)
        tiles = field.reshape(*lead, height // rows, *inner, width).transpose(-3, -2)
        return tiles.reshape(field.shape)
