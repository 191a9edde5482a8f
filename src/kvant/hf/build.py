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
from kvant.hf.attention import switchable
from kvant.hf.cache import HostCache
from kvant.hf.detect import check_crossing, crosses, host_layers, recipes
from kvant.hf.inside import host_model
from kvant.hf.masks import left_padding
from kvant.hf.smoothing import smooth
from kvant.hf.verbs import Explanation
from kvant.recipes import AnySpec

log = logging.getLogger("kvant")


@lru_cache(maxsize=1)
def check_version() -> None:
    """Warn once, if need be. The range stands in pyproject.toml."""
    known, have = known_range(), version("transformers")
    if known is not None and not known.specifier.contains(have, prereleases=True):
        log.warning(
            "transformers %s is outside %s, which kvant is known to work with",
            have,
            known.specifier,
        )


def known_range() -> Requirement | None:
    found = [Requirement(line) for line in requires("kvant") or ()]
    return next((r for r in found if r.marker and "known" in str(r.marker)), None)


class PairedCache(EncoderDecoderCache):
    """Both are ours; the second is written once and read by every later token."""

    self_attention_cache: HostCache
    cross_attention_cache: HostCache

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

    def explain(self) -> Explanation:
        own, cross = self.self_attention_cache.explain(), self.cross_attention_cache.explain()
        return Explanation(
            tuple(f"own rows: {line}" for line in own.lines)
            + tuple(f"rows of the encoder: {line}" for line in cross.lines)
        )


def cache_for(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> HostCache | PairedCache:
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
    check_version()
    inside = host_model(model)
    layers = host_layers(inside)
    full = smooth(inside, recipes(layers, spec))
    attachable = bool(switchable(inside))
    told = None if inside.config.is_encoder_decoder else attention_mask  # else it is the encoder's
    padding = None if told is None else _padding(told)
    columns = None if told is None else told.shape[1]
    own = HostCache(layers, full, padding=padding, columns=columns, attachable=attachable)
    own.backend = backend
    if not crosses(inside):
        return own
    check_crossing(inside, full)
    # An encoder has no newest rows.
    whole = full.changed(lambda layer: replace(layer, select=None, prune=None))
    cross = HostCache(layers, whole, cross=True, attachable=attachable)
    cross.backend = backend
    return PairedCache(own, cross)


def loaded(
    path: str | os.PathLike[str], model: PreTrainedModel, device: str | torch.device | None = None
) -> HostCache:
    """The cache in a file, as that model takes it."""
    inside = host_model(model)
    saved = files.read(path, device=inside.device if device is None else device)
    with files.restoring(path):
        cache = cache_for(inside, saved.spec)
        if not isinstance(cache, HostCache):
            raise CacheError(f"{type(inside).__name__} reads an encoder: it has no saved cache")
        cache.restore(saved.snapshot)
    return cache


def _padding(mask: Tensor) -> list[int] | None:
    """Columns of left padding; where there are holes, the host's own mask says what is seen."""
    if mask.ndim != 2:
        raise ValueError(f"attention_mask {list(mask.shape)}: [sequences, tokens] is needed")
    return left_padding(mask.bool())
