"""Test transformers' multi-token prediction heads with a cache of kvant: tokens stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.modeling_layers

import kvant
from hf.zoo import FAMILIES, build, randomize

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.modeling_layers, "MtpModel"),
    reason="this version of transformers has no heads",
)


@pytest.fixture
def random_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give heads random weights instead of those of a checkpoint."""
    heads = transformers.modeling_layers.MtpModel

    def make(model: Any, **options: Any) -> Any:
        made = heads(model, model.config.num_mtp_layers).eval()
        with torch.no_grad():
            for name, parameter in made.layers.named_parameters():
                randomize(name, parameter)
        return made

    monkeypatch.setattr(heads, "from_pretrained", make)


@pytest.mark.usefixtures("random_heads")
@pytest.mark.parametrize("spec", ["raw", "affine8,prefill=stored"])
def test_tokens_with_heads_are_those_without(spec: str) -> None:
    model, prompt = build("deepseek_v3"), FAMILIES["deepseek_v3"].inputs(tokens=40)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    kvant.attach(model, spec)
    plain = model.generate(**prompt, **options, past_key_values=kvant.cache_for(model, spec))
    cache = kvant.cache_for(model, spec)
    drafted = model.generate(**prompt, **options, past_key_values=cache, use_mtp=True)
    assert torch.equal(plain, drafted)
    assert cache.get_seq_length() == plain.shape[1] - 1
