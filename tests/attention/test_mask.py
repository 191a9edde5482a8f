"""Test visible rows, as lists of positions, against a five-line oracle; block skipping against
both.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cache.tagged import LayerCache, make_layer, make_rows
from kvant import Mask
from kvant.attention.length_groups import KeyBlock, LengthGroup, group_by_length
from kvant.attention.mask import evaluate_mask

MASKS = [
    Mask(causal, window, sinks, chunk)
    for causal in (True, False)
    for window in (None, 1, 3, 10)
    for sinks in (0, 2)
    for chunk in (None, 1, 5)
]


def list_visible_keys(mask: Mask, q: int, keys: range) -> list[int]:
    visible = [k for k in keys if mask.window is None or q - k < mask.window or k < mask.sinks]
    past = [k for k in visible if k <= q or not mask.causal]
    same = [k for k in past if mask.chunk is None or k // mask.chunk == q // mask.chunk]
    return [k for k in same if k >= 0 and q >= 0]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_rows_follow_the_rule(mask: Mask) -> None:
    keys = range(-3, 20)
    for q in range(-2, 20):
        mask_row = evaluate_mask(mask, torch.tensor(q), torch.tensor(keys))
        assert [k for k, v in zip(keys, mask_row.tolist(), strict=True) if v] == list_visible_keys(
            mask, q, keys
        )


def test_fewer_queries_than_keys_align_to_the_end() -> None:
    """Causal masks aligned to the top left show a late query the first keys only."""
    visible = evaluate_mask(Mask(), torch.tensor([[5], [6]]), torch.arange(7))
    assert [torch.nonzero(row).flatten().tolist() for row in visible] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("window", [1, 2, 7])
def test_window_counts_the_query_itself(window: int) -> None:
    """The comparison is strict, so no extra key is visible."""
    row = evaluate_mask(Mask(window=window), torch.tensor(11), torch.arange(20))
    assert torch.nonzero(row).flatten().tolist() == list(range(12 - window, 12))


def test_every_later_query_sees_the_sinks() -> None:
    row = evaluate_mask(Mask(window=2, sinks=3), torch.tensor(11), torch.arange(20))
    assert torch.nonzero(row).flatten().tolist() == [0, 1, 2, 10, 11]


def test_chunk_mask_shows_the_block_of_the_query() -> None:
    row = evaluate_mask(Mask(chunk=4), torch.tensor(6), torch.arange(12))
    assert torch.nonzero(row).flatten().tolist() == [4, 5, 6]


def list_key_blocks(group: LengthGroup) -> list[KeyBlock]:
    """Return blocks of every part of a view, of different sizes and positions."""
    page_table, length = group.view.page_table, group.length
    sealed = 64 * int(page_table.stop_sealed[group.first_sequence])
    dense = 64 * int(page_table.first_open[group.first_sequence])
    actual = [KeyBlock("sealed", a, a + 64) for a in range(0, sealed, 64)]
    actual += [
        KeyBlock("open", a, min(a + 40, group.new_from)) for a in range(dense, group.new_from, 40)
    ]
    actual += [KeyBlock("new", a, min(a + 40, length)) for a in range(group.new_from, length, 40)]
    actual += [
        KeyBlock("new", a, a + 3) for a in range(max(group.new_from, 60), min(110, length - 3))
    ]
    return actual


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.laws)])
@pytest.mark.parametrize(
    ("text", "start"),
    [("affine8", None), ("affine8,sinks=3", None), ("affine8", [0, 37]), ("raw,sinks=2", [5, 0])],
)
def test_relation_never_contradicts_allowed(text: str, start: list[int] | None, every: int) -> None:
    """A skipped block has no visible key, and a block without a mask has no hidden key."""
    state = LayerCache(make_layer(text))
    new = make_rows(0, 200, batch=1 if start is None else 2)
    state.append(new[:, :, :90], new[:, :, :90], start=start, prefill="stored")
    view = state.append(new[:, :, 90:], new[:, :, 90:], prefill="stored")
    actual = set()
    masks = [*MASKS[::every], Mask(chunk=16), Mask(causal=False, chunk=16)]
    for group in group_by_length(view):
        queries = [*range(90, group.length, 23), 100, 127, 128]
        for mask, block, q0 in itertools.product(masks, list_key_blocks(group), queries):
            for q1 in (q0 + 1, min(q0 + 8, group.length), min(q0 + 30, group.length)):
                relation = group.classify_block(mask, q0, q1, block)
                exact = group.make_block_mask(mask, q0, q1, block)
                assert relation != "none" or not exact.any(), (mask, q0, q1, block)
                assert relation != "all" or exact.all(), (mask, q0, q1, block)
                actual.add(relation)
    assert actual == {"all", "some", "none"}


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,sinks=3", "affine8,tail=20"])
def test_every_key_is_read_from_exactly_one_range(text: str) -> None:
    """Sealed pages, open pages, sinks and new rows overlap; each query must meet each key once."""
    state = LayerCache(make_layer(text))
    new = make_rows(0, 200, batch=2)
    state.append(new[:, :, :100], new[:, :, :100], start=[0, 30], prefill="stored")
    view = state.append(new[:, :, 100:], new[:, :, 100:], prefill="stored")
    for group in group_by_length(view):
        first, length = group.length - 100, group.length
        count = torch.zeros(100, length, dtype=torch.int64)
        for block in group.iterate_blocks(100, 1 << 20):
            visible = group.make_block_mask(Mask(), first, length, block)[0, 0]
            count[:, block.start : min(block.stop, length)] += visible[:, : length - block.start]
        positions = torch.arange(length)
        assert torch.equal(count, (positions[first:, None] >= positions).long())
