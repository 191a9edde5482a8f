"""Test outliers that leave the function of a model unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.outliers import scale_key_channels, scale_value_channels
from hf.zoo import build
from kvant.hf import cache_for


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize(("change", "side"), [(scale_key_channels, 0), (scale_value_channels, 1)])
def test_added_outliers_keep_the_function_and_change_the_rows(
    name: str, change: Any, side: int
) -> None:
    model, ids = build(name), torch.randint(3, 100, (1, 30))
    changed = change(model, 64.0, channels=(3,))  # a power of two: nothing is rounded
    caches = [cache_for(model, "raw"), cache_for(changed, "raw")]
    with torch.no_grad():
        plain, other = (
            variant(ids, past_key_values=cache).logits
            for variant, cache in zip((model, changed), caches, strict=True)
        )
    assert (plain - other).abs().max() < 1e-4 * plain.abs().max()
    for before, after in zip(*(cache.states for cache in caches), strict=True):
        grown = after.read()[side].norm(dim=2) / before.read()[side].norm(dim=2)
        dim = grown.shape[-1]
        large = torch.zeros(dim, dtype=torch.bool)
        large[[3, 3 + dim // 2]] = True
        assert (grown[..., ~large] - 1).abs().max() < 1e-2
        assert (grown[..., large] - 64).abs().max() < 1


def test_original_model_is_unchanged() -> None:
    model = build("llama")
    before = [weight.clone() for weight in model.parameters()]
    scale_key_channels(model, 30.0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_model_without_such_projections_is_refused() -> None:
    with pytest.raises(ValueError, match="no q_proj"):
        scale_key_channels(build("gpt2"), 30.0)


def test_transformation_that_changes_the_function_is_refused() -> None:
    with pytest.raises(ValueError, match="not the same function"):
        scale_key_channels(build("olmo2"), 30.0)  # its norms span all heads
