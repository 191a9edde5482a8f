"""Multi-head latent attention on the stored latents, without expanding them.

transformers expands all cached latents c into keys W c and values at every step (`expand_kv`).
Since that is linear, W can be folded into the queries instead (weight absorption):
q . (W c) = (W^T q) . c. A layer is folded only if a test call shows that its `expand_kv` computes
this product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvant.hf.handles import (
    AttentionCall,
    KVHandle,
    PendingAttention,
    SideName,
    make_handles,
    read_dense_rows,
)

ExpandFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PendingLatentAttention(PendingAttention):
    """The attention of a layer before `expand_kv`, which receives latents and rotated channels.

    Latents take the place of keys, and the RoPE channels of the keys take that of values.
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


def enable_folding(module: Any) -> None:
    """Replace the `expand_kv` of a module by one that leaves handles unexpanded."""
    module.__dict__["expand_kv"] = partial(_expand_kv, module)


def disable_folding(module: Any) -> None:
    """Undo `enable_folding`."""
    module.__dict__.pop("expand_kv", None)


def _expand_kv(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return handles for a pair of handles, unexpanded; expand anything else as the module does.

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
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and linear.bias is None and not hooked


@torch.no_grad()
def supports_folding(module: Any) -> bool:
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
