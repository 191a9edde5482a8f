"""Test recoding of one attention layer, with rows that carry their position."""

from __future__ import annotations

import random

import pytest
import torch

from cache.tagged import LayerCache, append_rows, assert_same, make_layer, make_rows, read_tags
from kvant import Cache, CacheSpec, CapacityError, LayerSpec, SpecError, attend, load, save
from kvant.attention.length_groups import has_visible_rows
from kvant.contracts import Mask
from kvant.retention import Window


def make_layer_of(text: str, count: int, **shape: int) -> LayerCache:
    state = LayerCache(make_layer(text))
    append_rows(state, count, **shape)
    return state


def recode(state: LayerCache, text: str) -> None:
    state.recode(make_layer(text))


def last_positions(window: int, length: int, sinks: int = 0) -> list[int]:
    first = max(sinks, length - window)
    return [*range(min(sinks, length)), *range(min(first, length), length)]


@pytest.mark.parametrize("length", [1, 63, 64, 127, 128, 200, 300])
@pytest.mark.parametrize("before", ["raw", "affine8", "affine4,tail=0"])
@pytest.mark.parametrize("after", ["raw", "affine8", "affine4", "affine8,page=128"])
def test_window_evicts_rows(before: str, after: str, length: int) -> None:
    state = make_layer_of(before, length)
    recode(state, f"{after},window=70,sinks=3")
    assert read_tags(state) == last_positions(70, length, 3)
    for _ in range(70):
        append_rows(state, 1)
    assert read_tags(state) == last_positions(70, length + 70, 3)


def test_dense_rows_stay_unchanged() -> None:
    """Another frame adds rounding only; the same frame changes no bit."""
    keys = torch.randn(1, 2, 300, 32)
    state = LayerCache(make_layer("turbo4,tail=100"))
    state.append(keys, keys, prefill="stored")
    before = state.read(192)
    recode(state, "turbo2,tail=100")
    for old_rows, now in zip(before, state.read(192), strict=True):
        assert torch.equal(old_rows, now)
    recode(state, "raw")
    assert (state.read(192)[0] - keys[:, :, 192:]).abs().max() < 1e-5


def test_unchanged_side_is_not_encoded_again() -> None:
    rows = torch.randn(1, 2, 300, 32)
    state = LayerCache(make_layer("affine4v3"))
    state.append(rows, rows, prefill="stored")
    before, dense = state.read(), state.snapshot().tensors["keys.open"]
    recode(state, "affine4/turbo3")
    assert torch.equal(state.read()[0], before[0])
    assert not torch.equal(state.read()[1], before[1])
    assert torch.equal(state.snapshot().tensors["keys.open"], dense)


def test_pages_sealed_by_a_shorter_tail_join_the_sealed_ones() -> None:
    keys = torch.randn(1, 2, 400, 32)
    state, fresh = (
        LayerCache(make_layer("affine4,tail=150")),
        LayerCache(make_layer("affine4,tail=3")),
    )
    for copy_ in (state, fresh):
        copy_.append(keys, keys, prefill="stored")
    recode(state, "affine4,tail=3")
    assert_same(state.snapshot(), fresh.snapshot())


def test_sinks_are_dense_from_the_oldest_kept_rows() -> None:
    keys = torch.randn(1, 1, 200, 32)
    state = LayerCache(make_layer("affine4,tail=0,sinks=2"))
    state.append(keys, keys, prefill="stored")
    sealed = state.read()[0]
    recode(state, "raw,window=20,sinks=5")
    now = state.read()[0]
    assert torch.equal(now[:, :, :2], keys[:, :, :2])
    assert torch.equal(now[:, :, 2:5], sealed[:, :, 2:5])


@pytest.mark.parametrize("after", ["raw", "affine8", "affine8,sinks=9", "raw,window=500,sinks=2"])
def test_sinks_adjacent_to_the_window_keep_all_rows(after: str) -> None:
    """All first rows survive as sinks only, so they can become pages again."""
    state = make_layer_of("raw,window=60,sinks=40,slack=0", 99)
    recode(state, after)
    assert read_tags(state) == list(range(99))


