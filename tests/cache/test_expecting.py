"""Tokens that a cache expects, whose rows somebody else writes: the same as appends."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.tagged import same
from kvant import Cache, CacheError, CapacityError, RecurrentSpec, UnsupportedView, attend, parse
from kvant.cache import merge
from kvant.contracts import View
from kvant.recipes import CacheSpec

SPECS = (
    "raw",
    "raw,window=70,sinks=3",
    "affine8",
    "affine4/turbo3,tail=3",
    "affine8,tail=0",
    "affine8,tail=300",
    "turbo4v2,window=100,sinks=4",
    "affine4,window=40,sinks=0,tail=90",
    "affine8,slack=9,window=80,sinks=0",
    "affine8,start=200",
)


def filled(text: str, count: int = 150) -> Cache:
    """Two layers, always of the same rows."""
    cache = Cache(2, text)
    torch.manual_seed(1)
    for layer in cache:
        layer.append(*rows(count), start=[0, 9])
    return cache


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, count, 32), torch.randn(2, 2, count, 48)


def write(pages: View, keys: Tensor, values: Tensor) -> None:
    """What a kernel does: rows go to where the newest position of each sequence lies."""
    extent, page = pages.page_table, pages.page_table.layer_group.page
    last = extent.lengths - 1
    slots = extent.open_table[np.arange(extent.batch), last // page]
    for side, row in ((pages.keys, keys), (pages.values, values)):
        side.open[slots, :, last % page] = side.codec.frame.transform_rows(row)[:, :, 0]


def step(cache: Cache, new: list[tuple[Tensor, Tensor]]) -> None:
    """By halves, unless a page falls due with its own row."""
    try:
        changes = cache.expect()
    except CapacityError as error:
        assert "falls due with it" in str(error)
        for layer, rows in zip(cache, new, strict=True):
            layer.append(*rows)
        return
    for layer, rows in zip(cache, new, strict=True):
        write(layer.make_view(changes[layer.group]), *rows)
    cache.arrive("elsewhere")


@pytest.mark.parametrize("capacity", ["", ",capacity=600"])
@pytest.mark.parametrize("text", SPECS)
def test_two_halves_are_an_append(text: str, capacity: str) -> None:
    one, other = filled(text + capacity), filled(text + capacity)
    for t in range(300):
        new = [rows(1) for _ in one]
        step(one, new)
        view, _ = (layer.append(*rows) for layer, rows in zip(other, new, strict=True))
        if t % 23 == 0 or other.length % 64 in (0, 1, 9, 10):
            same(one.snapshot(), other.snapshot())
            q = torch.randn(2, 4, 1, 32)
            assert torch.equal(attend(q, one[0].view()), attend(q, view))
    assert (one.nbytes, one.stats()["appends"]) == (other.nbytes, other.stats()["appends"])
    one.check()


@pytest.mark.parametrize("text", SPECS)
def test_the_first_half_changes_nothing_that_is_read(text: str) -> None:
    cache, draw = filled(text), random.Random(2)
    for _ in range(200):
        before = cache.snapshot()
        try:
            cache.expect(seals=draw.random() < 0.5)
        except CapacityError as error:
            assert "falls due with it" in str(error)
        same(cache.snapshot(), before)
        verb = draw.randrange(4)
        if verb == 0:
            cache.rewind(cache.reachable(cache.length - draw.randrange(3)))
        elif verb == 1:
            cache.rollback()
        for layer in cache:
            layer.append(*rows(1))
        cache.check()


@pytest.mark.parametrize("text", SPECS)
def test_with_a_capacity_memory_stays_where_it_is(text: str) -> None:
    cache, lies = filled(text + ",capacity=600"), set()
    for _ in range(400):
        step(cache, [rows(1) for _ in cache])
        sides = [side for layer in cache for side in layer.storage.sides.values()]
        tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
        lies.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(lies) == 1


def test_pages_that_are_shared_are_copied_before_rows_come() -> None:
    cache = filled("affine4,tail=3")
    twin = cache.fork()
    before = twin.snapshot()
    one = merge([cache, cache.extract(0)])
    for memory in (one, cache):
        changes = memory.expect()
        for layer in memory:
            pages = layer.make_view(changes[layer.group])
            new = [torch.ones(memory.batch, 2, 1, dim) for dim in (32, 48)]
            write(pages, *new)
        memory.arrive("elsewhere")
    same(twin.snapshot(), before)
    cache.check()


def test_more_than_the_capacity_is_refused() -> None:
    cache = filled("raw,capacity=151")
    step(cache, [rows(1) for _ in cache])
    before = cache.snapshot()
    with pytest.raises(CapacityError, match="152 tokens for a capacity of 151"):
        cache.expect()
    same(cache.snapshot(), before)
    cache.check()


def test_what_expects_nothing_says_why() -> None:
    with pytest.raises(CapacityError, match="append first"):
        Cache(1, "raw").expect()
    cache = Cache(spec=CacheSpec((*parse("raw", 1).layers, RecurrentSpec())))
    with pytest.raises(UnsupportedView, match="a layer that recurs"):
        cache.expect()
    cache = filled("raw")
    with pytest.raises(CacheError, match="nobody expects"):
        cache.arrive("elsewhere")
    cache.expect()
    cache.rollback()
    with pytest.raises(CacheError, match="nobody expects"):
        cache.arrive("elsewhere")
