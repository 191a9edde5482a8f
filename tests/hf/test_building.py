"""A cache for a model: from the model itself, or from a file; what is no model is refused."""

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
def test_what_is_no_loaded_model_is_refused_in_one_line(verb: Any, model: Any) -> None:
    for given, error in (
        ("gpt2", r"'gpt2' is the name of a model: .*from_pretrained"),
        (model.config, r"LlamaConfig is no model: .* kvant\.plan\(config, spec\)"),
        (nn.Linear(2, 2), r"Linear is no model of transformers, .* kvant\.Cache\("),
    ):
        with pytest.raises(TypeError, match=error):
            verb(given)


def test_a_saved_cache_goes_on_in_the_hands_of_a_model(model: Any, tmp_path: Path) -> None:
    """`kvant.load` gave a cache that no model of transformers takes."""
    path, ids = tmp_path / "a.kv.safetensors", torch.randint(3, 100, (1, 90))
    cache = kvant.cache_for(model, SPEC)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.crop(ids.shape[1] - 1 - cache.length)
    kvant.save(cache, path)
    for _ in range(2):
        again = kvant.load(path, model)
        assert again.length == ids.shape[1] - 1 and again.spec == cache.spec
        told = model.generate(ids, past_key_values=again, max_new_tokens=6, do_sample=False)
        assert told.equal(expected)
    assert isinstance(kvant.load(path), kvant.Cache)


def test_a_file_for_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "a.kv.safetensors", kvant.Cache(9, "affine8")
    kvant.save(other, path)
    with pytest.raises(kvant.CacheFileError, match=r"a\.kv\.safetensors: .*9"):
        kvant.load(path, model)
    with pytest.raises(TypeError, match="the name of a model"):
        kvant.load(path, "gpt2")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="tiles beside a model"):
        kvant.load(path, model, tiles=object())  # type: ignore[call-overload]


def test_the_cache_of_a_model_is_not_pickled(model: Any) -> None:
    with pytest.raises(TypeError, match=r"kvant\.save\(cache, path\)"):
        pickle.dumps(kvant.cache_for(model))
