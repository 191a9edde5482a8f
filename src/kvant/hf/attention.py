"""Register kvant's attention and masks with transformers, as `kvant_sdpa` and `kvant_eager`.

A handle stands for the keys or values in a cache (handles.py). PyTorch's SDPA accepts handles too,
but it has no learned sinks and no soft caps. It also needs a mask for a chunk that follows cached
rows, since its `is_causal` aligns the first query with the first key. `kvant_sdpa` and
`kvant_eager` have none of these limits. For ordinary tensors, each runs the transformers
implementation that it is named after.

Multi-head latent attention runs on the stored latents, without expanding them. transformers expands
all cached latents c into keys W c and values at every step (`expand_kv`). Since that is linear, W
can be folded into the queries instead (weight absorption): q . (W c) = (W^T q) . c. A layer is
folded only if a test call shows that its `expand_kv` computes this product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvant.hf.handles import (
    AttentionCall,
    KVHandle,
    PendingAttention,
    SideName,
    get_shared_source,
    make_handles,
    read_dense_rows,
)
from kvant.hf.masks import LazyMask, make_lazy_mask_function, materialize_tensor
from kvant.hf.model import find_latent_modules, has_hooks

AttentionForward = Callable[..., tuple[Tensor, Tensor | None]]
ExpandFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EAGER_FUNCTION_NAME = "eager_attention_forward"
SPARSE_ARGUMENTS = ("indices", "block_indices")  # sparse attention: ignoring them would be wrong
# Sink logits per query; kvant supports those per head, which are named `s_aux`.
UNSUPPORTED_ARGUMENTS = ("sinks",)


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
    """Return attention that reads the pages behind handles; for tensors it calls `fallback`."""

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
            causal = kwargs.get("is_causal")
            call = AttentionCall(
                _add_bias(attention_mask, kwargs.get("position_bias")),
                scaling,
                causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
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


def set_kvant_implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
    """Switch a model to kvant's attention; return the configurations and their old names."""
    implementations = find_attention_implementations(model)
    for config, name in implementations:
        config._attn_implementation_internal = KVANT_IMPLEMENTATIONS[name]
    return implementations


def restore_implementations(implementations: list[tuple[PreTrainedConfig, str]]) -> None:
    """Switch configurations back to the attention of transformers."""
    for config, name in implementations:
        config._attn_implementation_internal = name


@contextmanager
def use_kvant_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use kvant's attention within the context."""
    implementations = set_kvant_implementations(model)
    try:
        yield
    finally:
        restore_implementations(implementations)


# The name in transformers -> kvant's implementation, which falls back to it.
KVANT_IMPLEMENTATIONS = {"sdpa": "kvant_sdpa", "eager": "kvant_eager"}


def get_transformers_implementation(name: str | None) -> str | None:
    """Return the transformers name of an attention of kvant; return any other name as it is."""
    pairs = KVANT_IMPLEMENTATIONS.items()
    return next((original for original, kvant_name in pairs if kvant_name == name), name)


AttentionInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], wrap_attention(sdpa_attention_forward))
AttentionInterface.register(KVANT_IMPLEMENTATIONS["eager"], wrap_attention(call_eager_attention))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["sdpa"], make_lazy_mask_function(sdpa_mask))
AttentionMaskInterface.register(KVANT_IMPLEMENTATIONS["eager"], make_lazy_mask_function(eager_mask))


class PendingLatentAttention(PendingAttention):
    """The attention of a layer whose latents are not expanded yet.

    One handle stands for the latents, in place of the keys. The other stands for the rotated
    (RoPE) channels of the keys, in place of the values. The model passes both to `expand_kv`.
    """

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        heads, dim = view.keys.heads, view.keys.dim
        leading, rank = (view.batch, heads, self.num_columns), view.value_dim
        return (*leading, rank), (*leading, dim - rank)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """Return None: latents are not keys and values yet."""
        return None

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        self.check_dense(reason)
        rows = read_dense_rows(self.view, "keys", self.num_columns)
        rank = self.view.value_dim
        part = rows[..., :rank] if side == "keys" else rows[..., rank:]
        return part.to(self.dtype).contiguous()


