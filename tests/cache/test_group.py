"""Several memories under one length: all parts or none."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import layer, put, same, told
from kvant import Cache, CacheSpec, GroupSpec, RecurrentSpec, RewindError, SnapshotMismatch
from kvant.contracts import Snapshot


def cache(text: str = "raw", max_checkpoints: int = 16) -> Cache:
    parts = (("attention", layer(text)), ("memory", RecurrentSpec(max_checkpoints)))
    return Cache(None, CacheSpec((GroupSpec(parts),)))


def forward(cache: Cache, count: int) -> None:
    group = cache[0]
    length = group.length + count
    put(group["attention"], count)
    group["memory"].append(count, {"x": torch.full((1, 2), float(length))})


def grown(text: str, *lengths: int) -> Cache:
    """A cache with a checkpoint at each of these lengths but the last."""
    made = cache(text)
    for length in lengths:
        forward(made, length - made.length)
        if length != lengths[-1]:
            made.checkpoint()
    return made


def test_a_group_has_the_length_of_its_shortest_part() -> None:
    made = cache()
    put(made[0]["attention"], 3)
    assert (made.length, made[0].length, made[0]["attention"].length) == (0, 0, 3)
    made[0]["memory"].append(3, {"x": torch.zeros(1)})
    assert made.length == 3


def test_a_group_is_appended_to_by_its_parts() -> None:
    with pytest.raises(TypeError, match=r"attention, memory"):
        cache()[0].append(torch.zeros(1))


def test_a_group_is_its_parts_by_name() -> None:
    made = grown("raw", 5)
    assert set(made[0]) == {"attention", "memory"}
    assert made[0]["memory"].read()["x"].tolist() == [[5.0, 5.0]]


def test_reach_is_what_all_parts_can_serve() -> None:
    made = grown("raw", 4, 9, 20)
    assert [made.reachable(to) for to in (3, 4, 8, 12, 19, 20)] == [0, 4, 4, 9, 9, 20]


def test_reach_is_a_fixpoint() -> None:
    """The window serves 17, the checkpoint before it is 9, and that the window does not serve."""
    made = grown("raw,window=5,sinks=0,slack=5", 9, 18, 20)
    assert [made.reachable(to) for to in (20, 19, 18, 17)] == [20, 18, 18, 0]


def test_a_rewind_moves_all_parts() -> None:
    made = grown("affine8", 70, 100, 150)
    made.rewind(100)
    assert told(made[0]["attention"]) == list(range(100))
    assert made[0]["memory"].read()["x"].tolist() == [[100.0, 100.0]]


@pytest.mark.parametrize("to", [-1, 8, 19, 21])
def test_a_rewind_that_one_part_cannot_serve_moves_none(to: int) -> None:
    made = grown("raw", 4, 9, 20)
    before = made.snapshot()
    with pytest.raises(RewindError, match=f"{to}"):
        made.rewind(to)
    same(before, made.snapshot())


def test_layers_of_different_kinds_rewind_together_or_not_at_all() -> None:
    made = Cache(None, CacheSpec((layer("raw"), RecurrentSpec())))
    put(made[0], 5)
    made[1].append(5, {"x": torch.zeros(1)})
    with pytest.raises(RewindError, match=r"layer 1: length 3 cannot be reached from 5: .* 0"):
        made.rewind(3)
    assert told(made[0]) == [0, 1, 2, 3, 4]


def test_restore_takes_all_parts_or_none() -> None:
    made, other = grown("raw", 4, 9), grown("raw", 3)
    good = made.snapshot()
    broken = Snapshot({**good.tensors, "0/memory/later.x": torch.zeros(1)}, good.numbers)
    before = other.snapshot()
    with pytest.raises(SnapshotMismatch, match=r"later\.x"):
        other.restore(broken)
    same(before, other.snapshot())
    other.restore(good)
    same(good, other.snapshot())


def test_a_snapshot_of_another_part_is_refused() -> None:
    made = grown("raw", 4)
    good = made.snapshot()
    with pytest.raises(SnapshotMismatch, match="elsewhere/x belongs to none"):
        made.restore(Snapshot({**good.tensors, "0/elsewhere/x": torch.zeros(1)}, good.numbers))


def test_an_abandoned_forward_is_taken_back_from_the_parts_it_reached() -> None:
    made = grown("affine8", 70)
    before = made.snapshot()
    put(made[0]["attention"], 80)
    same(before, made.snapshot())


def test_a_fork_is_independent_both_ways() -> None:
    made = grown("affine8", 70, 90)
    twin = made.fork()
    forward(made, 5)
    twin.rewind(70)
    assert (made.length, twin.length) == (95, 70)
    assert twin[0]["memory"].read()["x"].tolist() == [[70.0, 70.0]]
    forward(twin, 1)
    assert told(twin[0]["attention"]) == list(range(71))


def test_a_group_counts_the_bytes_of_its_parts_and_bounds_what_it_holds() -> None:
    made = grown("raw,window=7,sinks=0", 30)
    attention, memory = made[0]["attention"], made[0]["memory"]
    assert made.nbytes == attention.nbytes + memory.nbytes
    assert (made.num_rows, made.max_held) == (7, 7)
    assert made.stats()["appends"] == 2


def test_reset_and_clear_reach_all_parts() -> None:
    made = grown("raw", 4, 9)
    made.reset()
    assert (made.length, made[0]["memory"].nbytes) == (0, 0)
    made.clear()
    assert made.nbytes == 0
