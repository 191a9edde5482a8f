"""Outliers that leave the function of a model what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.zoo import build
from kvant.eval.outliers import scale_key_channels, scale_value_channels
from kvant.hf import cache_for


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize(("change", "side"), [(scale_key_channels, 0), (scale_value_channels, 1)])
def test_the_function_stays_and_the_rows_do_not(name: str, change: Any, side: int) -> None:
    model, ids = build(name), torch.randint(3, 100, (1, 30))
    twin = change(model, 64.0, channels=(3,))  # a power of two: nothing is rounded
    caches = [cache_for(model, "raw"), cache_for(twin, "raw")]
    with torch.no_grad():
        plain, other = (
            one(ids, past_key_values=cache).logits
            for one, cache in zip((model, twin), caches, strict=True)
        )
    assert (plain - other).abs().max() < 1e-4 * plain.abs().max()
    for before, after in zip(*(cache.states for cache in caches), strict=True):
        grown = after.read()[side].norm(dim=2) / before.read()[side].norm(dim=2)
        dim = grown.shape[-1]
        large = torch.zeros(dim, dtype=torch.bool)
        large[[3, 3 + dim // 2]] = True
        assert (grown[..., ~large] - 1).abs().max() < 1e-2
        assert (grown[..., large] - 64).abs().max() < 1


def test_the_model_itself_stays() -> None:
    model = build("llama")
    before = [weight.clone() for weight in model.parameters()]
    scale_key_channels(model, 30.0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_model_without_such_projections_is_refused() -> None:
    with pytest.raises(ValueError, match="no q_proj"):
        scale_key_channels(build("gpt2"), 30.0)


def test_a_model_that_would_be_another_function_is_refused() -> None:
    with pytest.raises(ValueError, match="not the same function"):
        scale_key_channels(build("olmo2"), 30.0)  # whose norms are over all heads
