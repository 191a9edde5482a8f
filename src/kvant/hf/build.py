"""The cache of ours that fits a model of the host's."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf.cache import HostCache
from kvant.hf.detect import host_layers, recipes, without_windows
from kvant.hf.encoder_decoder import PairedCache
from kvant.hf.versions import check_version
from kvant.recipes import CacheSpec, LayerSpec


def cache_for(
    model: PreTrainedModel,
    spec: str | LayerSpec | CacheSpec = "raw",
    *,
    attention_mask: Tensor | None = None,
) -> HostCache | PairedCache:
    """An empty cache for `model.generate(..., past_key_values=cache)`.

    The mask of a left-padded batch is needed before the first rows only where the spec has sinks:
    each sequence keeps its own first positions.
    """
    check_version()
    layers = host_layers(model)
    full = recipes(layers, spec)
    if not model.config.is_encoder_decoder:
        return HostCache(layers, full, padding=_padding(attention_mask))
    full = without_windows(full)
    return PairedCache(HostCache(layers, full), HostCache(layers, full, cross=True))


def _padding(mask: Tensor | None) -> list[int] | None:
    """Columns of left padding of each sequence."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(f"attention_mask {list(mask.shape)}: [sequences, tokens] is needed")
    seen = mask.bool().int()
    start = seen.argmax(-1)
    if not bool((seen.sum(-1) == mask.shape[1] - start).all()):
        return None  # holes: the host's own mask says what is seen
    return [int(s) for s in start]
