"""Test 16-bit rounding, which differs between a chunk of tokens and single tokens.

Speculation verifies with kvant's attention in both cases, which rounds less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvant
from hf.zoo import FAMILIES

SINGLE = (20, *[1] * 20)
CHUNKS = (20, 5, 5, 5, 5)


def build_model(seed: int) -> PreTrainedModel:
    model, generator = FAMILIES["llama"].build(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25, generator=generator)
    return model.bfloat16()


@torch.no_grad()
def chunked_logits(model: PreTrainedModel, cache: Any, cuts: Sequence[int], seed: int) -> Tensor:
    """Return the logits after a prompt of 20 tokens."""
    ids = FAMILIES["llama"].inputs(1, 40, seed)["input_ids"]
    outs = [model(part, past_key_values=cache).logits for part in ids.split(list(cuts), 1)]
    return torch.cat(outs, 1)[:, 20:].float()


def test_draft_rounding_matches_the_transformers_cache() -> None:
    """In total: in a single model linear layers may round differently."""
    host, ours = list[float](), list[float]()
    for seed in range(12):
        model = build_model(seed)
        caches = (partial(DynamicCache, config=model.config), partial(kvant.cache_for, model))
        for cache, differences in zip(caches, (host, ours), strict=True):
            single, many = (chunked_logits(model, cache(), cuts, seed) for cuts in (SINGLE, CHUNKS))
            differences.append(float((single - many).abs().max()))
    assert sum(host) > 0 and sum(ours) <= sum(host) / 2, (host, ours)
