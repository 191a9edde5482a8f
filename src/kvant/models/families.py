"""Which kind each layer of a decoder is of, and what it stores, by the names that families use.

The words for kinds are those of transformers. Newer configurations say them in `layer_types`, older
ones by a pattern that their family knows. A rule is a function that gives the kind of every layer,
or None where it has nothing to go by; the first rule that answers counts, and a layer that no rule
knows sees everything. A layer stores the rows of each token, or a state that is the same at every
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvant.models.config_entries import ConfigEntries
from kvant.models.shapes import CHUNKED, CONV, CROSS, EMPTY, FULL, HYBRID, LINEAR, SLIDING

INDEXED = "indexed_attention"  # its rows are picked by an index that transformers keeps

KIND_ALIASES = {  # what else configurations call a kind
    "attention": FULL,
    "global": FULL,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "recurrent": LINEAR,
    "mlp": EMPTY,
    "moe": EMPTY,
    "M": LINEAR,
    "*": FULL,
    "-": EMPTY,
    "E": EMPTY,
}
UNIFORM_KINDS = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "bamba", "rwkv", "xlstm"), LINEAR),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    "falcon_h1": HYBRID,
}
# Every n-th layer sees everything, where the file does not say which.
WINDOW_PERIODS = {
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), 4),
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
HYBRID_PERIODS = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}

KindRule = Callable[[ConfigEntries, int], Sequence[str] | None]


def find_layer_kinds(entries: ConfigEntries, count: int) -> list[str]:
    """The kind of each of `count` layers."""
    found = next((f for rule in KIND_RULES if (f := rule(entries, count)) is not None), [])
    named = [KIND_ALIASES.get(kind, kind) for kind in found][:count]
    named += named[-1:] * (count - len(named)) or [FULL] * (count - len(named))
    return _drop_shared_layers(entries, named)


def read_layer_types(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    kinds = entries.get("layer_types", "layers_block_type")
    return kinds if _is_word_list(kinds) else None


def read_layer_pattern(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    pattern = entries.get("hybrid_override_pattern")
    return list(pattern) if isinstance(pattern, str) and pattern else None


def find_cross_attention(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Mllama: some layers read an image."""
    crossed = entries.get("cross_attention_layers")
    if not isinstance(crossed, Sequence):
        return None
    return [CROSS if index in crossed else FULL for index in range(count)]


