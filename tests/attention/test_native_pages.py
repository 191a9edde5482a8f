"""The native backend over pages: B sequences of B lengths, stored and read in one call each."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.lives import HEADS, SCALE, SLOTS, Life, by_torch, same_bytes, storage
from kvant.attention.native import NativeBackend
from kvant.codecs import Affine, Codebook, Fp8, Raw
from kvant.contracts import AttentionRequest, Codec, LayerStats, Mask, View
from kvant.native import get_library
from kvant.page_table import AppendPlan, LayerGroup, PageTable, Paging
from thin import once

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
# Every format is there where pages are sealed, too.
CELLS = once(
    product(CODECS, KINDS, [False, True], DTYPES),
    lambda row: (*row, (row[0], row[1].startswith("never"))),
)


def native(change: AppendPlan, rows: Any, sides: Any) -> None:
    assert NATIVE.store(change, rows, sides)


def life(text: str, kind: LayerGroup, seed: int, dtype: torch.dtype, *storers: Any) -> Life:
    keys, values = CODECS[text]
    return Life(
        kind, {"keys": keys, "values": values}, {"keys": 32, "values": 64}, dtype, storers, seed
    )


def steps(found: Life) -> list[tuple[int, bool]]:
    """Columns that come, and are they dense to each other?"""
    pick = found.random.choice
    counts = [pick([1, 1, 2, 17, 70, 200]) for _ in range(5)]
    return [(count, count > 1 and pick([True, False])) for count in counts]


def begun(found: Life, padded: bool) -> Life:
    batch = found.random.randint(1, 5)
    lengths = [found.random.choice([1, 5, 63, 64, 130, 300]) for _ in range(batch)]
    padding = [found.random.choice([0, 0, 3, 40, 90]) for _ in range(batch)]
    found.begin([] if padded else lengths, padding if padded else [])
    return found


@pytest.mark.parametrize(("text", "rule", "padded", "dtype"), CELLS)
def test_stored_bytes_are_those_of_the_codec(
    text: str, rule: str, padded: bool, dtype: torch.dtype
) -> None:
    """Copies, writes and seals of all sequences and both sides, and not a byte beside them."""
    found = begun(life(text, KINDS[rule], len(text + rule), dtype, native, by_torch), padded)
    for count, dense in steps(found):
        found.append(count, dense=dense)
        for name in ("keys", "values"):
            same_bytes(*(sides[name] for sides in found.sides))
        if found.random.random() < 0.4:
            found.twins()


def masks(kind: LayerGroup, rng: random.Random) -> list[Mask]:
    """That see no row which a kind lets go."""
    if kind.window is not None:
        return [Mask(window=kind.window, sinks=kind.sinks), Mask(window=20, sinks=kind.sinks)]
    some = Mask(window=rng.choice([30, 100]), sinks=rng.choice([0, 5, 80]))
    return [Mask(), some, Mask(chunk=50), Mask(causal=False)]


def tolerance(text: str, dtype: torch.dtype) -> float:
    """Any row too many or too few is off by ten times that."""
    rows = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 3e-2}[dtype]
    return rows if text == "raw" else 3e-2


@pytest.mark.parametrize(("text", "rule", "padded", "dtype"), CELLS)
def test_every_query_sees_what_the_rule_says(
    text: str, rule: str, padded: bool, dtype: torch.dtype
) -> None:
    threads = 1 + 2 * ((len(rule) + padded) % 2)
    kind = KINDS[rule]
    found = begun(life(text, kind, 7 * len(text) + len(rule), dtype, native), padded)
    rng, before = found.random, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count, dense in steps(found):
            found.append(count, dense=dense)
            mask = rng.choice(masks(kind, rng))
            own = count > 1 or rng.random() < 0.3
            ask(found, mask, count, own, text)
            if rng.random() < 0.3:
                found.twins()
    finally:
        torch.set_num_threads(before)


def ask(found: Life, mask: Mask, count: int, own: bool, text: str) -> None:
    change, rng = found.change, found.random
    assert change is not None
    pages = found.pages(mask, own)
    q = torch.randn(found.extent.batch, HEADS * rng.choice([1, 3, 4]), count, 32)
    logits = torch.randn(q.shape[1]) if rng.random() < 0.3 else None
    request = AttentionRequest(q.to(found.dtype), SCALE, mask, sink_logits=logits)
    assert NATIVE.supports(pages, request) is None
    out, lse = NATIVE.attend(request, pages)
    came = count if own and change.new_rows_dense else 0
    asked = sorted({0, count - 1, *rng.sample(range(count), min(count, 20))})
    right, right_lse = found.right(request.q, mask, came, logits, asked)
    assert lse is not None
    out, lse = out[:, :, asked], lse[:, :, asked]
    assert torch.equal(lse.isinf(), right_lse.isinf())
    bound = tolerance(text, found.dtype)
    assert (out - right).abs().max() < bound, str(found.kind)
    assert (lse - right_lse).nan_to_num(0.0).abs().max() < bound


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize("text", ["raw", "affine8"])
def test_keys_of_zero_count_the_rows_that_are_seen(text: str, rule: str) -> None:
    """Outputs are the mean of the positions seen, and their number is in the log-sum-exp."""
    kind = KINDS[rule]
    found = life(text, kind, 3, torch.float32, native)

    def made(count: int) -> dict[str, Tensor]:
        position = found.extent.lengths[:, None] + torch.arange(count).numpy()
        values = torch.from_numpy(position).float()[:, None, :, None].expand(-1, HEADS, -1, 64)
        keys = torch.zeros(len(position), HEADS, count, 32)
        return {"keys": keys, "values": values.contiguous()}

    found.made = made  # type: ignore[method-assign]
    found.begin([1, 64, 130, 333], [])
    for count in (1, 3, 70, 1, 200, 1):
        found.append(count)
        mask = Mask(window=kind.window, sinks=kind.sinks)
        pages = found.pages(mask, own=count > 1)
        out, lse = NATIVE.attend(
            AttentionRequest(torch.randn(4, HEADS, count, 32), 1.0, mask), pages
        )
        assert lse is not None
        for b, length in enumerate(found.extent.lengths.tolist()):
            for t in range(count):
                at = length - count + t
                low = 0 if kind.window is None else max(0, at - kind.window + 1)
                seen = [p for p in range(at + 1) if p >= low or p < kind.sinks]
                assert round(float(lse[b, 0, t].exp()), 1) == len(seen), (b, at)
                assert float(out[b, 0, t, 0]) == pytest.approx(sum(seen) / len(seen), rel=2e-2)


@pytest.mark.parametrize("text", ["raw", "affine8", "fp8/raw"])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_one_long_sequence_among_short_ones_is_as_alone(text: str, threads: int) -> None:
    """However the work is divided among threads."""
    found = life(text, KINDS["tail=0"], 1, torch.float32, native)
    found.begin([2500, 1, 64, 65, 3], [])
    found.append(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ask(found, Mask(), 1, False, text)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["raw", "affine8", "fp8", "turbo4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_columns_at_once_are_as_one_by_one(text: str, threads: int) -> None:
    """To the bit, where rows that came are read from their pages: 8 drafts and a token."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at_once, by_one = (life(text, KINDS["tail=0"], 5, torch.bfloat16, native) for _ in range(2))
        torch.manual_seed(5)
        at_once.begin([700, 1, 120], [])
        torch.manual_seed(5)
        by_one.begin([700, 1, 120], [])
        q = torch.randn(3, 8, 9, 32).bfloat16()
        at_once.append(9)
        pages = at_once.pages(Mask(), own=False)
        together, _ = NATIVE.attend(AttentionRequest(q, 0.2, Mask()), pages)
        rows = at_once.own
        for t in range(9):
            one = {name: x[:, :, t : t + 1] for name, x in rows.items()}
            by_one.made = lambda count, one=one: one  # type: ignore[method-assign, misc]
            by_one.append(1)
            pages = by_one.pages(Mask(), own=False)
            alone, _ = NATIVE.attend(AttentionRequest(q[:, :, t : t + 1], 0.2, Mask()), pages)
            assert torch.equal(alone, together[:, :, t : t + 1]), t
    finally:
        torch.set_num_threads(before)


