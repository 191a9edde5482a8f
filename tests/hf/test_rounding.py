"""In 16 bits a chunk of tokens rounds otherwise than one token after the other.

What speculation verifies is read by attention of ours in both cases, and rounds less.
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


def build(seed: int) -> PreTrainedModel:
    model, generator = FAMILIES["llama"].build(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25, generator=generator)
    return model.bfloat16()


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, cuts: Sequence[int], seed: int) -> Tensor:
    """Behind a prompt of 20 tokens."""
    ids = FAMILIES["llama"].inputs(1, 40, seed)["input_ids"]
    outs = [model(part, past_key_values=cache).logits for part in ids.split(list(cuts), 1)]
    return torch.cat(outs, 1)[:, 20:].float()


def test_a_draft_rounds_no_more_than_with_the_cache_of_the_host() -> None:
    """In all: a single model may round otherwise by what its linear layers do."""
    host, ours = list[float](), list[float]()
    for seed in range(12):
        model = build(seed)
        caches = (partial(DynamicCache, config=model.config), partial(kvant.cache_for, model))
        for cache, apart in zip(caches, (host, ours), strict=True):
            one, many = (logits(model, cache(), cuts, seed) for cuts in (SINGLE, CHUNKS))
            apart.append(float((one - many).abs().max()))
    assert sum(host) > 0 and sum(ours) <= sum(host) / 2, (host, ours)
