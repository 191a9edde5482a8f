"""A cache as a value: plain functions over a state that never changes.

The length of a layer is the shape of its rows, so no counter can disagree with them, and
torch.compile and the transforms of torch.func see tensors only. No tensor of a state is ever
written to or returned: inputs and outputs are copies.

The cost: an update copies all rows of its layer, once into the next state and once into its
result; `cached_attention` makes only the first copy. States share the layers that did not change.
Memory grows with the rows, up to `max_seq_len`. This module has no codecs, retention or frames:
use `kvant.Cache`, which changes in place, for those and for decoding token by token.

>>> from kvant import functional
>>> state = functional.init(batch_size=1, num_layers=1, num_heads=2, head_dim=64)
>>> after, keys, values = functional.update(state, 0, *torch.randn(2, 1, 2, 10, 64))
>>> functional.seq_length(state), functional.seq_length(after)
(0, 10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from kvant.errors import CapacityError

__all__ = ["State", "cached_attention", "get", "init", "reset", "seq_length", "update"]

LayerRows = tuple[Tensor, ...]  # by layer: [B, H, length, D], after any dimensions of vmap
AttendFunction = Callable[[Tensor, Tensor, Tensor, "State"], tuple[Tensor, "State"]]


@dataclass(frozen=True, eq=False)
class State:
    """The rows of every layer: an immutable pytree of tensors."""

    keys: LayerRows
    values: LayerRows
    max_seq_len: int

    def __repr__(self) -> str:
        lengths = [keys.shape[-2] for keys in self.keys]
        return f"State(lengths {lengths} of {self.max_seq_len})"


def _unflatten_state(sides: Iterable[Any], max_seq_len: Any) -> State:
    keys, values = sides
    return State(keys, values, max_seq_len)


register_pytree_node(
    State,
    lambda state: ([state.keys, state.values], state.max_seq_len),
    _unflatten_state,
    serialized_type_name="kvant.functional.State",
)


def init(
    *,
    batch_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    max_seq_len: int = 2048,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> State:
    """Make a state without tokens; `num_heads` counts key heads."""
    sizes = {"batch_size": batch_size, "num_layers": num_layers, "num_heads": num_heads}
    sizes |= {"head_dim": head_dim, "max_seq_len": max_seq_len}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size}: at least 1 is needed")
    if not dtype.is_floating_point:
        raise ValueError(f"rows of {dtype}: a floating point dtype is needed")
    shape = batch_size, num_heads, 0, head_dim
    keys, values = (
        tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers))
        for _ in range(2)
    )
    return State(keys, values, max_seq_len)


def update(state: State, layer: int, k: Tensor, v: Tensor) -> tuple[State, Tensor, Tensor]:
    """Append rows `k` and `v` [B, H, T, D]; return the new state and the layer's rows."""
    after = _append_rows(state, layer, k, v)
    return after, after.keys[layer].clone(), after.values[layer].clone()


def get(state: State, layer: int) -> tuple[Tensor, Tensor]:
    """Return copies of the keys and values of a layer, [B, H, n, D]."""
    _check_layer(state, layer)
    return state.keys[layer].clone(), state.values[layer].clone()


def seq_length(state: State, layer: int | None = None) -> int:
    """Return the tokens of a layer, or the fewest of any layer."""
    if layer is None:
        return min(keys.shape[-2] for keys in state.keys)
    _check_layer(state, layer)
    return state.keys[layer].shape[-2]


def reset(state: State) -> State:
    """Return a state of the same layers without tokens."""
    keys, values = (
        tuple(rows[..., :0, :].clone() for rows in side) for side in (state.keys, state.values)
    )
    return State(keys, values, state.max_seq_len)


