"""Test decoders that read an encoder without being encoder-decoders: encoder rows have their own
cache.

They build a two-part cache from a transformers cache, recognized by its class. Regression: with a
kvant cache, encoder rows were appended to the text layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import kvant
from kvant import CacheError, SpecError
from kvant.hf import PairedCache

ROWS = 10  # of the encoder
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
READING = {"add_cross_attention": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "blip": (
        "models.blip.modeling_blip_text.BlipTextLMHeadModel",
        {"encoder_hidden_size": 32, "sep_token_id": 1},
    ),
    "bert": ("BertLMHeadModel", READING),
    "gpt2": ("GPT2LMHeadModel", READING),
    "roformer": ("RoFormerForCausalLM", READING),
    "whisper": (
        "WhisperForCausalLM",
        {
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_target_positions": 64,
            "decoder_layers": 2,
        },
    ),
    "bart": (
        "BartForCausalLM",
        {"decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_layers": 4},
    ),
}


def build_decoder(name: str, layers: int = 2, **changes: Any) -> PreTrainedModel:
    path, options = FAMILIES[name]
    module: Any = transformers
    for part in path.split("."):
        module = getattr(module, part)
    settings = COMMON | {"num_hidden_layers": layers} | options | changes
    renamed = {module.config_class.attribute_map.get(key, key): settings[key] for key in settings}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel = module(module.config_class(**renamed)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


def make_tokens(count: int = 5) -> Tensor:
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(0))


def make_encoder_inputs(name: str, seed: int = 1, rows: int = ROWS) -> dict[str, Any]:
    states = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(seed))
    if name == "whisper":
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    return {"encoder_hidden_states": states}


@torch.no_grad()
def run_with_cache(model: PreTrainedModel, cache: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Return the logits of all tokens: three at once, then one at a time."""
    parts = [ids[:, :3], *ids[:, 3:].split(1, 1)]
    outs = [model(input_ids=x, past_key_values=cache, use_cache=True, **inputs) for x in parts]
    return torch.cat([out.logits for out in outs], 1)


@torch.no_grad()
def run_without_cache(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return logits


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["blip", "bert", "gpt2", "roformer", "whisper"])
def test_encoder_rows_are_read_as_without_a_cache(name: str, layers: int) -> None:
    model, ids = build_decoder(name, layers), make_tokens()
    cache = kvant.cache_for(model)
    assert isinstance(cache, PairedCache)
    ours = run_with_cache(model, cache, ids, **make_encoder_inputs(name))
    assert torch.allclose(
        ours, run_without_cache(model, ids, **make_encoder_inputs(name)), atol=1e-4
    )
    assert not torch.allclose(
        ours, run_without_cache(model, ids, **make_encoder_inputs(name, seed=2)), atol=1e-2
    )


def test_a_decoder_without_its_encoder_continues_a_text() -> None:
    model, ids = build_decoder("bert"), make_tokens()
    ours = run_with_cache(model, kvant.cache_for(model), ids)
    assert torch.allclose(ours, run_without_cache(model, ids), atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_blip_generates_the_same_as_with_the_transformers_cache(layers: int) -> None:
    model, ids = build_decoder("blip", layers), make_tokens(3)
    inputs = make_encoder_inputs("blip") | {
        "encoder_attention_mask": torch.ones(1, ROWS, dtype=torch.long)
    }
    settings = inputs | {"max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3):
        expected = model.generate(ids, num_beams=beams, **settings)
        cache = kvant.cache_for(model)
        ours = model.generate(ids, num_beams=beams, past_key_values=cache, **settings)
        kvant.attach(model)
        attached = model.generate(ids, num_beams=beams, **settings)
        kvant.detach(model)
        assert torch.equal(ours, expected)
        assert torch.equal(attached, expected)


@pytest.mark.parametrize("rows", [3, ROWS], ids=["as many as tokens", "more"])
def test_undeclared_encoder_rows_are_refused(rows: int) -> None:
    """Regression: as many rows as tokens looked like a restarted forward, at every layer."""
    model = build_decoder("bart")
    with pytest.raises(CacheError, match=r"encoder.*add_cross_attention|appended no rows"):
        run_with_cache(
            model, kvant.cache_for(model), make_tokens(), **make_encoder_inputs("bart", rows=rows)
        )
    declared_model = build_decoder("bart", add_cross_attention=True)
    ours = run_with_cache(
        declared_model,
        kvant.cache_for(declared_model),
        make_tokens(),
        **make_encoder_inputs("bart", rows=rows),
    )
    expected = run_without_cache(
        declared_model, make_tokens(), **make_encoder_inputs("bart", rows=rows)
    )
    assert torch.allclose(ours, expected, atol=1e-4)


def test_model_that_mixes_up_rows_in_any_cache_is_refused() -> None:
    config = transformers.BigBirdConfig(
        **COMMON, num_hidden_layers=2, attention_type="original_full"
    )
    kvant.cache_for(transformers.BigBirdForCausalLM(config))
    config.add_cross_attention = True
    with pytest.raises(SpecError, match="use_cache=False"):
        kvant.cache_for(transformers.BigBirdForCausalLM(config))


@pytest.mark.parametrize("name", ["blip", "bert"])
def test_text_only_generation_refuses_a_model_with_an_encoder(name: str) -> None:
    model = build_decoder(name)
    with pytest.raises(CacheError, match="reads an encoder"):
        list(kvant.generate(model, object(), [3, 4], max_new_tokens=1))
    kvant.attach(model, "affine4")  # attaching does not test it on a text
    with pytest.raises(SpecError, match="needs every row"):
        kvant.cache_for(model, "raw,window=8")
