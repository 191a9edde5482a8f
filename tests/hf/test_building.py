"""Test building a cache from a model or a file; invalid models are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvant
from hf.zoo import build

SPEC = "affine8,group=16"


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize("verb", [kvant.cache_for, kvant.attach])
def test_invalid_model_is_refused_in_one_line(verb: Any, model: Any) -> None:
    for bad_model, error in (
        ("gpt2", r"'gpt2' is the name of a model: .*from_pretrained"),
        (model.config, r"LlamaConfig is no model: .* kvant\.plan\(config, spec\)"),
        (nn.Linear(2, 2), r"Linear is neither a transformers model .* kvant\.Cache\("),
    ):
        with pytest.raises(TypeError, match=error):
            verb(bad_model)


def test_saved_cache_continues_with_a_model(model: Any, tmp_path: Path) -> None:
    """Regression: `kvant.load` returned a cache that no transformers model accepts."""
    path, ids = tmp_path / "a.kv.safetensors", torch.randint(3, 100, (1, 90))
    cache = kvant.cache_for(model, SPEC)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.crop(ids.shape[1] - 1 - cache.length)
    kvant.save(cache, path)
    for _ in range(2):
        reloaded = kvant.load(path, model)
        assert reloaded.length == ids.shape[1] - 1 and reloaded.spec == cache.spec
        continued = model.generate(ids, past_key_values=reloaded, max_new_tokens=6, do_sample=False)
        assert continued.equal(expected)
    assert isinstance(kvant.load(path), kvant.Cache)


def test_a_file_for_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "a.kv.safetensors", kvant.Cache(9, "affine8")
    kvant.save(other, path)
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors: .*9"):
        kvant.load(path, model)
    with pytest.raises(TypeError, match="the name of a model"):
        kvant.load(path, "gpt2")  # type: ignore[call-overload]


def test_model_cache_cannot_be_pickled(model: Any) -> None:
    with pytest.raises(TypeError, match=r"kvant\.save\(cache, path\)"):
        pickle.dumps(kvant.cache_for(model))
