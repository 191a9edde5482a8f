"""Test the native backend over pages: B sequences of B lengths, stored and read in one call
each.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.lives import (
    HEADS,
    SCALE,
    SLOTS,
    PagedSequences,
    assert_same_bytes,
    make_nan_storage,
    store_with_torch,
)
from kvant.attention.native import NativeBackend
from kvant.codecs import Affine, Codebook, Fp8, Raw
from kvant.contracts import AttentionRequest, Codec, LayerStats, Mask, View
from kvant.native import get_library
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging
from thin import thin_rows

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
NATIVE = NativeBackend()
CODECS: dict[str, tuple[Codec, Codec]] = {
    "raw": (Raw(), Raw()),
    "affine8": (Affine(8), Affine(8)),
    "affine4": (Affine(4, 32), Affine(4, 32)),
    "affine3": (Affine(3, 16), Affine(3, 16)),
    "turbo4": (Codebook(4), Codebook(4)),
    "fp8": (Fp8(), Fp8()),
    "affine8/affine4": (Affine(8), Affine(4)),
    "raw/turbo3": (Raw(), Codebook(3)),
    "fp8/raw": (Fp8(), Raw()),
}
KINDS = {
    "tail=0": LayerGroup(Paging(64, 0)),
    "tail=100": LayerGroup(Paging(64, 100)),
    "never": LayerGroup(Paging(64, None)),
    "never,window": LayerGroup(Paging(64, None), window=90, slack=5),
    "window,sinks": LayerGroup(Paging(64, 0), window=150, sinks=3),
    "sinks,late": LayerGroup(Paging(64, 9, 200), sinks=70),
    "large pages": LayerGroup(Paging(128, 0), window=100, sinks=130, slack=40),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Every format can be sealed here, too.
CELLS = thin_rows(
    product(CODECS, KINDS, [False, True], DTYPES),
    lambda row: (*row, (row[0], row[1].startswith("never"))),
)


def store_natively(plan: AppendPlan, rows: Any, sides: Any) -> None:
    assert NATIVE.store(plan, rows, sides)


def make_sequences(
    text: str, group: LayerGroup, seed: int, dtype: torch.dtype, *storers: Any
) -> PagedSequences:
    keys, values = CODECS[text]
    return PagedSequences(
        group, {"keys": keys, "values": values}, {"keys": 32, "values": 64}, dtype, storers, seed
    )


def list_append_steps(sequences: PagedSequences) -> list[tuple[int, bool]]:
    """New columns per append, and whether they are dense to each other."""
    pick = sequences.random.choice
    counts = [pick([1, 1, 2, 17, 70, 200]) for _ in range(5)]
    return [(count, count > 1 and pick([True, False])) for count in counts]


def append_steps(sequences: PagedSequences, padded: bool) -> PagedSequences:
    batch = sequences.random.randint(1, 5)
    lengths = [sequences.random.choice([1, 5, 63, 64, 130, 300]) for _ in range(batch)]
    padding = [sequences.random.choice([0, 0, 3, 40, 90]) for _ in range(batch)]
    sequences.begin([] if padded else lengths, padding if padded else [])
    return sequences


@pytest.mark.parametrize(("text", "rule", "padded", "dtype"), CELLS)
def test_stored_bytes_equal_those_of_the_codec(
    text: str, rule: str, padded: bool, dtype: torch.dtype
) -> None:
    """Compare copies, writes and seals of all sequences and both sides, and every other byte."""
    sequences = append_steps(
        make_sequences(
            text, KINDS[rule], len(text + rule), dtype, store_natively, store_with_torch
        ),
        padded,
    )
    for count, dense in list_append_steps(sequences):
        sequences.append(count, dense=dense)
        for name in ("keys", "values"):
            assert_same_bytes(*(sides[name] for sides in sequences.sides))
        if sequences.random.random() < 0.4:
            sequences.fork_sequences()


def make_masks(group: LayerGroup, rng: random.Random) -> list[Mask]:
    """Return masks that never show an evicted row."""
    if group.window is not None:
        return [Mask(window=group.window, sinks=group.sinks), Mask(window=20, sinks=group.sinks)]
    windowed = Mask(window=rng.choice([30, 100]), sinks=rng.choice([0, 5, 80]))
    return [Mask(), windowed, Mask(chunk=50), Mask(causal=False)]


def tolerance(text: str, dtype: torch.dtype) -> float:
    """Return a tolerance that a single missing or extra row exceeds tenfold."""
    rows = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 3e-2}[dtype]
    return rows if text == "raw" else 3e-2


@pytest.mark.parametrize(("text", "rule", "padded", "dtype"), CELLS)
def test_every_query_sees_the_rows_of_the_rule(
    text: str, rule: str, padded: bool, dtype: torch.dtype
) -> None:
    threads = 1 + 2 * ((len(rule) + padded) % 2)
    group = KINDS[rule]
    sequences = append_steps(
        make_sequences(text, group, 7 * len(text) + len(rule), dtype, store_natively), padded
    )
    rng, before = sequences.random, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count, dense in list_append_steps(sequences):
            sequences.append(count, dense=dense)
            mask = rng.choice(make_masks(group, rng))
            new_rows_dense = count > 1 or rng.random() < 0.3
            check_attention(sequences, mask, count, new_rows_dense, text)
            if rng.random() < 0.3:
                sequences.fork_sequences()
    finally:
        torch.set_num_threads(before)


def check_attention(
    sequences: PagedSequences, mask: Mask, count: int, new_rows_dense: bool, text: str
) -> None:
    plan, rng = sequences.plan, sequences.random
    assert plan is not None
    pages = sequences.make_view(mask, new_rows_dense)
    q = torch.randn(sequences.page_table.batch, HEADS * rng.choice([1, 3, 4]), count, 32)
    logits = torch.randn(q.shape[1]) if rng.random() < 0.3 else None
    request = AttentionRequest(q.to(sequences.dtype), SCALE, mask, sink_logits=logits)
    assert NATIVE.supports(pages, request) is None
    out, lse = NATIVE.attend(request, pages)
    num_new = count if new_rows_dense and plan.new_rows_dense else 0
    positions = sorted({0, count - 1, *rng.sample(range(count), min(count, 20))})
    right, right_lse = sequences.expected_attention(request.q, mask, num_new, logits, positions)
    assert lse is not None
    out, lse = out[:, :, positions], lse[:, :, positions]
    assert torch.equal(lse.isinf(), right_lse.isinf())
    bound = tolerance(text, sequences.dtype)
    assert (out - right).abs().max() < bound, str(sequences.group)
    assert (lse - right_lse).nan_to_num(0.0).abs().max() < bound


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_zero_keys_average_the_visible_rows(text: str, rule: str) -> None:
    """Outputs are the mean of the visible positions; the log-sum-exp gives their number."""
    group = KINDS[rule]
    sequences = make_sequences(text, group, 3, torch.float32, store_natively)

    def make_zero_rows(count: int) -> dict[str, Tensor]:
        position = sequences.page_table.lengths[:, None] + torch.arange(count).numpy()
        values = torch.from_numpy(position).float()[:, None, :, None].expand(-1, HEADS, -1, 64)
        keys = torch.zeros(len(position), HEADS, count, 32)
        return {"keys": keys, "values": values.contiguous()}

    sequences.make_rows = make_zero_rows  # type: ignore[method-assign]
    sequences.begin([1, 64, 130, 333], [])
    for count in (1, 3, 70, 1, 200, 1):
        sequences.append(count)
        mask = Mask(window=group.window, sinks=group.sinks)
        pages = sequences.make_view(mask, new_rows_dense=count > 1)
        out, lse = NATIVE.attend(
            AttentionRequest(torch.randn(4, HEADS, count, 32), 1.0, mask), pages
        )
        assert lse is not None
        for b, length in enumerate(sequences.page_table.lengths.tolist()):
            for t in range(count):
                position = length - count + t
                low = 0 if group.window is None else max(0, position - group.window + 1)
                visible = [p for p in range(position + 1) if p >= low or p < group.sinks]
                assert round(float(lse[b, 0, t].exp()), 1) == len(visible), (b, position)
                assert float(out[b, 0, t, 0]) == pytest.approx(
                    sum(visible) / len(visible), rel=2e-2
                )


@pytest.mark.parametrize("text", ["raw", "affine8", "fp8/raw"])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_long_sequence_among_short_ones_equals_alone(text: str, threads: int) -> None:
    """Independent of how the work is divided among threads."""
    sequences = make_sequences(text, KINDS["tail=0"], 1, torch.float32, store_natively)
    sequences.begin([2500, 1, 64, 65, 3], [])
    sequences.append(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_attention(sequences, Mask(), 1, False, text)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["raw", "affine8", "fp8", "turbo4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_queries_at_once_equal_one_by_one(text: str, threads: int) -> None:
    """To the bit, if new rows are read from their pages: 8 drafts and a token."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at_once, by_one = (
            make_sequences(text, KINDS["tail=0"], 5, torch.bfloat16, store_natively)
            for _ in range(2)
        )
        torch.manual_seed(5)
        at_once.begin([700, 1, 120], [])
        torch.manual_seed(5)
        by_one.begin([700, 1, 120], [])
        q = torch.randn(3, 8, 9, 32).bfloat16()
        at_once.append(9)
        pages = at_once.make_view(Mask(), new_rows_dense=False)
        batched, _ = NATIVE.attend(AttentionRequest(q, 0.2, Mask()), pages)
        rows = at_once.new_rows
        for t in range(9):
            single = {name: x[:, :, t : t + 1] for name, x in rows.items()}
            by_one.make_rows = lambda count, single=single: single  # type: ignore[method-assign, misc]
            by_one.append(1)
            pages = by_one.make_view(Mask(), new_rows_dense=False)
            single_, _ = NATIVE.attend(AttentionRequest(q[:, :, t : t + 1], 0.2, Mask()), pages)
            assert torch.equal(single_, batched[:, :, t : t + 1]), t
    finally:
        torch.set_num_threads(before)


