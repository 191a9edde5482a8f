"""Test the operations of a cache and their lifecycle rules, with rows that carry their position."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch

import kvant
from cache.tagged import (
    LayerCache,
    append_rows,
    assert_same,
    forward,
    make_layer,
    make_rows,
    read_tags,
)
from kvant import (
    Cache,
    CacheSpec,
    CapacityError,
    EmptySpec,
    LayerSpec,
    RewindError,
    SpecError,
    attend,
)
from kvant.codecs import Raw
from kvant.retention import KeepAll

SPECS = ("raw", "raw,step=1", "affine8", "affine4", "raw,sinks=3", "affine8,sinks=3")


def make_cache(text: str, count: int, num_layers: int = 2, **shape: int) -> Cache:
    cache = Cache(num_layers, text)
    forward(cache, count, **shape)
    return cache


def test_empty_cache_has_length_zero_and_no_bytes() -> None:
    cache = Cache(3, "affine8")
    assert (len(cache), cache.length, cache.num_rows, cache.batch) == (3, 0, 0, 0)
    assert (cache.nbytes, cache.nbytes_used) == (0, 0)
    assert (cache.reachable(5), cache.trim(5), cache.fork().length) == (0, 0, 0)
    cache.rewind(0)


@pytest.mark.parametrize("text", SPECS)
def test_an_empty_cache_reads_as_zero_rows(text: str) -> None:
    """Not as one row of zeros."""
    cache = Cache(1, text)
    assert [r.shape[2] for r in cache[0].read()] == [0, 0]
    assert cache[0].positions().shape[1] == 0
    forward(cache, 5, batch=2, heads=3)
    cache.reset()
    assert [list(r.shape) for r in cache[0].read()] == [[2, 3, 0, 8]] * 2
    assert cache[0].positions().shape == (2, 0)


@pytest.mark.parametrize("text", SPECS)
def test_every_layer_reads_all_its_rows(text: str) -> None:
    cache = make_cache(text, 130, num_layers=3)
    forward(cache, 1)
    assert [read_tags(state) for state in cache] == [list(range(131))] * 3
    assert (cache.length, cache.num_rows) == (131, 131)


@pytest.mark.parametrize("count, dropped", [(0, 0), (1, 1), (5, 5), (70, 70), (99, 70)])
def test_trim_drops_the_newest_and_returns_how_many(count: int, dropped: int) -> None:
    cache = make_cache("affine8", 70)
    assert cache.trim(count) == dropped
    assert cache.length == 70 - dropped
    assert [read_tags(state) for state in cache] == [list(range(70 - dropped))] * 2


def test_trim_refuses_to_grow() -> None:
    cache = make_cache("raw", 5)
    with pytest.raises(ValueError, match=r"trim\(-1\)"):
        cache.trim(-1)
    assert cache.length == 5


@pytest.mark.parametrize("length", [-1, 71])
def test_rewind_out_of_range_is_refused(length: int) -> None:
    cache = make_cache("raw", 70)
    with pytest.raises(RewindError, match=f"cannot rewind from 70 to {length}"):
        cache.rewind(length)
    assert cache.length == 70


def test_a_rewind_beyond_a_window_names_the_layer_and_the_limit_and_changes_nothing() -> None:
    cache = Cache(None, CacheSpec((make_layer("raw"), make_layer("raw,window=5,sinks=0,slack=3"))))
    forward(cache, 40)
    before = cache.snapshot()
    with pytest.raises(RewindError, match=r"layer 1: cannot rewind from 40 to 36: .* is 0"):
        cache.rewind(36)
    with pytest.raises(RewindError):
        cache.trim(4)
    assert_same(before, cache.snapshot())
    assert [cache.reachable(length) for length in (40, 38, 37, 36)] == [40, 38, 37, 0]
    cache.rewind(37)
    assert [read_tags(state)[-5:] for state in cache] == [[32, 33, 34, 35, 36]] * 2


def test_rewinds_are_counted_as_exact_or_decoded() -> None:
    cache = make_cache("affine8", 300, num_layers=1)
    cache.rewind(290)
    cache.rewind(100)
    stats = cache.stats()
    assert (stats["rewinds_exact"], stats["rewinds_decoded"]) == (1, 1)


@pytest.mark.parametrize("text", SPECS)
def test_reset_allows_other_shapes(text: str) -> None:
    """Regression: a retained buffer refused another batch size or head count."""
    cache = make_cache(text, 70, batch=2, heads=2)
    nbytes = cache.nbytes
    cache.reset()
    assert (cache.length, cache.num_rows, cache.nbytes) == (0, 0, nbytes)
    for shape in ({"batch": 3}, {"heads": 4}, {"dim": 16}):
        forward(cache, 70, **shape)
        assert read_tags(cache[1])[-1] == 69
        cache.reset()
    new = make_rows(0, 70, dtype=torch.bfloat16)
    for state in cache:
        state.append(new, new)
    assert cache[0].read()[0].dtype == torch.bfloat16


def test_reset_allows_another_padding() -> None:
    cache, new = Cache(1), make_rows(0, 9, batch=2)
    cache[0].append(new, new, start=[0, 4])
    cache.reset()
    cache[0].append(new, new, start=[2, 0])
    assert cache[0].positions()[:, 0].tolist() == [-1, 0]


def test_clear_frees_the_memory_that_reset_keeps() -> None:
    cache = make_cache("affine8,capacity=300", 200)
    nbytes = cache.nbytes
    cache.reset()
    assert cache.nbytes == nbytes > 0
    cache.clear()
    assert (cache.length, cache.nbytes, cache.nbytes_used, cache.batch) == (0, 0, 0, 0)
    forward(cache, 3)
    assert read_tags(cache[0]) == [0, 1, 2]


def test_range_read_returns_its_rows() -> None:
    cache = make_cache("affine8", 200)
    assert cache[1].read(70, 75)[0][0, 0, :, 0].tolist() == [70, 71, 72, 73, 74]


@pytest.mark.parametrize("text", ["raw", "affine8", "raw,window=50,sinks=0"])
def test_returned_rows_are_a_copy(text: str) -> None:
    cache = make_cache(text, 40)
    for side in cache[0].read():
        side.zero_()
    assert read_tags(cache[0]) == list(range(40))


@pytest.mark.parametrize("text", ["raw", "affine8", "raw,window=50,sinks=0"])
def test_returned_rows_survive_later_appends(text: str) -> None:
    cache = make_cache(text, 40)
    keys, before = cache[0].read()[0], cache[0].read()[0].clone()
    cache.trim(5)
    for state in cache:
        state.append(make_rows(90, 95), make_rows(90, 95))
    assert torch.equal(keys, before)


def test_rows_enter_and_leave_sequence_first() -> None:
    cache = Cache(1, "affine8")
    new = make_rows(0, 70, heads=2).transpose(1, 2)
    cache[0].append(new, new, order="BTHD")
    assert torch.equal(cache[0].read(order="BTHD")[0], new)
    assert torch.equal(cache[0].read()[0], new.transpose(1, 2))


@pytest.mark.parametrize("text", [*SPECS, "affine8,window=70,sinks=3", "raw,window=9,sinks=0"])
def test_select_takes_sequences_in_order_with_repeats(text: str) -> None:
    cache = make_cache(text, 131, batch=3)
    expected = [read_tags(cache[0], sequence) for sequence in range(3)]
    cache.select([2, 0, 0, 1])
    assert cache.batch == 4
    for state in cache:
        picked = [read_tags(state, sequence) for sequence in range(4)]
        assert picked == [expected[2], expected[0], expected[0], expected[1]]


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,window=70,sinks=3"])
def test_selected_sequences_continue_like_their_own_batches(text: str) -> None:
    keys, values = torch.randn(2, 3, 2, 200, 16)
    whole, part = Cache(1, text), Cache(1, text)
    whole[0].append(keys[:, :, :150], values[:, :, :150])
    part[0].append(keys[[2, 0], :, :150], values[[2, 0], :, :150])
    nbytes = whole.nbytes
    whole.select([2, 0])
    for cache in (whole, part):
        cache[0].append(keys[[2, 0], :, 150:], values[[2, 0], :, 150:])
    assert_same(whole.snapshot(), part.snapshot())
    assert part.nbytes <= whole.nbytes <= part.nbytes + nbytes // 3  # pages of the removed one
    whole.state.pools.check()


def test_select_keeps_the_padding_of_each_sequence() -> None:
    cache, new = Cache(1, "raw"), make_rows(0, 6, batch=3)
    cache[0].append(new, new, start=[0, 4, 2])
    cache.select([1, 2])
    assert cache[0].positions().tolist() == [[-1, -1, -1, -1, 0, 1], [-1, -1, 0, 1, 2, 3]]


def test_repeat_places_copies_next_to_each_other() -> None:
    cache = make_cache("raw", 3, batch=2)
    cache.repeat(2)
    assert [read_tags(cache[0], b)[0] for b in range(4)] == [0, 0, 1000, 1000]


def test_repeated_sequences_diverge() -> None:
    cache = make_cache("affine8", 64, num_layers=1)
    cache.repeat(2)
    new = torch.tensor([500.0, 600.0]).view(2, 1, 1, 1).expand(2, 1, 1, 8)
    cache[0].append(new, new)
    assert [read_tags(cache[0], b)[-2:] for b in range(2)] == [[63, 500], [63, 600]]


def test_select_repeats_and_reorders_sequences() -> None:
    cache = make_cache("raw", 3, batch=3)
    cache.select(torch.tensor([1, 1, 0]))
    assert [read_tags(cache[0], b)[0] for b in range(3)] == [1000, 1000, 0]


@pytest.mark.parametrize("index", [[3], [-1], [0, 7], [[0, 1]], []])
def test_missing_sequences_cannot_be_selected(index: list) -> None:
    """Regression: selecting no sequences left a cache that failed every operation."""
    cache = make_cache("raw", 3, batch=3)
    before = cache.snapshot()
    with pytest.raises(ValueError, match="of a batch of 3"):
        cache.select(index)
    assert_same(before, cache.snapshot())


def test_repeat_needs_a_count() -> None:
    with pytest.raises(ValueError, match=r"repeat\(0\)"):
        make_cache("raw", 3).repeat(0)


@pytest.mark.parametrize("text", [*SPECS, "affine8,window=70,sinks=3"])
def test_a_fork_is_independent_both_ways(text: str) -> None:
    cache = make_cache(text, 130)
    before = cache.snapshot()
    fork = cache.fork()
    for _ in range(3):
        append_tags(cache, 300)
    assert_same(before, fork.snapshot())
    after = cache.snapshot()
    fork.rewind(fork.length - 3)
    for _ in range(3):
        append_tags(fork, 700)
    assert_same(after, cache.snapshot())
    assert read_tags(fork[1])[-4:] == [126, 700, 700, 700]
    assert read_tags(cache[1])[-4:] == [129, 300, 300, 300]


@pytest.mark.parametrize("text", SPECS)
def test_trimmed_fork_is_a_reusable_prefix(text: str) -> None:
    """Tokens after a shared prefix depend on that prefix only: to the bit within slack."""
    cache = make_cache(text, 140)
    fork, single = cache.fork(), make_cache(text, 130)
    assert fork.trim(10) == 10
    for cache_ in (fork, single):
        append_tags(cache_, 500)
    assert read_tags(fork[1]) == [*range(130), 500]
    query = torch.randn(1, 1, 1, 8)
    assert torch.equal(*(attend(query, cache_[0].view()) for cache_ in (fork, single)))
    assert read_tags(cache[1]) == list(range(140))


def append_tags(cache: Cache, tag: int) -> None:
    for state in cache:
        state.append(make_rows(tag, tag + 1), make_rows(tag, tag + 1))


def test_fork_allocates_the_same_bytes() -> None:
    for text in (*SPECS, "raw,capacity=300", "affine8,window=70,sinks=0", "raw,window=9,sinks=0"):
        cache = make_cache(text, 130)
        assert cache.fork().nbytes == cache.nbytes


@pytest.mark.parametrize(
    "text", ["raw,capacity=10", "affine8,capacity=10", "raw,capacity=10,step=1"]
)
def test_capacity_refuses_with_value_limit_and_way_out_and_changes_nothing(text: str) -> None:
    """Regression: a write past the end overwrote the last rows."""
    cache = make_cache(text, 8)
    before = cache.snapshot()
    with pytest.raises(CapacityError, match=r"11 .* capacity of 10: .* capacity=11"):
        forward(cache, 3)
    assert_same(before, cache.snapshot())
    assert [read_tags(state) for state in cache] == [list(range(8))] * 2
    forward(cache, 2)
    assert (cache.length, cache.capacity, cache.max_held) == (10, 10, 10)


@pytest.mark.parametrize("text", ["affine8", "affine4", "affine8,window=100,sinks=0"])
def test_capacity_is_allocated_once_with_the_first_token(text: str) -> None:
    cache = make_cache(f"{text},capacity=1000", 1)
    nbytes, place = cache.nbytes, cache[0].view().keys.open.data_ptr()
    if "window" not in text:  # a chunk allocates both evicted and surviving pages
        forward(cache, 299)
    for _ in range(400):
        forward(cache, 1)
        assert (cache.nbytes, cache[0].view().keys.open.data_ptr()) == (nbytes, place)


def test_capacity_exceeded_in_a_later_layer_refuses_all() -> None:
    cache = Cache(None, CacheSpec((make_layer("raw"), make_layer("raw,capacity=10"))))
    forward(cache, 8)
    before = cache.snapshot()
    with pytest.raises(CapacityError):
        forward(cache, 3)
    assert_same(before, cache.snapshot())
    assert (cache.length, cache.capacity, cache.max_held) == (8, 10, None)


def test_limits_are_those_of_the_layers() -> None:
    assert (Cache(2).capacity, Cache(2).max_held) == (None, None)
    windowed = Cache(2, "raw,window=9,sinks=2")
    assert (windowed.capacity, windowed.max_held) == (None, 11)


def test_stats_count_operations() -> None:
    cache = make_cache("affine8", 100, batch=2)
    attend(torch.zeros(2, 1, 1, 8), cache[0].view())
    cache.trim(3)
    stats = cache.stats()
    assert stats["sequences"] == 2
    assert (stats["length"], stats["held"]) == (97, 97)
    assert (stats["nbytes"], stats["nbytes_used"]) == (cache.nbytes, cache.nbytes_used)
    assert stats["efficiency"] == cache.nbytes_used / cache.nbytes
    rows = cache[0].read()
    assert stats["raw_nbytes"] == len(cache) * sum(x.nbytes for x in rows)
    assert (stats["appends"], stats["rewinds_exact"], stats["rewinds_decoded"]) == (2, 2, 0)
    assert (stats["abandoned"], stats["attended"]) == (0, {"reference": 1})
    assert sum(stats["sealed"].values()) == 2 * 2 * 2  # layers, sequences, keys and values


def test_stats_of_an_empty_cache_divide_by_nothing() -> None:
    assert Cache(2).stats()["efficiency"] == 0.0


def test_snapshot_round_trips_bit_for_bit() -> None:
    for text in (*SPECS, "affine8,window=70,sinks=3", "raw,window=9,sinks=0"):
        cache = make_cache(text, 131, batch=2)
        snapshot = cache.snapshot()
        forward(cache, 200, batch=2)
        cache.restore(snapshot)
        assert_same(snapshot, cache.snapshot())
        forward(cache, 1, batch=2)
        assert read_tags(cache[1])[-3:] == [129, 130, 131]


def test_a_restore_is_committed() -> None:
    cache = make_cache("affine8", 70)
    snapshot = cache.snapshot()
    forward(cache, 30)
    cache.restore(snapshot)
    cache.rollback()
    assert_same(snapshot, cache.snapshot())


def test_snapshot_is_unaffected_by_later_appends() -> None:
    """Regression: a lazy snapshot returned rows written by a later append."""
    cache = make_cache("raw,capacity=300", 100)
    snapshot = cache.snapshot()
    copies = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    cache.rewind(50)
    append_tags(cache, 900)
    cache.clear()
    assert all(torch.equal(copies[name], snapshot.tensors[name]) for name in copies)


def test_snapshot_with_another_layer_count_is_refused() -> None:
    cache = make_cache("raw", 5, num_layers=3)
    other = make_cache("raw", 7, num_layers=2)
    before = other.snapshot()
    with pytest.raises(ValueError, match="belongs to none of"):
        other.restore(cache.snapshot())
    assert_same(before, other.snapshot())


def test_num_layers_and_a_spec_must_agree() -> None:
    with pytest.raises(SpecError, match="3"):
        Cache(3, CacheSpec((make_layer("raw"),) * 2))
    with pytest.raises(SpecError, match="num_layers"):
        Cache(None, "raw")


def test_single_recipe_applies_to_all_layers() -> None:
    cache = Cache(3, make_layer("affine8,window=70,sinks=0"))
    assert cache.spec == Cache(3, "affine8,window=70,sinks=0").spec


def sees_exactly(
    means: torch.Tensor, squares: torch.Tensor, window: int, sinks: int, p: int
) -> bool:
    """Whether mean and mean square are those of exactly the rows that position p sees."""
    visible = [k for k in range(p + 1) if p - k < window or k < sinks]
    mean = sum(visible) / len(visible)
    square = sum(k * k for k in visible) / len(visible)
    return abs(means - mean) < 1e-9 * max(mean, 1) and abs(squares - square) < 1e-9 * max(square, 1)


@pytest.mark.parametrize("seed", range(3))
def test_prompt_of_twenty_windows_runs_in_bounded_memory(seed: int) -> None:
    """Keys are zero, so all visible rows weigh the same; values are position and its square.

    Positions up to 10240 are exact in float32, their squares are stored as two halves.
    """
    window, sinks, slack, page, total = 512, 4, 16, 64, 20 * 512
    draw = random.Random(seed)
    state = LayerCache(make_layer(f"raw,window={window},sinks={sinks}"))
    position = torch.arange(total)
    square = position * position
    values = torch.stack([position, square // 4096, square % 4096], 1).float()[None, None]
    page_nbytes = page * (1 + 3) * 4
    while state.length < total:
        place = state.length
        count = min(draw.choice([1, 1, 7, 64, 300, 511, 512, 513, 1500]), total - place)
        new = values[:, :, place : place + count]
        view = state.append(torch.zeros(1, 1, count, 1), new)
        out = attend(torch.zeros(1, 1, count, 1).double(), view)[0, 0]
        queries = {0, count - 1, draw.randrange(count), draw.randrange(count)}
        for q in sorted(queries):
            mean, high, low = out[q].tolist()
            assert sees_exactly(mean, high * 4096 + low, window, sinks, place + q), place + q
        pages = -(-(window + slack) // page) + 2  # the open page, and the page of the sinks
        assert state.held <= window + sinks
        assert state.nbytes <= pages * page_nbytes
        state.state.pools.check()
    assert read_positions(state) == [0, 1, 2, 3, *range(total - window, total)]


def read_positions(state: LayerCache) -> list[int]:
    places = state.positions()[0].tolist()
    assert state.read()[1][0, 0, :, 0].tolist() == places
    return places


@pytest.mark.parametrize("text", ["affine8,window=100,sinks=4", "turbo4,window=100,sinks=4,tail=0"])
def test_compressed_window_evicts_pages(text: str) -> None:
    state, peak = LayerCache(make_layer(text)), 0
    for _ in range(500):
        append_rows(state, 1)
        peak = max(peak, state.nbytes)
    for count in (300, 1000, 5):
        append_rows(state, count)
        assert state.nbytes <= peak
    assert state.held == 104
    assert state.positions()[0].tolist() == [0, 1, 2, 3, *range(1705, 1805)]


def test_layers_with_different_windows_have_separate_masks() -> None:
    """Regression: a mask built from the first layer was used for all of them."""
    cache = Cache(
        None,
        CacheSpec(
            (
                make_layer("raw"),
                make_layer("raw,window=3,sinks=0"),
                make_layer("raw,window=2,sinks=0"),
            )
        ),
    )
    forward(cache, 20)
    views = forward(cache, 4)
    means = [attend(torch.zeros(1, 1, 4, 8), view)[0, 0, :, 0].tolist() for view in views]
    assert means[0] == [10.0, 10.5, 11.0, 11.5]
    assert means[1] == [19.0, 20.0, 21.0, 22.0]
    assert means[2] == [19.5, 20.5, 21.5, 22.5]


def test_fork_with_a_capacity_allocates_no_more_than_the_cache() -> None:
    """Regression: the copy allocated the whole capacity for pages that were not sealed yet."""
    cache = Cache(1, "affine8,capacity=100000")
    forward(cache, 1)
    assert cache.fork().nbytes == cache.nbytes


@pytest.mark.parametrize("sinks", [0, 63, 64, 200])
def test_window_does_not_move_for_every_token_with_any_sinks(sinks: int) -> None:
    """Once full it never moves: evicted pages make room for new ones."""
    cache = Cache(1, f"raw,window=256,sinks={sinks}")
    for _ in range(600):
        forward(cache, 1)
    nbytes, place = cache.nbytes, cache[0].view().keys.open.data_ptr()
    for _ in range(300):
        forward(cache, 1)
        assert (cache.nbytes, cache[0].view().keys.open.data_ptr()) == (nbytes, place)


def test_boolean_index_is_not_accepted_for_sequences() -> None:
    cache = Cache(1, "raw")
    forward(cache, 3, batch=2)
    for index in (torch.tensor([True, False]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ValueError, match="of a batch of 2"):
            cache.select(index)


@pytest.mark.parametrize("start", [2, [0.5], [[1]], torch.tensor([True])], ids=str)
def test_start_of_wrong_type_is_refused(start: object) -> None:
    cache = Cache(1, "raw")
    with pytest.raises(ValueError, match="one whole number per sequence"):
        cache[0].append(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), start=start)


def test_unknown_prefill_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'dense' or 'stored' is needed"):
        Cache(1, "raw")[0].append(*torch.zeros(2, 1, 1, 3, 8), prefill="Stored")


def test_memory_is_freed_with_the_last_reference() -> None:
    """Without the garbage collector: the next cache may need the memory."""
    cache = Cache(2, "affine8")
    rows = torch.zeros(1, 1, 8, 64)
    for state in cache:
        state.append(rows, rows)
    layer_ref = weakref.ref(cache[0])
    gc.disable()
    try:
        del cache, state
        assert layer_ref() is None
    finally:
        gc.enable()


def test_a_layer_outlives_its_cache() -> None:
    layer = Cache(1, "raw")[0]
    for _ in range(2):
        append_rows(layer, 3)
    assert read_tags(layer) == list(range(6))


def test_stateless_layer_does_not_block_operations() -> None:
    spec = LayerSpec(Raw(), Raw(), KeepAll())
    cache = Cache(spec=CacheSpec((spec, EmptySpec(), spec)))
    for index in (0, 2):
        cache[index].append(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    assert (len(cache), cache.length, len(list(cache))) == (3, 3, 2)
    with pytest.raises(ValueError, match="layer 1 has no cache"):
        cache[1]


@pytest.mark.parametrize("text", SPECS)
def test_move_includes_all_tensors(text: str) -> None:
    """The meta device has shapes without data, so any leftover tensor would show."""
    cache = make_cache(text, 200)
    before = [layer.nbytes for layer in cache]
    cache.move("meta")
    assert [layer.nbytes for layer in cache] == before
    for state in cache:
        view = state.view()
        tensors = [
            t for side in (view.keys, view.values) for t in (side.open, *side.sealed.values())
        ]
        assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("text", SPECS)
def test_move_to_the_same_device_changes_nothing(text: str) -> None:
    cache = make_cache(text, 200)
    fork = cache.fork()
    cache.move("cpu")
    forward(cache, 3)
    forward(fork, 3)
    assert_same(cache.snapshot(), fork.snapshot())


def test_move_rolls_back_a_failed_forward() -> None:
    cache = make_cache("affine8", 100)
    cache[0].append(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
    cache.move("cpu")
    assert [layer.length for layer in cache] == [100, 100]


def test_a_deep_copy_is_a_fork() -> None:
    """Regression: its layers used the state of the original, which committed and rolled back
    for them.
    """
    cache = Cache(2, "raw,window=8,sinks=0")
    forward(cache, 10)
    clone = copy.deepcopy(cache)
    for _ in range(40):
        forward(clone, 1)
    assert (clone.length, clone.num_rows, cache.length) == (50, 8, 10)
    forward(clone, 1, num_appended=1)
    assert (clone.is_complete, cache.is_complete) == (False, True)
    forward(cache, 1)
    assert [read_tags(state) for state in cache] == [list(range(3, 11))] * 2


def test_reset_cache_is_explained() -> None:
    """Regression: it has storages and no tokens, and a view of 0 tokens was refused."""
    cache = Cache(1, "raw")
    cache[0].append(*torch.randn(2, 1, 1, 5, 32))
    cache.reset()
    assert "empty" in str(kvant.explain(cache))
