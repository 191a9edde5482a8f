"""Test operations of a compressed cache that transformers' QuantizedCache lacks, one by one.

Its fp8 backend needs no extra package. The other backends share these methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import Cache

import kvant
from hf.modes import make_draft, make_repetitive
from hf.parity import (
    PROMPT,
    Text,
    generate_text,
    model_of,
    prepare_model,
    text_of,
    with_small_pages,
)
from hf.zoo import FAMILIES

NAME = "llama"
SPEC = with_small_pages("affine8", prefill="stored")


def make_quantized_cache() -> Cache:
    return QuantizedCache(backend="fp8", config=model_of(NAME).config)


def make_kvant_cache() -> Cache:
    return kvant.cache_for(model_of(NAME), SPEC)


def make_prompt() -> Text:
    return text_of(FAMILIES[NAME]).prompt


@torch.no_grad()
def forward_logits(cache: Cache, ids: Tensor) -> Tensor:
    """Append these tokens and return their logits."""
    logits: Tensor = model_of(NAME)(ids, past_key_values=cache).logits
    return logits


def prefill_batch(cache: Cache, sequences: int = 1) -> Cache:
    """Prefill a batch with the prompt, each sequence ending in a different token."""
    forward_logits(cache, make_prompt().ids.repeat(sequences, 1))
    forward_logits(cache, torch.arange(5, 5 + sequences)[:, None])
    return cache


def logits_after(verb: Callable[[Any], None], cache: Cache, sequences: int) -> Tensor:
    """Return the logits of one more token, after an operation on a batch."""
    prefill_batch(cache, sequences)
    verb(cache)
    return forward_logits(cache, torch.tensor([[9], [9]]))


def test_crop_matches_transformers() -> None:
    with pytest.raises(IndexError):
        prefill_batch(make_quantized_cache()).crop(-2)
    cache = prefill_batch(make_kvant_cache())
    cache.crop(-2)
    assert cache.get_seq_length() == PROMPT - 1
    repeat = torch.cat(
        [forward_logits(cache, token) for token in (make_prompt().ids[:, -1:], torch.tensor([[5]]))]
    )
    reference = make_kvant_cache()
    forward_logits(reference, make_prompt().ids[:, :-1])
    never_gone = [
        forward_logits(reference, token)
        for token in (make_prompt().ids[:, -1:], torch.tensor([[5]]))
    ]
    assert torch.allclose(repeat, torch.cat(never_gone), atol=1e-5)


SELECTIONS: dict[str, tuple[Callable[[Any], None], int, tuple[int, int]]] = {
    "batch_select_indices": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), 3, (2, 0)),
    "batch_repeat_interleave": (lambda c: c.batch_repeat_interleave(2), 1, (0, 0)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selecting_sequences_matches_transformers(name: str) -> None:
    verb, sequences, order = SELECTIONS[name]
    with pytest.raises((IndexError, RuntimeError)):
        logits_after(verb, make_quantized_cache(), sequences)
    whole = prefill_batch(make_kvant_cache(), sequences)
    expected = forward_logits(whole, torch.full((sequences, 1), 9))[list(order)]
    assert torch.allclose(logits_after(verb, make_kvant_cache(), sequences), expected, atol=1e-5)


@pytest.mark.parametrize("name", ("mistral", "gemma3", "llama4", "gemma4", "falcon_h1", "lfm2"))
def test_sliding_layers_are_supported(name: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    with pytest.raises(ValueError, match="only full attention layers"):
        QuantizedCache(backend="fp8", config=model.config)
    cache = kvant.cache_for(model, with_small_pages("affine8"))
    tokens = generate_text(model, family, text_of(family).prompt, cache)
    assert tokens.shape[1] == PROMPT + 12


SPECULATION: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant_model": lambda: {"assistant_model": make_draft(NAME)},
}


@pytest.mark.parametrize("name", SPECULATION)
def test_speculation_matches_plain_decoding(name: str) -> None:
    options, text, family = SPECULATION[name](), make_repetitive(make_prompt()), FAMILIES[NAME]
    with pytest.raises((IndexError, ValueError)):  # a message with words from 5.24 on
        generate_text(model_of(NAME), family, text, make_quantized_cache(), **options)
    plain = generate_text(model_of(NAME), family, text, make_kvant_cache())
    assert torch.equal(
        generate_text(model_of(NAME), family, text, make_kvant_cache(), **options), plain
    )
    with prepare_model(model_of(NAME), "attached", SPEC) as model:
        assert torch.equal(generate_text(model, family, text, **options), plain)