def nothing(codec: Codec, dim: int, dtype: torch.dtype, page: int) -> View:
    keys, values = (storage(codec, dim, dtype, page) for _ in range(2))
    extent = PageTable.make_empty(LayerGroup(Paging(page, None)), [0])
    return View(keys, values, None, extent, False, Mask(), dim, LayerStats())


@pytest.mark.parametrize(
    ("codec", "dim", "dtype", "page", "why"),
    [
        (Raw(), 24, torch.float32, 64, "keys 24 wide: a multiple of 16 up to 256 is needed"),
        (Raw(), 32, torch.float64, 64, "keys of torch.float64, or not contiguous"),
        (Affine(3, 16), 48, torch.float32, 64, "of 3 bits, 48 wide: a multiple of 32 is needed"),
        (Raw(), 32, torch.float32, 16, "pages of 16 rows: a multiple of 64 is needed"),
    ],
)
def test_what_is_not_read_is_said(
    codec: Codec, dim: int, dtype: torch.dtype, page: int, why: str
) -> None:
    reason = NATIVE.supports(nothing(codec, dim, dtype, page))
    assert reason is not None and why in reason


def test_values_inside_the_keys_are_not_read() -> None:
    pages = nothing(Raw(), 32, torch.float32, 64)
    both = View(pages.keys, pages.keys, None, pages.page_table, False, Mask(), 32, LayerStats())
    assert NATIVE.supports(both) == "values that lie inside the keys"


def test_one_side_alone_is_stored() -> None:
    """Values that lie inside the keys have no rows of their own."""
    found = Life(
        KINDS["tail=0"], {"keys": Affine(8)}, {"keys": 64}, torch.float32, (native, by_torch), 2
    )
    found.nothing = lambda: {"keys": torch.zeros(HEADS, 0, 64)}  # type: ignore[method-assign]
    found.begin([130, 70], [])
    found.append(70)
    same_bytes(*(sides["keys"] for sides in found.sides))


@pytest.mark.parametrize("odd", [torch.float64, torch.bfloat16])
def test_rows_of_another_kind_are_left_to_others(odd: torch.dtype) -> None:
    found = life("raw", KINDS["never"], 1, torch.float32, native)
    found.begin([3], [])
    change = found.append(1)
    rows = {name: x.to(odd) for name, x in found.own.items()}
    assert not NATIVE.store(change, rows, found.sides[0])
    few = {name: x[:, :1] for name, x in found.own.items()}
    assert not NATIVE.store(change, few, found.sides[0])


def test_slots_that_are_not_there_are_refused() -> None:
    found = life("affine8", KINDS["tail=0"], 1, torch.float32, native)
    found.begin([130, 70], [])
    change = found.append(1)
    change.derived.clear()
    change.writes[0, 1] = SLOTS
    with pytest.raises(RuntimeError, match="writes: slots that the open pages do not have"):
        NATIVE.store(change, found.own, found.sides[0])
    pages = found.pages(Mask(), own=False)
    pages.page_table.sealed_table[0, 1] = SLOTS
    q = torch.randn(2, HEADS, 1, 32)
    with pytest.raises(RuntimeError, match="sealed: slots that the codes, scales"):
        NATIVE.attend(AttentionRequest(q, 1.0, Mask()), pages)
