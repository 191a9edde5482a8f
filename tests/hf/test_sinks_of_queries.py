"""Test the sink per query of Inkling 2. Regression: attached models ignored it, with wrong
tokens.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Inkling2ForCausalLM

import kvant


def build_model() -> Inkling2ForCausalLM:
    config_class = Inkling2ForCausalLM.config_class
    config = config_class(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["hybrid_sliding", "hybrid"],
        sliding_window=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        d_rel=8,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = Inkling2ForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("way", ["stock", "attached"])
@torch.no_grad()
def test_sink_of_each_query_is_seen(way: str) -> None:
    model = build_model()
    ids = torch.randint(3, 120, (1, 24), generator=torch.Generator().manual_seed(0))
    expected = model(ids, use_cache=False).logits
    if way == "attached":
        kvant.attach(model)
    cache, parts = kvant.cache_for(model), [ids[:, :12], ids[:, 12:17], *ids[:, 17:].split(1, 1)]
    ours = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
    assert torch.allclose(torch.cat(ours, 1), expected, atol=1e-4 * float(expected.std()))
