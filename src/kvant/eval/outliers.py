"""The same function with rows that are hard to store: a few channels large, and undone behind them.

Many models have such channels; small ones do not. Scaled in pairs that a rotary embedding turns
together (one in each half of a head), keys and queries give the scores that they gave; values are
scaled back by the projection behind them. So whatever a format loses more than before is its own
doing. Exact but for rounding.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

CHANNELS = (3, 11, 20)  # of the first half of a head; their partners are in the second
ModelT = TypeVar("ModelT", bound=nn.Module)


def with_outliers(model: ModelT, factor: float, channels: tuple[int, ...] = CHANNELS) -> ModelT:
    """A copy whose keys have these channels so many times as large, in every layer and head."""
    twin = copy.deepcopy(model)
    for block in _blocks(twin, "q_proj", "k_proj"):
        for side, by in (("k", factor), ("q", 1 / factor)):
            for weight in _rows(block, side):
                _scale(weight, block.head_dim, channels, by)
    return twin


def with_heavy_values(model: ModelT, factor: float, channels: tuple[int, ...] = CHANNELS) -> ModelT:
    """A copy whose values have them so; the projection behind attention takes it back."""
    twin = copy.deepcopy(model)
    for block in _blocks(twin, "v_proj", "o_proj"):
        for weight in _rows(block, "v"):
            _scale(weight, block.head_dim, channels, factor)
        back = block.o_proj.weight.data.T.contiguous()
        _scale(back, block.head_dim, channels, 1 / factor)
        block.o_proj.weight.data.copy_(back.T)
    return twin


def _blocks(model: nn.Module, *names: str) -> list[Any]:
    found = [block for block in model.modules() if all(hasattr(block, name) for name in names)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {' beside a '.join(names)} to scale")
    return found


def _rows(block: Any, side: str) -> list[Tensor]:
    """What makes the rows of a side, channel by channel: a norm behind the projection has it."""
    norm = getattr(block, f"{side}_norm", None)
    if norm is not None and norm.weight.shape == (block.head_dim,):
        return [norm.weight.data]
    projection = getattr(block, f"{side}_proj")
    return [tensor.data for tensor in (projection.weight, projection.bias) if tensor is not None]


def _scale(weight: Tensor, dim: int, channels: tuple[int, ...], by: float) -> None:
    """In place: the first dimension is that of heads and their channels."""
    half = dim // 2
    for channel in channels:
        for one in (channel % half, channel % half + half):
            weight.view(-1, dim, *weight.shape[1:])[:, one] *= by
