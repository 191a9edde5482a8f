"""The same function with rows that are hard to store: a few channels large, and undone behind them.

Many models have such channels; small ones do not. Scaled in pairs that a rotary embedding turns
together (one in each half of a head), keys and queries give the scores that they gave; values are
scaled back by the projection behind them. So whatever a format loses more than before is its own
doing. Exact but for rounding.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

OUTLIER_CHANNELS = (3, 11, 20)  # of the first half of a head; their partners are in the second
MAX_RELATIVE_ERRORS = {
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 0.1,
}  # of the logits
ModelT = TypeVar("ModelT", bound=nn.Module)


def scale_key_channels(
    model: ModelT, factor: float, channels: tuple[int, ...] = OUTLIER_CHANNELS
) -> ModelT:
    """A copy whose keys have these channels so many times as large, in every layer and head."""
    twin = copy.deepcopy(model)
    for block in _find_attention_blocks(twin, "q_proj", "k_proj"):
        for side, by in (("k", factor), ("q", 1 / factor)):
            for weight in _get_row_weights(block, side):
                _scale_channels(weight, block.head_dim, channels, by)
    return _check_equivalent(model, twin)


def scale_value_channels(
    model: ModelT, factor: float, channels: tuple[int, ...] = OUTLIER_CHANNELS
) -> ModelT:
    """A copy whose values have them so; the projection behind attention takes it back."""
    twin = copy.deepcopy(model)
    for block in _find_attention_blocks(twin, "v_proj", "o_proj"):
        for weight in _get_row_weights(block, "v"):
            _scale_channels(weight, block.head_dim, channels, factor)
        back = block.o_proj.weight.data.T.contiguous()
        _scale_channels(back, block.head_dim, channels, 1 / factor)
        block.o_proj.weight.data.copy_(back.T)
    return _check_equivalent(model, twin)


@torch.no_grad()
def _check_equivalent(model: Any, scaled: ModelT) -> ModelT:
    """The twin, if it says what the model says: not every model is built of these parts alone."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, 16), generator=generator).to(model.device)
    right, found = (one(ids, use_cache=False).logits.float() for one in (model, scaled))
    off = float((found - right).norm() / right.norm())
    if not off < MAX_RELATIVE_ERRORS[model.dtype]:
        raise ValueError(
            f"{type(model).__name__} is not the same function with its channels scaled: its "
            f"predictions are off by {off:.2g} of themselves"
        )
    return scaled


def _find_attention_blocks(model: nn.Module, *names: str) -> list[Any]:
    found = [block for block in model.modules() if all(hasattr(block, name) for name in names)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {' beside a '.join(names)} to scale")
    return found


def _get_row_weights(block: Any, side: str) -> list[Tensor]:
    """What makes the rows of a side, channel by channel: a norm behind the projection has it."""
    norm = getattr(block, f"{side}_norm", None)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == (block.head_dim,):
        return [weight.data]
    projection = getattr(block, f"{side}_proj")
    return [tensor.data for tensor in (projection.weight, projection.bias) if tensor is not None]


def _scale_channels(weight: Tensor, dim: int, channels: tuple[int, ...], factor: float) -> None:
    """In place: the first dimension is that of heads and their channels."""
    half = dim // 2
    for channel in channels:
        for one in (channel % half, channel % half + half):
            weight.view(-1, dim, *weight.shape[1:])[:, one] *= factor