@dataclass(eq=False)
class ExpandedLatents:
    """A KVSource of the keys and values that `expand_kv` would compute."""

    pending: PendingLatentAttention
    module: Any
    expand: ExpandFunction
    latents: KVHandle
    rotated: KVHandle
    expanded: tuple[Tensor, Tensor] | None = None

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module = self.module
        batch, _, num_columns, _ = self.latents.shape
        leading, nope_dim = (batch, _count_heads(module), num_columns), module.qk_nope_head_dim
        return (*leading, nope_dim + self.rotated.shape[-1]), (*leading, module.v_head_dim)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        module, nope_dim = self.module, self.module.qk_nope_head_dim
        to_keys, to_values = _split_weights(module)
        folded = torch.cat([q[..., :nope_dim] @ to_keys, q[..., nope_dim:]], -1)
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        out = PendingAttention.attend(self.pending, folded, call._replace(scale=scale))
        return None if out is None else out @ to_values.transpose(-1, -2)

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        if self.expanded is None:
            self.expanded = self.expand(
                self.latents.materialize(reason), self.rotated.materialize(reason)
            )
        return self.expanded[0 if side == "keys" else 1]


def enable_folding(model: PreTrainedModel) -> list[Any]:
    """Replace `expand_kv` by one that leaves handles unexpanded; return the changed modules."""
    modules = [module for module in find_latent_modules(model) if _supports_folding(module)]
    for module in modules:
        module.__dict__["expand_kv"] = partial(_expand_kv, module)
    return modules


def disable_folding(modules: list[Any]) -> None:
    """Undo `enable_folding`."""
    for module in modules:
        module.__dict__.pop("expand_kv", None)


def _expand_kv(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return unexpanded handles for a pair of handles; expand other tensors as the module does.

    Attention on the returned handles folds the weights into the queries.
    """
    expand = MethodType(type(module).expand_kv, module)
    if (
        type(latents) is not KVHandle
        or type(rotated) is not KVHandle
        or not _is_plain_projection(module)
    ):
        keys, values = expand(latents, rotated)
        return keys, values
    assert isinstance(latents.source, PendingLatentAttention)
    source = ExpandedLatents(latents.source, module, expand, latents, rotated)
    return make_handles(source, latents.dtype, latents.device)


def _is_plain_projection(module: Any) -> bool:
    """Return whether the projection is a bare weight, without bias, adapters or hooks."""
    linear = module.kv_b_proj
    return type(linear) is nn.Linear and linear.bias is None and not has_hooks(linear)


@torch.no_grad()
def _supports_folding(module: Any) -> bool:
    """Return whether `expand_kv` computes the expected product, by a test on random rows."""
    try:
        if not _is_plain_projection(module):
            return False
        to_keys, to_values = _split_weights(module)
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, 1, 3, module.kv_lora_rank, generator=generator).to(to_keys)
        rotated = torch.randn(2, 1, 3, module.qk_rope_head_dim, generator=generator).to(to_keys)
        keys, values = module.expand_kv(latents, rotated)
        expected = torch.cat(
            [latents @ to_keys.transpose(-1, -2), rotated.expand(-1, keys.shape[1], -1, -1)], -1
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
    return _is_close(keys, expected) and _is_close(values, latents @ to_values.transpose(-1, -2))


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if actual.dtype == torch.float32 else 0.05
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=tolerance, atol=tolerance
    )


def _count_heads(module: Any) -> int:
    rows = module.kv_b_proj.weight.shape[0]
    return int(rows // (module.qk_nope_head_dim + module.v_head_dim))


def _split_weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of keys [heads, nope, rank] and of values [heads, v, rank]."""
    nope_dim = module.qk_nope_head_dim
    weight: Tensor = module.kv_b_proj.weight.view(
        _count_heads(module), nope_dim + module.v_head_dim, module.kv_lora_rank
    )
    return weight[:, :nope_dim], weight[:, nope_dim:]
