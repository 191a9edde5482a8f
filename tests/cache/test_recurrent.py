"""Test states of fixed shape: stored in float32, replaced, never modified in place, reached by
checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.tagged import LayerCache, assert_same
from kvant import (
    Cache,
    CacheSpec,
    RecurrentSpec,
    RewindError,
    SnapshotMismatch,
    load,
    parse,
    save,
)
from kvant.contracts import Snapshot


def make_state(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((2, 3), float(length)), "conv": torch.full((2, 1, 4), length + 0.5)}


def make_grown_layer(*checkpoints: int, length: int = 20, limit: int = 16) -> LayerCache:
    """Return a layer whose state is its length."""
    layer = LayerCache(RecurrentSpec(limit))
    for position in range(1, length + 1):
        layer.append(1, make_state(position))
        if position in checkpoints:
            layer.checkpoint()
    return layer


def read_state_length(layer: LayerCache) -> float:
    state = layer.read()
    assert torch.equal(state["x"], make_state(layer.length)["x"])
    return state["x"][0, 0].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_states_are_stored_in_float32(dtype: torch.dtype) -> None:
    """A recurrence in bfloat16 drifts: rounding errors of the tokens accumulate."""
    layer = LayerCache(RecurrentSpec())
    layer.append(1, {"x": torch.ones(1, 2, dtype=dtype)})
    stored = layer.read()
    for _ in range(2000):
        layer.append(1, {"x": stored["x"] + 0.001})
        stored = layer.read()
    assert stored["x"].dtype == torch.float32
    assert abs(stored["x"][0, 0].item() - 3.0) < 1e-3


def test_integer_and_float64_states_keep_their_dtype() -> None:
    layer = LayerCache(RecurrentSpec())
    layer.append(1, {"n": torch.tensor([7]), "d": torch.tensor([1.0]).double()})
    stored = layer.read()
    assert (stored["n"].dtype, stored["d"].dtype) == (torch.int64, torch.float64)


def test_an_append_copies_the_state() -> None:
    layer = LayerCache(RecurrentSpec())
    state = make_state(1)
    layer.append(1, state)
    state["x"].fill_(9)
    assert read_state_length(layer) == 1


def test_only_checkpoints_are_reachable() -> None:
    layer = make_grown_layer(4, 9, 15)
    reach = [layer.reachable(length) for length in (0, 3, 4, 8, 9, 14, 15, 19, 20, 25)]
    assert reach == [0, 0, 4, 4, 9, 9, 15, 15, 20, 20]


def test_rewind_to_a_checkpoint_restores_its_state() -> None:
    """A rewind of the length alone would leave the state of later tokens."""
    layer = make_grown_layer(4, 9, 15)
    for length in (15, 9, 4):
        layer.rewind(length)
        assert (layer.length, read_state_length(layer)) == (length, length)


def test_rewind_drops_later_checkpoints() -> None:
    layer = make_grown_layer(4, 9, 15)
    layer.rewind(9)
    for position in range(10, 21):
        layer.append(1, make_state(position))
    assert layer.reachable(19) == 9


def test_a_rewind_between_checkpoints_is_refused_and_changes_nothing() -> None:
    layer = make_grown_layer(4, 9)
    before = layer.snapshot()
    for length in (-1, 5, 10, 19, 21):
        with pytest.raises(RewindError, match=f"cannot rewind from 20 to {length}"):
            layer.rewind(length)
    assert_same(before, layer.snapshot())


def test_rewind_to_zero_is_always_possible() -> None:
    layer = make_grown_layer(4)
    layer.rewind(0)
    assert (layer.length, layer.read()) == (0, {})
    layer.append(2, {"other": torch.zeros(5)})
    assert layer.length == 2


def test_oldest_checkpoints_are_evicted() -> None:
    layer = make_grown_layer(2, 4, 6, 8, length=9, limit=3)
    assert [layer.reachable(length) for length in (3, 5, 7, 8)] == [0, 4, 6, 8]


def test_a_second_checkpoint_at_one_length_changes_nothing() -> None:
    layer = make_grown_layer(5, length=5)
    layer.checkpoint()
    assert len(layer.snapshot().numbers) == 2


@pytest.mark.parametrize(
    "state",
    [
        {"x": torch.zeros(2, 3)},
        {**make_state(1), "z": torch.zeros(1)},
        {**make_state(1), "x": torch.zeros(1, 3)},
    ],
    ids=["one missing", "one more", "another shape"],
)
def test_a_state_of_other_shapes_is_refused(state: dict) -> None:
    layer = make_grown_layer(2, length=3)
    before = layer.snapshot()
    with pytest.raises(ValueError, match=r"for a layer of|one batch size"):
        layer.append(1, state)
    assert_same(before, layer.snapshot())


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 tokens"):
        LayerCache(RecurrentSpec()).append(-1, make_state(0))


def test_a_snapshot_holds_the_checkpoints_too() -> None:
    layer, other = make_grown_layer(4, 9), LayerCache(RecurrentSpec())
    other.restore(layer.snapshot())
    assert_same(layer.snapshot(), other.snapshot())
    other.rewind(4)
    assert (read_state_length(other), read_state_length(layer)) == (4, 20)


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
def test_restore_refuses_inconsistent_snapshots(tensors: dict, numbers: dict) -> None:
    """Regression: a checkpoint beyond the current length, or a duplicate, was accepted."""
    layer = make_grown_layer(2, length=3, limit=2)
    before = layer.snapshot()
    with pytest.raises(SnapshotMismatch):
        layer.restore(Snapshot(tensors, numbers))
    assert_same(before, layer.snapshot())


def test_sequences_are_selected_in_every_checkpoint() -> None:
    layer = LayerCache(RecurrentSpec())
    layer.append(1, {"x": torch.tensor([[10.0], [20.0]])})
    layer.checkpoint()
    layer.append(1, {"x": torch.tensor([[11.0], [21.0]])})
    layer.select(torch.tensor([1, 0, 1]))
    assert layer.read()["x"].flatten().tolist() == [21, 11, 21]
    layer.rewind(1)
    assert layer.read()["x"].flatten().tolist() == [20, 10, 20]


def test_fork_is_independent_both_ways() -> None:
    layer = make_grown_layer(4, length=6)
    fork = layer.fork()
    layer.append(1, make_state(7))
    fork.rewind(4)
    assert (read_state_length(layer), read_state_length(fork)) == (7, 4)


def test_nbytes_counts_the_state_and_all_checkpoints() -> None:
    state_nbytes = (2 * 3 + 2 * 4) * 4
    assert make_grown_layer(length=3).nbytes == state_nbytes
    assert make_grown_layer(1, 2, length=3).nbytes == 3 * state_nbytes


def test_reset_drops_state_and_checkpoints() -> None:
    layer = make_grown_layer(4)
    layer.reset()
    assert (layer.length, layer.nbytes, layer.reachable(9)) == (0, 0, 0)


def test_layer_built_in_inference_mode_works_outside() -> None:
    cache = Cache(None, CacheSpec((RecurrentSpec(),)))
    with torch.inference_mode():
        cache[0].append(1, make_state(1))
        cache.checkpoint()
        cache.select([1, 0])
        fork = cache.fork()
    for each in (cache, fork):
        each[0].append(1, make_state(2))
        each.rewind(1)
        assert read_state_length(each[0]) == 1


def test_in_place_changes_of_a_model_reach_neither_layer_nor_checkpoint() -> None:
    """Regression: a failed forward that updated its state in place corrupted the committed one."""
    cache = Cache(None, CacheSpec((RecurrentSpec(), RecurrentSpec())))
    for layer in cache:
        layer.append(1, {"h": torch.ones(1, 2)})
    cache.checkpoint()
    source = torch.full((1, 2), 5.0)
    for layer in cache:
        layer.append(1, {"h": source})
    source.mul_(3)
    cache[0].append(1, {"h": cache[0].read()["h"].mul_(10)})  # then the forward fails
    assert cache[1].read()["h"].tolist() == [[5.0, 5.0]]
    assert cache.trim(0) == 0
    assert cache[0].read()["h"].tolist() == [[5.0, 5.0]]
    cache.rewind(1)
    cache[0].read()["h"].zero_()
    assert cache[0].read()["h"].tolist() == [[1.0, 1.0]]


def test_a_state_without_a_batch_is_refused() -> None:
    layer = LayerCache(RecurrentSpec())
    with pytest.raises(ValueError, match="batch"):
        layer.append(1, {"h": torch.tensor(1.0)})
    assert layer.length == 0


def test_checkpoints_of_other_shapes_than_the_state_are_refused() -> None:
    tensors = {"now.h": torch.zeros(1, 3), "at0.h": torch.zeros(2, 3)}
    with pytest.raises(SnapshotMismatch, match="other shapes"):
        LayerCache(RecurrentSpec()).restore(Snapshot(tensors, {"now": 2, "at0": 1}))


@pytest.mark.parametrize("shapes", [((0, 3),), ((1, 3), (5, 3))], ids=["none", "several"])
def test_snapshot_of_zero_or_several_sequences_is_refused(
    shapes: tuple[tuple[int, int], ...],
) -> None:
    """Regression: a select of such a state failed halfway through the layers."""
    tensors = {f"now.s{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    with pytest.raises(SnapshotMismatch, match="sequences"):
        LayerCache(RecurrentSpec()).restore(Snapshot(tensors, {"now": 3}))


def test_moved_states_share_memory_with_their_checkpoint(tmp_path: Path) -> None:
    """Regression: a move to the same device doubled the bytes, and `save` failed."""
    cache = Cache(spec=CacheSpec((RecurrentSpec(),)))
    cache[0].append(3, make_state(3))
    cache.checkpoint()
    nbytes = cache.nbytes
    cache.move("cpu")
    assert cache.nbytes == nbytes
    cache.select([1, 0])
    assert cache.nbytes == nbytes
    save(cache, tmp_path / "a.kv")
    assert_same(load(tmp_path / "a.kv").snapshot(), cache.snapshot())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"conv/x": torch.ones(2, 3)}, "names without / are needed"),
        ({"": torch.ones(2, 3)}, "names without / are needed"),
        ({"x": torch.ones(0, 3)}, "one batch size"),
        ({"x": torch.ones(2, 3), "y": torch.ones(3, 3)}, "one batch size"),
    ],
)
def test_a_state_that_no_file_could_hold_is_refused(
    state: dict[str, torch.Tensor], message: str
) -> None:
    layer = LayerCache(RecurrentSpec())
    with pytest.raises(ValueError, match=message):
        layer.append(1, state)
    assert layer.length == 0


def test_rows_of_another_batch_than_a_state_are_refused() -> None:
    """Regression: only the other order was, and the file could not be loaded."""
    cache = Cache(spec=CacheSpec((RecurrentSpec(), *parse("raw", 1).layers)))
    rows = torch.randn(3, 2, 5, 16)
    cache[0].append(5, {"x": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="3 sequences, where another layer of this forward has 2"):
        cache[1].append(rows, rows)
    cache[1].append(rows[:2], rows[:2])
    assert cache.length == 5 and cache.batch == 2
