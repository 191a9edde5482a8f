"""One test for each bug of earlier caches, named after it.

Generation, speculation, transformers and many sequences have their own tests.
"""

from __future__ import annotations

import pytest
import torch

import kvant
from cache.tagged import (
    LayerCache,
    append_rows,
    assert_same,
    forward,
    make_layer,
    make_recipe,
    make_rows,
    read_tags,
)
from kvant import Cache, CacheSpec, CapacityError, Mask, RecurrentSpec, RewindError, attend
from kvant.attention import dispatch, reference
from kvant.attention.reference import ReferenceBackend
from kvant.codecs import Raw
from kvant.contracts import View
from kvant.retention import Window
from laws import oracle
from laws.cases import backend_tolerance


def mean_visible_tags(view: View, queries: int, **rest) -> list[float]:
    """Return the mean of the tags that each token sees, by zero queries."""
    (heads, dim), batch = view.keys.open.shape[1::2], view.batch
    out = attend(torch.zeros(batch, heads, queries, dim), view, **rest)
    return [round(v, 3) for v in out[0, 0, :, 0].tolist()]


def test_a_window_that_shows_one_token_too_many() -> None:
    state = LayerCache(make_layer("raw,window=3,sinks=0"))
    assert mean_visible_tags(append_rows(state, 10), 3) == [6.0, 7.0, 8.0]
    assert mean_visible_tags(append_rows(state, 1), 1) == [9.0]


def test_a_reset_that_keeps_the_old_shapes() -> None:
    cache = Cache(1)
    forward(cache, 5, batch=2, heads=4)
    cache.reset()
    forward(cache, 5, batch=3, heads=2)
    assert read_tags(cache[0], 2, 1) == [5000, 5001, 5002, 5003, 5004]


def test_a_reset_that_does_nothing() -> None:
    cache = Cache(1, "raw,step=1")
    forward(cache, 5)
    cache.reset()
    forward(cache, 2)
    assert read_tags(cache[0]) == [0, 1]


def test_a_trim_that_drops_nothing() -> None:
    cache = Cache(2, "affine8")
    forward(cache, 100)
    assert cache.trim(30) == 30
    assert [read_tags(state) for state in cache] == [list(range(70))] * 2


def test_a_recurrence_rolled_back_by_its_length_alone() -> None:
    state = LayerCache(RecurrentSpec())
    state.append(1, {"x": torch.tensor([1.0])})
    state.checkpoint()
    state.append(1, {"x": torch.tensor([2.0])})
    state.rewind(1)
    assert state.read()["x"].tolist() == [1.0]


def test_single_mask_from_the_first_layer_for_all_layers() -> None:
    cache = Cache(None, CacheSpec((make_layer("raw"), make_layer("raw,window=3,sinks=0"))))
    assert [mean_visible_tags(view, 2) for view in forward(cache, 9)] == [[3.5, 4.0], [6.0, 7.0]]


@pytest.mark.parametrize("text", ["raw,window=8,sinks=2", "affine8,window=8,sinks=2,slack=0"])
def test_a_chunk_that_overwrites_the_window_of_its_own_first_queries(text: str) -> None:
    state = LayerCache(make_layer(text))
    for count in (5, 30, 7, 200, 1, 9):
        place = state.length
        tags = mean_visible_tags(append_rows(state, count), count)
        for query, mean in enumerate(tags, place):
            visible = [k for k in range(query + 1) if query - k < 8 or k < 2]
            assert abs(mean - sum(visible) / len(visible)) < 2e-3, query


@pytest.mark.parametrize(
    "text", ["turbo3,tail=0", "affine3,tail=0", "affine4,tail=0,window=90,sinks=0"]
)
def test_bits_of_rows_that_were_dropped_left_in_the_page(text: str) -> None:
    keys, values = torch.randn(2, 1, 1, 256, 32)
    clean, used = LayerCache(make_layer(text)), LayerCache(make_layer(text))
    used.append(*torch.randn(2, 1, 1, 256, 32))
    used.reset()
    for state in (clean, used):
        state.append(keys, values)
    assert_same(clean.snapshot(), used.snapshot())


