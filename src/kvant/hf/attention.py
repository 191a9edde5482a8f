"""Register kvant's attention and masks with transformers, as `kvant_sdpa` and `kvant_eager`.

A handle stands for the keys or values in a cache (handles.py). Both names support what PyTorch's
SDPA on handles does not: learned sinks, soft caps, chunks with padding, and calls without a mask.
For ordinary tensors, each name runs the transformers implementation that it is named after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvant.hf.handles import AttentionCall, get_shared_source
from kvant.hf.masks import LazyMask, make_lazy_mask_function, materialize_tensor

AttentionForward = Callable[..., tuple[Tensor, Tensor | None]]
EAGER_FUNCTION_NAME = "eager_attention_forward"
SPARSE_ARGUMENTS = ("indices", "block_indices")  # sparse attention: ignoring them would be wrong
UNSUPPORTED_ARGUMENTS = ("sinks",)  # sink logits per query; kvant adds only those per head, `s_aux`


def call_eager_attention(
    module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention in the file of the module's class, or of a base class."""
    namespaces = (vars(sys.modules[base.__module__]) for base in type(module).__mro__)
    function = next(
        names[EAGER_FUNCTION_NAME] for names in namespaces if EAGER_FUNCTION_NAME in names
    )
    out: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return out


def wrap_attention(fallback: AttentionForward) -> AttentionForward:
    """Return attention that reads pages for handles, and calls `fallback` otherwise."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        for name in SPARSE_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"{name}: kvant's attention supports no sparse selection; kvant.detach the "
                    "model, and give generate a cache from kvant.cache_for"
                )
        source = get_shared_source(key, value)
        supported = not dropout and not kwargs.get("output_attentions")
        supported = supported and all(kwargs.get(name) is None for name in UNSUPPORTED_ARGUMENTS)
        if source is not None and supported:
            call = AttentionCall(
                _add_bias(attention_mask, kwargs.get("position_bias")),
                scaling,
                causal=_resolve_causal(module, kwargs.get("is_causal")),
                softcap=kwargs.get("softcap"),
                sink_logits=kwargs.get("s_aux"),
            )
            out = source.attend(query, call)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        reason = "attention of transformers"
        mask = attention_mask.original_mask if type(attention_mask) is LazyMask else attention_mask
        rows = materialize_tensor(key, reason), materialize_tensor(value, reason)
        return fallback(module, query, *rows, mask, dropout=dropout, scaling=scaling, **kwargs)

    return forward


def _resolve_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Combine a position bias with the mask of transformers into one additive mask."""
    if bias is None:
        return mask
    dense = materialize_tensor(mask, "a position bias")
    if dense is None:
        return bias
    return bias.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else bias + dense


def find_attention_implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
    """Return pairs of configuration and attention name for all parts that kvant can serve."""
    implementations = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_attn_implementation():
            name = module.config._attn_implementation
            if name in KVANT_IMPLEMENTATIONS:
                implementations[id(module.config)] = (module.config, name)
    return list(implementations.values())


def set_kvant_implementations(implementations: list[tuple[PreTrainedConfig, str]]) -> None:
    """Switch configurations to kvant's attention."""
    for config, name in implementations:
        config._attn_implementation_internal = KVANT_IMPLEMENTATIONS[name]


def restore_implementations(implementations: list[tuple[PreTrainedConfig, str]]) -> None:
    """Switch configurations back to the attention of transformers."""
    for config, name in implementations:
        config._attn_implementation_internal = name


@contextmanager
def use_kvant_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use kvant's attention within the context."""
    implementations = find_attention_implementations(model)
    set_kvant_implementations(implementations)
    try:
        yield
    finally:
        restore_implementations(implementations)


# The name in transformers -> kvant's implementation, which falls back to it.
KVANT_IMPLEMENTATIONS = {"sdpa": "kvant_sdpa", "eager": "kvant_eager"}


def get_transformers_implementation(name: str | None) -> str | None:
    """Translate kvant's name of an attention to that of transformers; keep any other name."""
    renamed = KVANT_IMPLEMENTATIONS.items()
    return next((original for original, kvant_name in renamed if kvant_name == name), name)


AttentionInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], wrap_attention(sdpa_attention_forward))
AttentionInterface.register(KVANT_IMPLEMENTATIONS["eager"], wrap_attention(call_eager_attention))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], make_lazy_mask_function(sdpa_mask))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["eager"], make_lazy_mask_function(eager_mask))
