"""A cache in pieces is the cache: put together again, it has the same snapshot to the bit."""

from __future__ import annotations

import pytest
import torch

import kvant
from kvant.cache.pieces import Pieces, pages_of, together
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch

SPECS = (
    *("raw", "affine8", "affine4", "turbo4v2", "fp8", "raw,page=128", "affine8,slack=70"),
    *("raw,window=100", "raw,window=100,sinks=70", "affine8,window=200", "affine8,sinks=4"),
    *("affine4,window=300,sinks=4", "affine4,edge=1:raw", "affine8,start=300"),
    *("affine8,window=100,step=512", "raw,capacity=1024", "affine6v4,tail=70"),
)
LENGTHS = (1, 63, 64, 65, 128, 200, 256, 300, 513)


def filled(spec: str, length: int) -> kvant.Cache:
    """A cache of rows whose values are their positions, read in two chunks and a token."""
    cache = kvant.Cache(3, spec)
    rows = torch.arange(length, dtype=torch.float32)[:, None] + torch.arange(64) / 64
    for begin, stop in ((0, length // 2), (length // 2, length - 1), (length - 1, length)):
        if stop > begin:
            chunk = rows[begin:stop].expand(1, 2, -1, -1)
            for layer in range(3):
                cache[layer].append(chunk + layer, -chunk)
    return cache


def pages_in(pieces: Pieces, kind: int, numbers: range) -> Fields:
    found = {
        name: torch.empty(len(numbers), *shape, dtype=dtype)
        for name, (dtype, shape) in pieces.shapes(kind).items()
    }
    if numbers:
        pieces.copy(kind, numbers, found)
    return found


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("spec", SPECS)
def test_together_they_are_the_cache(spec: str, length: int) -> None:
    cache = filled(spec, length)
    pieces, whole = Pieces(cache), cache.snapshot()
    pages = {kind: pages_in(pieces, kind, numbers) for kind, numbers in enumerate(pieces.ranges)}
    empty, rest = kvant.Cache(3, spec), pieces.rest()
    assert dict(enumerate(pieces.ranges)) == pages_of(empty, length, rest)
    again = together(empty, length, rest, pages)
    assert again.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    empty.restore(again)
    assert empty.length == length
    for layer in range(3):
        for one, other in zip(empty[layer].read(), cache[layer].read(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("spec", ["raw", "affine8", "fp8,page=128", "affine6,slack=0"])
def test_whole_pages_need_no_rest(spec: str) -> None:
    cache = filled(spec, 300)
    pieces = Pieces(cache)
    empty = kvant.Cache(3, spec)
    pages = pages_in(pieces, 0, range(256 // cache.spec.layers[0].page))
    empty.restore(together(empty, 256, None, {0: pages}))
    assert empty.length == 256
    cache.rewind(256)
    for layer in range(3):
        for one, other in zip(empty[layer].read(), cache[layer].read(), strict=True):
            assert torch.equal(one, other)


def test_what_does_not_fit_together_is_refused() -> None:
    cache, empty = filled("affine8", 200), kvant.Cache(3, "affine8")
    pieces = Pieces(cache)
    rest = pieces.rest()
    pages = pages_in(pieces, 0, pieces.ranges[0])
    another = Pieces(filled("affine8", 201)).rest()
    with pytest.raises(SnapshotMismatch, match="200 tokens"):
        together(empty, 200, another, {0: pages})
    without = Snapshot({k: v for k, v in rest.tensors.items() if not k.endswith("numbers")}, {})
    with pytest.raises(SnapshotMismatch, match="numbers"):
        together(empty, 200, without, {0: pages})
    for wrong in (
        {name: x[1:] for name, x in pages.items()},
        pages | {"0/keys.open": rest.tensors["0/keys.open"]},
    ):
        with pytest.raises(SnapshotMismatch, match=r"of \d pages"):
            together(empty, 200, rest, {0: wrong})
    fewer = {name: x for name, x in pages.items() if name != "1/keys.codes"}
    with pytest.raises(SnapshotMismatch, match=r"keys\.codes"):
        empty.restore(together(empty, 200, rest, {0: fewer}))
    assert not empty.length
    with pytest.raises(ValueError, match="one with tokens"):
        Pieces(empty)