def test_a_window_restored_by_its_length_alone() -> None:
    state = LayerCache(make_layer("raw,window=8,sinks=2"))
    append_rows(state, 100)
    snapshot = state.snapshot()
    append_rows(state, 300)
    state.restore(snapshot)
    assert read_tags(state) == [0, 1, *range(92, 100)]
    assert mean_visible_tags(append_rows(state, 1), 1) == [round((1 + sum(range(93, 101))) / 10, 3)]


@pytest.mark.parametrize("text", ["affine8", "turbo4"])
def test_a_mirror_of_the_whole_cache_to_read_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention decodes a bounded number of rows at a time, for any length."""
    state = LayerCache(make_layer(text))
    state.append(*torch.randn(2, 1, 1, 6400, 32))
    opened = []
    codec = type(state.spec.keys)
    plain = codec.open

    def count_rows(self, fields):
        rows_ = plain(self, fields)
        opened.append(rows_.numel())
        return rows_

    monkeypatch.setattr(codec, "open", count_rows)
    monkeypatch.setattr(dispatch, "BACKENDS", [ReferenceBackend(max_opened_values=4 * 64 * 32)])
    attend(torch.randn(1, 4, 1, 32), state.view(), backend="reference")
    assert max(opened) == 4 * 64 * 32
    assert sum(opened) >= 2 * 6144 * 32


def test_sequences_of_a_batch_that_share_a_scratch_buffer() -> None:
    keys, values = torch.randn(2, 3, 2, 200, 16)
    q = torch.randn(3, 4, 1, 16)
    whole = LayerCache(make_layer("affine8"))
    whole.append(keys, values)
    out = attend(q, whole.view())
    for sequence in range(3):
        single = LayerCache(make_layer("affine8"))
        single.append(keys[sequence : sequence + 1], values[sequence : sequence + 1])
        error = attend(q[sequence : sequence + 1], single.view()) - out[sequence : sequence + 1]
        assert error.abs().max() < 1e-6


@pytest.mark.parametrize(
    "text", ["affine8,rotate", "turbo4", "turbo4v2", "raw/turbo4", "turbo4/raw"]
)
def test_queries_that_are_not_rotated_as_their_keys_are(text: str) -> None:
    state = LayerCache(make_layer(text))
    state.append(*torch.randn(2, 1, 2, 300, 32))
    q = torch.randn(1, 8, 1, 32)
    every = torch.ones(1, 1, 300, dtype=torch.bool)
    expected = oracle.exact_attention(q, *state.read(), every)
    view = state.view()
    assert (attend(q, view).double() - expected).abs().max() < backend_tolerance(view)


def test_a_recurrence_kept_in_sixteen_bits() -> None:
    state = LayerCache(RecurrentSpec())
    state.append(1, {"x": torch.ones(1).bfloat16()})
    stored = state.read()["x"]
    for _ in range(100):
        state.append(1, {"x": stored + 0.001})
        stored = state.read()["x"]
    assert abs(stored.item() - 1.1) < 1e-4


def test_sinks_that_move_with_the_window() -> None:
    """Sinks keep their absolute positions: rows are positioned on arrival and never change."""
    state = LayerCache(make_layer("raw,window=4,sinks=2"))
    append_rows(state, 50)
    assert read_tags(state) == [0, 1, 46, 47, 48, 49]
    assert state.positions().tolist() == [[0, 1, 46, 47, 48, 49]]


def test_one_position_for_all_layers_that_the_first_layer_moves() -> None:
    """Regression: the second layer started where the first had stopped."""
    cache = Cache(3, "raw")
    views = forward(cache, 4)
    assert [view.page_table.num_columns for view in views] == [4, 4, 4]
    assert [read_tags(state) for state in cache] == [[0, 1, 2, 3]] * 3


def test_an_overflow_that_lands_on_the_last_rows() -> None:
    cache = Cache(1, "raw,capacity=6")
    forward(cache, 5)
    with pytest.raises(CapacityError):
        forward(cache, 2)
    assert read_tags(cache[0]) == [0, 1, 2, 3, 4]


def test_an_empty_cache_that_reads_as_a_row_of_zeros() -> None:
    assert Cache(1)[0].read()[0].shape[2] == 0


def test_a_prompt_that_sees_its_future() -> None:
    assert mean_visible_tags(append_rows(LayerCache(make_layer("raw")), 5), 5) == [
        0.0,
        0.5,
        1.0,
        1.5,
        2.0,
    ]


def test_a_small_number_added_to_the_sum_of_the_weights() -> None:
    view = LayerCache(make_layer("raw")).append(
        torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1, 8), 1e4)
    )
    assert (attend(torch.zeros(1, 1, 1, 8), view) == 1e4).all()


def test_a_second_layer_that_slides_by_the_length_of_the_first() -> None:
    cache = Cache(3, "raw,window=6,sinks=1")
    for count in (4, 5, 3, 20, 1):
        forward(cache, count)
        assert len({tuple(read_tags(state)) for state in cache}) == 1
    assert read_tags(cache[2]) == [0, 27, 28, 29, 30, 31, 32]


def test_a_chunk_longer_than_the_window_kept_whole() -> None:
    state = LayerCache(make_recipe(Raw(), Window(8), slack=0, page=8))
    append_rows(state, 500)
    assert read_tags(state) == list(range(492, 500))
    assert state.nbytes == (8 + 8) * 2 * 8 * 4


def test_a_window_that_lets_one_row_too_many_go() -> None:
    state = LayerCache(make_recipe(Raw(), Window(4), slack=0))
    append_rows(state, 4)
    assert read_tags(state) == [0, 1, 2, 3]
    append_rows(state, 1)
    assert read_tags(state) == [1, 2, 3, 4]


def test_a_ring_joined_with_a_chunk_after_it_wrapped() -> None:
    """Regression: rows were read in slot order, and the newest of them dropped."""
    state = LayerCache(make_recipe(Raw(), Window(6), slack=0, page=8))
    for count in (*[1] * 20, 3, *[1] * 5, 9, 1):
        append_rows(state, count)
        assert read_tags(state) == list(range(max(0, state.length - 6), state.length))


def test_a_snapshot_that_a_later_append_overwrites() -> None:
    cache = Cache(1, "raw,window=6,sinks=0")
    forward(cache, 20)
    snapshot = cache.snapshot()
    for _ in range(200):
        forward(cache, 1)
    cache.restore(snapshot)
    assert read_tags(cache[0]) == [14, 15, 16, 17, 18, 19]


def test_a_snapshot_that_pins_the_whole_buffer() -> None:
    cache = Cache(1, "affine8,capacity=10000")
    forward(cache, 70)
    for name, tensor in cache.snapshot().tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_a_window_resumed_without_the_rows_it_needs() -> None:
    state = LayerCache(make_layer("raw,window=6,sinks=0,slack=4"))
    append_rows(state, 50)
    with pytest.raises(RewindError, match="the longest length it can reach is 0"):
        state.rewind(45)
    state.rewind(46)
    assert mean_visible_tags(append_rows(state, 1), 1) == [43.5]


def test_a_trim_that_brings_overwritten_rows_back() -> None:
    cache = Cache(1, "raw,window=6,sinks=0,slack=4")
    forward(cache, 50)
    with pytest.raises(RewindError):
        cache.trim(20)
    assert cache.length == 50
    assert cache.trim(4) == 4
    assert read_tags(cache[0]) == [40, 41, 42, 43, 44, 45]


def test_rows_in_another_order_after_one_token_than_after_many() -> None:
    single, many = (LayerCache(make_layer("raw,window=6,sinks=2")) for _ in range(2))
    append_rows(many, 40)
    for _ in range(40):
        append_rows(single, 1)
    assert read_tags(single) == read_tags(many) == [0, 1, 34, 35, 36, 37, 38, 39]


def test_layers_at_different_lengths_after_a_failure() -> None:
    cache = Cache(
        None, CacheSpec((make_layer("raw"), make_layer("raw,capacity=10"), make_layer("affine8")))
    )
    forward(cache, 9)
    with pytest.raises(CapacityError):
        forward(cache, 2)
    assert cache.reachable(99) == 9
    assert [state.length for state in cache] == [9, 9, 9]


def test_a_causal_mask_aligned_to_the_first_key() -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 5)
    assert mean_visible_tags(append_rows(state, 2), 2) == [2.5, 3.0]


def test_a_copy_that_shares_its_memory() -> None:
    cache = Cache(1, "raw,capacity=100")
    forward(cache, 5)
    fork = cache.fork()
    for each, tag in ((cache, 100), (fork, 200)):
        each.rewind(3)
        each[0].append(make_rows(tag, tag + 2), make_rows(tag, tag + 2))
    assert (read_tags(cache[0]), read_tags(fork[0])) == ([0, 1, 2, 100, 101], [0, 1, 2, 200, 201])


def test_a_length_that_is_the_number_of_rows_or_slots() -> None:
    cache = Cache(1, "raw,window=6,sinks=1")
    forward(cache, 50)
    slots = cache.nbytes // (2 * 8 * 4)
    assert (cache.length, cache.num_rows) == (50, 7)
    assert slots > 7


def test_a_padded_query_that_gives_nan() -> None:
    new = make_rows(0, 5)
    view = LayerCache(make_layer("raw")).append(new, new, start=[3])
    out, lse = attend(torch.ones(1, 1, 5, 8), view, return_lse=True)
    assert (out[0, 0, :3] == 0).all() and out.isfinite().all()
    assert (lse[0, 0, :3] == float("-inf")).all()


def test_a_rewind_that_some_layers_make_and_others_refuse() -> None:
    cache = Cache(
        None,
        CacheSpec((make_layer("raw"), RecurrentSpec(), make_layer("raw,window=5,sinks=0,slack=0"))),
    )
    for index, state in enumerate(cache):
        if index == 1:
            state.append(20, {"x": torch.zeros(1)})
        else:
            append_rows(state, 20)
    with pytest.raises(RewindError):
        cache.rewind(15)
    assert [state.length for state in cache] == [20, 20, 20]
    assert read_tags(cache[0]) == list(range(20))


@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_keys_repeated_for_every_head_of_their_group(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen query heads on one KV head: rows are multiplied without copies."""
    state = LayerCache(make_layer(text))
    state.append(*torch.randn(2, 1, 1, 300, 16))
    shapes = []
    plain = reference._grouped_matmul

    def visible(x, args):
        shapes.append(args.shape[1])
        return plain(x, args)

    monkeypatch.setattr(reference, "_grouped_matmul", visible)
    attend(torch.randn(1, 16, 1, 16), state.view(), backend="reference")
    assert shapes and set(shapes) == {1}


