"""States of fixed shape: kept wide, replaced and never written to, reached by checkpoints."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import One, same
from kvant import Cache, CacheSpec, RecurrentSpec, RewindError, SnapshotMismatch
from kvant.contracts import Snapshot


def state_at(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((2, 3), float(length)), "conv": torch.full((2, 1, 4), length + 0.5)}


def grown(*checkpoints: int, length: int = 20, limit: int = 16) -> One:
    """A layer whose state says its length."""
    layer = One(RecurrentSpec(limit))
    for at in range(1, length + 1):
        layer.append(1, state_at(at))
        if at in checkpoints:
            layer.checkpoint()
    return layer


def told(layer: One) -> float:
    state = layer.read()
    assert torch.equal(state["x"], state_at(layer.length)["x"])
    return state["x"][0, 0].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_kept_in_thirty_two(dtype: torch.dtype) -> None:
    """A recurrence kept in bfloat16 drifts: the rounding of every token adds up."""
    layer = One(RecurrentSpec())
    layer.append(1, {"x": torch.ones(1, 2, dtype=dtype)})
    kept = layer.read()
    for _ in range(2000):
        layer.append(1, {"x": kept["x"] + 0.001})
        kept = layer.read()
    assert kept["x"].dtype == torch.float32
    assert abs(kept["x"][0, 0].item() - 3.0) < 1e-3


def test_integers_and_doubles_stay_what_they_are() -> None:
    layer = One(RecurrentSpec())
    layer.append(1, {"n": torch.tensor([7]), "d": torch.tensor([1.0]).double()})
    kept = layer.read()
    assert (kept["n"].dtype, kept["d"].dtype) == (torch.int64, torch.float64)


def test_an_append_copies_the_state() -> None:
    layer = One(RecurrentSpec())
    state = state_at(1)
    layer.append(1, state)
    state["x"].fill_(9)
    assert told(layer) == 1


def test_only_checkpoints_are_reachable() -> None:
    layer = grown(4, 9, 15)
    reach = [layer.reachable(to) for to in (0, 3, 4, 8, 9, 14, 15, 19, 20, 25)]
    assert reach == [0, 0, 4, 4, 9, 9, 15, 15, 20, 20]


def test_a_rewind_to_a_checkpoint_brings_its_state_back() -> None:
    """A rewind that moves the length alone leaves the state of tokens that are gone."""
    layer = grown(4, 9, 15)
    for to in (15, 9, 4):
        layer.rewind(to)
        assert (layer.length, told(layer)) == (to, to)


def test_a_rewind_forgets_later_checkpoints() -> None:
    layer = grown(4, 9, 15)
    layer.rewind(9)
    for at in range(10, 21):
        layer.append(1, state_at(at))
    assert layer.reachable(19) == 9


def test_a_rewind_between_checkpoints_is_refused_and_changes_nothing() -> None:
    layer = grown(4, 9)
    before = layer.snapshot()
    for to in (-1, 5, 10, 19, 21):
        with pytest.raises(RewindError, match=f"length {to} cannot be reached from 20"):
            layer.rewind(to)
    same(before, layer.snapshot())


def test_a_rewind_to_nothing_is_always_possible() -> None:
    layer = grown(4)
    layer.rewind(0)
    assert (layer.length, layer.read()) == (0, {})
    layer.append(2, {"other": torch.zeros(5)})
    assert layer.length == 2


def test_the_oldest_checkpoints_make_room() -> None:
    layer = grown(2, 4, 6, 8, length=9, limit=3)
    assert [layer.reachable(to) for to in (3, 5, 7, 8)] == [0, 4, 6, 8]


def test_a_second_checkpoint_at_one_length_changes_nothing() -> None:
    layer = grown(5, length=5)
    layer.checkpoint()
    assert len(layer.snapshot().numbers) == 2


@pytest.mark.parametrize(
    "state",
    [
        {"x": torch.zeros(2, 3)},
        {**state_at(1), "z": torch.zeros(1)},
        {**state_at(1), "x": torch.zeros(1, 3)},
    ],
    ids=["one missing", "one more", "another shape"],
)
def test_a_state_of_other_shapes_is_refused(state: dict) -> None:
    layer = grown(2, length=3)
    before = layer.snapshot()
    with pytest.raises(ValueError, match="for a layer of"):
        layer.append(1, state)
    same(before, layer.snapshot())


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 tokens"):
        One(RecurrentSpec()).append(-1, state_at(0))


def test_a_snapshot_holds_the_checkpoints_too() -> None:
    layer, other = grown(4, 9), One(RecurrentSpec())
    other.restore(layer.snapshot())
    same(layer.snapshot(), other.snapshot())
    other.rewind(4)
    assert (told(other), told(layer)) == (4, 20)


@pytest.mark.parametrize(
    ("tensors", "numbers"),
    [
        ({}, {"now": -1}),
        ({}, {"at0": 3}),
        ({}, {"now": 3, "at1": 1}),
        ({}, {"now": 9, "at0": 5, "at1": 3}),
        ({}, {"now": 9, "at0": 5, "at1": 5}),
        ({}, {"now": 3, "at0": 9}),
        ({}, {"now": 9, "at0": 1, "at1": 2, "at2": 3}),
        ({"later.x": torch.zeros(1)}, {"now": 3}),
        ({"now": torch.zeros(1)}, {"now": 3}),
    ],
    ids=[
        "a negative length",
        "no state now",
        "a checkpoint missing",
        "checkpoints that fall",
        "a checkpoint twice",
        "a checkpoint ahead of now",
        "more checkpoints than there may be",
        "an unknown moment",
        "a tensor without a name",
    ],
)
def test_restore_refuses_nonsense(tensors: dict, numbers: dict) -> None:
    """A checkpoint ahead of the present length, or one twice, was once taken in."""
    layer = grown(2, length=3, limit=2)
    before = layer.snapshot()
    with pytest.raises(SnapshotMismatch):
        layer.restore(Snapshot(tensors, numbers))
    same(before, layer.snapshot())


def test_sequences_are_selected_in_every_moment() -> None:
    layer = One(RecurrentSpec())
    layer.append(1, {"x": torch.tensor([[10.0], [20.0]])})
    layer.checkpoint()
    layer.append(1, {"x": torch.tensor([[11.0], [21.0]])})
    layer.select(torch.tensor([1, 0, 1]))
    assert layer.read()["x"].flatten().tolist() == [21, 11, 21]
    layer.rewind(1)
    assert layer.read()["x"].flatten().tolist() == [20, 10, 20]


def test_a_fork_is_independent_both_ways() -> None:
    layer = grown(4, length=6)
    twin = layer.fork()
    layer.append(1, state_at(7))
    twin.rewind(4)
    assert (told(layer), told(twin)) == (7, 4)


def test_bytes_are_those_of_all_moments() -> None:
    one = (2 * 3 + 2 * 4) * 4
    assert grown(length=3).nbytes == one
    assert grown(1, 2, length=3).nbytes == 3 * one


def test_reset_forgets_everything() -> None:
    layer = grown(4)
    layer.reset()
    assert (layer.length, layer.nbytes, layer.reachable(9)) == (0, 0, 0)


def test_what_was_made_in_inference_mode_goes_on_outside() -> None:
    cache = Cache(None, CacheSpec((RecurrentSpec(),)))
    with torch.inference_mode():
        cache[0].append(1, state_at(1))
        cache.checkpoint()
        cache.select([1, 0])
        twin = cache.fork()
    for each in (cache, twin):
        each[0].append(1, state_at(2))
        each.rewind(1)
        assert told(each[0]) == 1


def test_what_a_model_does_to_a_state_in_place_reaches_neither_the_layer_nor_a_checkpoint() -> None:
    """A forward that died after updating its state in place once spoiled the committed one."""
    cache = Cache(None, CacheSpec((RecurrentSpec(), RecurrentSpec())))
    for layer in cache:
        layer.append(1, {"h": torch.ones(1, 2)})
    cache.checkpoint()
    given = torch.full((1, 2), 5.0)
    for layer in cache:
        layer.append(1, {"h": given})
    given.mul_(3)
    cache[0].append(1, {"h": cache[0].read()["h"].mul_(10)})  # and dies
    assert cache[1].read()["h"].tolist() == [[5.0, 5.0]]
    assert cache.trim(0) == 0
    assert cache[0].read()["h"].tolist() == [[5.0, 5.0]]
    cache.rewind(1)
    cache[0].read()["h"].zero_()
    assert cache[0].read()["h"].tolist() == [[1.0, 1.0]]


def test_a_state_without_a_batch_is_refused() -> None:
    layer = One(RecurrentSpec())
    with pytest.raises(ValueError, match="batch"):
        layer.append(1, {"h": torch.tensor(1.0)})
    assert layer.length == 0


def test_checkpoints_of_other_shapes_than_the_state_are_refused() -> None:
    tensors = {"now.h": torch.zeros(1, 3), "at0.h": torch.zeros(2, 3)}
    with pytest.raises(SnapshotMismatch, match="other shapes"):
        One(RecurrentSpec()).restore(Snapshot(tensors, {"now": 2, "at0": 1}))


@pytest.mark.parametrize("shapes", [((0, 3),), ((1, 3), (5, 3))], ids=["none", "several"])
def test_a_snapshot_of_no_batch_or_of_several_is_refused(
    shapes: tuple[tuple[int, int], ...],
) -> None:
    """A select of such a state failed halfway through the layers."""
    tensors = {f"now.s{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    with pytest.raises(SnapshotMismatch, match="sequences"):
        One(RecurrentSpec()).restore(Snapshot(tensors, {"now": 3}))
