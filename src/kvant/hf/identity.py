"""What tells one model from another: rows of one are noise to the other.

Two models of the same shape differ in their weights, so a few of every weight are looked at, and
how positions are turned. Knows nothing of names: a copy elsewhere is the same model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LOOKED_AT = 16  # values of each weight


def identity(model: PreTrainedModel) -> str:
    """The same for the same weights in the same dtype, wherever they lie."""
    sha = hashlib.sha256(json.dumps(_positions(model.config), sort_keys=True).encode())
    for name, weight in model.named_parameters():
        sha.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        sha.update(_values(weight).numpy().tobytes())
    return sha.hexdigest()[:32]


def _positions(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    return repr(getattr(text, "rope_parameters", None))


@torch.no_grad()
def _values(weight: Tensor) -> Tensor:
    """Some values, evenly spread; none of a weight that is not here."""
    if weight.is_meta or weight.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    spread = torch.linspace(0, weight.numel() - 1, LOOKED_AT, dtype=torch.float64).long()
    place = torch.unravel_index(spread.to(weight.device), weight.shape)
    return weight.detach()[place].cpu().double()
