"""Many positions at once over rows of 16 bits, on every instruction set: sizes that end inside of
blocks and of matrices, masks, sequences of several lengths, values that are no numbers."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from isas import ISAS, loaded_for
from kvant import Cache, attend, explain
from kvant.attention import native
from kvant.contracts import View
from kvant.native import NativeLibrary, get_library
from thin import once

pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.usefixtures("every_isa"),
]
FORMATS = ("raw", "affine8", "affine6", "affine4", "fp8", "turbo4", "affine8v4", "raw/affine3")
# heads of keys, queries a head, key width, value width
SHAPES = ((2, 4, 128, 128), (1, 7, 64, 96), (2, 1, 96, 32), (1, 16, 256, 192), (1, 3, 32, 64))
RULES = (("tail=3,prefill=stored", torch.float32), ("window=70,sinks=5", torch.bfloat16))
UNEVEN = ((2, 2, 80, 48), (1, 5, 16, 112))  # no multiples of 32, nor for all formats


@pytest.fixture(scope="module", params=ISAS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    return loaded_for(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def every_isa(loaded: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "get_library", lambda: loaded)


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    ours, theirs = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


def both(q: Tensor, view: View, scale: float | None = None) -> list[Tensor]:
    asked = (("native", q), ("reference", q.double()))
    return [attend(x, view, scale=scale, backend=name) for name, x in asked]


@pytest.mark.parametrize(("text", "queries"), once(product(FORMATS, [10, 17, 90])))
def test_many_positions_are_those_of_the_reference(text: str, queries: int) -> None:
    """Three sequences of different lengths, by two threads."""
    torch.set_num_threads(2)
    shapes = SHAPES if text not in ("raw", "affine8", "fp8") else (*SHAPES, *UNEVEN)
    for heads, group, dim, wide in shapes:
        keys = torch.randn(3, heads, 201, dim).bfloat16()
        values = torch.randn(3, heads, 201, wide).bfloat16()
        for rule, dtype in RULES:
            state = Cache(1, f"{text},{rule}")[0]
            first = 201 - queries
            state.append(keys[:, :, :first], values[:, :, :first], start=[0, 5, 67])
            view = state.append(keys[:, :, first:], values[:, :, first:])
            assert explain(view).backend == "native"
            q = torch.randn(3, heads * group, queries, dim).to(dtype)
            assert relative(*both(q, view)) < 1e-2, (heads, group, dim, rule)
    torch.set_num_threads(1)


def test_queries_keep_what_16_bits_would_lose() -> None:
    """Scores of some tens show it: 4e-3 where queries are rounded."""
    rows = torch.randn(2, 1, 2, 500, 64).bfloat16()
    view = Cache(1, "raw")[0].append(*rows)
    assert relative(*both(torch.randn(1, 4, 500, 64), view, scale=1.0)) < 1e-3


@pytest.mark.parametrize("text", ["raw", "affine8,sinks=64", "affine4,sinks=64"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_row_that_is_no_number_is_that_of_queries_that_see_it(
    text: str, odd: float, side: str
) -> None:
    rows = {name: torch.randn(1, 2, 150, 48).bfloat16() for name in ("keys", "values")}
    rows[side][0, 1, 140, 7] = odd
    view = Cache(1, text)[0].append(rows["keys"], rows["values"])
    ours, theirs = both(torch.randn(1, 4, 150, 48), view)
    assert ours[:, :, :140].isfinite().all() and ours[:, :2].isfinite().all()
    if side == "values" or math.isnan(odd):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert not ours[:, 2:, 140:, 7].isfinite().any()
    assert relative(ours[:, :, :140], theirs[:, :, :140]) < 1e-2


@pytest.mark.parametrize("text", ["raw", "affine8", "affine4"])
def test_a_draft_over_rows_of_16_bits_is_as_one_by_one(text: str) -> None:
    """Eight tokens and the one before them, to the bit."""
    at_once, by_one = (Cache(1, f"{text},prefill=stored") for _ in range(2))
    keys, values = torch.randn(2, 1, 2, 209, 64).bfloat16()
    q = torch.randn(1, 8, 209, 64).bfloat16()
    for cache in (at_once, by_one):
        cache[0].append(keys[:, :, :200], values[:, :, :200])
    together = attend(q[:, :, 200:], at_once[0].append(keys[:, :, 200:], values[:, :, 200:]))
    for i in range(9):
        one = slice(200 + i, 201 + i)
        view = by_one[0].append(keys[:, :, one], values[:, :, one])
        assert torch.equal(attend(q[:, :, one], view), together[:, :, i : i + 1])
