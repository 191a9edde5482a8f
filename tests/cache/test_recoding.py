"""Recoding one attention layer, with rows that carry their position."""

from __future__ import annotations

import random

import pytest
import torch

from cache.tagged import One, layer, put, rows, same, told
from kvant import Cache, CapacityError, LayerSpec, SpecError, attend, load, save
from kvant.attention.reference import has_visible_rows
from kvant.contracts import Mask
from kvant.retention import Window


def grown(text: str, count: int, **shape: int) -> One:
    state = One(layer(text))
    put(state, count, **shape)
    return state


def recode(state: One, text: str) -> None:
    state.recode(layer(text))


def last(window: int, length: int, sinks: int = 0) -> list[int]:
    first = max(sinks, length - window)
    return [*range(min(sinks, length)), *range(min(first, length), length)]


@pytest.mark.parametrize("length", [1, 63, 64, 127, 128, 200, 300])
@pytest.mark.parametrize("before", ["raw", "affine8", "affine4,tail=0"])
@pytest.mark.parametrize("after", ["raw", "affine8", "affine4", "affine8,page=128"])
def test_a_window_lets_rows_go(before: str, after: str, length: int) -> None:
    state = grown(before, length)
    recode(state, f"{after},window=70,sinks=3")
    assert told(state) == last(70, length, 3)
    for _ in range(70):
        put(state, 1)
    assert told(state) == last(70, length + 70, 3)


def test_rows_that_are_dense_stay_as_they_are() -> None:
    """Under another frame only what rounding adds; under the same one not a bit."""
    keys = torch.randn(1, 2, 300, 32)
    state = One(layer("turbo4,tail=100"))
    state.append(keys, keys, prefill="stored")
    before = state.read(192)
    recode(state, "turbo2,tail=100")
    for one, now in zip(before, state.read(192), strict=True):
        assert torch.equal(one, now)
    recode(state, "raw")
    assert (state.read(192)[0] - keys[:, :, 192:]).abs().max() < 1e-5


def test_a_side_that_stays_is_not_encoded_again() -> None:
    rows = torch.randn(1, 2, 300, 32)
    state = One(layer("affine4v3"))
    state.append(rows, rows, prefill="stored")
    before, dense = state.read(), state.snapshot().tensors["keys.open"]
    recode(state, "affine4/turbo3")
    assert torch.equal(state.read()[0], before[0])
    assert not torch.equal(state.read()[1], before[1])
    assert torch.equal(state.snapshot().tensors["keys.open"], dense)


def test_pages_that_fall_due_by_a_shorter_tail_join_those_that_are_sealed() -> None:
    keys = torch.randn(1, 2, 400, 32)
    state, fresh = One(layer("affine4,tail=150")), One(layer("affine4,tail=3"))
    for one in (state, fresh):
        one.append(keys, keys, prefill="stored")
    recode(state, "affine4,tail=3")
    same(state.snapshot(), fresh.snapshot())


def test_sinks_are_dense_from_the_oldest_rows_there_are() -> None:
    keys = torch.randn(1, 1, 200, 32)
    state = One(layer("affine4,tail=0,sinks=2"))
    state.append(keys, keys, prefill="stored")
    sealed = state.read()[0]
    recode(state, "raw,window=20,sinks=5")
    now = state.read()[0]
    assert torch.equal(now[:, :, :2], keys[:, :, :2])
    assert torch.equal(now[:, :, 2:5], sealed[:, :, 2:5])


@pytest.mark.parametrize("after", ["raw", "affine8", "affine8,sinks=9", "raw,window=500,sinks=2"])
def test_sinks_that_touch_the_window_are_all_rows(after: str) -> None:
    """The first rows are there as sinks only, so the whole of them may become pages again."""
    state = grown("raw,window=60,sinks=40,slack=0", 99)
    recode(state, after)
    assert told(state) == list(range(99))


def test_padded_sequences_keep_their_own_sinks() -> None:
    new = rows(0, 200, batch=2)
    state = One(layer("raw"))
    state.append(new, new, start=[0, 70])
    recode(state, "affine8,window=50,sinks=3")
    keys = state.read()[0][:, 0, :, 0].round().long()
    assert keys[0].tolist() == last(50, 200, 3)
    assert keys[1].tolist() == [1070, 1071, 1072, *range(1150, 1200)]


@pytest.mark.parametrize(
    "before, after, message",
    [
        (
            "raw,window=50,sinks=0",
            "raw",
            r"all rows of 300 tokens.*last 50 are held.*at most window=50",
        ),
        (
            "affine4,window=50,sinks=0",
            "affine8,window=51,sinks=0",
            r"window=51 of 300 tokens.*last 50",
        ),
        ("affine4,window=50,sinks=4", "raw,window=50,sinks=5", r"sinks=5.*4 are held.*sinks=4"),
        ("raw,window=50,sinks=0", "affine4,window=20,sinks=1", r"sinks=1.*0 are held"),
    ],
)
def test_rows_that_are_gone_are_refused(before: str, after: str, message: str) -> None:
    state = grown(before, 300)
    snapshot = state.snapshot()
    with pytest.raises(SpecError, match=message):
        recode(state, after)
    same(state.snapshot(), snapshot)
    assert state.spec == layer(before)


def test_a_window_may_widen_while_all_rows_are_held() -> None:
    state = grown("raw,window=50,sinks=0", 50)
    recode(state, "affine8,window=90,sinks=3")
    put(state, 100)
    assert told(state) == last(90, 150, 3)


def test_a_capacity_that_is_too_small_is_refused() -> None:
    state = grown("raw", 300)
    with pytest.raises(CapacityError, match=r"300 tokens for a capacity of 299"):
        recode(state, "affine8,capacity=299")
    recode(state, "affine8,capacity=300")
    with pytest.raises(CapacityError):
        put(state, 1)


