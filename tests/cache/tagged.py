"""Rows whose value is their position, so that a failure prints [7, 8, 9, 11].

Sequence b and head h add 1000 * (b * heads + h), so rows of different heads differ. All channels of
a row are equal, which affine formats store exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache.tiled import make_tiled_cache
from kvant import Cache, CacheSpec, LayerSpec, parse
from kvant.cache import PagedLayer
from kvant.contracts import Codec, Snapshot, Tiles, View
from kvant.recipes import Recipe
from kvant.retention import Retention


class LayerCache:
    """A cache of one layer, with the operations of both."""

    def __init__(
        self, spec: Recipe, tiles: Tiles | None = None, cache: Cache | None = None
    ) -> None:
        self.tiles = tiles
        self.cache = cache or make_tiled_cache(None, CacheSpec((spec,)), tiles)

    def __getattr__(self, name: str) -> Any:
        layer = self.cache[0]
        return getattr(layer if hasattr(layer, name) else self.cache, name)

    def fork(self) -> LayerCache:
        return LayerCache(self.spec, self.tiles, self.cache.fork())

    def recode(self, spec: LayerSpec) -> None:
        self.cache.recode(CacheSpec((spec,)))

    def snapshot(self) -> Snapshot:
        """Return the parts of the layer's snapshot without the layer name."""
        whole = self.cache.snapshot()
        parts = [{n.removeprefix("0/"): x for n, x in part.items()} for part in _parts(whole)]
        return Snapshot(*parts)

    def restore(self, snapshot: Snapshot) -> None:
        parts = [{f"0/{name}": x for name, x in part.items()} for part in _parts(snapshot)]
        self.cache.restore(Snapshot(*parts))


def _parts(snapshot: Snapshot) -> tuple[Any, Any]:
    return snapshot.tensors, snapshot.numbers


def make_rows(
    start: int,
    stop: int,
    batch: int = 1,
    heads: int = 1,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return rows [batch, heads, stop - start, dim]."""
    owner = 1000 * torch.arange(batch * heads).view(batch, heads, 1, 1)
    return (owner + torch.arange(start, stop).view(1, 1, -1, 1)).to(dtype).repeat(1, 1, 1, dim)


def append_rows(state: PagedLayer | LayerCache, count: int, **shape: int) -> View:
    """Append the next `count` rows."""
    new = make_rows(state.length, state.length + count, **shape)
    view: View = state.append(new, new)
    return view


def forward(cache: Cache, count: int, num_appended: int | None = None, **shape: int) -> list[View]:
    """Append the next `count` rows to every layer, or to the first `num_appended` of them."""
    place = cache.length
    new = make_rows(place, place + count, **shape)
    return [
        cache[i].append(new, new)
        for i in range(len(cache) if num_appended is None else num_appended)
    ]


def read_tags(state: PagedLayer | LayerCache, sequence: int = 0, head: int = 0) -> list[int]:
    """Return the tags that one head reads, after checking that all channels and both sides
    agree.
    """
    keys, values = state.read()
    assert torch.equal(keys, values)
    assert torch.equal(keys, keys[..., :1].expand_as(keys))
    return [round(v) for v in keys[sequence, head, :, 0].tolist()]


def assert_same(a: Snapshot, b: Snapshot) -> None:
    """Whether two results are equal bit for bit; NaN equals itself."""
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, other)]
        assert torch.equal(*bits), name


def make_layer(text: str) -> LayerSpec:
    spec = parse(text, 1).layers[0]
    assert isinstance(spec, LayerSpec)
    return spec


def make_recipe(codec: Codec, rule: Retention, **rest: int) -> LayerSpec:
    return LayerSpec(codec, codec, rule, **rest)  # type: ignore[arg-type]
