"""The cache of ours that fits a model of the host's."""

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
    """Warn once, if need be. The range stands in pyproject.toml."""
    known, have = get_tested_versions(), version("transformers")
    if known is not None and not known.specifier.contains(have, prereleases=True):
        log.warning(
            "transformers %s is outside %s, which kvant is known to work with",
            have,
            known.specifier,
        )


def get_tested_versions() -> Requirement | None:
    found = [Requirement(line) for line in requires("kvant") or ()]
    return next((r for r in found if r.marker and "known" in str(r.marker)), None)


class PairedCache(EncoderDecoderCache):
    """Both are ours; the second is written once and read by every later token."""

    self_attention_cache: TransformersCache
    cross_attention_cache: TransformersCache

    def check_dynamic_cache(self, method: str) -> None:
        """The host asks for its own class before it crops or selects: ours can do both."""

    def fork(self) -> PairedCache:
        twin = PairedCache(self.self_attention_cache.fork(), self.cross_attention_cache.fork())
        twin.is_updated = dict(self.is_updated)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PairedCache:
        return self.fork()

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens that were generated, or all; how many that was."""
        return self.self_attention_cache.trim(count)

    def clear(self) -> None:
        """Forget the tokens, those of the encoder too, and free the memory."""
        self.reset()
        self.self_attention_cache.clear()
        self.cross_attention_cache.clear()

    def stats(self) -> dict[str, Any]:
        return {
            "self": self.self_attention_cache.stats(),
            "cross": self.cross_attention_cache.stats(),
        }

    def explain(self) -> CacheExplanation:
        own, cross = self.self_attention_cache.explain(), self.cross_attention_cache.explain()
        return CacheExplanation(
            tuple(f"own rows: {line}" for line in own.lines)
            + tuple(f"rows of the encoder: {line}" for line in cross.lines)
        )


def cache_for(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> TransformersCache | PairedCache:
    """An empty cache for `model.generate(..., cache=cache)`.

    `backend` is the one that is to read every layer ("reference", "native", "triton"), else the
    first that can.

    The mask of a left-padded batch is needed before the first rows only where the spec has sinks:
    each sequence keeps its own first positions.

    >>> cache = kvant.cache_for(model, "affine8")
    >>> ids = model.generate(**inputs, cache=cache, max_new_tokens=4)
    >>> cache.get_seq_length() == ids.shape[1] - 1  # the last token was not read
    True
    """
    check_transformers_version()
    inside = get_transformers_model(model)
    layers = get_model_layers(inside)
    full = fit_smooth_frames(inside, make_cache_spec(layers, spec))
    attachable = bool(find_attention_implementations(inside))
    told = None if inside.config.is_encoder_decoder else attention_mask  # else it is the encoder's
    padding = None if told is None else _find_padding(told)
    columns = None if told is None else told.shape[1]
    own = TransformersCache(layers, full, padding=padding, columns=columns, attachable=attachable)
    own.backend = backend
    if not has_cross_attention(inside):
        return own
    check_cross_attention(inside, full)
    # An encoder has no newest rows.
    whole = full.map_layers(lambda layer: replace(layer, select=None, prune=None))
    cross = TransformersCache(layers, whole, is_cross=True, attachable=attachable)
    cross.backend = backend
    return PairedCache(own, cross)


def load_cache(
    path: str | os.PathLike[str], model: PreTrainedModel, device: str | torch.device | None = None
) -> TransformersCache:
    """The cache in a file, as that model takes it."""
    inside = get_transformers_model(model)
    saved = files.read(path, device=inside.device if device is None else device)
    with files.convert_errors(path):
        cache = cache_for(inside, saved.spec)
        if not isinstance(cache, TransformersCache):
            raise CacheError(f"{type(inside).__name__} reads an encoder: it has no saved cache")
        cache.restore(saved.snapshot)
    return cache


def _find_padding(mask: Tensor) -> list[int] | None:
    """Columns of left padding; where there are holes, the host's own mask says what is seen."""
    if mask.ndim != 2:
        raise ValueError(f"attention_mask {list(mask.shape)}: [sequences, tokens] is needed")
    return find_left_padding(mask.bool())
