"""Decoders that read an encoder and are no encoder-decoders: its rows lie in a cache of their own.

They make one of two parts from the host's own cache, known by its class. Given one of ours they
appended the rows of the encoder to the layers of the text.
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


def build(name: str, layers: int = 2, **changes: Any) -> PreTrainedModel:
    path, options = FAMILIES[name]
    kind: Any = transformers
    for part in path.split("."):
        kind = getattr(kind, part)
    told = COMMON | {"num_hidden_layers": layers} | options | changes
    renamed = {kind.config_class.attribute_map.get(key, key): told[key] for key in told}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel = kind(kind.config_class(**renamed)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


def tokens(count: int = 5) -> Tensor:
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(0))


def encoder(name: str, seed: int = 1, rows: int = ROWS) -> dict[str, Any]:
    states = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(seed))
    if name == "whisper":
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    return {"encoder_hidden_states": states}


@torch.no_grad()
def driven(model: PreTrainedModel, cache: Any, ids: Tensor, **given: Any) -> Tensor:
    """Logits of all tokens: three at once, then one after the other."""
    parts = [ids[:, :3], *ids[:, 3:].split(1, 1)]
    outs = [model(input_ids=x, past_key_values=cache, use_cache=True, **given) for x in parts]
    return torch.cat([out.logits for out in outs], 1)


@torch.no_grad()
def whole(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["blip", "bert", "gpt2", "roformer", "whisper"])
def test_an_encoder_is_read_as_without_a_cache(name: str, layers: int) -> None:
    model, ids = build(name, layers), tokens()
    cache = kvant.cache_for(model)
    assert isinstance(cache, PairedCache)
    ours = driven(model, cache, ids, **encoder(name))
    assert torch.allclose(ours, whole(model, ids, **encoder(name)), atol=1e-4)
    assert not torch.allclose(ours, whole(model, ids, **encoder(name, seed=2)), atol=1e-2)


def test_a_decoder_without_its_encoder_continues_a_text() -> None:
    model, ids = build("bert"), tokens()
    ours = driven(model, kvant.cache_for(model), ids)
    assert torch.allclose(ours, whole(model, ids), atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_blip_generates_what_it_generates_with_the_cache_of_the_host(layers: int) -> None:
    model, ids = build("blip", layers), tokens(3)
    given = encoder("blip") | {"encoder_attention_mask": torch.ones(1, ROWS, dtype=torch.long)}
    settings = given | {"max_new_tokens": 12, "do_sample": False}
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
def test_rows_of_an_encoder_are_refused_where_nobody_told_of_one(rows: int) -> None:
    """As many rows as tokens looked like a forward that began anew, at every layer."""
    model = build("bart")
    with pytest.raises(CacheError, match=r"encoder.*add_cross_attention|brought no rows"):
        driven(model, kvant.cache_for(model), tokens(), **encoder("bart", rows=rows))
    told = build("bart", add_cross_attention=True)
    ours = driven(told, kvant.cache_for(told), tokens(), **encoder("bart", rows=rows))
    expected = whole(told, tokens(), **encoder("bart", rows=rows))
    assert torch.allclose(ours, expected, atol=1e-4)


def test_a_model_that_confuses_rows_in_any_cache_is_refused() -> None:
    config = transformers.BigBirdConfig(
        **COMMON, num_hidden_layers=2, attention_type="original_full"
    )
    kvant.cache_for(transformers.BigBirdForCausalLM(config))
    config.add_cross_attention = True
    with pytest.raises(SpecError, match="use_cache=False"):
        kvant.cache_for(transformers.BigBirdForCausalLM(config))


@pytest.mark.parametrize("name", ["blip", "bert"])
def test_what_only_continues_text_refuses_a_model_that_reads_an_encoder(name: str) -> None:
    model = build(name)
    with pytest.raises(CacheError, match="reads an encoder"):
        list(kvant.generate(model, object(), [3, 4], max_new_tokens=1))
    kvant.attach(model, "affine4")  # and is not tried on a text
    with pytest.raises(SpecError, match="needs every row"):
        kvant.cache_for(model, "raw,window=8")
