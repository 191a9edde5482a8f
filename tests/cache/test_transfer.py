"""Test a cache restored page by page: its snapshot equals the source to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import kvant
from kvant.cache.transfer import (
    PageSet,
    RestoreBuffer,
    check_tail_shapes,
    get_page_shapes,
    list_required_pages,
    make_empty_tail_state,
)
from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.page_table import PADDING
from kvant.pages import storage
from kvant.recipes import CacheSpec, RecurrentSpec

SPECS = (
    *("raw", "affine8", "affine4", "turbo4v2", "fp8", "raw,page=128", "affine8,slack=70"),
    *(
        "raw,window=100,sinks=0",
        "raw,window=100,sinks=70",
        "affine8,window=200,sinks=0",
        "affine8,sinks=4",
    ),
    *("affine4,window=300,sinks=4", "affine4,edge=1:raw", "affine8,start=300"),
    *("affine8,window=100,sinks=0,step=512", "raw,capacity=1024", "affine6v4,tail=70"),
)
LENGTHS = (1, 63, 64, 65, 128, 200, 256, 300, 513)


def make_filled_cache(spec: str, length: int) -> kvant.Cache:
    """Return a cache of rows whose values are their positions, from two chunks and a token."""
    cache = kvant.Cache(3, spec)
    rows = torch.arange(length, dtype=torch.float32)[:, None] + torch.arange(64) / 64
    for begin, stop in ((0, length // 2), (length // 2, length - 1), (length - 1, length)):
        if stop > begin:
            chunk = rows[begin:stop].expand(1, 2, -1, -1)
            for layer in range(3):
                cache[layer].append(chunk + layer, -chunk)
    return cache


def read_pages(pieces: PageSet, group: int, numbers: Sequence[int]) -> Fields:
    fields = {
        name: torch.empty(len(numbers), *shape, dtype=dtype)
        for name, (dtype, shape) in get_page_shapes(pieces.cache, group).items()
    }
    if numbers:
        pieces.copy_pages(group, numbers, fields)
    return fields


def store_missing_pages(arrival: RestoreBuffer, pieces: PageSet, run: int = 3) -> None:
    """Store all missing pages, the last ones first."""
    for group, missing in arrival.missing_slots.items():
        numbers = sorted(missing)
        for first in reversed(range(0, len(numbers), run)):
            run_of_pages = numbers[first : first + run]
            for part in (
                (run_of_pages,)
                if run_of_pages[-1] - run_of_pages[0] < run
                else ([n] for n in run_of_pages)
            ):
                arrival.write_pages(
                    group, range(part[0], part[-1] + 1), read_pages(pieces, group, part)
                )


def assert_same(first: kvant.Cache, second: kvant.Cache) -> None:
    actual, expected = first.snapshot(), second.snapshot()
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("spec", SPECS)
def test_restored_cache_equals_the_source(spec: str, length: int) -> None:
    cache = make_filled_cache(spec, length)
    pieces, empty = PageSet(cache), kvant.Cache(3, spec)
    rest = pieces.snapshot_tail_state()
    assert dict(enumerate(pieces.page_ranges)) == list_required_pages(empty, length, rest)
    arrival = RestoreBuffer(empty, length, rest)
    store_missing_pages(arrival, pieces)
    restored = arrival.finish(length)
    assert_same(restored, cache)
    for layer in range(3):
        for first, second in zip(restored[layer].read(), cache[layer].read(), strict=True):
            assert torch.equal(first, second)
    assert not empty.length
    empty.state.pools.check()


@pytest.mark.parametrize("other_length", [64, 200, 300])
@pytest.mark.parametrize("spec", SPECS)
def test_restored_cache_shares_pages_with_the_other_cache(spec: str, other_length: int) -> None:
    cache, other = make_filled_cache(spec, 300), make_filled_cache(spec, other_length)
    before, pieces = other.snapshot(), PageSet(cache)
    arrival = RestoreBuffer(other.fork(), 300, pieces.snapshot_tail_state())
    store_missing_pages(arrival, pieces)
    restored = arrival.finish(300)
    assert_same(restored, cache)
    for group, missing in arrival.missing_slots.items():
        other_table, now = (
            other.state.page_tables[group],
            restored.state.page_tables[group],
        )
        sealed = now.layer_group.seals
        other_slots = set(
            (other_table.list_sealed_slots() if sealed else other_table.list_open_slots()).tolist()
        )
        new = (
            set((now.list_sealed_slots() if sealed else now.list_open_slots()).tolist())
            - other_slots
        )
        assert set(missing.values()) <= new
    restored.state.pools.check()
    del arrival, restored
    other.state.pools.check()
    now = other.snapshot()
    assert all(torch.equal(now.tensors[name], x) for name, x in before.tensors.items())


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4,tail=70"])
def test_other_cache_may_reallocate_while_pages_arrive(spec: str) -> None:
    cache, second = make_filled_cache(spec, 300), make_filled_cache(spec, 100)
    empty, pieces = second.fork(), PageSet(cache)
    empty.reset()
    arrival = RestoreBuffer(empty, 300, pieces.snapshot_tail_state())
    old_sides = [storage.sides for storage in second.state.storages.values()]
    copies = [second.fork() for _ in range(30)]
    store_missing_pages(arrival, pieces, 1)
    for copy in copies:  # each allocates pages, so memory is reallocated
        chunk = torch.ones(1, 2, 300, 64)
        for layer in range(3):
            copy[layer].append(chunk, chunk)
    now = [storage.sides for storage in second.state.storages.values()]
    assert all(first is not two for first, two in zip(old_sides, now, strict=True))
    assert_same(arrival.finish(300), cache)
    second.state.pools.check()


@pytest.mark.parametrize("spec", ["raw", "affine8", "fp8,page=128", "affine6,slack=0"])
@pytest.mark.parametrize("arrived", [256, 128])
def test_whole_pages_need_no_tail_state(spec: str, arrived: int) -> None:
    cache = make_filled_cache(spec, 300)
    pieces, empty = PageSet(cache), kvant.Cache(3, spec)
    arrival = RestoreBuffer(
        empty, 256, make_empty_tail_state(empty, 256, {0: get_page_shapes(cache, 0)})
    )
    count = arrived // cache.spec.layers[0].page
    arrival.write_pages(0, range(count), read_pages(pieces, 0, range(count)))
    restored = arrival.finish(arrived)
    assert restored.length == arrived
    cache.rewind(arrived)
    for layer in range(3):
        for first, second in zip(restored[layer].read(), cache[layer].read(), strict=True):
            assert torch.equal(first, second)


def test_dropped_restore_frees_its_slots() -> None:
    cache, empty = make_filled_cache("affine8", 300), kvant.Cache(3, "affine8")
    pieces = PageSet(cache)
    arrival = RestoreBuffer(empty, 300, pieces.snapshot_tail_state())
    arrival.write_pages(0, range(2), read_pages(pieces, 0, range(2)))
    assert sum(pool.size - pool.num_free for pool in empty.state.pools[0]) > 4
    del arrival
    empty.state.pools.check()
    for pool in empty.state.pools[0]:
        pool.collect_orphans()
        assert pool.num_free == pool.size


def test_inconsistent_pages_are_refused() -> None:
    cache, empty = make_filled_cache("affine8", 200), kvant.Cache(3, "affine8")
    pieces = PageSet(cache)
    rest = pieces.snapshot_tail_state()
    pages = dict(read_pages(pieces, 0, pieces.page_ranges[0]))
    another = PageSet(make_filled_cache("affine8", 201)).snapshot_tail_state()
    with pytest.raises(SnapshotMismatch, match="200 tokens"):
        RestoreBuffer(empty, 200, another)
    without = Snapshot({k: v for k, v in rest.tensors.items() if not k.endswith("numbers")}, {})
    with pytest.raises(SnapshotMismatch, match="numbers"):
        RestoreBuffer(empty, 200, without)
    fewer = Snapshot({k: v for k, v in rest.tensors.items() if k != "1/keys.open"}, {})
    with pytest.raises(SnapshotMismatch, match=r"layer 1: keys\.open"):
        RestoreBuffer(empty, 200, fewer)
    with pytest.raises(SnapshotMismatch, match="layer 0: rows of 2 heads"):
        other = kvant.Cache(3, "affine8")
        for layer in other:
            layer.append(torch.ones(1, 4, 1, 64), torch.ones(1, 4, 1, 64))
        other.reset()
        RestoreBuffer(other, 200, rest)
    arrival = RestoreBuffer(empty, 200, rest)
    for wrong in (
        {name: x[1:] for name, x in pages.items()},
        pages | {"0/keys.open": rest.tensors["0/keys.open"]},
        pages | {"0/keys.codes": pages["0/keys.codes"].to(torch.int16)},
        {name: x for name, x in pages.items() if name != "1/keys.codes"},
        pages | {"7/keys.codes": pages["0/keys.codes"]},
    ):
        with pytest.raises(SnapshotMismatch, match="keys"):
            arrival.write_pages(0, pieces.page_ranges[0], wrong)
    assert not empty.length
    with pytest.raises(ValueError, match="one with tokens"):
        PageSet(empty)


def change_layer_number(rest: Snapshot, column: int, value: int) -> Snapshot:
    """Give every layer a different number."""
    tensors = dict(rest.tensors)
    for name in tensors:
        if name.endswith("numbers"):
            tensors[name] = tensors[name].clone()
            tensors[name][0, column] = value
    return Snapshot(tensors, rest.numbers)


def test_sequences_of_another_length_or_number_are_refused() -> None:
    cache = make_filled_cache("affine4", 300)
    rest = PageSet(cache).snapshot_tail_state()
    with pytest.raises(SnapshotMismatch, match="of 300 tokens"):
        RestoreBuffer(kvant.Cache(3, "affine4"), 300, change_layer_number(rest, PADDING, 5))
    with pytest.raises(ValueError, match="a cache of 2 sequences"):
        RestoreBuffer(kvant.merge([cache, cache]), 400, rest)
    spec = CacheSpec((kvant.Cache(1, "raw").spec.layers[0], RecurrentSpec()))
    hybrid = kvant.Cache(spec=spec)
    hybrid[0].append(torch.ones(1, 2, 100, 64), torch.ones(1, 2, 100, 64))
    hybrid[1].append(100, {"h": torch.zeros(1, 4)})
    rest, empty = PageSet(hybrid).snapshot_tail_state(), kvant.Cache(spec=spec)
    for batch, length in ((1, 120), (1, 80), (2, 100)):
        state = {"1/now.h": torch.zeros(batch, 4)}
        bad_tail = Snapshot({**rest.tensors, **state}, {**rest.numbers, "1/now": length})
        with pytest.raises(SnapshotMismatch, match=r"one of 100|batches of"):
            RestoreBuffer(empty, 100, bad_tail)
    empty.state.pools.check()


def test_tail_state_without_rows_takes_the_tensors_of_its_pages() -> None:
    cache = make_filled_cache("affine8,slack=0", 256)
    rest, shapes = PageSet(cache).snapshot_tail_state(), {0: get_page_shapes(cache, 0)}
    check_tail_shapes(rest, shapes)
    for name in ("0/keys.open", "2/values.codes"):
        tensor = rest.tensors[name]
        for wrong in (tensor.new_empty(0, 9000, *tensor.shape[2:]), tensor.to(torch.int64)):
            with pytest.raises(SnapshotMismatch, match=f"{name} is not"):
                check_tail_shapes(Snapshot({**rest.tensors, name: wrong}, {}), shapes)


def test_finished_restore_ignores_further_pages() -> None:
    cache, other = make_filled_cache("affine8", 300), make_filled_cache("affine8", 300)
    empty, pieces = other.fork(), PageSet(cache)
    empty.reset()
    with RestoreBuffer(empty, 300, pieces.snapshot_tail_state()) as arrival:
        slots = arrival.missing_slots[0]
    for pool in empty.state.pools[0]:
        pool.collect_orphans()
    assert not other.state.pools[0].sealed.ref_counts[list(slots.values())].any()
    fork = other.fork()  # holds these slots
    for layer in range(3):
        fork[layer].append(torch.ones(1, 2, 300, 64), torch.ones(1, 2, 300, 64))
    before = fork.snapshot()
    store_missing_pages(arrival, pieces)
    after = fork.snapshot()
    assert all(torch.equal(after.tensors[name], x) for name, x in before.tensors.items())
    other.state.pools.check()


def test_restore_without_a_target_allocates_its_own_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = make_filled_cache("raw", 6400), make_filled_cache("raw", 300)
    empty, pieces, reserved = other.fork(), PageSet(cache), storage.reserve_tensor
    empty.reset()

    def little(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if shape[0] > 60:
            raise MemoryError("no memory")
        return reserved(shape, dtype, device)

    monkeypatch.setattr(storage, "reserve_tensor", little)
    with pytest.raises(MemoryError):
        RestoreBuffer(empty, 6400, pieces.snapshot_tail_state())
    for layer in range(3):
        other[layer].append(torch.ones(1, 2, 300, 64), torch.ones(1, 2, 300, 64))
    assert other.length == 600
    other.state.pools.check()
