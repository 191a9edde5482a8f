"""Test many positions at once over 16-bit rows on every instruction set.

Covers sizes that end inside blocks and matrices, masks, ragged sequences and NaN values.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import kvant.native
from isas import ISAS, load_or_skip
from kvant import Cache, attend, explain
from kvant.attention import native
from kvant.contracts import View
from kvant.native import NativeLibrary, get_library
from thin import thin_rows

pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.usefixtures("every_isa"),
]
FORMATS = ("raw", "affine8", "affine6", "affine4", "fp8", "turbo4", "affine8v4", "raw/affine3")
# KV heads, queries per head, key width, value width
SHAPES = ((2, 4, 128, 128), (1, 7, 64, 96), (2, 1, 96, 32), (1, 16, 256, 192), (1, 3, 32, 64))
RULES = (("tail=3,prefill=stored", torch.float32), ("window=70,sinks=5", torch.bfloat16))
UNEVEN = ((2, 2, 80, 48), (1, 5, 16, 112))  # not multiples of 32, nor supported by all formats


@pytest.fixture(scope="module", params=ISAS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    return load_or_skip(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def every_isa(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (native, kvant.native):
        monkeypatch.setattr(module, "get_library", lambda: library)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    ours, theirs = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


def attend_with_both(q: Tensor, view: View, scale: float | None = None) -> list[Tensor]:
    runs = (("native", q), ("reference", q.double()))
    return [attend(x, view, scale=scale, backend=name) for name, x in runs]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("text", "shape", "queries"),
    thin_rows(
        row
        for row in product(FORMATS, (*SHAPES, *UNEVEN), [10, 17, 90])
        if row[1] in SHAPES or row[0] in ("raw", "affine8", "fp8")
    ),
    ids=str,
)
def test_many_positions_match_the_reference(
    text: str, shape: tuple[int, int, int, int], queries: int
) -> None:
    """Three sequences of different lengths on two threads."""
    heads, group, dim, value_dim = shape
    keys = torch.randn(3, heads, 201, dim).bfloat16()
    values = torch.randn(3, heads, 201, value_dim).bfloat16()
    for rule, dtype in RULES:
        state = Cache(1, f"{text},{rule}")[0]
        first = 201 - queries
        state.append(keys[:, :, :first], values[:, :, :first], start=[0, 5, 67])
        view = state.append(keys[:, :, first:], values[:, :, first:])
        assert explain(view).backend == "native"
        q = torch.randn(3, heads * group, queries, dim).to(dtype)
        assert relative_error(*attend_with_both(q, view)) < 1e-2, rule


def test_queries_keep_float32_precision() -> None:
    """Scores of several tens reveal rounding of queries: 4e-3."""
    rows = torch.randn(2, 1, 2, 500, 64).bfloat16()
    view = Cache(1, "raw")[0].append(*rows)
    assert relative_error(*attend_with_both(torch.randn(1, 4, 500, 64), view, scale=1.0)) < 1e-3


@pytest.mark.parametrize("text", ["raw", "affine8,sinks=64", "affine4,sinks=64"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_nan_row_reaches_only_queries_that_see_it(text: str, odd: float, side: str) -> None:
    rows = {name: torch.randn(1, 2, 150, 48).bfloat16() for name in ("keys", "values")}
    rows[side][0, 1, 140, 7] = odd
    view = Cache(1, text)[0].append(rows["keys"], rows["values"])
    ours, theirs = attend_with_both(torch.randn(1, 4, 150, 48), view)
    assert ours[:, :, :140].isfinite().all() and ours[:, :2].isfinite().all()
    if side == "values" or math.isnan(odd):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert not ours[:, 2:, 140:, 7].isfinite().any()
    assert relative_error(ours[:, :, :140], theirs[:, :, :140]) < 1e-2


@pytest.mark.parametrize("text", ["raw", "affine8", "affine4"])
def test_draft_over_16_bit_rows_equals_token_by_token(text: str) -> None:
    """Eight tokens and the previous one, to the bit."""
    at_once, by_one = (Cache(1, f"{text},prefill=stored") for _ in range(2))
    keys, values = torch.randn(2, 1, 2, 209, 64).bfloat16()
    q = torch.randn(1, 8, 209, 64).bfloat16()
    for cache in (at_once, by_one):
        cache[0].append(keys[:, :, :200], values[:, :, :200])
    batched = attend(q[:, :, 200:], at_once[0].append(keys[:, :, 200:], values[:, :, 200:]))
    for i in range(9):
        single = slice(200 + i, 201 + i)
        view = by_one[0].append(keys[:, :, single], values[:, :, single])
        assert torch.equal(attend(q[:, :, single], view), batched[:, :, i : i + 1])


@pytest.mark.parametrize("text", ["affine8", "affine6", "affine4", "fp8", "turbo4v4", "turbo3v3"])
def test_one_token_matches_the_reference(text: str, library: NativeLibrary) -> None:
    """AVX-512 and AMX multiply queries and weights of 16 bits, other sets integers of 15 bits."""
    bound = 1e-2 if library.isa in ("avx512", "amx") else 3e-3
    shapes = SHAPES if text == "turbo3v3" else (*SHAPES, *UNEVEN)
    for heads, group, dim, value_dim in shapes:
        keys = torch.randn(1, heads, 201, dim).bfloat16()
        values = torch.randn(1, heads, 201, value_dim).bfloat16()
        view = Cache(1, f"{text},tail=0,prefill=stored")[0].append(keys, values)
        q = torch.randn(1, heads * group, 1, dim)
        assert relative_error(*attend_with_both(q, view)) < bound, (heads, group, dim)
