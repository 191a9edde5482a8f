"""Multi-head latent attention: rows are stored compressed, and read without unfolding them.

The host unfolds all cached latents into keys and values at every step (`expand_kv`). As that is
linear, queries can be folded instead: q . (W c) = (W^T q) . c. A layer takes part only where its
`expand_kv` is seen to compute just that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvant.hf.handles import KVHandle, make_handles
from kvant.hf.pending_attention import AttentionCall, PendingAttention, SideName, read_dense_rows

ExpandFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PendingLatentAttention(PendingAttention):
    """Latents stand where the host expects keys, rotated channels where it expects values."""

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        heads, dim = view.keys.heads, view.keys.dim
        lead, rank = (view.batch, heads, self.num_columns), view.value_dim
        return (*lead, rank), (*lead, dim - rank)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        """They are no keys and no values yet."""
        return None

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        self.check_dense(reason)
        rows = read_dense_rows(self.view, "keys", self.num_columns)
        rank = self.view.value_dim
        part = rows[..., :rank] if side == "keys" else rows[..., rank:]
        return part.to(self.dtype).contiguous()


@dataclass(eq=False)
class UnfoldedLatents:
    """What `expand_kv` would give for a reading: a `Source` of keys and values."""

    pending: PendingLatentAttention
    module: Any
    expand: ExpandFunction
    latents: KVHandle
    rotated: KVHandle
    expanded: tuple[Tensor, Tensor] | None = None

    def get_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module = self.module
        batch, _, shown, _ = self.latents.shape
        lead, keys = (batch, _count_heads(module), shown), module.qk_nope_head_dim
        return (*lead, keys + self.rotated.shape[-1]), (*lead, module.v_head_dim)

    def attend(self, q: Tensor, call: AttentionCall) -> Tensor | None:
        module, plain = self.module, self.module.qk_nope_head_dim
        to_keys, to_values = _split_weights(module)
        folded = torch.cat([q[..., :plain] @ to_keys, q[..., plain:]], -1)
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
    """Let the `expand_kv` of a module leave handles folded."""
    module.__dict__["expand_kv"] = partial(_expand_kv, module)


def disable_folding(module: Any) -> None:
    """Undo `fold`."""
    module.__dict__.pop("expand_kv", None)


def _expand_kv(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    expand = MethodType(type(module).expand_kv, module)
    if (
        type(latents) is not KVHandle
        or type(rotated) is not KVHandle
        or not _is_plain_projection(module)
    ):
        keys, values = expand(latents, rotated)
        return keys, values
    assert isinstance(latents.source, PendingLatentAttention)
    source = UnfoldedLatents(latents.source, module, expand, latents, rotated)
    return make_handles(source, latents.dtype, latents.device)


def _is_plain_projection(module: Any) -> bool:
    """Is the projection nothing but its weight? Adapters and hooks say otherwise."""
    linear = module.kv_b_proj
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and linear.bias is None and not hooked


@torch.no_grad()
def supports_folding(module: Any) -> bool:
    """Is unfolding what we take it for? Asked with a few random rows, in float32."""
    try:
        if not _is_plain_projection(module):
            return False
        to_keys, to_values = _split_weights(module)
        like, seed = to_keys, torch.Generator().manual_seed(0)
        latents = torch.randn(2, 1, 3, module.kv_lora_rank, generator=seed).to(like)
        rotated = torch.randn(2, 1, 3, module.qk_rope_head_dim, generator=seed).to(like)
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
    """What unfolds keys and values: [heads, nope, rank] and [heads, v, rank]."""
    plain = module.qk_nope_head_dim
    weight: Tensor = module.kv_b_proj.weight.view(
        _count_heads(module), plain + module.v_head_dim, module.kv_lora_rank
    )
    return weight[:, :plain], weight[:, plain:]