@pytest.mark.parametrize("text", ["affine8", "affine2", "fp8", "turbo4", "turbo2"])
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0])
def test_a_row_of_one_value_divided_by_its_range(text: str, value: float) -> None:
    state = LayerCache(make_layer(f"{text},tail=0"))
    same_rows = torch.full((1, 1, 128, 32), value)
    state.append(same_rows, same_rows)
    keys, _ = state.read()
    assert keys.isfinite().all()
    if value == 0.0 or text.startswith("affine"):
        assert (keys - value).abs().max() == 0


def test_sums_kept_in_sixteen_bits() -> None:
    state = LayerCache(make_layer("bf16"))
    view = state.append(torch.zeros(1, 1, 3000, 8), torch.ones(1, 1, 3000, 8))
    assert (attend(torch.zeros(1, 1, 1, 8).bfloat16(), view) == 1).all()


@pytest.mark.parametrize(
    "text", ["turbo3", "affine3", "affine5", "affine6", "affine2", "fp8", "turbo4"]
)
@pytest.mark.parametrize("dim", [8, 24, 40, 72, 80, 96])
def test_widths_that_words_and_groups_do_not_divide(text: str, dim: int) -> None:
    state = LayerCache(make_layer(f"{text},tail=0"))
    keys, values = torch.randn(2, 1, 2, 192, dim)
    state.append(keys, values)
    bound = {"affine2": 1.3, "turbo3": 2.5, "affine3": 0.6, "turbo4": 2.0}.get(text, 0.3)
    for stored, expected in zip(state.read(), (keys, values), strict=True):
        assert stored.shape == expected.shape
        assert (stored - expected).abs().max() < bound
        assert (stored - expected).abs().max() > 0


