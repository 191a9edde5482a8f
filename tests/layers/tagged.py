"""Rows whose value is their position, so that a failure reads [7, 8, 9, 11].

Sequence b and head h add 1000 * (b * heads + h): rows of another head cannot pass for one's own.
Every channel of a row is alike, which affine formats store exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant import Cache, LayerSpec, parse
from kvant.contracts import Codec, LayerState, Retention, Snapshot, View


def rows(
    start: int,
    stop: int,
    batch: int = 1,
    heads: int = 1,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[batch, heads, stop - start, dim]."""
    owner = 1000 * torch.arange(batch * heads).view(batch, heads, 1, 1)
    return (owner + torch.arange(start, stop).view(1, 1, -1, 1)).to(dtype).repeat(1, 1, 1, dim)


def put(state: LayerState, count: int, **shape: int) -> View:
    """Append the next `count` rows."""
    new = rows(state.length, state.length + count, **shape)
    view: View = state.append(new, new)
    return view


def forward(cache: Cache, count: int, upto: int | None = None, **shape: int) -> list[View]:
    """Append the next `count` rows to every layer, or to the first `upto` of them."""
    place = cache.length
    new = rows(place, place + count, **shape)
    return [cache[i].append(new, new) for i in range(len(cache) if upto is None else upto)]


def told(state: LayerState, sequence: int = 0, head: int = 0) -> list[int]:
    """The tags that one head reads, if all channels and both sides say the same."""
    keys, values = state.read()
    assert torch.equal(keys, values)
    assert torch.equal(keys, keys[..., :1].expand_as(keys))
    return [round(v) for v in keys[sequence, head, :, 0].tolist()]


def same(a: Snapshot, b: Snapshot) -> None:
    """Bit for bit; NaN equals itself."""
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, other)]
        assert torch.equal(*bits), name


def layer(text: str) -> LayerSpec:
    spec = parse(text, 1).layers[0]
    assert isinstance(spec, LayerSpec)
    return spec


def recipe(codec: Codec, rule: Retention, **rest: int) -> LayerSpec:
    return LayerSpec(codec, codec, rule, **rest)  # type: ignore[arg-type]
