"""What transformers' own QuantizedCache cannot do, call by call, and that a compressed cache can.

Its fp8 backend needs nothing installed. The others share these calls with it.
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
from hf.modes import draft, repetitive
from hf.parity import PROMPT, Text, generated, handed, model_of, small_pages, text_of
from hf.zoo import FAMILIES

NAME = "llama"
SPEC = small_pages("affine8", prefill="stored")


def theirs() -> Cache:
    return QuantizedCache(backend="fp8", config=model_of(NAME).config)


def ours() -> Cache:
    return kvant.cache_for(model_of(NAME), SPEC)


def prompt() -> Text:
    return text_of(FAMILIES[NAME]).prompt


@torch.no_grad()
def read(cache: Cache, ids: Tensor) -> Tensor:
    """Logits for these tokens, which the cache holds afterwards."""
    logits: Tensor = model_of(NAME)(ids, past_key_values=cache).logits
    return logits


def filled(cache: Cache, sequences: int = 1) -> Cache:
    """The prompt, read by so many sequences, of which each goes on with a token of its own."""
    read(cache, prompt().ids.repeat(sequences, 1))
    read(cache, torch.arange(5, 5 + sequences)[:, None])
    return cache


def after(verb: Callable[[Any], None], cache: Cache, sequences: int) -> Tensor:
    """Logits of one more token, after a verb on a cache of so many sequences."""
    filled(cache, sequences)
    verb(cache)
    return read(cache, torch.tensor([[9], [9]]))


def test_crop() -> None:
    with pytest.raises(IndexError):
        filled(theirs()).crop(-2)
    cache = filled(ours())
    cache.crop(-2)
    assert cache.get_seq_length() == PROMPT - 1
    again = torch.cat([read(cache, token) for token in (prompt().ids[:, -1:], torch.tensor([[5]]))])
    straight = ours()
    read(straight, prompt().ids[:, :-1])
    never_gone = [read(straight, token) for token in (prompt().ids[:, -1:], torch.tensor([[5]]))]
    assert torch.allclose(again, torch.cat(never_gone), atol=1e-5)


SELECTIONS: dict[str, tuple[Callable[[Any], None], int, tuple[int, int]]] = {
    "batch_select_indices": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), 3, (2, 0)),
    "batch_repeat_interleave": (lambda c: c.batch_repeat_interleave(2), 1, (0, 0)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selecting_sequences(name: str) -> None:
    verb, sequences, order = SELECTIONS[name]
    with pytest.raises((IndexError, RuntimeError)):
        after(verb, theirs(), sequences)
    whole = filled(ours(), sequences)
    expected = read(whole, torch.full((sequences, 1), 9))[list(order)]
    assert torch.allclose(after(verb, ours(), sequences), expected, atol=1e-5)


@pytest.mark.parametrize("name", ("mistral", "gemma3", "llama4", "gemma4", "falcon_h1", "lfm2"))
def test_layers_that_are_not_full_attention(name: str) -> None:
    model, family = model_of(name), FAMILIES[name]
    with pytest.raises(ValueError, match="only full attention layers"):
        QuantizedCache(backend="fp8", config=model.config)
    cache = kvant.cache_for(model, small_pages("affine8"))
    tokens = generated(model, family, text_of(family).prompt, cache)
    assert tokens.shape[1] == PROMPT + 12


SPECULATION: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant_model": lambda: {"assistant_model": draft(NAME)},
}


@pytest.mark.parametrize("name", SPECULATION)
def test_speculation(name: str) -> None:
    options, text, family = SPECULATION[name](), repetitive(prompt()), FAMILIES[NAME]
    with pytest.raises((IndexError, ValueError)):  # an error in words from 5.24 on
        generated(model_of(NAME), family, text, theirs(), **options)
    plain = generated(model_of(NAME), family, text, ours())
    assert torch.equal(generated(model_of(NAME), family, text, ours(), **options), plain)
    with handed(model_of(NAME), "attached", SPEC) as model:
        assert torch.equal(generated(model, family, text, **options), plain)
