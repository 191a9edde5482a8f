"""A model of a family, a prompt, and the logits of later tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvant
from hf.zoo import VOCABULARY, build


def make_attached_model(name: str) -> Any:
    """Return a model with kvant's attention: reading dense rows itself, it would read all of
    them.
    """
    model = build(name)
    kvant.attach(model, "raw", guard=False)
    return model


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


@torch.no_grad()
def prefill_prompt(model: Any, spec: str, prompt: list[int]) -> Any:
    cache = kvant.cache_for(model, spec)
    model(torch.tensor([prompt]), past_key_values=cache)
    return cache


@torch.no_grad()
def decode_logits(model: Any, cache: Any, lengths: list[int], indices: list[int]) -> Tensor:
    outs = []
    for step in range(3):
        ids = torch.tensor([[5 + 7 * step + i] for i in indices])
        places = torch.tensor([[length + step] for length in lengths])
        outs.append(model(ids, past_key_values=cache, position_ids=places).logits[:, -1])
    return torch.stack(outs, 1)
