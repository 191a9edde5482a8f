"""What a graph takes over of a model for good, and models of which that is not all.

A replay reads tensors where they lay and repeats what plain values led to. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

PLAIN = (bool, int, float, str)
COMMON = frozenset(vars(nn.Module()))  # what PyTorch keeps of any module


def unfit(model: PreTrainedModel) -> str | None:
    """Why a replay would not do what the model does."""
    if model.training:
        return "the model is in training mode"
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        return f"the model lies on {', '.join(sorted(devices))}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in vars(module):
            return f"{name or 'the model'} has hooks, which a replay does not call"
    return None


def baked(model: PreTrainedModel) -> list[object]:
    """Where its tensors lie, and the plain values that its modules hold, as of adapters."""
    found: list[object] = [x.data_ptr() for x in chain(model.parameters(), model.buffers())]
    for module in model.modules():
        own = ((name, value) for name, value in vars(module).items() if name not in COMMON)
        found.extend((name, _plain(value)) for name, value in own)
    return found


def _plain(value: Any) -> object:
    """Something equal for equal values; None for what is no plain value."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return tuple((key, item) for key, item in value.items() if isinstance(item, PLAIN))
    if isinstance(value, list | tuple | set):
        return tuple(item for item in value if isinstance(item, PLAIN))
    return None
