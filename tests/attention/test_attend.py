"""Test attend() against explicit float64 formulas, and its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvant
from cache.tagged import LayerCache, append_rows, make_layer, make_rows
from kvant import Cache, LayerSpec, Mask, UnsupportedView, attend, explain
from kvant.attention import dispatch, reference, store_rows
from kvant.attention.mask import evaluate_mask
from kvant.attention.reference import ReferenceBackend
from kvant.cli.options import BACKENDS
from kvant.codecs import Affine, Codebook, Raw
from kvant.codecs.frames import Diagonal
from kvant.contracts import AttentionRequest, View
from kvant.retention import KeepAll
from laws import oracle
from laws.cases import backend_tolerance

KINDS = (
    "raw",
    "affine8,prefill=stored",
    "turbo4,prefill=stored",
    "raw,sinks=3",
    "affine8,sinks=3,prefill=stored",
)


def make_filled_layer(
    text: str, count: int = 200, batch: int = 2, heads: int = 2, dim: int = 16, value_dim: int = 16
) -> tuple[LayerCache, View]:
    state = LayerCache(make_layer(text))
    view = state.append(
        torch.randn(batch, heads, count, dim), torch.randn(batch, heads, count, value_dim)
    )
    return state, view


def make_causal_mask(queries: int, keys: int) -> Tensor:
    q, k = torch.arange(keys - queries, keys), torch.arange(keys)
    return (k <= q[:, None])[None]


def mean_visible_tags(view: View, queries: int, **rest) -> list[float]:
    """Return the mean tag of the visible rows, which zero queries give."""
    heads, dim = view.keys.open.shape[1::2]
    out = attend(torch.zeros(view.batch, heads, queries, dim), view, **rest)
    return [round(v, 3) for v in out[0, 0, :, 0].tolist()]


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("text", ["raw", "affine8", "turbo3"])
def test_query_heads_read_the_rows_of_their_kv_head(group: int, text: str) -> None:
    """As in repeat_interleave: query head h reads KV head h // group."""
    state, _ = make_filled_layer(text, batch=1, heads=3)
    q = torch.randn(1, 3 * group, 1, 16)
    expected = oracle.exact_attention(q, *state.read(), make_causal_mask(1, 200))
    view = state.view()
    assert (attend(q, view).double() - expected).abs().max() < backend_tolerance(view)


@pytest.mark.parametrize("text", KINDS)
def test_fewer_queries_than_new_rows_align_to_the_newest(text: str) -> None:
    _, view = make_filled_layer(text)
    q = torch.randn(2, 4, 200, 16)
    whole = attend(q, view)
    for count in (1, 2, 63, 130):
        part = attend(q[:, :, -count:], view)
        assert (part - whole[:, :, -count:]).abs().max() < backend_tolerance(view)


@pytest.mark.parametrize("text", ["raw,window=4,sinks=0", "affine8", "affine8,window=70,sinks=0"])
def test_queries_whose_rows_left_the_view_are_refused(text: str) -> None:
    """Regression: older queries were answered without rows that they see."""
    state = LayerCache(make_layer(text))
    append_rows(state, 127)
    view = append_rows(state, 1)
    with pytest.raises(ValueError, match="70 queries"):
        attend(torch.zeros(1, 1, 70, 8), view)
    assert mean_visible_tags(view, 3) == mean_visible_tags(state.view(3), 3)
    assert mean_visible_tags(view, 1) == mean_visible_tags(state.view(3), 3)[2:]


def test_more_queries_than_new_rows_are_served_within_the_view() -> None:
    state = LayerCache(make_layer("raw"))
    append_rows(state, 7)
    assert mean_visible_tags(append_rows(state, 1), 3) == [2.5, 3.0, 3.5]