def test_padded_sequences_keep_their_own_sinks() -> None:
    new = make_rows(0, 200, batch=2)
    state = LayerCache(make_layer("raw"))
    state.append(new, new, start=[0, 70])
    recode(state, "affine8,window=50,sinks=3")
    keys = state.read()[0][:, 0, :, 0].round().long()
    assert keys[0].tolist() == last_positions(50, 200, 3)
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
        (
            "affine4,window=50,sinks=4",
            "raw,window=50,sinks=5",
            r"sinks=5.*first 4 rows are held.*sinks=4",
        ),
        ("raw,window=50,sinks=0", "affine4,window=20,sinks=1", r"sinks=1.*first 0 rows are held"),
    ],
)
def test_evicted_rows_are_refused(before: str, after: str, message: str) -> None:
    state = make_layer_of(before, 300)
    snapshot = state.snapshot()
    with pytest.raises(SpecError, match=message):
        recode(state, after)
    assert_same(state.snapshot(), snapshot)
    assert state.spec == make_layer(before)


def test_window_may_widen_while_all_rows_are_kept() -> None:
    state = make_layer_of("raw,window=50,sinks=0", 50)
    recode(state, "affine8,window=90,sinks=3")
    append_rows(state, 100)
    assert read_tags(state) == last_positions(90, 150, 3)


def test_a_capacity_that_is_too_small_is_refused() -> None:
    state = make_layer_of("raw", 300)
    with pytest.raises(CapacityError, match=r"300 tokens for a capacity of 299"):
        recode(state, "affine8,capacity=299")
    recode(state, "affine8,capacity=300")
    with pytest.raises(CapacityError):
        append_rows(state, 1)


def test_rows_of_unsupported_width_are_refused() -> None:
    state = make_layer_of("raw", 70, dim=20)
    with pytest.raises(ValueError, match="20 values"):
        recode(state, "affine8")
    assert read_tags(state) == list(range(70))


def test_an_empty_layer_takes_the_recipe() -> None:
    state = LayerCache(make_layer("raw"))
    recode(state, "affine8,window=10,sinks=0")
    append_rows(state, 100)
    assert read_tags(state) == list(range(90, 100))
    state.reset()
    recode(state, "raw")
    assert (state.length, state.nbytes) == (0, 0)
    append_rows(state, 100, batch=2)
    assert read_tags(state) == list(range(100))


def test_rows_are_stored_in_the_requested_dtype() -> None:
    state = make_layer_of("raw", 100)
    recode(state, "bf16")
    assert state.read()[0].dtype == torch.bfloat16
    append_rows(state, 1)
    assert state.read()[0].dtype == torch.bfloat16


def test_rewind_within_slack_stays_exact_if_the_format_is_unchanged() -> None:
    keys = torch.randn(1, 1, 130, 32)
    state = LayerCache(make_layer("affine2,tail=0"))
    state.append(keys, keys, prefill="stored")
    recode(state, "affine2,tail=0,window=100,sinks=0")
    state.rewind(127)
    assert torch.equal(state.read(64)[0], keys[:, :, 64:127])
    assert state.stats.rewinds_exact == 1


def test_rewind_never_reaches_missing_rows(tmp_path: pytest.TempPathFactory) -> None:
    """The first page of the new window begins before the rows that the old window kept."""
    cache = Cache(1, "raw,window=100,sinks=0")
    for _ in range(2):
        append_rows(cache[0], 253)
    cache.recode("affine8,window=100,sinks=0")
    save(cache, f"{tmp_path}/a")
    for copy_ in (cache, cache.fork(), load(f"{tmp_path}/a")):
        copy_.rewind(496)
        assert has_visible_rows(copy_[0].view(13), 13, Mask(window=100))  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="sealed or released"):
            copy_[0].view(14)  # type: ignore[attr-defined]
        assert copy_.reachable(484) == 484
        assert copy_.reachable(483) == 0
        copy_.rewind(484)
        assert read_tags(copy_[0]) == list(range(384, 484))


def test_missing_rows_are_remembered_until_a_reset() -> None:
    state = make_layer_of("raw,window=100,sinks=0,slack=0", 490)
    recode(state, "affine8,window=100,sinks=0,slack=60")
    recode(state, "affine4,window=100,sinks=0,slack=60")
    # The page where the window begins is complete from its first row, 384.
    assert state.reachable(483) == 0
    state.rewind(state.reachable(484))
    assert read_tags(state) == list(range(384, 484))
    state.reset()
    append_rows(state, 300)
    assert state.reachable(250) == 250


