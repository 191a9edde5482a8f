"""A cache that comes from elsewhere shares pages with one that begins with the same tokens."""

from __future__ import annotations

import pytest
import torch

import kvant
from cache.test_pieces import SPECS

HELD = ((1, 64), (63, 200), (64, 65), (128, 300), (256, 256), (300, 200), (300, 513))


def grown(spec: str, *stops: int) -> kvant.Cache:
    """A cache of rows whose values are their positions, in chunks that end there."""
    cache, begin = kvant.Cache(3, spec), 0
    for stop in stops:
        append(cache, begin, stop)
        begin = stop
    return cache


def append(cache: kvant.Cache, begin: int, stop: int) -> None:
    rows = torch.arange(begin, stop, dtype=torch.float32)[:, None] + torch.arange(64) / 64
    for layer in range(3):
        cache[layer].append(rows.expand(1, 2, -1, -1) + layer, -rows.expand(1, 2, -1, -1))


def same(one: kvant.Cache, other: kvant.Cache) -> None:
    found, expected = one.snapshot(), other.snapshot()
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize("apart", [True, False], ids=["elsewhere", "in_its_pools"])
@pytest.mark.parametrize(("held", "length"), HELD)
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_the_other_cache_and_whole_pages_are_shared(
    spec: str, held: int, length: int, apart: bool
) -> None:
    base = grown(spec, held)
    other = kvant.Cache(3, spec) if apart else base.fork()
    other.reset()
    append(other, 0, min(held, length))
    if held < length:
        append(other, held, length)
    before = base.snapshot()
    extended = base.import_sequence(other)
    same(extended, other)
    base.check()
    for kind, one in enumerate(extended._tracker.state.page_tables):
        had = base._tracker.state.page_tables[kind]
        if one.layer_group.seals:
            there, pages = (
                range(had.first_sealed[0], had.stop_sealed[0]),
                one.list_sealed_pages()[1],
            )
            tables = one.sealed_table[0], had.sealed_table[0]
        else:
            whole = min(held, length) // one.layer_group.page
            there, pages = range(had.first_open[0], whole), one.list_open_pages()[1]
            tables = one.open_table[0], had.open_table[0]
        shared = [number for number in pages.tolist() if number in there]
        assert tables[0][shared].tolist() == tables[1][shared].tolist()
        mine = {*one.list_open_slots().tolist()}, {*one.list_sealed_slots().tolist()}
        theirs = {*had.list_open_slots().tolist()}, {*had.list_sealed_slots().tolist()}
        assert sum(len(a & b) for a, b in zip(mine, theirs, strict=True)) == len(shared)
    append(extended, length, length + 70)  # in pages of its own
    append(other, length, length + 70)
    same(extended, other)
    now = base.snapshot()
    assert all(torch.equal(now.tensors[name], tensor) for name, tensor in before.tensors.items())
    del extended
    base.check()


@pytest.mark.parametrize("spec", ["raw", "affine8,tail=0", "turbo4v4,tail=0"])
def test_what_is_shared_is_never_written(spec: str) -> None:
    """Other rows in the pages that both have are not taken."""
    base, other = grown(spec, 200), kvant.Cache(3, spec)
    rows = torch.full((1, 2, 300, 64), 1e4)
    for layer in range(3):
        other[layer].append(rows, rows)
    before = base.snapshot()
    extended = base.import_sequence(other)
    now = base.snapshot()
    assert all(torch.equal(now.tensors[name], tensor) for name, tensor in before.tensors.items())
    for mine, old, new in zip(extended[0].read(), base[0].read(), other[0].read(), strict=True):
        assert torch.equal(mine[:, :, :192], old[:, :, :192])
        assert torch.equal(mine[:, :, 192:], new[:, :, 192:])


def test_a_batch_is_refused() -> None:
    one = grown("raw", 10)
    two = kvant.merge([grown("raw", 10), grown("raw", 12)])
    for base, other in ((one, two), (two, one)):
        with pytest.raises(ValueError, match=r"sequences by .: both have to be of one"):
            base.import_sequence(other)
    with pytest.raises(ValueError, match="recode it"):
        one.import_sequence(grown("affine8", 20))
