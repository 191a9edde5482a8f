"""Visible rows, as lists of positions, against a five-line oracle; block skipping against both."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvant import Mask
from kvant.attention.mask import Block, allowed, relation, visible
from kvant.layers import Attention
from layers.tagged import layer, rows

MASKS = [
    Mask(causal, window, sinks, chunk)
    for causal in (True, False)
    for window in (None, 1, 3, 10)
    for sinks in (0, 2)
    for chunk in (None, 1, 5)
]


def seen_by(mask: Mask, q: int, keys: range) -> list[int]:
    near = [k for k in keys if mask.window is None or q - k < mask.window or k < mask.sinks]
    past = [k for k in near if k <= q or not mask.causal]
    same = [k for k in past if mask.chunk is None or k // mask.chunk == q // mask.chunk]
    return [k for k in same if k >= 0 and q >= 0]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_rows_are_those_of_the_rule(mask: Mask) -> None:
    keys = range(-3, 20)
    for q in range(-2, 20):
        mask_row = visible(mask, torch.tensor(q), torch.tensor(keys))
        assert [k for k, v in zip(keys, mask_row.tolist(), strict=True) if v] == seen_by(
            mask, q, keys
        )


def test_fewer_queries_than_keys_stand_at_the_end() -> None:
    """Top-left aligned causal masks show a late query the first keys only."""
    seen = visible(Mask(), torch.tensor([[5], [6]]), torch.arange(7))
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_window_is_that_many_keys_with_oneself(window: int) -> None:
    """Not one more: the comparison is strict."""
    row = visible(Mask(window=window), torch.tensor(11), torch.arange(20))
    assert torch.nonzero(row).flatten().tolist() == list(range(12 - window, 12))


def test_sinks_are_seen_from_everywhere_behind_them() -> None:
    row = visible(Mask(window=2, sinks=3), torch.tensor(11), torch.arange(20))
    assert torch.nonzero(row).flatten().tolist() == [0, 1, 2, 10, 11]


def test_a_chunk_is_the_own_block_of_positions() -> None:
    row = visible(Mask(chunk=4), torch.tensor(6), torch.arange(12))
    assert torch.nonzero(row).flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("text", "start"),
    [("affine8", None), ("affine8,sinks=3", None), ("affine8", [0, 37]), ("raw,sinks=2", [5, 0])],
)
def test_relation_never_contradicts_what_is_allowed(text: str, start: list[int] | None) -> None:
    """A skipped block has nothing visible, and one without a mask nothing hidden."""
    state = Attention(layer(text))
    new = rows(0, 200, batch=1 if start is None else 2)
    view = state.append(new, new, start=start, prefill="stored")
    due = view.page_table.shape[1] * 64
    places = [Block("sealed", a, a + 64) for a in range(0, due, 64)]
    places += [Block("dense", a, min(a + 40, 200)) for a in range(view.dense_from, 200, 40)]
    places += [Block("dense", a, a + 3) for a in range(max(view.dense_from, 60), 110)]
    found = set()
    masks = [*MASKS, Mask(chunk=16), Mask(causal=False, chunk=16)]
    for mask, block, q0 in itertools.product(masks, places, [*range(0, 200, 23), 70, 85, 100]):
        for q1 in (q0 + 1, min(q0 + 8, 200), min(q0 + 30, 200)):
            how = relation(view, mask, q0, q1, block)
            exact = allowed(view, mask, q0, q1, block)
            assert how != "none" or not exact.any(), (mask, q0, q1, block)
            assert how != "all" or exact.all(), (mask, q0, q1, block)
            found.add(how)
    assert found == {"all", "some", "none"}


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,sinks=3", "affine8,tail=20"])
def test_every_key_is_read_from_exactly_one_place(text: str) -> None:
    """Sealed, dense and sinks overlap in memory; a query must meet each key once."""
    state = Attention(layer(text))
    new = rows(0, 200, batch=2)
    view = state.append(new, new, start=[0, 30], prefill="stored")
    places = [("sealed", 0, view.page_table.shape[1] * 64), ("dense", view.dense_from, 200)]
    count = torch.zeros(2, 1, 200, 200, dtype=torch.int64)
    for part, begin, end in places:
        if end > begin:
            block = Block(part, begin, end)  # type: ignore[arg-type]
            count[:, :, :, begin:end] += allowed(view, Mask(), 0, 200, block)
    if sinks := view.keys.sinks.shape[2]:
        seen = allowed(view, Mask(), 0, 200, Block("sinks", 0, sinks))
        for sequence, start in enumerate((0, 30)):
            count[sequence, :, :, start : start + sinks] += seen[sequence]
    columns = torch.arange(200)
    for sequence, start in enumerate((0, 30)):
        expected = (columns[:, None] >= columns) & (columns >= start)
        assert torch.equal(count[sequence, 0], expected.long())