def cached_attention(*, num_heads: int, head_dim: int, layer: int) -> AttendFunction:
    """Return a function of (q, k, v, state) that appends rows and attends causally to the layer.

    `num_heads` query heads share the key heads of the state, so they are a multiple of them.
    Outputs are [B, heads, T, D] in the dtype of the queries. Computed in float32, or in float64
    for float64 rows; the scores of a prompt are in memory at once.
    """
    if num_heads < 1 or head_dim < 1:
        raise ValueError(f"{num_heads} heads of {head_dim} channels: at least 1 is needed")

    def attend(q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        _check_layer(state, layer)
        _check_queries(q, k, num_heads, head_dim)
        after = _append_rows(state, layer, k, v)
        return _compute_attention(q, after.keys[layer], after.values[layer]), after

    return attend


def _append_rows(state: State, layer: int, k: Tensor, v: Tensor) -> State:
    _check_layer(state, layer)
    for name, rows, cached in (("k", k, state.keys[layer]), ("v", v, state.values[layer])):
        _check_rows(name, rows, cached)
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k of {k.shape[2]} tokens and v of {v.shape[2]}: equal counts are needed")
    length = state.keys[layer].shape[-2] + k.shape[2]
    if length > state.max_seq_len:
        raise CapacityError(
            f"{length} tokens in layer {layer} for a max_seq_len of {state.max_seq_len}: reset the "
            f"state, or init with max_seq_len={length}"
        )
    return State(
        _append_to_layer(state.keys, layer, k),
        _append_to_layer(state.values, layer, v),
        state.max_seq_len,
    )


def _append_to_layer(side: LayerRows, layer: int, rows: Tensor) -> LayerRows:
    longer = torch.cat([side[layer], rows], dim=2)
    return tuple(longer if index == layer else cached for index, cached in enumerate(side))


def _compute_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention of the newest T tokens; queries of a key head form one matrix."""
    batch, all_heads, count, dim = q.shape
    heads = keys.shape[1]
    group = all_heads // heads
    wide = torch.promote_types(keys.dtype, torch.float32)
    keys, values = keys.to(wide), values.to(wide)
    grouped = (q.to(wide) * dim**-0.5).reshape(batch, heads, group * count, dim)
    scores = grouped @ keys.transpose(-1, -2)
    single = count == 1  # the newest token sees every row
    out = torch.softmax(scores, -1) @ values if single else _compute_causal(scores, values, group)
    return out.reshape(q.shape).to(q.dtype)


def _compute_causal(scores: Tensor, values: Tensor, group: int) -> Tensor:
    """Return the causal softmax of scores [B, H, group * T, n] times the values.

    Zero times NaN is NaN: a masked row must not turn earlier queries' outputs into NaN.
    """
    length, count = values.shape[2], scores.shape[2] // group
    visible = torch.ones(count, length, dtype=torch.bool, device=values.device).tril(length - count)
    weights = torch.softmax(scores.masked_fill(~visible.repeat(group, 1), float("-inf")), -1)
    nonfinite = ~torch.isfinite(values)
    spoiled = nonfinite.long().cumsum(2)[:, :, length - count :] > 0
    out = weights @ values.masked_fill(nonfinite, 0.0)
    return out.masked_fill(spoiled.repeat(1, 1, group, 1), float("nan"))


def _check_layer(state: State, layer: int) -> None:
    if not 0 <= layer < len(state.keys):
        raise ValueError(f"layer {layer} of a state with {len(state.keys)} layers, counted from 0")


def _check_rows(name: str, rows: Tensor, cached: Tensor) -> None:
    fits = rows.ndim == cached.ndim == 4 and rows.shape[:2] == cached.shape[:2]
    if not fits or rows.shape[3] != cached.shape[3]:
        batch, heads, dim = [*cached.shape[:-2], cached.shape[-1]][-3:]
        mapped = (
            f", mapped over {list(cached.shape[:-4])}: use torch.vmap" if cached.ndim > 4 else ""
        )
        raise ValueError(
            f"{name} of shape {list(rows.shape)} for a state of [{batch}, {heads}, T, {dim}]"
            f"{mapped}"
        )
    if (rows.dtype, rows.device) != (cached.dtype, cached.device):
        raise ValueError(
            f"{name} of {rows.dtype} on {rows.device} for a state of {cached.dtype} on "
            f"{cached.device}"
        )


def _check_queries(q: Tensor, k: Tensor, num_heads: int, head_dim: int) -> None:
    """Raise ValueError unless queries fit the new keys, which are checked against the state."""
    shape = [k.shape[0], num_heads, k.shape[2], head_dim] if k.ndim == 4 else []
    if list(q.shape) != shape or k.shape[3] != head_dim or num_heads % max(k.shape[1], 1):
        raise ValueError(
            f"q of shape {list(q.shape)} with k of {list(k.shape)}: [B, {num_heads}, T, "
            f"{head_dim}] and [B, H, T, {head_dim}] are needed, {num_heads} a multiple of H"
        )
    if (q.dtype, q.device) != (k.dtype, k.device):
        raise ValueError(f"q of {q.dtype} on {q.device}, k of {k.dtype} on {k.device}")
