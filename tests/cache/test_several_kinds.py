"""Test layer groups under one cache: an operation applies to all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant import Cache, CacheSpec, RecurrentSpec, merge, parse
from kvant.recipes import Recipe


def make_cache(*specs: str | Recipe) -> Cache:
    return Cache(spec=CacheSpec(tuple(make_layer(spec) for spec in specs)))


def make_layer(spec: str | Recipe) -> Recipe:
    return parse(spec, 1).layers[0] if isinstance(spec, str) else spec


def make_counted_rows(stop: int) -> torch.Tensor:
    """Return rows whose value is their position."""
    return torch.arange(stop).float().view(1, 1, -1, 1).expand(1, 1, stop, 32)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layer_groups_merged_by_a_recode_keep_the_union_of_rows(order: tuple[int, int]) -> None:
    """Regression: the page table of the first layer was used for all, and zeros were read as
    rows.
    """
    specs = ("affine8,tail=0", "affine8,tail=0,window=128,sinks=0")
    cache = make_cache(*(specs[i] for i in order))
    for entry in cache:
        entry.append(make_counted_rows(512), make_counted_rows(512))
    cache.recode("affine8,tail=0,window=128,sinks=0,slack=100")
    assert len(cache.state.layout.layer_groups) == 1
    length = cache.reachable(512 - 10)
    cache.rewind(length)
    for entry in cache:
        values, positions = entry.read()[0][0, 0, :, 0], entry.positions()[0]
        assert (values - positions).abs().max() < 2
        assert positions.tolist() == list(range(length - 128, length))
    assert cache.reachable(420) == 0
    cache.state.pools.check()


def test_layers_of_different_slack_are_widened_to_the_largest() -> None:
    cache = make_cache("affine8,tail=0,slack=16", "affine8,tail=0,slack=100")
    for entry in cache:
        entry.append(make_counted_rows(300), make_counted_rows(300))
    cache.ensure_slack(100)
    cache.rewind(230)
    for entry in cache:
        assert (entry.read()[0][0, 0, :, 0] - torch.arange(230)).abs().max() < 2


def make_hybrid(counts: list[int], padding: list[int]) -> Cache:
    """Return attention next to a state that counts non-padding tokens."""
    cache = make_cache("raw", RecurrentSpec())
    for n, count in enumerate(counts):
        forward(cache, count, padding, start=padding if n == 0 else None)
        cache.checkpoint()
    return cache


def forward(cache: Cache, count: int, padding: list[int], start: Any = None) -> None:
    num_tokens = cache.length + count - torch.tensor(padding).float()
    cache[0].append(*torch.randn(2, len(padding), 1, count, 16), start=start)
    cache[1].append(count, {"seen": num_tokens[:, None]})


def test_extracted_state_counts_no_padding() -> None:
    cache = make_hybrid([7, 6], [3, 0])
    single = cache.extract(0)
    assert (single.length, single[1].length) == (10, 10)
    assert single.reachable(9) == 4
    single.rewind(4)
    assert single.lengths == [4] and single[1].read()["seen"].item() == 4
    forward(single, 1, [0])
    assert single.length == 5


def test_merged_state_is_as_long_as_the_longest_sequence() -> None:
    merged = merge([make_hybrid([7], [3, 0]), make_hybrid([6], [2])])
    assert merged.lengths == [4, 7, 4] and merged[1].length == merged.length == 7
    merged.checkpoint()
    forward(merged, 1, [3, 0, 3])
    merged.rewind(7)
    assert merged.lengths == [4, 7, 4]
    merged.remove(1)
    assert merged.length == merged[1].length == 4


def test_sequence_within_its_padding_is_neither_merged_nor_extracted() -> None:
    cache = make_cache("raw")
    cache[0].append(*torch.randn(2, 2, 1, 3, 16), start=[5, 0])
    for verb in (lambda: cache.extract(0), lambda: merge([cache, cache])):
        with pytest.raises(ValueError, match="lacks 2 columns of its padding"):
            verb()
    assert cache.extract(1).lengths == [3]


def test_layers_of_one_forward_have_the_same_sequences() -> None:
    cache = make_cache("raw", "raw,window=9,sinks=0")
    cache[0].append(*torch.randn(2, 2, 1, 3, 16))
    with pytest.raises(ValueError, match="rows of 3 sequences"):
        cache[1].append(*torch.randn(2, 3, 1, 3, 16))
    mixed = make_cache("raw", RecurrentSpec())
    mixed[0].append(*torch.randn(2, 2, 1, 3, 16))
    with pytest.raises(ValueError, match="5 sequences, where another layer of this forward has 2"):
        mixed[1].append(3, {"s": torch.zeros(5, 1)})


def test_exact_rewind_ends_pages_of_all_sizes() -> None:
    """Regression: a multiple of the largest page was tried, which ends no page of the others."""
    layers = [parse(f"affine8,page={page}", 1).layers[0] for page in (128, 192)]
    cache = Cache(spec=CacheSpec(tuple(layers)))
    for layer in cache:
        layer.append(*torch.randn(2, 1, 1, 800, 32))
    assert cache.find_exact_rewind(700) == 384