def make_empty_view(codec: Codec, dim: int, dtype: torch.dtype, page: int) -> View:
    keys, values = (make_nan_storage(codec, dim, dtype, page) for _ in range(2))
    page_table = PageTable.make_empty(LayerGroup(Paging(page, None)), [0])
    shape = 1, keys.heads, dim
    return View(keys, values, None, page_table, False, Mask(), *shape, LayerStats())


@pytest.mark.parametrize(
    ("codec", "dim", "dtype", "page", "message"),
    [
        (Raw(), 24, torch.float32, 64, "keys 24 wide: a multiple of 16 up to 256 is needed"),
        (Raw(), 32, torch.float64, 64, "keys of torch.float64, or not contiguous"),
        (Affine(3, 16), 48, torch.float32, 64, "of 3 bits, 48 wide: a multiple of 32 is needed"),
        (Raw(), 32, torch.float32, 16, "pages of 16 rows: a multiple of 64 is needed"),
    ],
)
def test_unsupported_views_give_a_reason(
    codec: Codec, dim: int, dtype: torch.dtype, page: int, message: str
) -> None:
    reason = NATIVE.supports(make_empty_view(codec, dim, dtype, page))
    assert reason is not None and message in reason


def test_values_inside_keys_are_not_supported() -> None:
    pages = make_empty_view(Raw(), 32, torch.float32, 64)
    assert NATIVE.supports(pages._replace(values=pages.keys)) == "values stored inside the keys"


