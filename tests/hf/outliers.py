"""Make the rows of a model hard to store, without changing its function.

Many models have a few channels that are much larger than the others; small models do not. Here a
few channels are scaled up and compensated elsewhere:

* keys by the inverse in the queries, in the channel pairs that the rotary embedding rotates (one in
  each half of a head);
* values by the inverse in the output projection.

The outputs are the same but for rounding, so any additional loss is due to the cache format.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

OUTLIER_CHANNELS = (3, 11, 20)  # of the first half of a head; their pairs are in the second
# Of the logits.
MAX_RELATIVE_ERRORS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
ModelT = TypeVar("ModelT", bound=nn.Module)


def scale_key_channels(
    model: ModelT, factor: float, channels: tuple[int, ...] = OUTLIER_CHANNELS
) -> ModelT:
    """Return a copy with these key channels scaled by `factor`, in every layer and head."""
    scaled_model = copy.deepcopy(model)
    for block in _find_attention_blocks(scaled_model, "q_proj", "k_proj"):
        for side, scale in (("k", factor), ("q", 1 / factor)):
            for weight in _get_row_weights(block, side):
                _scale_channels(weight, block.head_dim, channels, scale)
    return _check_equivalent(model, scaled_model)


def scale_value_channels(
    model: ModelT, factor: float, channels: tuple[int, ...] = OUTLIER_CHANNELS
) -> ModelT:
    """Return a copy with these value channels scaled; the output projection compensates."""
    scaled_model = copy.deepcopy(model)
    for block in _find_attention_blocks(scaled_model, "v_proj", "o_proj"):
        for weight in _get_row_weights(block, "v"):
            _scale_channels(weight, block.head_dim, channels, factor)
        columns = block.o_proj.weight.data.T.contiguous()
        _scale_channels(columns, block.head_dim, channels, 1 / factor)
        block.o_proj.weight.data.copy_(columns.T)
    return _check_equivalent(model, scaled_model)


@torch.no_grad()
def _check_equivalent(model: Any, scaled: ModelT) -> ModelT:
    """Return the scaled model; raise if it does not compute the same function."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, 16), generator=generator).to(model.device)
    logits, scaled_logits = (m(ids, use_cache=False).logits.float() for m in (model, scaled))
    error = float((scaled_logits - logits).norm() / logits.norm())
    if not error < MAX_RELATIVE_ERRORS[model.dtype]:
        raise ValueError(
            f"{type(model).__name__} is not the same function with its channels scaled: its "
            f"logits differ by {error:.2g} of their norm"
        )
    return scaled


def _find_attention_blocks(model: nn.Module, *names: str) -> list[Any]:
    blocks = [block for block in model.modules() if all(hasattr(block, name) for name in names)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no {' and '.join(names)} to scale")
    return blocks


def _get_row_weights(block: Any, side: str) -> list[Tensor]:
    """Return the weights that scale the rows of a side: a norm after the projection, or it."""
    norm = getattr(block, f"{side}_norm", None)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == (block.head_dim,):
        return [weight.data]
    projection = getattr(block, f"{side}_proj")
    return [tensor.data for tensor in (projection.weight, projection.bias) if tensor is not None]


def _scale_channels(weight: Tensor, dim: int, channels: tuple[int, ...], factor: float) -> None:
    """Scale channels in place; the first dimension is heads times channels."""
    half = dim // 2
    for channel in channels:
        for index in (channel % half, channel % half + half):
            weight.view(-1, dim, *weight.shape[1:])[:, index] *= factor