WINDOWS = (20, 50, 64, 70, 100, 130, 200)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 20 else pytest.mark.laws) for n in range(60)]
)
def test_random_operations_read_the_expected_rows(seed: int) -> None:
    """For any sequence of windows, pages and slacks, rows are right or refused."""
    dice = random.Random(seed)
    window, sinks, start = 10_000, 0, dice.choice((0, 0, 9))
    state = LayerCache(make_layer("raw"))
    new = make_rows(0, 300)
    state.append(new, new, start=[start])
    for _ in range(40):
        verb = dice.choice(("put", "put", "rewind", "recode", "restore"))
        if verb == "put":
            append_rows(state, dice.choice((1, 1, 3, 40, 90)))
        if verb == "rewind":
            length = state.reachable(max(1, state.length - dice.choice((1, 5, 11, 16, 30, 70))))
            state.rewind(length or state.length)
        if verb == "recode":
            window_, sinks_ = dice.choice(WINDOWS), dice.choice((0, 3, 30))
            text = f"{dice.choice(('raw', 'affine8', 'affine4'))},page={dice.choice((64, 128))}"
            text += f",slack={dice.choice((0, 5, 16, 40))},tail={dice.choice((0, 10, 90))}"
            try:
                recode(state, f"{text},window={window_},sinks={sinks_}")
                window, sinks = window_, sinks_
            except SpecError:
                assert window_ > window or sinks_ > sinks
        if verb == "restore":
            state.restore(state.snapshot())
        expect_rows(state, window, sinks, start)


def expect_rows(state: LayerCache, window: int, sinks: int, start: int) -> None:
    keys, values = state.read()
    visible = [p for p in state.positions()[0].tolist() if p >= 0]
    length = state.length - start
    assert sorted(set(visible)) == sorted(
        set(range(min(sinks, length))) | set(range(max(0, length - window), length))
    )
    for side in (keys, values):
        tags = side[0, 0, :, 0].round().long() - start
        valid = state.positions()[0] >= 0
        assert torch.equal(tags[valid], state.positions()[0][valid])
    q = torch.zeros(1, 1, 1, 8)
    mean = attend(q, state.view())[0, 0, 0, 0].item() - start
    assert mean == pytest.approx(sum(set(visible)) / len(set(visible)), rel=1e-4)


def test_values_inside_keys_survive_a_recode() -> None:
    state = LayerCache(LayerSpec(*2 * (make_layer("raw").keys,), Window(50), value_dim=4))
    state.append(make_rows(0, 100))
    spec = make_layer("affine8,window=30,sinks=0")
    state.recode(LayerSpec(spec.keys, spec.keys, spec.retention, value_dim=4))
    keys, values = state.read()
    assert (keys.shape[2:], values.shape[2:]) == ((30, 8), (30, 4))
    assert keys[0, 0, :, 0].round().tolist() == list(range(70, 100))


def test_layers_that_dropped_different_rows_get_no_common_prune() -> None:
    """Regression: the unpruned layer lost rows, and the next prune kept rows that were none."""
    cache = Cache(spec=CacheSpec((make_layer("raw"), make_layer("raw,prune=keydiff:64"))))
    for layer in cache:
        layer.append(*torch.randn(2, 1, 1, 300, 32))
    cache.prune()
    with pytest.raises(SpecError, match="dropped different rows"):
        cache.recode("raw,prune=keydiff:64")
    assert [layer.num_rows for layer in cache] == [300, 64]


def test_layers_pruned_to_other_budgets_get_no_common_prune() -> None:
    """Regression: the second layer lost 64 of its rows."""
    texts = "raw,prune=keydiff:64", "raw,prune=keydiff:128"
    cache = Cache(spec=CacheSpec(tuple(map(make_layer, texts))))
    for layer in cache:
        layer.append(*torch.randn(2, 1, 1, 300, 32))
    cache.prune()
    with pytest.raises(SpecError, match="dropped different rows"):
        cache.recode(texts[1])
    assert [layer.num_rows for layer in cache] == [64, 128]
