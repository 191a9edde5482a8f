"""Layers of several kinds under one cache: what a verb does to one, it does to all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache.tiled import Tiled
from kvant import Cache, CacheSpec, RecurrentSpec, merge, parse
from kvant.recipes import Recipe


def cache_of(*specs: str | Recipe) -> Cache:
    return Cache(spec=CacheSpec(tuple(layer(spec) for spec in specs)))


def layer(spec: str | Recipe) -> Recipe:
    return parse(spec, 1).layers[0] if isinstance(spec, str) else spec


def counted(stop: int) -> torch.Tensor:
    """Rows whose value is their position."""
    return torch.arange(stop).float().view(1, 1, -1, 1).expand(1, 1, stop, 32)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_kinds_that_a_recode_joins_hold_what_all_of_them_held(order: tuple[int, int]) -> None:
    """Bug: the integers of the first layer were those of all, and zeros passed for rows."""
    specs = ("affine8,tail=0", "affine8,tail=0,window=128,sinks=0")
    cache = cache_of(*(specs[i] for i in order))
    for one in cache:
        one.append(counted(512), counted(512))
    cache.recode("affine8,tail=0,window=128,sinks=0,slack=100")
    assert len(cache._tracker.layer_groups) == 1
    to = cache.reachable(512 - 10)
    cache.rewind(to)
    for one in cache:
        found, positions = one.read()[0][0, 0, :, 0], one.positions()[0]
        assert (found - positions).abs().max() < 2
        assert positions.tolist() == list(range(to - 128, to))
    assert cache.reachable(420) == 0
    cache.check()


def test_layers_of_several_slacks_are_widened_to_one() -> None:
    cache = cache_of("affine8,tail=0,slack=16", "affine8,tail=0,slack=100")
    for one in cache:
        one.append(counted(300), counted(300))
    cache.ensure_slack(100)
    cache.rewind(230)
    for one in cache:
        assert (one.read()[0][0, 0, :, 0] - torch.arange(230)).abs().max() < 2


def hybrid(counts: list[int], padding: list[int]) -> Cache:
    """Attention beside a state that counts the tokens that are no padding."""
    cache = cache_of("raw", RecurrentSpec())
    for n, count in enumerate(counts):
        forward(cache, count, padding, start=padding if n == 0 else None)
        cache.checkpoint()
    return cache


def forward(cache: Cache, count: int, padding: list[int], start: Any = None) -> None:
    seen = cache.length + count - torch.tensor(padding).float()
    cache[0].append(*torch.randn(2, len(padding), 1, count, 16), start=start)
    cache[1].append(count, {"seen": seen[:, None]})


def test_a_state_counts_no_padding_of_a_sequence_that_is_extracted() -> None:
    cache = hybrid([7, 6], [3, 0])
    one = cache.extract(0)
    assert (one.length, one[1].length) == (10, 10)
    assert one.reachable(9) == 4
    one.rewind(4)
    assert one.lengths == [4] and one[1].read()["seen"].item() == 4
    forward(one, 1, [0])
    assert one.length == 5


def test_a_merged_state_is_as_long_as_the_longest_sequence() -> None:
    both = merge([hybrid([7], [3, 0]), hybrid([6], [2])])
    assert both.lengths == [4, 7, 4] and both[1].length == both.length == 7
    both.checkpoint()
    forward(both, 1, [3, 0, 3])
    both.rewind(7)
    assert both.lengths == [4, 7, 4]
    both.remove(1)
    assert both.length == both[1].length == 4


def test_a_sequence_in_its_padding_is_neither_merged_nor_extracted() -> None:
    cache = cache_of("raw")
    cache[0].append(*torch.randn(2, 2, 1, 3, 16), start=[5, 0])
    for verb in (lambda: cache.extract(0), lambda: merge([cache, cache])):
        with pytest.raises(ValueError, match="2 columns of padding are still to come"):
            verb()
    assert cache.extract(1).lengths == [3]


def test_bytes_in_other_tiles_are_not_merged() -> None:
    caches = [Cache(1, "affine8,tail=0", tiles=tiles) for tiles in (Tiled(), Tiled(8, 4))]
    for cache in caches:
        cache[0].append(*torch.randn(2, 1, 1, 200, 32))
    with pytest.raises(ValueError, match="bytes in Tiled"):
        merge(caches)


def test_layers_of_one_forward_have_the_same_sequences() -> None:
    cache = cache_of("raw", "raw,window=9,sinks=0")
    cache[0].append(*torch.randn(2, 2, 1, 3, 16))
    with pytest.raises(ValueError, match="rows of 3 sequences"):
        cache[1].append(*torch.randn(2, 3, 1, 3, 16))
    mixed = cache_of("raw", RecurrentSpec())
    mixed[0].append(*torch.randn(2, 2, 1, 3, 16))
    with pytest.raises(ValueError, match="a state of 5 sequences"):
        mixed[1].append(3, {"s": torch.zeros(5, 1)})
