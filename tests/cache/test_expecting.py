"""Test tokens that a cache expects and a kernel writes: equal to appends."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.tagged import assert_same
from kvant import Cache, CacheError, CapacityError, RecurrentSpec, UnsupportedView, attend, parse
from kvant.cache import merge
from kvant.cache.tokens import commit_tokens, plan_tokens
from kvant.contracts import View
from kvant.recipes import CacheSpec
from thin import thin_rows

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


def make_filled_cache(text: str, count: int = 150) -> Cache:
    """Return two layers, always with the same rows."""
    cache = Cache(2, text)
    torch.manual_seed(1)
    for layer in cache:
        layer.append(*make_rows(count), start=[0, 9])
    return cache


def make_rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, count, 32), torch.randn(2, 2, count, 48)


def write_rows(pages: View, keys: Tensor, values: Tensor) -> None:
    """Write rows like a kernel: to the slot of each sequence's newest position."""
    page_table, page = pages.page_table, pages.page_table.layer_group.page
    last = page_table.lengths - 1
    slots = page_table.open_table[np.arange(page_table.batch), last // page]
    for side, row in ((pages.keys, keys), (pages.values, values)):
        side.open[slots, :, last % page] = side.codec.frame.transform_rows(row)[:, :, 0]


def append_by_halves(cache: Cache, new: list[tuple[Tensor, Tensor]]) -> None:
    """Append by expect and arrive, unless this token completes a page."""
    try:
        changes = plan_tokens(cache)
    except CapacityError as error:
        assert "completes a page" in str(error)
        for layer, rows in zip(cache, new, strict=True):
            layer.append(*rows)
        return
    for layer, rows in zip(cache, new, strict=True):
        write_rows(layer.make_view(changes[layer.leaf.group]), *rows)
    commit_tokens(cache, "elsewhere")


@pytest.mark.parametrize(("text", "capacity"), thin_rows(product(SPECS, ["", ",capacity=600"])))
def test_expect_then_arrive_equals_append(text: str, capacity: str) -> None:
    first, second = make_filled_cache(text + capacity), make_filled_cache(text + capacity)
    for t in range(300):
        new = [make_rows(1) for _ in first]
        append_by_halves(first, new)
        view, _ = (layer.append(*rows) for layer, rows in zip(second, new, strict=True))
        if t % 23 == 0 or second.length % 64 in (0, 1, 9, 10):
            assert_same(first.snapshot(), second.snapshot())
            q = torch.randn(2, 4, 1, 32)
            assert torch.equal(attend(q, first[0].view()), attend(q, view))
    assert (first.nbytes, first.stats()["appends"]) == (second.nbytes, second.stats()["appends"])
    first.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
def test_expect_changes_no_readable_row(text: str) -> None:
    cache, draw = make_filled_cache(text), random.Random(2)
    for _ in range(200):
        before = cache.snapshot()
        try:
            plan_tokens(cache, seals=draw.random() < 0.5)
        except CapacityError as error:
            assert "completes a page" in str(error)
        assert_same(cache.snapshot(), before)
        verb = draw.randrange(4)
        if verb == 0:
            cache.rewind(cache.reachable(cache.length - draw.randrange(3)))
        elif verb == 1:
            cache.rollback()
        for layer in cache:
            layer.append(*make_rows(1))
        cache.state.pools.check()


@pytest.mark.parametrize("text", SPECS)
def test_capacity_keeps_memory_in_place(text: str) -> None:
    cache, addresses = make_filled_cache(text + ",capacity=600"), set()
    for _ in range(400):
        append_by_halves(cache, [make_rows(1) for _ in cache])
        sides = [side for layer in cache for side in layer.storage.sides.values()]
        tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


def test_shared_pages_are_copied_before_rows_arrive() -> None:
    cache = make_filled_cache("affine4,tail=3")
    fork = cache.fork()
    before = fork.snapshot()
    batch = merge([cache, cache.extract(0)])
    for kv_cache in (batch, cache):
        changes = plan_tokens(kv_cache)
        for layer in kv_cache:
            pages = layer.make_view(changes[layer.leaf.group])
            new = [torch.ones(kv_cache.batch, 2, 1, dim) for dim in (32, 48)]
            write_rows(pages, *new)
        commit_tokens(kv_cache, "elsewhere")
    assert_same(fork.snapshot(), before)
    cache.state.pools.check()


def test_expect_beyond_capacity_is_refused() -> None:
    cache = make_filled_cache("raw,capacity=151")
    append_by_halves(cache, [make_rows(1) for _ in cache])
    before = cache.snapshot()
    with pytest.raises(CapacityError, match="152 tokens for a capacity of 151"):
        plan_tokens(cache)
    assert_same(cache.snapshot(), before)
    cache.state.pools.check()


def test_unsupported_layers_give_a_reason() -> None:
    with pytest.raises(CapacityError, match="append first"):
        plan_tokens(Cache(1, "raw"))
    cache = Cache(spec=CacheSpec((*parse("raw", 1).layers, RecurrentSpec())))
    with pytest.raises(UnsupportedView, match="a recurrent layer"):
        plan_tokens(cache)
    cache = make_filled_cache("raw")
    with pytest.raises(CacheError, match="without plan_tokens"):
        commit_tokens(cache, "elsewhere")
    plan_tokens(cache)
    cache.rollback()
    with pytest.raises(CacheError, match="without plan_tokens"):
        commit_tokens(cache, "elsewhere")