def test_rows_of_a_width_that_the_format_cannot_store_are_refused() -> None:
    state = grown("raw", 70, dim=20)
    with pytest.raises(ValueError, match="20 values"):
        recode(state, "affine8")
    assert told(state) == list(range(70))


def test_an_empty_layer_takes_the_recipe() -> None:
    state = One(layer("raw"))
    recode(state, "affine8,window=10,sinks=0")
    put(state, 100)
    assert told(state) == list(range(90, 100))
    state.reset()
    recode(state, "raw")
    assert (state.length, state.nbytes) == (0, 0)
    put(state, 100, batch=2)
    assert told(state) == list(range(100))


def test_rows_are_stored_in_the_dtype_that_is_asked_for() -> None:
    state = grown("raw", 100)
    recode(state, "bf16")
    assert state.read()[0].dtype == torch.bfloat16
    put(state, 1)
    assert state.read()[0].dtype == torch.bfloat16


def test_a_rewind_within_slack_stays_exact_where_the_format_stays() -> None:
    keys = torch.randn(1, 1, 130, 32)
    state = One(layer("affine2,tail=0"))
    state.append(keys, keys, prefill="stored")
    recode(state, "affine2,tail=0,window=100,sinks=0")
    state.rewind(127)
    assert torch.equal(state.read(64)[0], keys[:, :, 64:127])
    assert state.stats.rewinds_exact == 1


def test_no_rewind_reaches_rows_that_never_came(tmp_path: pytest.TempPathFactory) -> None:
    """The first page of the new window begins before the rows that the old one had kept."""
    cache = Cache(1, "raw,window=100,sinks=0")
    for _ in range(2):
        put(cache[0], 253)
    cache.recode("affine8,window=100,sinks=0")
    save(cache, f"{tmp_path}/a")
    for one in (cache, cache.fork(), load(f"{tmp_path}/a")):
        one.rewind(496)
        assert has_visible_rows(one[0].view(13), 13, Mask(window=100))  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="sealed or gone"):
            one[0].view(14)  # type: ignore[attr-defined]
        assert one.reachable(484) == 484
        assert one.reachable(483) == 0
        one.rewind(484)
        assert told(one[0]) == list(range(384, 484))


def test_rows_that_never_came_are_remembered_until_a_reset() -> None:
    state = grown("raw,window=100,sinks=0,slack=0", 490)
    recode(state, "affine8,window=100,sinks=0,slack=60")
    recode(state, "affine4,window=100,sinks=0,slack=60")
    # The page that the window begins in is there from its first row, 384, on.
    assert state.reachable(483) == 0
    state.rewind(state.reachable(484))
    assert told(state) == list(range(384, 484))
    state.reset()
    put(state, 300)
    assert state.reachable(250) == 250


WINDOWS = (20, 50, 64, 70, 100, 130, 200)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 20 else pytest.mark.laws) for n in range(60)]
)
def test_random_operations_read_what_is_there(seed: int) -> None:
    """Whatever windows, pages and slacks follow each other, rows are right or refused."""
    dice = random.Random(seed)
    window, sinks, start = 10_000, 0, dice.choice((0, 0, 9))
    state = One(layer("raw"))
    new = rows(0, 300)
    state.append(new, new, start=[start])
    for _ in range(40):
        verb = dice.choice(("put", "put", "rewind", "recode", "restore"))
        if verb == "put":
            put(state, dice.choice((1, 1, 3, 40, 90)))
        if verb == "rewind":
            to = state.reachable(max(1, state.length - dice.choice((1, 5, 11, 16, 30, 70))))
            state.rewind(to or state.length)
        if verb == "recode":
            asked, kept = dice.choice(WINDOWS), dice.choice((0, 3, 30))
            text = f"{dice.choice(('raw', 'affine8', 'affine4'))},page={dice.choice((64, 128))}"
            text += f",slack={dice.choice((0, 5, 16, 40))},tail={dice.choice((0, 10, 90))}"
            try:
                recode(state, f"{text},window={asked},sinks={kept}")
                window, sinks = asked, kept
            except SpecError:
                assert asked > window or kept > sinks
        if verb == "restore":
            state.restore(state.snapshot())
        expect_rows(state, window, sinks, start)


def expect_rows(state: One, window: int, sinks: int, start: int) -> None:
    keys, values = state.read()
    seen = [p for p in state.positions()[0].tolist() if p >= 0]
    length = state.length - start
    assert sorted(set(seen)) == sorted(
        set(range(min(sinks, length))) | set(range(max(0, length - window), length))
    )
    for side in (keys, values):
        tags = side[0, 0, :, 0].round().long() - start
        there = state.positions()[0] >= 0
        assert torch.equal(tags[there], state.positions()[0][there])
    q = torch.zeros(1, 1, 1, 8)
    mean = attend(q, state.view())[0, 0, 0, 0].item() - start
    assert mean == pytest.approx(sum(set(seen)) / len(set(seen)), rel=1e-4)


def test_values_inside_the_keys_stay_there() -> None:
    state = One(LayerSpec(*2 * (layer("raw").keys,), Window(50), value_dim=4))
    state.append(rows(0, 100))
    spec = layer("affine8,window=30,sinks=0")
    state.recode(LayerSpec(spec.keys, spec.keys, spec.retention, value_dim=4))
    keys, values = state.read()
    assert (keys.shape[2:], values.shape[2:]) == ((30, 8), (30, 4))
    assert keys[0, 0, :, 0].round().tolist() == list(range(70, 100))
