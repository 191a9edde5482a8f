"""The shapes of a model's rows, as its configuration tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch

NAMES = {  # what a configuration calls it, the likeliest name first
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "dtype": ("dtype", "torch_dtype"),
}


@dataclass(frozen=True)
class Shape:
    """What is alike in all layers."""

    num_layers: int
    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Of a configuration (a mapping, or an object), or of a model that has one."""
        entries = _entries(model)
        found = {what: _first(entries, names) for what, names in NAMES.items()}
        heads = _positive(found["heads"], "heads")
        dim = found["head_dim"] or _positive(found["hidden"], "hidden") // heads
        return cls(
            num_layers=_positive(found["layers"], "layers"),
            num_heads=_positive(found["kv_heads"] or heads, "kv_heads"),
            key_dim=_positive(dim, "head_dim"),
            value_dim=_positive(entries.get("v_head_dim") or dim, "head_dim"),
            dtype=_dtype(found["dtype"]),
        )


def _entries(model: Any) -> Mapping[str, Any]:
    config = getattr(model, "config", model)
    entries = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if entries is None:
        raise ValueError(f"{short(model)} is no Shape, no configuration and no model")
    nested = entries.get("text_config")
    return entries if nested is None else _entries(nested)


def _first(entries: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((entries[name] for name in names if entries.get(name) is not None), None)


def _positive(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} = {value!r}: the configuration needs one of {NAMES[what]}")
    return value


def _dtype(value: Any) -> torch.dtype:
    """Configurations may leave it out; then it is what nearly all models are stored in."""
    if value is None:
        return torch.bfloat16
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype = {value!r}: the name of a torch dtype is needed, or none")
    return named
