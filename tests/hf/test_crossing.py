"""Test layers that read an image among text layers, as in Mllama: rows per image, not per token.

Regression: as text layers they ended every forward early. Each token was stored, treated as an
incomplete forward, and rolled back before the next one, so all tokens were wrong.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MllamaConfig, MllamaForConditionalGeneration

import kvant
from kvant import CacheError
from kvant.hf import TransformersCache

IMAGE, PROMPT = 4, 7
PLACES = ([1], [1, 3], [3])  # of the layers that read an image; the last one ends a forward, too

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 3,
    "hidden_size": 16,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 32,
    "projection_dim": 32,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
}


@lru_cache
def model_of(*places: int) -> MllamaForConditionalGeneration:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        text = TEXT | {"cross_attention_layers": list(places)}
        config = MllamaConfig(text_config=text, vision_config=VISION, image_token_index=IMAGE)
        model = MllamaForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            if "gate" in name:  # otherwise an image changes nothing
                parameter.fill_(0.5)
    model.generation_config.eos_token_id = None
    return model


def tokens(count: int, seed: int = 0, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 99, (batch, count), generator=generator)


def image(count: int = PROMPT, seed: int = 0, batch: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(batch, 1, 4, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.tensor([[6]] * batch),
        "aspect_ratio_mask": torch.ones(batch, 1, 4),
        "cross_attention_mask": torch.ones(batch, count, 1, 4),
    }


def prompt(seed: int = 0, batch: int = 1) -> dict[str, Tensor]:
    ids = tokens(PROMPT, seed, batch)
    ids[:, 1] = IMAGE
    return {"input_ids": ids, **image(seed=seed, batch=batch)}


def generate_tokens(model: Any, cache: Any = None, count: int = 12, **inputs: Any) -> Tensor:
    settings = {"do_sample": False, "max_new_tokens": count} | inputs
    out: Tensor = model.generate(past_key_values=cache, **settings)
    return out


@torch.no_grad()
def forward_logits(model: Any, cache: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """Return the logits of the last token."""
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs).logits
    return logits[:, -1]


def make_cache_with_image(*places: int) -> tuple[MllamaForConditionalGeneration, TransformersCache]:
    """Return a cache that has read an image."""
    model = model_of(*places)
    cache = kvant.cache_for(model)
    forward_logits(
        model, cache, **{"ids" if k == "input_ids" else k: v for k, v in prompt().items()}
    )
    return model, cache


def recompute_logits(model: Any, ids: Tensor, seed: int = 0) -> Tensor:
    """Return the logits of the last token, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False, **image(ids.shape[1], seed)).logits
    return logits[:, -1]


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "batch": {"batch": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_image_and_text_give_the_tokens_of_the_whole_text(places: list[int], mode: str) -> None:
    model, settings = model_of(*places), dict(MODES[mode])
    inputs = prompt(batch=settings.pop("batch", 1))
    beams = {name: value for name, value in settings.items() if name == "num_beams"}
    expected = generate_tokens(model, **inputs, **beams or {"use_cache": False})
    assert torch.equal(
        generate_tokens(model, kvant.cache_for(model), **inputs, **settings), expected
    )
    kvant.attach(model)
    attached = generate_tokens(model, **inputs, **settings)
    kvant.detach(model)
    assert torch.equal(attached, expected)


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_text_without_an_image_is_cached(places: list[int]) -> None:
    model, ids = model_of(*places), tokens(9)
    for spec in ("raw", "raw,window=64"):
        ours = generate_tokens(model, kvant.cache_for(model, spec), input_ids=ids)
        assert torch.equal(
            ours, generate_tokens(model, DynamicCache(config=model.config), input_ids=ids)
        )


def test_image_rows_are_stored_next_to_text_rows() -> None:
    model, cache = make_cache_with_image(1)
    forward_logits(model, cache, tokens(1))
    assert cache.get_seq_length() == PROMPT + 1
    assert cache.stats()["abandoned"] == 0
    assert "layer 1, cross_attention: kept by transformers" in str(cache.explain())
    assert [shape.kind for shape in kvant.plan(model).layers].count("cross_attention") == 1


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_rewound_tokens_keep_the_image(places: list[int]) -> None:
    model, cache = make_cache_with_image(*places)
    forward_logits(model, cache, tokens(3, seed=1), cross_attention_mask=torch.ones(1, 3, 1, 4))
    cache.crop(-3)
    last = tokens(1, seed=2)
    expected = recompute_logits(model, torch.cat([prompt()["input_ids"], last], 1))
    ours = forward_logits(model, cache, last, cross_attention_mask=torch.ones(1, 1, 1, 4))
    assert torch.allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("forget", [lambda c: c.crop(-PROMPT), lambda c: c.reset()])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_image_is_dropped_with_its_text(places: list[int], forget: Any) -> None:
    model, cache = make_cache_with_image(*places)
    forget(cache)
    other = prompt(seed=5)
    expected = recompute_logits(model, other["input_ids"], seed=5)
    ours = forward_logits(model, cache, other.pop("input_ids"), **other)
    assert torch.allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("operation", ["image", "text"])
@pytest.mark.parametrize("places", [[1], [1, 2]], ids=str)
def test_image_of_a_failed_forward_is_not_seen(
    places: list[int], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = model_of(*places), kvant.cache_for(model_of(*places))
    inputs = prompt()
    ids = inputs.pop("input_ids")
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[3], "update", None)
        with pytest.raises(TypeError):
            forward_logits(model, cache, ids, **inputs)
    if operation == "image":
        other = prompt(seed=5)
        expected = recompute_logits(model, other["input_ids"], seed=5)
        ours = forward_logits(model, cache, other.pop("input_ids"), **other)
    else:
        expected = forward_logits(model, kvant.cache_for(model), ids)
        ours = forward_logits(model, cache, ids)
    assert torch.allclose(ours, expected, atol=1e-4)


def test_fork_has_its_own_image() -> None:
    model, cache = make_cache_with_image(1)
    fork, mask = copy.deepcopy(cache), torch.ones(1, 1, 1, 4)
    expected = forward_logits(model, cache, tokens(1, seed=1), cross_attention_mask=mask)
    cache.reset()
    assert torch.equal(
        forward_logits(model, fork, tokens(1, seed=1), cross_attention_mask=mask), expected
    )
    fork.crop(-PROMPT - 1)
    assert fork.get_seq_length() == 0
    assert fork.layers[1].get_seq_length() == 0


def test_operations_that_would_lose_the_image_are_refused() -> None:
    _, cache = make_cache_with_image(1)
    for verb in (cache.snapshot, lambda: cache.rewind(3), lambda: cache.recode("affine8")):
        with pytest.raises(CacheError, match=r"layers \[1\] \(cross_attention\) live in transform"):
            verb()
