"""Test that the query heads of one token are never mistaken for several tokens.

For one token transformers packs the heads of a group as queries (`pack_gqa`), and some models use
the last token of a chunk only. A chunk with as many tokens as a group has heads shows a confusion.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

import kvant
from hf.expected import expect_reading
from hf.parity import TOLERANCE, Cell, Way, model_of, prepare_model, with_small_pages
from hf.zoo import build, family_names
from kvant import UnsupportedView
from kvant.hf.model import supports_chunked_prefill
from thin import thin_rows

PROMPT, CHUNKS = 18, (2, 4, 3, 2)  # groups of the zoo have 2 heads, or 4 with one KV head
STEP = 0.02  # of 8 bits, in logits relative to their spread
WAYS: tuple[Way, ...] = ("stock", "attached")
CHANGES = (
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 2, "global_head_dim": 288},  # too wide for PyTorch's grouped queries
)


def tokens(count: int) -> Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def last_logits(
    model: PreTrainedModel, cache: Any, prompt: int = PROMPT, chunks: tuple[int, ...] = CHUNKS
) -> Tensor:
    """Return the logits of the last token after each chunk of a text."""
    cuts = [0, *itertools.accumulate(chunks, initial=prompt)]
    ids, takes = tokens(cuts[-1]), inspect.signature(model.forward).parameters
    logits = []
    for start, stop in itertools.pairwise(cuts):
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if "position_ids" in takes:
            options["position_ids"] = torch.arange(start, stop)[None]
        if "logits_to_keep" in takes:
            options["logits_to_keep"] = 1
        logits.append(model(ids[:, start:stop], **options).logits[0, -1])
    return torch.stack(logits)


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.std())


def check(model: PreTrainedModel, plain: PreTrainedModel, way: Way) -> None:
    expected = last_logits(plain, DynamicCache(config=plain.config))
    with prepare_model(model, way, "raw"):
        assert apart(last_logits(model, kvant.cache_for(model)), expected) < TOLERANCE


def check_stored(model: PreTrainedModel, way: Way, spec: Any) -> None:
    """Check that a chunk equals its tokens one by one, as the rule says.

    If float32 noise flips a code, the difference is a whole quantization step.
    """
    single = (1,) * sum(CHUNKS)
    with prepare_model(model, way, spec):
        chunked = last_logits(model, kvant.cache_for(model, spec))
        singly = last_logits(model, kvant.cache_for(model, spec), chunks=single)
    ends = torch.tensor([0, *itertools.accumulate(CHUNKS)])
    assert apart(chunked, singly[ends]) < STEP


DECODERS = [n for n in family_names("decoder", "hybrid") if supports_chunked_prefill(model_of(n))]


@pytest.mark.parametrize(("name", "way"), thin_rows(itertools.product(DECODERS, WAYS)))
def test_chunk_as_long_as_a_group(name: str, way: Way) -> None:
    check(model_of(name), model_of(name, "eager"), way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if turn % 4 == 0 else pytest.mark.laws)
        for turn, (name, way) in enumerate(itertools.product(DECODERS, WAYS))
    ],
)
def test_chunk_of_stored_rows_as_long_as_a_group(name: str, way: Way) -> None:
    """It works if attention reads pages, and is right or refused otherwise."""
    spec = with_small_pages("affine8", prefill="stored")
    try:
        check_stored(model_of(name), way, spec)
    except UnsupportedView:
        assert expect_reading(Cell(name, "affine8", 1, "chunked", way)) == "materialized"


@pytest.mark.parametrize(
    ("spec", "changes", "way"),
    thin_rows(
        itertools.product(["raw", "stored", "narrow"], CHANGES, WAYS),
        lambda row: (row[0], str(row[1]), row[2]),
    ),
    ids=str,
)
def test_shared_layers_with_any_groups(spec: str, changes: dict[str, int], way: Way) -> None:
    model = build("gemma4", **changes)
    if spec == "raw":
        check(model, build("gemma4", **changes, attn_implementation="eager"), way)
    elif spec == "stored":
        check_stored(model, way, with_small_pages("affine8", prefill="stored"))
    else:
        check_stored(model, way, "raw,window=4,sinks=0")


# ---- PyTorch's attention on a pair of handles equals that on dense rows


def handles(model: PreTrainedModel, heads: int, count: int) -> tuple[Tensor, Tensor]:
    cache, dim = kvant.cache_for(model), 16
    for length in (9, count):
        pairs = [cache.update(*torch.randn(2, 1, heads, length, dim), layer) for layer in range(4)]
    keys, values = pairs[-1]
    return keys, values


MASKS = ("none", "causal", "row", "rows", "row a head", "rows a head")


def mask_of(mask_kind: str, heads: int, queries: int, columns: int) -> Tensor | None:
    if mask_kind in ("none", "causal"):
        return None
    shape = (1, heads if "head" in mask_kind else 1, queries if "rows" in mask_kind else 1, columns)
    mask = torch.rand(shape) < 0.5
    mask[..., -1] = True
    return mask


@pytest.mark.parametrize(
    ("name", "mask_kind", "heads"),
    thin_rows(itertools.product(["llama", "phi"], MASKS, [1, 2])),  # with groups, and without
)
def test_explicit_repeat_of_a_handle_is_honoured(name: str, mask_kind: str, heads: int) -> None:
    model = build(name)
    for count, queries, groups in itertools.product((1, 2, 3), (1, 2, 3), (1, 2)):
        torch.manual_seed(0)
        keys, values = handles(model, heads, count)
        q = torch.randn(1, heads * groups, queries, 16)
        options: dict[str, Any] = {
            "attn_mask": mask_of(mask_kind, heads * groups, queries, 9 + count),
            "is_causal": mask_kind == "causal",
            "enable_gqa": groups > 1,
        }
        ours = [scaled_dot_product_attention(q, keys, values, **options) for _ in range(2)]
        theirs = scaled_dot_product_attention(q, keys.clone(), values.clone(), **options)
        for out in ours:
            assert torch.allclose(out, theirs, atol=1e-5), (count, queries, groups)


def test_explicit_repeat_after_grouped_calls_is_honoured() -> None:
    """After grouped calls, queries on the KV heads are those of one token."""
    model = build("llama")
    for mask_kind, queries in itertools.product(MASKS, (2, 3)):
        torch.manual_seed(0)
        keys, values = handles(model, 2, queries)
        mask = mask_of("rows", 4, queries, 9 + queries)
        twice = repeat_kv(keys, 2), repeat_kv(values, 2)
        scaled_dot_product_attention(torch.randn(1, 4, queries, 16), *twice, attn_mask=mask)
        options = {
            "attn_mask": mask_of(mask_kind, 2, queries, 9 + queries),
            "is_causal": mask_kind == "causal",
        }
        q = torch.randn(1, 2, queries, 16)
        ours = scaled_dot_product_attention(q, keys, values, **options)
        theirs = scaled_dot_product_attention(q, keys.clone(), values.clone(), **options)
        assert torch.allclose(ours, theirs, atol=1e-5), (mask_kind, queries)


@pytest.mark.parametrize("mask_kind", [kind for kind in MASKS if kind != "causal"])
def test_explicit_repeat_of_encoder_rows_is_honoured(mask_kind: str) -> None:
    for heads, queries, groups in itertools.product((1, 2), (1, 2, 3), (1, 2)):
        torch.manual_seed(0)
        cache = kvant.cache_for(build("bart")).cross_attention_cache
        for layer in range(2):
            cache.update(*torch.randn(2, 1, heads, 9, 16), layer)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        q = torch.randn(1, heads * groups, queries, 16)
        mask = mask_of(mask_kind, heads * groups, queries, 9)
        options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": groups > 1}
        ours = scaled_dot_product_attention(q, keys, values, **options)
        theirs = scaled_dot_product_attention(q, keys.clone(), values.clone(), **options)
        assert torch.allclose(ours, theirs, atol=1e-5), (heads, queries, groups)
