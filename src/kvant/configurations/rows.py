"""The rows that one attention layer stores of each token: how many heads, how wide, in which dtype.

What is missing is refused with the names that would have told it; what is there is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvant.configurations.entries import Entries
from kvant.shapes import FULL

NAMES = {  # what a configuration calls it, the likeliest name first
    "layers": (
        "num_decoder_layers",
        "decoder_layers",
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
    ),
    "heads": (
        "decoder_attention_heads",
        "num_decoder_attention_heads",
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "attention_head_dim", "kv_channels"),
    "hidden": ("attention_hidden_size", "hidden_size", "n_embd", "d_model"),
    "dtype": ("dtype", "torch_dtype"),
    "context": (
        "max_position_embeddings",
        "max_target_positions",
        "n_positions",
        "max_seq_len",
        "seq_length",
    ),
}


def rows(entries: Entries, kind: str, index: int) -> dict[str, int]:
    """The numbers of a `LayerShape` that attends."""
    rank = entries.number("kv_lora_rank")
    if rank is not None:  # compressed rows, and the part with positions, in one stream
        wide = rank + (entries.number("qk_rope_head_dim") or 0)
        return {"num_heads": 1, "key_dim": wide, "value_dim": rank, "latent": rank}
    dim = _head_dim(entries, kind, index)
    own = entries.number("v_head_dim")
    return {
        "num_heads": _kv_heads(entries, kind, index),
        "key_dim": dim,
        "value_dim": dim if own is None else positive(own, "head_dim"),
    }


def _head_dim(entries: Entries, kind: str, index: int) -> int:
    apart = entries.get("per_layer_config")  # which says the same of each layer
    told = entries.get("global_head_dim") if kind == FULL and apart is None else None
    told = told or _of(entries, "head_dim", index)
    if told is None:
        heads = positive(_of(entries, "heads", index), "heads")
        told = positive(_of(entries, "hidden", index), "hidden") // heads
    return positive(told, "head_dim")


def _kv_heads(entries: Entries, kind: str, index: int) -> int:
    """The heads that are cached, which are not always those that a configuration counts."""
    heads = positive(_of(entries, "heads", index), "heads")
    if entries.get("new_decoder_architecture"):  # Falcon repeats keys before they are cached
        return heads
    if entries.get("multi_query"):
        return 1
    told = _of(entries, "kv_heads", index) or entries.inside("attn_config").get("kv_n_heads")
    if kind == FULL and entries.get("attention_k_eq_v") is not False:
        told = entries.get("num_global_key_value_heads") or told
    return heads if told is None else positive(told, "kv_heads")


def _of(entries: Entries, what: str, index: int) -> Any:
    """What is told of one layer, where it may be one number or a list of them."""
    value = entries.get(*NAMES[what])
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return value[index] if listed and index < len(value) else value


def positive(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} = {value!r}: the configuration needs one of {NAMES[what]}")
    return value


def dtype_of(value: Any) -> torch.dtype:
    """Configurations may leave it out; then it is what nearly all models are stored in."""
    if value is None:
        return torch.bfloat16
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype = {value!r}: the name of a torch dtype is needed, or none")
    return named
