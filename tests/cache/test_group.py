"""Test groups of layers under one length: operations apply to all parts or to none."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import append_rows, assert_same, make_layer, read_tags
from kvant import Cache, CacheSpec, GroupSpec, RecurrentSpec, RewindError, SnapshotMismatch
from kvant.contracts import Snapshot


def make_cache(text: str = "raw", max_checkpoints: int = 16) -> Cache:
    parts = (("attention", make_layer(text)), ("memory", RecurrentSpec(max_checkpoints)))
    return Cache(None, CacheSpec((GroupSpec(parts),)))


def forward(cache: Cache, count: int) -> None:
    group = cache[0]
    length = group.length + count
    append_rows(group["attention"], count)
    group["memory"].append(count, {"x": torch.full((1, 2), float(length))})


def make_grown_cache(text: str, *lengths: int) -> Cache:
    """Return a cache with a checkpoint at each of these lengths but the last."""
    group_cache = make_cache(text)
    for length in lengths:
        forward(group_cache, length - group_cache.length)
        if length != lengths[-1]:
            group_cache.checkpoint()
    return group_cache


def test_group_length_is_that_of_its_shortest_part() -> None:
    group_cache = make_cache()
    append_rows(group_cache[0]["attention"], 3)
    assert (group_cache.length, group_cache[0].length, group_cache[0]["attention"].length) == (
        0,
        0,
        3,
    )
    group_cache[0]["memory"].append(3, {"x": torch.zeros(1)})
    assert group_cache.length == 3


def test_group_is_appended_to_through_its_parts() -> None:
    with pytest.raises(TypeError, match=r"attention, memory"):
        make_cache()[0].append(torch.zeros(1))


def test_group_gives_its_parts_by_name() -> None:
    group_cache = make_grown_cache("raw", 5)
    assert set(group_cache[0]) == {"attention", "memory"}
    assert group_cache[0]["memory"].read()["x"].tolist() == [[5.0, 5.0]]


def test_reachable_lengths_are_those_all_parts_support() -> None:
    group_cache = make_grown_cache("raw", 4, 9, 20)
    assert [group_cache.reachable(length) for length in (3, 4, 8, 12, 19, 20)] == [
        0,
        4,
        4,
        9,
        9,
        20,
    ]


def test_reach_is_a_fixpoint() -> None:
    """The window reaches 17; the checkpoint before it is at 9, which the window cannot reach."""
    group_cache = make_grown_cache("raw,window=5,sinks=0,slack=5", 9, 18, 20)
    assert [group_cache.reachable(length) for length in (20, 19, 18, 17)] == [20, 18, 18, 0]


def test_rewind_moves_all_parts() -> None:
    group_cache = make_grown_cache("affine8", 70, 100, 150)
    group_cache.rewind(100)
    assert read_tags(group_cache[0]["attention"]) == list(range(100))
    assert group_cache[0]["memory"].read()["x"].tolist() == [[100.0, 100.0]]


@pytest.mark.parametrize("length", [-1, 8, 19, 21])
def test_rewind_that_one_part_refuses_moves_none(length: int) -> None:
    group_cache = make_grown_cache("raw", 4, 9, 20)
    before = group_cache.snapshot()
    with pytest.raises(RewindError, match=f"{length}"):
        group_cache.rewind(length)
    assert_same(before, group_cache.snapshot())


def test_layers_of_different_kinds_rewind_together_or_not_at_all() -> None:
    group_cache = Cache(None, CacheSpec((make_layer("raw"), RecurrentSpec())))
    append_rows(group_cache[0], 5)
    group_cache[1].append(5, {"x": torch.zeros(1)})
    with pytest.raises(RewindError, match=r"layer 1: cannot rewind from 5 to 3: .* 0"):
        group_cache.rewind(3)
    assert read_tags(group_cache[0]) == [0, 1, 2, 3, 4]


def test_restore_applies_to_all_parts_or_none() -> None:
    group_cache, other = make_grown_cache("raw", 4, 9), make_grown_cache("raw", 3)
    good = group_cache.snapshot()
    broken = Snapshot({**good.tensors, "0/memory/later.x": torch.zeros(1)}, good.numbers)
    before = other.snapshot()
    with pytest.raises(SnapshotMismatch, match=r"later\.x"):
        other.restore(broken)
    assert_same(before, other.snapshot())
    other.restore(good)
    assert_same(good, other.snapshot())


def test_a_snapshot_of_another_part_is_refused() -> None:
    group_cache = make_grown_cache("raw", 4)
    good = group_cache.snapshot()
    with pytest.raises(SnapshotMismatch, match="elsewhere/x belongs to none"):
        group_cache.restore(
            Snapshot({**good.tensors, "0/elsewhere/x": torch.zeros(1)}, good.numbers)
        )


def test_incomplete_forward_is_rolled_back_in_its_parts() -> None:
    group_cache = make_grown_cache("affine8", 70)
    before = group_cache.snapshot()
    append_rows(group_cache[0]["attention"], 80)
    assert_same(before, group_cache.snapshot())


def test_fork_is_independent_both_ways() -> None:
    group_cache = make_grown_cache("affine8", 70, 90)
    fork = group_cache.fork()
    forward(group_cache, 5)
    fork.rewind(70)
    assert (group_cache.length, fork.length) == (95, 70)
    assert fork[0]["memory"].read()["x"].tolist() == [[70.0, 70.0]]
    forward(fork, 1)
    assert read_tags(fork[0]["attention"]) == list(range(71))


def test_group_sums_the_bytes_of_its_parts_and_bounds_kept_tokens() -> None:
    group_cache = make_grown_cache("raw,window=7,sinks=0", 30)
    attention, recurrent = group_cache[0]["attention"], group_cache[0]["memory"]
    assert group_cache.nbytes == attention.nbytes + recurrent.nbytes
    assert (group_cache.num_rows, group_cache.max_held) == (7, 7)
    assert group_cache.stats()["appends"] == 2


def test_reset_and_clear_reach_all_parts() -> None:
    group_cache = make_grown_cache("raw", 4, 9)
    group_cache.reset()
    assert (group_cache.length, group_cache[0]["memory"].nbytes) == (0, 0)
    group_cache.clear()
    assert group_cache.nbytes == 0
