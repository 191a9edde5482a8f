"""Attention and masks under a name of our own, registered with the host beside its own names.

What SDPA cannot express goes through here: learned sinks, soft caps, chunks with padding, and no
mask at all. For tensors that are no handles the host's own implementation runs, and gives what it
always gave: so a name says which one stands behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvant.hf.handles import get_shared_source
from kvant.hf.lazy_tensor import materialize_tensor
from kvant.hf.masks import LazyMask, make_lazy_mask_function
from kvant.hf.pending_attention import AttentionCall

AttentionForward = Callable[..., tuple[Tensor, Tensor | None]]
EAGER_FUNCTION_NAME = "eager_attention_forward"
SPARSE_ARGUMENTS = (
    "indices",
    "block_indices",
)  # of sparse attention: leaving them out would be wrong
UNSUPPORTED_ARGUMENTS = (
    "sinks",
)  # a logit of each query that leads nowhere: only the host's own adds it


def call_eager_attention(
    module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention that a model's own file defines, or that of the class it was made from."""
    files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    found = next(names[EAGER_FUNCTION_NAME] for names in files if EAGER_FUNCTION_NAME in names)
    out: tuple[Tensor, Tensor | None] = found(module, *args, **kwargs)
    return out


def wrap_attention(fallback: AttentionForward) -> AttentionForward:
    """Attention on the pages for handles, and the host's for everything else."""

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
                    f"{name}: kvant's attention knows no sparse selection; kvant.detach the model, "
                    "and give generate a cache from kvant.cache_for"
                )
        source = get_shared_source(key, value)
        ours = not dropout and not kwargs.get("output_attentions")
        ours = ours and all(kwargs.get(name) is None for name in UNSUPPORTED_ARGUMENTS)
        if source is not None and ours:
            question = AttentionCall(
                _add_bias(attention_mask, kwargs.get("position_bias")),
                scaling,
                causal=_resolve_causal(module, kwargs.get("is_causal")),
                softcap=kwargs.get("softcap"),
                sink_logits=kwargs.get("s_aux"),
            )
            out = source.attend(query, question)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        why = "attention of the host's"
        mask = attention_mask.original_mask if type(attention_mask) is LazyMask else attention_mask
        rows = materialize_tensor(key, why), materialize_tensor(value, why)
        return fallback(module, query, *rows, mask, dropout=dropout, scaling=scaling, **kwargs)

    return forward


def _resolve_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A bias on positions is a mask of numbers; the host's own mask lies on top of it."""
    if bias is None:
        return mask
    hidden = materialize_tensor(mask, "a bias on positions")
    if hidden is None:
        return bias
    return bias.masked_fill(~hidden, -torch.inf) if hidden.dtype == torch.bool else bias + hidden


def find_attention_implementations(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """The configurations of a model, or of its parts, that take a name of ours for attention."""
    found = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_attn_implementation():
            name = module.config._attn_implementation
            if name in KVANT_IMPLEMENTATIONS:
                found[id(module.config)] = (module.config, name)
    return list(found.values())


def set_kvant_implementations(implementations: list[tuple[Any, str]]) -> None:
    """To the names of ours."""
    for config, name in implementations:
        config._attn_implementation_internal = KVANT_IMPLEMENTATIONS[name]


def restore_implementations(implementations: list[tuple[Any, str]]) -> None:
    for config, name in implementations:
        config._attn_implementation_internal = name


@contextmanager
def use_kvant_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model uses the names of ours."""
    found = find_attention_implementations(model)
    set_kvant_implementations(found)
    try:
        yield
    finally:
        restore_implementations(found)


KVANT_IMPLEMENTATIONS = {
    "sdpa": "kvant_sdpa",
    "eager": "kvant_eager",
}  # the host's name: ours over it


def get_transformers_implementation(name: str | None) -> str | None:
    """Return the host's name of attention, also where ours stands in its place."""
    return next((host for host, ours in KVANT_IMPLEMENTATIONS.items() if ours == name), name)


AttentionInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], wrap_attention(sdpa_attention_forward))
AttentionInterface.register(KVANT_IMPLEMENTATIONS["eager"], wrap_attention(call_eager_attention))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], make_lazy_mask_function(sdpa_mask))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["eager"], make_lazy_mask_function(eager_mask))
