"""Test that a restored cache shares pages with a cache of the same first tokens."""

from __future__ import annotations

import pytest
import torch

import kvant
from cache.test_transfer import SPECS

HELD = ((1, 64), (63, 200), (64, 65), (128, 300), (256, 256), (300, 200), (300, 513))


def make_cache(spec: str, *stops: int) -> kvant.Cache:
    """Return a cache of rows whose values are their positions, in chunks with these ends."""
    cache, begin = kvant.Cache(3, spec), 0
    for stop in stops:
        append_rows(cache, begin, stop)
        begin = stop
    return cache


def append_rows(cache: kvant.Cache, begin: int, stop: int) -> None:
    rows = torch.arange(begin, stop, dtype=torch.float32)[:, None] + torch.arange(64) / 64
    for layer in range(3):
        cache[layer].append(rows.expand(1, 2, -1, -1) + layer, -rows.expand(1, 2, -1, -1))


def assert_same(first: kvant.Cache, second: kvant.Cache) -> None:
    actual, expected = first.snapshot(), second.snapshot()
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


@pytest.mark.parametrize("diverges", [True, False], ids=["elsewhere", "in_its_pools"])
@pytest.mark.parametrize(("base_length", "length"), HELD)
@pytest.mark.parametrize("spec", SPECS)
def test_extended_cache_equals_its_source_and_shares_whole_pages(
    spec: str, base_length: int, length: int, diverges: bool
) -> None:
    base = make_cache(spec, base_length)
    other = kvant.Cache(3, spec) if diverges else base.fork()
    other.reset()
    append_rows(other, 0, min(base_length, length))
    if base_length < length:
        append_rows(other, base_length, length)
    before = base.snapshot()
    extended = base.import_sequence(other)
    assert_same(extended, other)
    base.state.pools.check()
    for group, page_table in enumerate(extended.state.page_tables):
        base_table = base.state.page_tables[group]
        if page_table.layer_group.seals:
            shared_slots, pages = (
                range(base_table.first_sealed[0], base_table.stop_sealed[0]),
                page_table.list_sealed_pages()[1],
            )
            tables = page_table.sealed_table[0], base_table.sealed_table[0]
        else:
            whole = min(base_length, length) // page_table.layer_group.page
            shared_slots, pages = (
                range(base_table.first_open[0], whole),
                page_table.list_open_pages()[1],
            )
            tables = page_table.open_table[0], base_table.open_table[0]
        shared = [number for number in pages.tolist() if number in shared_slots]
        assert tables[0][shared].tolist() == tables[1][shared].tolist()
        own_slots = (
            {*page_table.list_open_slots().tolist()},
            {*page_table.list_sealed_slots().tolist()},
        )
        theirs = (
            {*base_table.list_open_slots().tolist()},
            {*base_table.list_sealed_slots().tolist()},
        )
        assert sum(len(a & b) for a, b in zip(own_slots, theirs, strict=True)) == len(shared)
    append_rows(extended, length, length + 70)  # in separate pages
    append_rows(other, length, length + 70)
    assert_same(extended, other)
    now = base.snapshot()
    assert all(torch.equal(now.tensors[name], tensor) for name, tensor in before.tensors.items())
    del extended
    base.state.pools.check()


@pytest.mark.parametrize("spec", ["raw", "affine8,tail=0", "turbo4v4,tail=0"])
def test_shared_pages_are_never_written(spec: str) -> None:
    """Different rows for shared pages are ignored."""
    base, other = make_cache(spec, 200), kvant.Cache(3, spec)
    rows = torch.full((1, 2, 300, 64), 1e4)
    for layer in range(3):
        other[layer].append(rows, rows)
    before = base.snapshot()
    extended = base.import_sequence(other)
    now = base.snapshot()
    assert all(torch.equal(now.tensors[name], tensor) for name, tensor in before.tensors.items())
    for actual, old, new in zip(extended[0].read(), base[0].read(), other[0].read(), strict=True):
        assert torch.equal(actual[:, :, :192], old[:, :, :192])
        assert torch.equal(actual[:, :, 192:], new[:, :, 192:])


def test_a_batch_is_refused() -> None:
    single = make_cache("raw", 10)
    two = kvant.merge([make_cache("raw", 10), make_cache("raw", 12)])
    for base, other in ((single, two), (two, single)):
        with pytest.raises(ValueError, match=r"import of . sequences, . here: one each is needed"):
            base.import_sequence(other)
    with pytest.raises(ValueError, match="recode it"):
        single.import_sequence(make_cache("affine8", 20))


def test_pruned_cache_is_refused() -> None:
    """Regression: pages of equal numbers were shared though their rows are of other tokens."""
    base, other = (make_cache("raw,prune=keydiff:50%", length) for length in (300, 600))
    base.prune(), other.prune()
    with pytest.raises(ValueError, match="prune="):
        base.import_sequence(other)