def test_one_side_alone_can_be_compressed() -> None:
    """Values inside the keys have no rows of their own."""
    sequences = PagedSequences(
        KINDS["tail=0"],
        {"keys": Affine(8)},
        {"keys": 64},
        torch.float32,
        (store_natively, store_with_torch),
        2,
    )
    sequences.empty_rows = lambda: {"keys": torch.zeros(HEADS, 0, 64)}  # type: ignore[method-assign]
    sequences.begin([130, 70], [])
    sequences.append(70)
    assert_same_bytes(*(sides["keys"] for sides in sequences.sides))


@pytest.mark.parametrize("odd", [torch.float64, torch.bfloat16])
def test_rows_of_other_dtypes_are_left_to_other_backends(odd: torch.dtype) -> None:
    sequences = make_sequences("raw", KINDS["never"], 1, torch.float32, store_natively)
    sequences.begin([3], [])
    plan = sequences.append(1)
    rows = {name: x.to(odd) for name, x in sequences.new_rows.items()}
    assert not NATIVE.store(plan, rows, sequences.sides[0])
    part_of_rows = {name: x[:, :1] for name, x in sequences.new_rows.items()}
    assert not NATIVE.store(plan, part_of_rows, sequences.sides[0])


def test_slots_out_of_range_are_refused() -> None:
    sequences = make_sequences("affine8", KINDS["tail=0"], 1, torch.float32, store_natively)
    sequences.begin([130, 70], [])
    plan = sequences.append(1)
    plan.derived.clear()
    plan.writes[0, 1] = SLOTS
    with pytest.raises(RuntimeError, match="writes: slots that the open pages do not have"):
        NATIVE.store(plan, sequences.new_rows, sequences.sides[0])
    pages = sequences.make_view(Mask(), new_rows_dense=False)
    pages.page_table.sealed_table[0, 1] = SLOTS
    q = torch.randn(2, HEADS, 1, 32)
    with pytest.raises(RuntimeError, match="sealed: slots that the codes, scales"):
        NATIVE.attend(AttentionRequest(q, 1.0, Mask()), pages)
