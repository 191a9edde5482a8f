"""Test the argument name of the cache in transformers: it changed, and must cause no warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import kvant
from hf.zoo import FAMILIES, build
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import get_cache_argument
from kvant.probing.divergence import compute_logits


@pytest.fixture(autouse=True)
def nothing_is_deprecated() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("family", ["llama", "mamba", "falcon_h1"])
def test_cache_is_passed_by_the_current_transformers_argument_name(family: str) -> None:
    model, inputs = build(family), FAMILIES[family].inputs(tokens=6)
    cache = kvant.cache_for(model, "raw")
    plain = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    options = {get_cache_argument(model): cache}
    assert plain.equal(model.generate(**inputs, **options, max_new_tokens=3, do_sample=False))
    assert cache.get_seq_length() > 0
    with kvant.attach(model, "raw"):
        assert plain.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_generation_loop_uses_that_name(family: str) -> None:
    model, ids = build(family), FAMILIES[family].inputs(tokens=6)["input_ids"]
    decoder = TransformersDecoder(model)
    decoder.compute_logits(ids[0].tolist(), decoder.make_cache("raw"))
    cache = kvant.cache_for(model, "raw")
    assert compute_logits(model, ids, cache).shape[0] == 6


def test_fitted_scales_use_that_name() -> None:
    kvant.cache_for(build("llama"), "affine8,smooth")