@pytest.mark.parametrize("text", KINDS)
def test_scratch_size_does_not_change_outputs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, view = make_filled_layer(text, count=300)
    q = torch.randn(2, 4, 300, 16)
    whole, lse = attend(q, view, return_lse=True, backend="reference")
    for rows_, scores in ((1, 1), (2 * 2 * 16 * 64, 5000), (1 << 20, 1)):
        monkeypatch.setattr(
            kvant.attention, "BACKENDS", [ReferenceBackend(max_opened_values=rows_)]
        )
        monkeypatch.setattr(reference, "MAX_SCORES", scores)
        small, other = attend(q, view, return_lse=True, backend="reference")
        assert (small - whole).abs().max() < 2e-6
        assert (other - lse).abs().max() < 2e-6


@pytest.mark.parametrize("codec", [Raw(), Affine(8), Codebook(4)], ids=str)
@pytest.mark.parametrize("dims", [(16, 40), (40, 16), (8, 128)], ids=str)
def test_keys_and_values_may_differ_in_width(codec, dims: tuple[int, int]) -> None:
    state = LayerCache(LayerSpec(codec, codec, KeepAll()))
    state.append(torch.randn(1, 2, 300, dims[0]), torch.randn(1, 2, 300, dims[1]))
    q = torch.randn(1, 4, 1, dims[0])
    out = attend(q, state.view())
    assert out.shape == (1, 4, 1, dims[1])
    expected = oracle.exact_attention(q, *state.read(), make_causal_mask(1, 300))
    assert (out.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("codec", [Raw(), Affine(8), Codebook(4)], ids=str)
def test_values_inside_keys_are_their_first_channels(codec) -> None:
    inside = LayerCache(LayerSpec(codec, codec, KeepAll(), value_dim=24))
    keys, q = torch.randn(1, 1, 300, 32), torch.randn(1, 8, 1, 32)
    inside.append(keys)
    out = attend(q, inside.view())
    read = inside.read()
    assert torch.equal(read[1], read[0][..., :24])
    expected = oracle.exact_attention(q, *read, make_causal_mask(1, 300))
    assert out.shape == (1, 8, 1, 24)
    assert (out.double() - expected).abs().max() < 1e-5


def test_scale_and_softcap_follow_the_formula() -> None:
    state, view = make_filled_layer("raw")
    keys, values = (r.double() for r in state.read())
    q = torch.randn(2, 2, 1, 16) * 5
    for scale, cap in ((0.3, None), (0.3, 2.0), (None, 0.5)):
        scores = q.double() @ keys.transpose(2, 3) * (0.25 if scale is None else scale)
        scores = scores if cap is None else torch.tanh(scores / cap) * cap
        expected = scores.softmax(-1) @ values
        out = attend(q, view, scale=scale, softcap=cap)
        assert (out.double() - expected).abs().max() < 1e-5


def test_sink_logits_add_a_column_without_values() -> None:
    state, view = make_filled_layer("raw", heads=2)
    keys, values = (r.double().repeat_interleave(2, 1) for r in state.read())
    q, logits = torch.randn(2, 4, 1, 16), torch.tensor([-3.0, 0.0, 2.0, 40.0])
    scores = q.double() @ keys.transpose(2, 3) / 4
    column = logits.double().view(1, 4, 1, 1).expand(2, 4, 1, 1)
    joint = torch.cat([scores, column], -1)
    expected = joint.softmax(-1)[..., :-1] @ values
    out, lse = attend(q, view, sink_logits=logits, return_lse=True)
    assert (out.double() - expected).abs().max() < 1e-5
    assert (lse.double() - joint.logsumexp(-1)).abs().max() < 1e-5


def test_lse_is_the_log_sum_exp_of_the_scores() -> None:
    state, view = make_filled_layer("affine8,prefill=stored")
    q = torch.randn(2, 2, 1, 16)
    scores = q.double() @ state.read()[0].double().transpose(2, 3) / 4
    _, lse = attend(q, view, return_lse=True)
    assert lse.shape == (2, 2, 1)
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < backend_tolerance(view)


@pytest.mark.parametrize("text", KINDS)
def test_two_halves_merge_by_log_sum_exp(text: str) -> None:
    _, view = make_filled_layer(text)
    q = torch.randn(2, 4, 1, 16)
    whole, whole_lse = attend(q, view, return_lse=True)
    first = torch.arange(200)[None] < 77
    parts = [attend(q, view, mask=m, return_lse=True) for m in (first, ~first)]
    (a, a_lse), (b, b_lse) = parts
    lse = torch.logaddexp(a_lse, b_lse)
    merged = a * (a_lse - lse).exp().unsqueeze(-1) + b * (b_lse - lse).exp().unsqueeze(-1)
    assert (merged - whole).abs().max() < backend_tolerance(view)
    assert (lse - whole_lse).abs().max() < backend_tolerance(view)


@pytest.mark.parametrize("text", KINDS)
def test_query_with_no_visible_key_gives_zeros(text: str) -> None:
    _, view = make_filled_layer(text)
    nothing = torch.zeros(2, 200, dtype=torch.bool)
    nothing[1] = True
    for mask in (nothing, torch.where(nothing, 0.0, float("-inf"))):
        out, lse = attend(torch.randn(2, 2, 2, 16), view, mask=mask, return_lse=True)
        assert torch.equal(out[:, :, 0], torch.zeros(2, 2, 16))
        assert (lse[:, :, 0] == float("-inf")).all()
        assert out[:, :, 1].isfinite().all() and (out[:, :, 1] != 0).all()


def test_query_in_padding_gives_zeros() -> None:
    state = LayerCache(make_layer("affine8,sinks=2"))
    new = make_rows(0, 100, batch=2)
    view = state.append(new, new, start=[0, 70])
    out, lse = attend(torch.zeros(2, 1, 100, 8), view, return_lse=True)
    assert (out[1, 0, :70] == 0).all() and (lse[1, 0, :70] == float("-inf")).all()
    assert [round(v) for v in out[1, 0, 70:73, 0].tolist()] == [1070, 1070, 1071]


@pytest.mark.parametrize("lead", [(), (1,), (4,), (1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("text", KINDS)
def test_masks_broadcast_in_every_shape(text: str, lead: tuple[int, ...]) -> None:
    state, view = make_filled_layer(text)
    q = torch.randn(2, 4, 1, 16)
    mask = torch.rand(*lead, 1, 200) < 0.5
    keys, values = (r.double().repeat_interleave(2, 1) for r in state.read())
    scores = q.double() @ keys.transpose(2, 3) / 4
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    added = torch.where(mask, 0.0, float("-inf"))
    for variant in (mask, added, added.half()):
        assert (attend(q, view, mask=variant).double() - expected).abs().max() < 1e-5


def test_float_masks_are_added_to_the_scores() -> None:
    state, view = make_filled_layer("affine8,sinks=3,prefill=stored")
    q, bias = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 200)
    keys, values = (r.double() for r in state.read())
    expected = (q.double() @ keys.transpose(2, 3) / 4 + bias).softmax(-1) @ values
    assert (attend(q, view, mask=bias).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("text", ["raw", "affine8", "affine8,sinks=3"])
def test_mask_with_fewer_columns_aligns_to_the_newest_keys(text: str) -> None:
    state = LayerCache(make_layer(text))
    view = append_rows(state, 100)
    mask = torch.tensor([[True, False, True, False], [False, True, False, True]])
    assert mean_visible_tags(view, 2, mask=mask) == [97.0, 98.0]
    assert mean_visible_tags(view, 2, mask=torch.where(mask, 0.0, float("-inf"))) == [97.0, 98.0]


def test_explicit_mask_may_show_future_keys() -> None:
    state = LayerCache(make_layer("raw"))
    view = append_rows(state, 6)
    assert mean_visible_tags(view, 6, mask=torch.ones(6, 6, dtype=torch.bool)) == [2.5] * 6
    assert mean_visible_tags(view, 6, mask=Mask(causal=False)) == [2.5] * 6


def test_mask_of_ones_does_not_show_padding() -> None:
    state = LayerCache(make_layer("raw"))
    new = make_rows(0, 6)
    view = state.append(new, new, start=[2])
    assert mean_visible_tags(view, 1, mask=torch.ones(1, 6, dtype=torch.bool)) == [3.5]


def test_mask_rule_replaces_the_rule_of_the_view() -> None:
    view = append_rows(LayerCache(make_layer("raw")), 10)
    assert mean_visible_tags(view, 1, mask=Mask(window=3)) == [8.0]
    assert mean_visible_tags(view, 1, mask=Mask(window=2, sinks=2)) == [(0 + 1 + 8 + 9) / 4]
    assert mean_visible_tags(view, 1, mask=Mask(chunk=4)) == [8.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("text", ["raw", "affine8,prefill=stored", "turbo4,prefill=stored,tail=0"])
@pytest.mark.parametrize("place", [3, 130])
def test_nonfinite_row_reaches_only_queries_that_see_it(
    bad: float, side: str, text: str, place: int
) -> None:
    """Query t sees row `place` for t >= place, until its window has passed."""
    keys, values = torch.randn(2, 1, 2, 140, 16)
    clean = LayerCache(make_layer(text))
    expected = attend(torch.ones(1, 2, 140, 16), clean.append(keys, values), mask=Mask(window=9))
    (keys if side == "keys" else values)[:, 0, place] = bad
    state = LayerCache(make_layer(text))
    out = attend(torch.ones(1, 2, 140, 16), state.append(keys, values), mask=Mask(window=9))
    sees = torch.zeros(140, dtype=torch.bool)
    sees[place : place + 9] = True
    assert (out[0, 0, ~sees] - expected[0, 0, ~sees]).abs().max() < 1e-5
    assert (out[0, 1] - expected[0, 1]).abs().max() < 1e-5
    if not (side == "keys" and bad == float("-inf")):  # a score of -inf has weight zero
        assert not out[0, 0, sees].isfinite().all(-1).any()


def test_nonfinite_row_stays_in_its_sequence() -> None:
    for text in ("raw", "affine8,prefill=stored"):
        new = torch.randn(2, 1, 140, 16)
        new[0, 0, 5] = float("nan")
        out = attend(torch.ones(2, 1, 140, 16), LayerCache(make_layer(text)).append(new, new))
        assert out[0, 0, 5:].isnan().all() and out[0, 0, :5].isfinite().all()
        assert out[1].isfinite().all()


def test_nonfinite_row_in_padding_is_never_seen() -> None:
    new = torch.randn(1, 1, 100, 16)
    new[:, :, :7] = float("nan")
    for text in ("raw", "raw,sinks=2", "affine8,sinks=2"):
        view = LayerCache(make_layer(text)).append(new, new, start=[7])
        assert attend(torch.ones(1, 1, 100, 16), view).isfinite().all()


def test_softmax_weights_sum_to_one_for_tiny_scores() -> None:
    """A constant added to the denominator shows if all scores are equal and low."""
    view = LayerCache(make_layer("raw")).append(
        -torch.ones(1, 1, 9, 8) * 100, torch.ones(1, 1, 9, 8)
    )
    out, lse = attend(torch.ones(1, 1, 1, 8), view, return_lse=True)
    assert torch.equal(out, torch.ones(1, 1, 1, 8))
    assert math.isclose(lse.item(), -800 / 8**0.5 + math.log(9), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    _, view = make_filled_layer("affine8")
    assert attend(torch.randn(2, 2, 1, 16).to(dtype), view).dtype == dtype


def test_softmax_accumulates_in_float32_for_any_row_dtype() -> None:
    """4096 weights summed in bfloat16 stop growing at 256."""
    state = LayerCache(make_layer("bf16"))
    view = state.append(torch.zeros(1, 1, 4096, 8), torch.ones(1, 1, 4096, 8))
    out, lse = attend(torch.zeros(1, 1, 1, 8).bfloat16(), view, return_lse=True)
    assert (out == 1).all()
    assert math.isclose(lse.item(), math.log(4096), rel_tol=1e-6)


def test_the_backend_in_use_is_counted() -> None:
    state, view = make_filled_layer("affine8")
    q = torch.zeros(2, 2, 1, 16)
    attend(q, view, backend="reference")
    attend(q, view, backend="reference")
    assert state.stats.attend_calls == {"reference": 2}
    assert state.stats.sealed_pages.total() == 2 * 2 * (200 // 64)  # pages of keys and of values


def test_unknown_backend_is_refused() -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match=r"'cuda-magic' is not one of \[.*'reference'"):
        attend(torch.zeros(2, 2, 1, 16), view, backend="cuda-magic")


class RefusingBackend:
    """A backend that reads no view."""

    name = "choosy"

    def supports(self, view, request=None):
        return "it is Tuesday"

    def store(self, change, rows, sides):
        return False


def test_explain_names_the_backend_of_a_view_and_why_others_cannot_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", [RefusingBackend(), ReferenceBackend()])
    monkeypatch.setattr(store_rows, "STORE_BACKENDS", [RefusingBackend(), ReferenceBackend()])
    state, view = make_filled_layer("affine8")
    reasons = explain(view)
    assert (reasons.backend, reasons.refusals) == ("reference", (("choosy", "it is Tuesday"),))
    assert "reference: reads this view" in str(reasons) and "not choosy: it is Tuesday" in str(
        reasons
    )
    attend(torch.zeros(2, 2, 1, 16), view)
    assert state.stats.attend_calls == {"reference": 1}
    assert set(state.stats.sealed_pages) == {"reference"}


def test_named_backend_that_cannot_read_the_view_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", [RefusingBackend(), *dispatch.BACKENDS])
    state, view = make_filled_layer("raw")
    with pytest.raises(UnsupportedView, match=r"'choosy'.*it is Tuesday"):
        attend(torch.zeros(2, 2, 1, 16), view, backend="choosy")
    assert not state.stats.attend_calls


@pytest.mark.parametrize("text", ["affine8", "turbo4"])
def test_sdpa_fallback_decodes_all_pages_only_if_selected(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = LayerCache(make_layer(text))
    state.append(*torch.randn(2, 1, 2, 20000, 32))  # more than a block of the reference backend
    opened = []
    codec = type(state.spec.keys)
    plain = codec.open
    monkeypatch.setattr(
        codec, "open", lambda self, f: opened.append(f["codes"].shape) or plain(self, f)
    )
    q, view = torch.randn(1, 4, 1, 32), state.view()
    fused = attend(q, view)
    pages = int(view.page_table.stop_sealed[0])
    assert not any(pages in shape[:2] for shape in opened)
    whole = attend(q, view, backend="dequantize")
    assert pages in opened[-1][:2]
    assert (fused - whole).abs().max() < backend_tolerance(view)
    assert state.stats.attend_calls["dequantize"] == 1


BAD_QUERIES = {
    "one sequence": ((4, 1, 32), r"one sequence pass q\[None\]"),
    "three dimensions": ((2, 1, 16), r"\[2, 1, 16\].*\[2, 2, \., 16\]"),
    "another batch": ((1, 2, 1, 16), r"\[1, 2, 1, 16\].*\[2, 2, \., 16\]"),
    "heads that are no multiple": ((2, 3, 1, 16), r"\[2, 3, 1, 16\].*\[2, 2, \., 16\]"),
    "no heads": ((2, 0, 1, 16), r"\[2, 0, 1, 16\].*\[2, 2, \., 16\]"),
    "another width": ((2, 2, 1, 8), r"\[2, 2, 1, 8\].*\[2, 2, \., 16\]"),
    "more than there are tokens": ((2, 2, 201, 16), "201 queries.*200 tokens"),
}


@pytest.mark.parametrize(("shape", "message"), BAD_QUERIES.values(), ids=BAD_QUERIES)
def test_queries_of_wrong_shape_are_refused_with_both_shapes(
    shape: tuple[int, ...], message: str
) -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(shape), view)


def test_queries_on_another_device_are_refused() -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match=r"meta.*cpu"):
        attend(torch.zeros(2, 2, 1, 16, device="meta"), view)


BAD_MASKS = {
    "more columns": torch.ones(1, 201, dtype=torch.bool),
    "other rows": torch.ones(3, 200, dtype=torch.bool),
    "another batch": torch.ones(3, 1, 1, 200, dtype=torch.bool),
    "other heads": torch.ones(1, 3, 1, 200, dtype=torch.bool),
    "one dimension": torch.ones(200, dtype=torch.bool),
    "five dimensions": torch.ones(1, 1, 1, 1, 200, dtype=torch.bool),
    "no columns": torch.ones(1, 0, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", BAD_MASKS.values(), ids=BAD_MASKS)
def test_masks_of_wrong_shape_are_refused_with_both_shapes(mask: Tensor) -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match=r"mask of shape \[.*\] does not fit 1 queries"):
        attend(torch.zeros(2, 2, 1, 16), view, mask=mask)


def test_a_mask_of_integers_is_refused() -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match="int64"):
        attend(torch.zeros(2, 2, 1, 16), view, mask=torch.ones(1, 200, dtype=torch.int64))


def test_sink_logits_of_wrong_shape_are_refused() -> None:
    _, view = make_filled_layer("raw")
    with pytest.raises(ValueError, match=r"\[3\] for 2 heads"):
        attend(torch.zeros(2, 2, 1, 16), view, sink_logits=torch.zeros(3))


def test_sink_logits_of_minus_infinity_are_no_sinks() -> None:
    """Regression: on a row that sees nothing they gave NaN."""
    _, view = make_filled_layer("raw")
    q = torch.randn(2, 4, 3, 16)
    none = torch.full((4,), float("-inf"))
    assert torch.equal(attend(q, view, sink_logits=none), attend(q, view))
    hidden_mask = torch.zeros(3, 5, dtype=torch.bool)
    out, lse = attend(q, view, mask=hidden_mask, sink_logits=none, return_lse=True)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    out, lse = attend(q, view, mask=hidden_mask, sink_logits=torch.zeros(4), return_lse=True)
    assert (out == 0).all()
    assert (lse == 0).all()


def test_float64_mask_works_with_float32_queries() -> None:
    _, view = make_filled_layer("raw")
    q, mask = torch.randn(2, 4, 3, 16), torch.randn(3, 20)
    assert torch.equal(attend(q, view, mask=mask.double()), attend(q, view, mask=mask))


def test_half_precision_queries_do_not_overflow_in_a_frame() -> None:
    codec = Affine(8, 16, Diagonal(((1e-3,) * 16,)))
    state = LayerCache(LayerSpec(codec, codec, KeepAll()))
    view = state.append(*torch.randn(2, 1, 1, 9, 16).half())
    out = attend(torch.full((1, 1, 1, 16), 100.0).half(), view)
    assert out.isfinite().all()


def test_sinks_beyond_a_rewind_are_not_seen() -> None:
    state = LayerCache(make_layer("raw,sinks=6"))
    for value in (1.0, 100.0):
        state.append(torch.zeros(1, 1, 3, 8), torch.full((1, 1, 3, 8), value))
    state.rewind(3)
    out = attend(torch.zeros(1, 1, 1, 8), state.view(), mask=Mask(causal=False))
    assert (out == 1).all()
    same = LayerCache(make_layer("raw,sinks=6"))
    same.append(torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 8))
    first, second = state.snapshot(), same.snapshot()
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("rule", [{"window": 0}, {"chunk": 0}, {"sinks": -1}], ids=str)
def test_inconsistent_mask_is_refused(rule: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="or more is needed"):
        Mask(**rule)


def test_queries_that_need_an_evicted_page_are_refused() -> None:
    """All queries read the same dense rows; only the oldest needs one page more."""
    state = LayerCache(make_layer("affine8,window=100,sinks=0"))
    append_rows(state, 611)
    view = append_rows(state, 1)
    assert view.page_table.first_sealed.tolist() == [7]
    attend(torch.zeros(1, 1, 1, 8), view)
    with pytest.raises(ValueError, match="rows that the oldest query sees"):
        attend(torch.zeros(1, 1, 70, 8), view)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("start", [None, [0, 9], [7, 9]])
@pytest.mark.parametrize(
    ("spec", "length", "served"),
    [
        ("raw", 300, True),
        ("raw,sinks=2", 300, True),
        ("raw,window=64,sinks=4", 300, True),
        ("raw,window=64,sinks=0", 50, True),
        ("raw,window=64,sinks=2", 50, True),
        ("raw,window=64,sinks=0", 300, False),
        ("raw,window=64,sinks=2", 300, False),
        ("affine8,window=64,sinks=0", 300, False),
    ],
)
def test_sinks_of_a_mask_are_seen_or_refused(
    spec: str, length: int, served: bool, start: list[int] | None, backend: str
) -> None:
    """Regression: sinks that a layer does not store were silently omitted."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 1, length, 16, generator=generator)
    q, mask = torch.randn(2, 1, 1, 16, generator=generator), Mask(window=8, sinks=4)
    cache = kvant.Cache(1, spec)
    cache[0].append(keys[:, :, :-1], values[:, :, :-1], start=start)
    view = cache[0].append(keys[:, :, -1:], values[:, :, -1:])
    if not served:
        with pytest.raises(ValueError, match="no more sinks than the view's"):
            attend(q, view, mask=mask, backend=backend)
        return
    place = torch.arange(length) - torch.tensor(start or [0, 0])[:, None]
    visible = evaluate_mask(mask, place[:, -1:], place)[:, None, None]
    scores = (q @ keys.transpose(-1, -2) / 4).masked_fill(~visible, -torch.inf)
    out = attend(q, view, mask=mask, backend=backend)
    assert torch.allclose(out, scores.softmax(-1) @ values, atol=1e-5)


def test_decode_backend_is_not_inferred_from_a_prefill_chunk() -> None:
    """The rows of the open forward alone determine the backend."""
    state: Any = Cache(1, "affine8,tail=0")[0]
    state.append(*torch.randn(2, 1, 2, 200, 32))

    def token() -> None:
        attend(torch.randn(1, 2, 1, 32), state.append(*torch.randn(2, 1, 2, 1, 32)))

    token()
    before = dict(state.stats.attend_calls)
    odd = torch.randn(2, 1, 2, 32, 40).transpose(-1, -2)  # channels are not contiguous
    attend(torch.randn(1, 2, 40, 32), state.append(*odd))
    token()
    [name] = before
    assert state.stats.attend_calls[name] == 2


def test_commands_know_the_backends() -> None:
    assert [backend.name for backend in dispatch.BACKENDS] == BACKENDS


def test_attention_request_keeps_its_argument_order() -> None:
    """External backends build requests with positional arguments."""
    q, mask = torch.randn(1, 2, 1, 8), Mask()
    request = AttentionRequest(q, 0.5, mask, 30.0)
    assert (request.softcap, request.return_lse, request.out_dtype) == (30.0, True, torch.float32)
    narrow = AttentionRequest(q, 0.5, mask, None, None, False, torch.bfloat16)
    assert (narrow.return_lse, narrow.out_dtype) == (False, torch.bfloat16)
