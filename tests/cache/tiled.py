"""A page layout that no backend reads: cache operations must not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvant import Cache
from kvant.cache.layout import CacheLayout
from kvant.contracts import Tiles
from kvant.pages.storage import TileSelector
from kvant.recipes import AnySpec


@dataclass(frozen=True)
class Tiled:
    """Tiles of `rows` rows x `width` values for every field that they divide."""

    rows: int = 16
    width: int = 4

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return self._swapped(field, into, packed=False)

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        return self._swapped(field, into, packed=True)

    def _swapped(self, field: Tensor, into: Tensor | None, *, packed: bool) -> Tensor:
        *lead, height, value_dim = field.shape
        if not (height % self.rows or value_dim % self.width):
            inner = (self.rows, value_dim // self.width)
            inner = inner[::-1] if packed else inner
            tiles = field.reshape(*lead, height // self.rows, *inner, self.width)
            field = tiles.transpose(-3, -2).reshape(field.shape)
        return field if into is None else into.copy_(field)


def make_tiled_cache(num_layers: int | None, spec: AnySpec, tiles: Tiles | None) -> Cache:
    """Return a cache whose pages are in `tiles` on every device; None: the default."""
    if tiles is None:
        return Cache(num_layers, spec)
    return make_selecting_cache(num_layers, spec, lambda device: tiles)


def make_selecting_cache(
    num_layers: int | None, spec: AnySpec, select_tiles: TileSelector
) -> Cache:
    cache = Cache(num_layers, spec)
    layout = CacheLayout.from_spec(cache.spec, select_tiles=select_tiles)
    cache.holder.state = replace(cache.holder.state, layout=layout)
    return cache