def find_uniform_kind(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    kind = UNIFORM_KINDS.get(str(entries.get("model_type")))
    return None if kind is None else [kind] * count


def read_attention_indices(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """The layers that attend, by number; Kimi counts from 1."""
    linear, conv = entries.get("attn_layer_indices"), entries.get("full_attn_idxs")
    counted = entries.get_entries("linear_attn_config").get("full_attn_layers")
    if isinstance(counted, Sequence):
        linear = [index - 1 for index in counted]
    attending = linear if linear is not None else conv
    if not isinstance(attending, Sequence):
        return None
    other = LINEAR if linear is not None else CONV
    return [FULL if index in attending else other for index in range(count)]


def read_block_types(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """A short list again and again: RecurrentGemma, whose attention has a window."""
    block = entries.get("block_types")
    if not _is_word_list(block):
        return None
    attends = SLIDING if entries.get("attention_window_size") else FULL
    named = [attends if word == "attention" else KIND_ALIASES.get(word, word) for word in block]
    return (named * count)[:count]


def find_hybrid_period(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Attention every so many layers: Jamba from an offset on, Qwen3-Next at the end of a run."""
    family = str(entries.get("model_type"))
    period, offset = entries.get_int("attn_layer_period"), entries.get_int("attn_layer_offset")
    if period and offset is not None and family != "zamba":  # whose offset counts otherwise
        return [FULL if index % period == offset else LINEAR for index in range(count)]
    interval = entries.get_int("full_attention_interval") or HYBRID_PERIODS.get(family)
    return _repeat_period(interval, LINEAR, count) if interval else None


def find_chunked_layers(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Llama 4: where positions are rotated, a query sees its own chunk only."""
    if not entries.get_int("attention_chunk_size"):
        return None
    rotated = entries.get("no_rope_layers")  # which says 1 where there is rope
    interval = entries.get_int("no_rope_layer_interval")
    if not rotated and interval is None and entries.get("model_type") == "llama4_text":
        interval = 4
    if rotated:
        return [CHUNKED if rope else FULL for rope in rotated]
    return _repeat_period(interval, CHUNKED, count) if interval else [CHUNKED] * count


def find_windowed_layers(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    if read_window(entries) is None:
        return None
    pattern = entries.get("sliding_window_pattern", "_sliding_window_pattern")
    pattern = pattern or WINDOW_PERIODS.get(str(entries.get("model_type")))
    if isinstance(pattern, str) and pattern:  # "LLLG": local and global
        return [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(count)]
    if type(pattern) is int:
        return _repeat_period(pattern, SLIDING, count)
    first = entries.get_int("max_window_layers") or 0
    return [SLIDING if index >= first else FULL for index in range(count)]


KIND_RULES: tuple[KindRule, ...] = (
    read_layer_types,
    read_layer_pattern,
    read_attention_indices,
    find_cross_attention,
    find_uniform_kind,
    read_block_types,
    find_hybrid_period,
    find_chunked_layers,
    find_windowed_layers,
)


def read_window(entries: ConfigEntries) -> int | None:
    """How far back a layer with a window sees."""
    if entries.get("use_sliding_window") is False:
        return None
    return entries.get_int("sliding_window", "attention_window_size", "sliding_window_size")


def _repeat_period(interval: int, others: str, count: int) -> list[str]:
    return [others if (index + 1) % interval else FULL for index in range(count)]


def _is_word_list(kinds: Any) -> bool:
    listed = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    return listed and all(isinstance(kind, str) for kind in kinds)


def _drop_shared_layers(entries: ConfigEntries, kinds: list[str]) -> list[str]:
    """The last layers of Gemma 3n and 4 read the rows of earlier ones."""
    shared = entries.get_int("num_kv_shared_layers") or 0
    own = len(kinds) - min(shared, len(kinds))
    return kinds[:own] + [EMPTY] * (len(kinds) - own)


CONFIG_NAMES = {  # what a configuration calls it, the likeliest name first
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


def read_row_sizes(entries: ConfigEntries, kind: str, index: int) -> dict[str, int]:
    """The numbers of a `LayerShape` that attends."""
    rank = entries.get_int("kv_lora_rank")
    if rank is not None:  # compressed rows, and the part with positions, in one stream
        wide = rank + (entries.get_int("qk_rope_head_dim") or 0)
        return {"num_heads": 1, "key_dim": wide, "value_dim": rank, "latent": rank}
    dim = _read_head_dim(entries, kind, index)
    own = entries.get_int("v_head_dim")
    return {
        "num_heads": _read_kv_heads(entries, kind, index),
        "key_dim": dim,
        "value_dim": dim if own is None else check_positive(own, "head_dim"),
    }


def _read_head_dim(entries: ConfigEntries, kind: str, index: int) -> int:
    apart = entries.get("per_layer_config")  # which says the same of each layer
    told = entries.get("global_head_dim") if kind == FULL and apart is None else None
    told = told or _read_layer_value(entries, "head_dim", index)
    if told is None:
        heads = check_positive(_read_layer_value(entries, "heads", index), "heads")
        told = check_positive(_read_layer_value(entries, "hidden", index), "hidden") // heads
    return check_positive(told, "head_dim")


def _read_kv_heads(entries: ConfigEntries, kind: str, index: int) -> int:
    """The heads that are cached, which are not always those that a configuration counts."""
    heads = check_positive(_read_layer_value(entries, "heads", index), "heads")
    if entries.get("new_decoder_architecture"):  # Falcon repeats keys before they are cached
        return heads
    if entries.get("multi_query"):
        return 1
    told = _read_layer_value(entries, "kv_heads", index) or entries.get_entries("attn_config").get(
        "kv_n_heads"
    )
    if kind == FULL and entries.get("attention_k_eq_v") is not False:
        told = entries.get("num_global_key_value_heads") or told
    return heads if told is None else check_positive(told, "kv_heads")


def _read_layer_value(entries: ConfigEntries, name_key: str, index: int) -> Any:
    """What is told of one layer, where it may be one number or a list of them."""
    value = entries.get(*CONFIG_NAMES[name_key])
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return value[index] if listed and index < len(value) else value


def check_positive(value: Any, name_key: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{name_key} = {value!r}: the configuration needs one of {CONFIG_NAMES[name_key]}"
        )
    return value


def parse_dtype(value: Any) -> torch.dtype:
    """Configurations may leave it out; then it is what nearly all models are stored in."""
    if value is None:
        return torch.bfloat16
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(named, torch.dtype):
        raise ValueError(f"dtype = {value!r}: the name of a torch dtype is needed, or none")
    return named


FLOAT32_BYTES = 4  # bytes of float32

# What families call the heads of a selective state space, the channels of a head, the groups that
# share a projection, the width of the state and that of the convolution.
MAMBA2_NAMES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)
# The first kind has no heads: how much wider than the model, state, convolution.
MAMBA1_NAMES = (
    ("mamba_expand", "mamba_d_state", "mamba_d_conv"),
    ("expand", "state_size", "conv_kernel"),
)
ZAYA_NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim", "cca_time0", "cca_time1")
DELTA_NET_NAMES = (  # a gated delta net: heads and channels of keys and values, convolution
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def count_state_nbytes(entries: ConfigEntries, kind: str, itemsize: int) -> int | None:
    """Bytes of one layer and one sequence, or None where the configuration does not tell."""
    if kind == CONV:
        told = entries.get_ints(("hidden_size", "conv_L_cache"))
        return None if told is None else told[0] * told[1] * itemsize
    own = _count_zaya_nbytes(entries, itemsize) or _count_delta_net_nbytes(entries, itemsize)
    return own or _count_mamba2_nbytes(entries, itemsize) or _count_mamba1_nbytes(entries, itemsize)


def _count_zaya_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    """Zaya: two convolutions over queries and keys, and half of the values of one token."""
    told = entries.get_ints(ZAYA_NAMES)
    if told is None:
        return None
    heads, kv_heads, dim, first, second = told
    columns = (heads + kv_heads) * dim * (first + second - 2)
    return (columns + kv_heads * dim // 2) * itemsize


def _count_delta_net_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    told = entries.get_ints(DELTA_NET_NAMES)
    if told is None:
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = told
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return channels * kernel * itemsize + value_heads * key_dim * value_dim * FLOAT32_BYTES


def _count_mamba2_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    told = entries.get_ints(*MAMBA2_NAMES) or _read_derived_head_dim(entries)
    if told is None:
        return None
    heads, dim, groups, width, kernel = told
    channels = heads * dim + 2 * groups * width
    return channels * kernel * itemsize + heads * dim * width * FLOAT32_BYTES


def _read_derived_head_dim(entries: ConfigEntries) -> tuple[int, ...] | None:
    """Where the channels of a head are left to be what the heads divide."""
    heads, _, *others = MAMBA2_NAMES[0]
    told = entries.get_ints((heads, "hidden_size", "mamba_expand", *others))
    if told is None:
        return None
    count, hidden, expand, *rest = told
    return (count, hidden * expand // count, *rest)


def _count_mamba1_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    told, hidden = entries.get_ints(*MAMBA1_NAMES), entries.get_int("hidden_size")
    if told is None or hidden is None:
        return None
    expand, width, kernel = told
    return expand * hidden * (kernel * itemsize + width * FLOAT32_BYTES)
