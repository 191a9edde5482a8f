"""The cache of ours that fits a model of the host's."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant import files
from kvant.errors import CacheError
from kvant.hf.attention import switchable
from kvant.hf.cache import HostCache
from kvant.hf.detect import check_crossing, crosses, host_layers, recipes
from kvant.hf.encoder_decoder import PairedCache
from kvant.hf.inside import host_model
from kvant.hf.padding import left_padding
from kvant.hf.smoothing import smooth
from kvant.hf.versions import check_version
from kvant.recipes import AnySpec


def cache_for(
    model: nn.Module,
    spec: AnySpec = "raw",
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> HostCache | PairedCache:
    """An empty cache for `model.generate(..., past_key_values=cache)`.

    `backend` is the one that is to read every layer ("reference", "native", "triton"), else the
    first that can.

    The mask of a left-padded batch is needed before the first rows only where the spec has sinks:
    each sequence keeps its own first positions.
    """
    check_version()
    inside = host_model(model)
    layers = host_layers(inside)
    full = smooth(inside, recipes(layers, spec))
    attachable = bool(switchable(inside))
    told = None if inside.config.is_encoder_decoder else attention_mask  # else it is the encoder's
    padding = None if told is None else _padding(told)
    own = HostCache(layers, full, padding=padding, attachable=attachable)
    own.backend = backend
    if not crosses(inside):
        return own
    check_crossing(inside, full)
    cross = HostCache(layers, full, cross=True, attachable=attachable)
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