def padding_difference(text: str, columns: int) -> float:
    """Return the difference of a sequence after padding columns to itself without them."""
    keys, values = torch.randn(2, 1, 2, 200, 16)
    q = torch.randn(1, 4, 200, 16)
    noise = torch.randn(2, 1, 2, columns, 16)
    single, padded = (LayerCache(make_layer(f"{text},prefill=stored")) for _ in range(2))
    expected = attend(q, single.append(keys, values))
    view = padded.append(
        torch.cat([noise[0], keys], 2), torch.cat([noise[1], values], 2), start=[columns]
    )
    return float((attend(q, view) - expected).abs().max())


@pytest.mark.parametrize("columns", [20, 64])
@pytest.mark.parametrize("text", ["raw", "raw,window=20,sinks=3"])
def test_a_padded_sequence_that_differs_from_itself_unpadded(text: str, columns: int) -> None:
    assert padding_difference(text, columns) < 1e-5


@pytest.mark.parametrize("text", ["affine8", "affine4,tail=7", "turbo4,tail=0,sinks=3"])
def test_padding_of_whole_pages_that_changes_what_is_sealed(text: str) -> None:
    """Pages start at the same tokens then, and are sealed with the same ones."""
    assert padding_difference(text, 64) < 1e-5
    assert padding_difference(text, 128) < 1e-5


