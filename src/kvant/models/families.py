"""The kind and the cached sizes of each layer of a decoder, by the names that model families use.

A configuration is a mapping (a config.json) or an object with attributes; a model has one.
`ConfigEntries` looks its entries up, without interpreting their names.

Kinds have the names of transformers. Newer configurations list them in `layer_types`; older ones
follow a pattern of their family. A rule is a function that returns the kind of every layer, or None
if it does not apply. The first rule that applies counts; without one, all layers have full
attention. A layer stores rows per token, or a state of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch

from kvant.models.shapes import CHUNKED, CONV, CROSS, EMPTY, FULL, HYBRID, LINEAR, SLIDING

NESTED_CONFIGS = ("decoder", "text_config", "llm_config", "language_config")  # of the decoder

# Entries that a config.json of these families omits, by the defaults of their configuration class.
CONFIG_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "gpt_bigcode": {"multi_query": True},
    "lfm2": {"conv_L_cache": 3},
}


@dataclass(frozen=True)
class ConfigEntries:
    """The entries of a decoder, or of one of its layers; earlier sources have priority."""

    sources: tuple[Any, ...]
    outer: ConfigEntries | None = None  # of the model that contains the decoder

    @classmethod
    def from_model(cls, model: Any) -> ConfigEntries:
        """Return the decoder entries of a configuration, or of a model that has one."""
        config = getattr(model, "config", model)
        if not _is_config(config):
            raise ValueError(f"{short(model)} is not a Shape, a configuration or a model")
        entries = cls((config,))
        while _is_config(nested := entries.get(*NESTED_CONFIGS)):
            entries = cls((nested,), outer=entries)
        defaults = CONFIG_DEFAULTS.get(str(entries.get("model_type")), {})
        return cls((*entries.sources, defaults), entries.outer)

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that is set, or None."""
        for name in names:
            for source in self.sources:
                value = _read_value(source, name)
                if value is not None:
                    return value
        return None

    def get_anywhere(self, *names: str) -> Any:
        """Return `get` of the decoder, or else of the containing model."""
        value = self.get(*names)
        return self.outer.get_anywhere(*names) if value is None and self.outer else value

    def get_int(self, *names: str) -> int | None:
        """Return `get` if it is an integer; None for words such as "auto"."""
        value = self.get(*names)
        return value if type(value) is int else None

    def get_ints(self, *groups: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the integers of the first group whose names are all set."""
        for names in groups:
            values = [number for name in names if (number := self.get_int(name)) is not None]
            if len(values) == len(names):
                return tuple(values)
        return None

    def get_entries(self, name: str) -> ConfigEntries:
        """Return the entries nested in an entry, possibly none."""
        value = self.get(name)
        return ConfigEntries((value,) if _is_config(value) else ())

    def get_layer(self, index: int) -> ConfigEntries:
        """Return the entries of one layer: those of `per_layer_config` have priority."""
        per_layer = self.get("per_layer_config")
        if isinstance(per_layer, Sequence):
            per_layer = dict(enumerate(per_layer))
        if not isinstance(per_layer, Mapping):
            return self
        layer_config = per_layer.get(str(index), per_layer.get(index))
        own = () if layer_config is None else (layer_config,)
        return ConfigEntries((*own, *self.sources), self.outer)


def _is_config(config: Any) -> bool:
    return isinstance(config, Mapping) or hasattr(config, "__dict__")


def _read_value(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers raises for entries that differ by layer
        return None


INDEXED = "indexed_attention"  # sparse attention with an index, cached by transformers

KIND_ALIASES = {  # other names of kinds
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
# Every n-th layer has full attention, unless the file lists them.
WINDOW_PERIODS = {
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), 4),
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
HYBRID_PERIODS = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}

KindRule = Callable[[ConfigEntries, int], Sequence[str] | None]


def find_layer_kinds(entries: ConfigEntries, count: int) -> list[str]:
    """Return the kind of each of `count` layers."""
    names = next(
        (result for rule in KIND_RULES if (result := rule(entries, count)) is not None), []
    )
    kinds = [KIND_ALIASES.get(kind, kind) for kind in names][:count]
    kinds += kinds[-1:] * (count - len(kinds)) or [FULL] * (count - len(kinds))
    return _drop_shared_layers(entries, kinds)


def read_layer_types(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    kinds = entries.get("layer_types", "layers_block_type")
    return kinds if _is_word_list(kinds) else None


def read_layer_pattern(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    pattern = entries.get("hybrid_override_pattern")
    return list(pattern) if isinstance(pattern, str) and pattern else None


def find_cross_attention(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Return the kinds of Mllama, in which some layers read an image."""
    cross_layers = entries.get("cross_attention_layers")
    if not isinstance(cross_layers, Sequence):
        return None
    return [CROSS if index in cross_layers else FULL for index in range(count)]


def find_uniform_kind(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    kind = UNIFORM_KINDS.get(str(entries.get("model_type")))
    return None if kind is None else [kind] * count


def read_attention_indices(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Return the kinds by a list of attention layers; Kimi counts from 1."""
    linear, conv = entries.get("attn_layer_indices"), entries.get("full_attn_idxs")
    from_one = entries.get_entries("linear_attn_config").get("full_attn_layers")
    if isinstance(from_one, Sequence):
        linear = [index - 1 for index in from_one]
    attention_layers = linear if linear is not None else conv
    if not isinstance(attention_layers, Sequence):
        return None
    other = LINEAR if linear is not None else CONV
    return [FULL if index in attention_layers else other for index in range(count)]


def read_block_types(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Return a repeated block of kinds: RecurrentGemma, whose attention has a window."""
    block = entries.get("block_types")
    if not _is_word_list(block):
        return None
    attends = SLIDING if entries.get("attention_window_size") else FULL
    kinds = [attends if word == "attention" else KIND_ALIASES.get(word, word) for word in block]
    return (kinds * count)[:count]


def find_hybrid_period(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Return periodic attention: at an offset in Jamba, at the end of a period in Qwen3-Next."""
    family = str(entries.get("model_type"))
    period, offset = entries.get_int("attn_layer_period"), entries.get_int("attn_layer_offset")
    if period and offset is not None and family != "zamba":  # its offset has another meaning
        return [FULL if index % period == offset else LINEAR for index in range(count)]
    interval = entries.get_int("full_attention_interval") or HYBRID_PERIODS.get(family)
    return _repeat_period(interval, LINEAR, count) if interval else None


def find_chunked_layers(entries: ConfigEntries, count: int) -> Sequence[str] | None:
    """Return the kinds of Llama 4, whose layers with rotary positions have chunked attention."""
    if not entries.get_int("attention_chunk_size"):
        return None
    rotated = entries.get("no_rope_layers")  # despite its name, 1 means rope
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
    """Return the window of layers with sliding attention."""
    if entries.get("use_sliding_window") is False:
        return None
    return entries.get_int("sliding_window", "attention_window_size", "sliding_window_size")


def _repeat_period(interval: int, others: str, count: int) -> list[str]:
    return [others if (index + 1) % interval else FULL for index in range(count)]


def _is_word_list(kinds: Any) -> bool:
    is_list = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    return is_list and all(isinstance(kind, str) for kind in kinds)


def _drop_shared_layers(entries: ConfigEntries, kinds: list[str]) -> list[str]:
    """Return the kinds with the last layers of Gemma 3n and 4 empty: they read earlier rows."""
    num_shared = entries.get_int("num_kv_shared_layers") or 0
    num_cached = len(kinds) - min(num_shared, len(kinds))
    return kinds[:num_cached] + [EMPTY] * (len(kinds) - num_cached)


CONFIG_NAMES = {  # names in configurations, the most common first
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
    """Return the sizes of a `LayerShape` with attention."""
    rank = entries.get_int("kv_lora_rank")
    if rank is not None:  # MLA: a latent and its rotary part in one row
        width = rank + (entries.get_int("qk_rope_head_dim") or 0)
        return {"num_heads": 1, "key_dim": width, "value_dim": rank, "latent_width": rank}
    dim = _read_head_dim(entries, kind, index)
    value_dim = entries.get_int("v_head_dim")
    return {
        "num_heads": _read_kv_heads(entries, kind, index),
        "key_dim": dim,
        "value_dim": dim if value_dim is None else check_positive(value_dim, "head_dim"),
    }


def _read_head_dim(entries: ConfigEntries, kind: str, index: int) -> int:
    per_layer = entries.get("per_layer_config")  # it has the head_dim of each layer
    dim = entries.get("global_head_dim") if kind == FULL and per_layer is None else None
    dim = dim or _read_layer_value(entries, "head_dim", index)
    if dim is None:
        heads = check_positive(_read_layer_value(entries, "heads", index), "heads")
        dim = check_positive(_read_layer_value(entries, "hidden", index), "hidden") // heads
    return check_positive(dim, "head_dim")


def _read_kv_heads(entries: ConfigEntries, kind: str, index: int) -> int:
    """Return the number of cached heads, which may differ from the configured one."""
    heads = check_positive(_read_layer_value(entries, "heads", index), "heads")
    if entries.get("new_decoder_architecture"):  # Falcon repeats keys before they are cached
        return heads
    if entries.get("multi_query"):
        return 1
    kv_heads = _read_layer_value(entries, "kv_heads", index) or entries.get_entries(
        "attn_config"
    ).get("kv_n_heads")
    if kind == FULL and entries.get("attention_k_eq_v") is not False:
        kv_heads = entries.get("num_global_key_value_heads") or kv_heads
    return heads if kv_heads is None else check_positive(kv_heads, "kv_heads")


def _read_layer_value(entries: ConfigEntries, name_key: str, index: int) -> Any:
    """Return the value of one layer, from an entry that is a number or a list."""
    value = entries.get(*CONFIG_NAMES[name_key])
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value[index] if is_list and index < len(value) else value


def check_positive(value: Any, name_key: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{name_key} = {value!r}: the configuration needs one of {CONFIG_NAMES[name_key]}"
        )
    return value


def parse_dtype(value: Any) -> torch.dtype:
    """Return a dtype; configurations may omit it, then it is that of nearly all checkpoints."""
    if value is None:
        return torch.bfloat16
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype = {value!r}: the name of a torch dtype is needed, or none")
    return dtype


FLOAT32_BYTES = 4

# Names for a selective state space: heads, channels of a head, groups that share a projection,
# width of the state, width of the convolution.
MAMBA2_NAMES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)
# Mamba 1 has no heads: expansion of the model width, width of the state, width of the convolution.
MAMBA1_NAMES = (
    ("mamba_expand", "mamba_d_state", "mamba_d_conv"),
    ("expand", "state_size", "conv_kernel"),
)
ZAYA_NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim", "cca_time0", "cca_time1")
DELTA_NET_NAMES = (  # gated delta net: heads and channels of keys, of values, convolution
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def count_state_nbytes(entries: ConfigEntries, kind: str, itemsize: int) -> int | None:
    """Return the bytes of the state of one layer and sequence, or None if it is unknown."""
    if kind == CONV:
        sizes = entries.get_ints(("hidden_size", "conv_L_cache"))
        return None if sizes is None else sizes[0] * sizes[1] * itemsize
    nbytes = _count_zaya_nbytes(entries, itemsize) or _count_delta_net_nbytes(entries, itemsize)
    return (
        nbytes or _count_mamba2_nbytes(entries, itemsize) or _count_mamba1_nbytes(entries, itemsize)
    )


def _count_zaya_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    """Return the bytes of Zaya: two convolutions of queries and keys, and half a value row."""
    sizes = entries.get_ints(ZAYA_NAMES)
    if sizes is None:
        return None
    heads, kv_heads, dim, first, second = sizes
    columns = (heads + kv_heads) * dim * (first + second - 2)
    return (columns + kv_heads * dim // 2) * itemsize


def _count_delta_net_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    sizes = entries.get_ints(DELTA_NET_NAMES)
    if sizes is None:
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = sizes
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return channels * kernel * itemsize + value_heads * key_dim * value_dim * FLOAT32_BYTES


def _count_mamba2_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    sizes = entries.get_ints(*MAMBA2_NAMES) or _read_derived_head_dim(entries)
    if sizes is None:
        return None
    heads, dim, groups, width, kernel = sizes
    channels = heads * dim + 2 * groups * width
    return channels * kernel * itemsize + heads * dim * width * FLOAT32_BYTES


def _read_derived_head_dim(entries: ConfigEntries) -> tuple[int, ...] | None:
    """Return the sizes of Mamba 2 if the channels of a head follow from the model width."""
    heads, _, *others = MAMBA2_NAMES[0]
    sizes = entries.get_ints((heads, "hidden_size", "mamba_expand", *others))
    if sizes is None:
        return None
    count, hidden, expand, *rest = sizes
    return (count, hidden * expand // count, *rest)


def _count_mamba1_nbytes(entries: ConfigEntries, itemsize: int) -> int | None:
    sizes, hidden = entries.get_ints(*MAMBA1_NAMES), entries.get_int("hidden_size")
    if sizes is None or hidden is None:
        return None
    expand, width, kernel = sizes
    return expand * hidden * (kernel * itemsize + width * FLOAT32_BYTES)
