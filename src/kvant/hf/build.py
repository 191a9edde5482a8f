"""Build the cache that fits a model of transformers."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from kvant.cache import files
from kvant.errors import CacheError
from kvant.hf.attention import find_attention_implementations
from kvant.hf.cache import TransformersCache
from kvant.hf.cache_methods import CacheExplanation
from kvant.hf.masks import find_left_padding
from kvant.hf.model import get_transformers_model
from kvant.hf.model_layers import (
    check_cross_attention,
    get_model_layers,
    has_cross_attention,
    make_cache_spec,
)
from kvant.hf.smoothing import fit_smooth_frames
from kvant.recipes import AnySpec

log = logging.getLogger("kvant")


@lru_cache(maxsize=1)
def check_transformers_version() -> None:
    """Warn once if transformers is outside the tested versions of pyproject.toml."""
    tested, installed = get_tested_versions(), version("transformers")
    if tested is not None and not tested.specifier.contains(installed, prereleases=True):
        log.warning(
            "transformers %s is outside %s, the versions that kvant is known to work with",
            installed,
            tested.specifier,
        )


def get_tested_versions() -> Requirement | None:
    """Return the requirement on transformers of the extra `known`."""
    requirements = [Requirement(line) for line in requires("kvant") or ()]
    return next((r for r in requirements if r.marker and "known" in str(r.marker)), None)


class PairedCache(EncoderDecoderCache):
    """Two kvant caches: of the decoder, and of the encoder's rows, which are written once."""

    self_attention_cache: TransformersCache
    cross_attention_cache: TransformersCache

    def check_dynamic_cache(self, method: str) -> None:
        """Accept any method: transformers requires its own class, but kvant supports them all."""

    def fork(self) -> PairedCache:
        """Return a copy that shares pages until either cache writes to them."""
        copy = PairedCache(self.self_attention_cache.fork(), self.cross_attention_cache.fork())
        copy.is_updated = dict(self.is_updated)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> PairedCache:
        return self.fork()

    def trim(self, count: int) -> int:
        """Drop up to `count` of the newest generated tokens, and return their number."""
        return self.self_attention_cache.trim(count)

    def clear(self) -> None:
        """Drop all tokens, those of the encoder included, and free the memory."""
        self.reset()
        self.self_attention_cache.clear()
        self.cross_attention_cache.clear()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of both caches."""
        return {
            "self": self.self_attention_cache.stats(),
            "cross": self.cross_attention_cache.stats(),
        }

    def explain(self) -> CacheExplanation:
        """Explain how each layer of both caches is stored and read."""
        decoder, encoder = self.self_attention_cache.explain(), self.cross_attention_cache.explain()
        return CacheExplanation(
            tuple(f"rows of the decoder: {line}" for line in decoder.lines)
            + tuple(f"rows of the encoder: {line}" for line in encoder.lines)
        )


def cache_for(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> TransformersCache | PairedCache:
    """Make an empty cache for `model.generate(..., cache=cache)`.

    `backend` names the one that reads every layer ("reference", "native", "triton"); by default
    each layer uses the first that can.

    A left-padded batch needs its `attention_mask` here only if the spec has sinks, as each sequence
    keeps its own first positions.

    >>> cache = kvant.cache_for(model, "affine8")
    >>> ids = model.generate(**inputs, cache=cache, max_new_tokens=4)
    >>> cache.get_seq_length() == ids.shape[1] - 1  # the last token is not cached
    True
    """
    check_transformers_version()
    hf_model = get_transformers_model(model)
    layers = get_model_layers(hf_model)
    cache_spec = fit_smooth_frames(hf_model, make_cache_spec(layers, spec))
    attachable = bool(find_attention_implementations(hf_model))
    # The mask of an encoder-decoder model is that of the encoder.
    mask = None if hf_model.config.is_encoder_decoder else attention_mask
    padding = None if mask is None else _find_padding(mask)
    columns = None if mask is None else mask.shape[1]
    cache = TransformersCache(
        layers, cache_spec, padding=padding, columns=columns, attachable=attachable
    )
    cache.backend = backend
    if not has_cross_attention(hf_model):
        return cache
    check_cross_attention(hf_model, cache_spec)
    # Every query reads all rows of an encoder: neither selection nor pruning applies.
    cross_spec = cache_spec.map_layers(lambda layer: replace(layer, select=None, prune=None))
    cross = TransformersCache(layers, cross_spec, is_cross=True, attachable=attachable)
    cross.backend = backend
    return PairedCache(cache, cross)


def load_cache(
    path: str | os.PathLike[str], model: PreTrainedModel, device: str | torch.device | None = None
) -> TransformersCache:
    """Load a saved cache for `model`."""
    hf_model = get_transformers_model(model)
    saved = files.read(path, device=hf_model.device if device is None else device)
    with files.convert_errors(path):
        cache = cache_for(hf_model, saved.spec)
        if not isinstance(cache, TransformersCache):
            raise CacheError(
                f"{type(hf_model).__name__} reads an encoder: its cache cannot be saved or loaded"
            )
        cache.restore(saved.snapshot)
    return cache


def _find_padding(mask: Tensor) -> list[int] | None:
    """Return the left padding of each sequence, None for a mask with holes."""
    if mask.ndim != 2:
        raise ValueError(f"attention_mask {list(mask.shape)}: [sequences, tokens] is needed")
    return find_left_padding(mask.bool())