@pytest.mark.parametrize("text", ["affine8", "affine4,tail=0", "turbo4,tail=7,sinks=3"])
@pytest.mark.parametrize("columns", [1, 20, 63])
def test_padding_within_a_page_that_moves_its_edges(text: str, columns: int) -> None:
    """Pages are made of positions: padding is never stored, and the same tokens are sealed."""
    assert padding_difference(text, columns) < 1e-5


def test_a_stride_that_is_the_number_of_rows() -> None:
    """Coherent for 50 tokens, then nonsense in every head but the first."""
    state = LayerCache(make_layer("affine8,capacity=400"))
    for _ in range(200):
        append_rows(state, 1, batch=2, heads=3)
    for sequence in range(2):
        for head in range(3):
            tag = 1000 * (3 * sequence + head)
            assert read_tags(state, sequence, head) == list(range(tag, tag + 200))


def test_a_file_that_names_the_class_to_make(tmp_path) -> None:
    """Names in a file are looked up in plain dicts of recipes, and nowhere else."""
    with pytest.raises(kvant.SpecError, match="allowed: one of raw, affine, codebook"):
        kvant.spec.from_json(
            '{"kind":"cache","layers":[{"kind":"attention","keys":{"name":"eval"},'
            '"values":{"name":"raw"},"retention":{"name":"all","sinks":0}}]}'
        )


def test_a_mask_rule_with_sinks_on_a_cache_without() -> None:
    """Regression: pages of sinks that only the caller's mask names were skipped with the window."""
    state = LayerCache(make_layer("affine8"))
    view = append_rows(state, 300)
    expected = [(0 + 1 + sum((n - 1, n))) / 4 for n in (298, 299)]
    assert mean_visible_tags(view, 2, mask=Mask(window=2, sinks=2)) == expected
    assert mean_visible_tags(append_rows(state, 1), 1, mask=Mask(window=2, sinks=2)) == [
        (0 + 1 + 299 + 300) / 4
    ]
