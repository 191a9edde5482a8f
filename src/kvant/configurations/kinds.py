"""Which kind each layer of a decoder is of, in the words of transformers.

Newer configurations say it in `layer_types`, older ones by a pattern that their family knows. A
rule is a function that gives the kind of every layer, or None where it has nothing to go by; the
first rule that answers counts, and a layer that no rule knows sees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvant.configurations.entries import Entries
from kvant.shapes import CHUNKED, CONV, CROSS, EMPTY, FULL, HYBRID, LINEAR, SLIDING

INDEXED = "indexed_attention"  # its rows are picked by an index that transformers keeps

WORDS = {  # what else configurations call a kind
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
EVERYWHERE = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "bamba", "rwkv", "xlstm"), LINEAR),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    "falcon_h1": HYBRID,
}
# Every n-th layer sees everything, where the file does not say which.
PATTERNS = {
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), 4),
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
INTERVALS = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}

Rule = Callable[[Entries, int], Sequence[str] | None]


def kinds(entries: Entries, count: int) -> list[str]:
    """The kind of each of `count` layers."""
    found = next((f for rule in RULES if (f := rule(entries, count)) is not None), [])
    named = [WORDS.get(kind, kind) for kind in found][:count]
    named += named[-1:] * (count - len(named)) or [FULL] * (count - len(named))
    return _without_shared(entries, named)


def told(entries: Entries, count: int) -> Sequence[str] | None:
    kinds = entries.get("layer_types", "layers_block_type")
    return kinds if _words(kinds) else None


def spelled(entries: Entries, count: int) -> Sequence[str] | None:
    pattern = entries.get("hybrid_override_pattern")
    return list(pattern) if isinstance(pattern, str) and pattern else None


def crossing(entries: Entries, count: int) -> Sequence[str] | None:
    """Mllama: some layers read an image."""
    crossed = entries.get("cross_attention_layers")
    if not isinstance(crossed, Sequence):
        return None
    return [CROSS if index in crossed else FULL for index in range(count)]


def everywhere(entries: Entries, count: int) -> Sequence[str] | None:
    kind = EVERYWHERE.get(str(entries.get("model_type")))
    return None if kind is None else [kind] * count


def listed(entries: Entries, count: int) -> Sequence[str] | None:
    """The layers that attend, by number; Kimi counts from 1."""
    linear, conv = entries.get("attn_layer_indices"), entries.get("full_attn_idxs")
    counted = entries.inside("linear_attn_config").get("full_attn_layers")
    if isinstance(counted, Sequence):
        linear = [index - 1 for index in counted]
    attending = linear if linear is not None else conv
    if not isinstance(attending, Sequence):
        return None
    other = LINEAR if linear is not None else CONV
    return [FULL if index in attending else other for index in range(count)]


def repeated(entries: Entries, count: int) -> Sequence[str] | None:
    """A short list again and again: RecurrentGemma, whose attention has a window."""
    block = entries.get("block_types")
    if not _words(block):
        return None
    attends = SLIDING if entries.get("attention_window_size") else FULL
    named = [attends if word == "attention" else WORDS.get(word, word) for word in block]
    return (named * count)[:count]


def periodic(entries: Entries, count: int) -> Sequence[str] | None:
    """Attention every so many layers: Jamba from an offset on, Qwen3-Next at the end of a run."""
    family = str(entries.get("model_type"))
    period, offset = entries.number("attn_layer_period"), entries.number("attn_layer_offset")
    if period and offset is not None and family != "zamba":  # whose offset counts otherwise
        return [FULL if index % period == offset else LINEAR for index in range(count)]
    interval = entries.number("full_attention_interval") or INTERVALS.get(family)
    return _ending(interval, LINEAR, count) if interval else None


def chunked(entries: Entries, count: int) -> Sequence[str] | None:
    """Llama 4: where positions are rotated, a query sees its own chunk only."""
    if not entries.number("attention_chunk_size"):
        return None
    rotated = entries.get("no_rope_layers")  # which says 1 where there is rope
    interval = entries.number("no_rope_layer_interval")
    if not rotated and interval is None and entries.get("model_type") == "llama4_text":
        interval = 4
    if rotated:
        return [CHUNKED if rope else FULL for rope in rotated]
    return _ending(interval, CHUNKED, count) if interval else [CHUNKED] * count


def windowed(entries: Entries, count: int) -> Sequence[str] | None:
    if window(entries) is None:
        return None
    pattern = entries.get("sliding_window_pattern", "_sliding_window_pattern")
    pattern = pattern or PATTERNS.get(str(entries.get("model_type")))
    if isinstance(pattern, str) and pattern:  # "LLLG": local and global
        return [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(count)]
    if type(pattern) is int:
        return _ending(pattern, SLIDING, count)
    first = entries.number("max_window_layers") or 0
    return [SLIDING if index >= first else FULL for index in range(count)]


RULES: tuple[Rule, ...] = (
    told,
    spelled,
    listed,
    crossing,
    everywhere,
    repeated,
    periodic,
    chunked,
    windowed,
)


def window(entries: Entries) -> int | None:
    """How far back a layer with a window sees."""
    if entries.get("use_sliding_window") is False:
        return None
    return entries.number("sliding_window", "attention_window_size", "sliding_window_size")


def _ending(interval: int, others: str, count: int) -> list[str]:
    return [others if (index + 1) % interval else FULL for index in range(count)]


def _words(kinds: Any) -> bool:
    listed = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    return listed and all(isinstance(kind, str) for kind in kinds)


def _without_shared(entries: Entries, kinds: list[str]) -> list[str]:
    """The last layers of Gemma 3n and 4 read the rows of earlier ones."""
    shared = entries.number("num_kv_shared_layers") or 0
    own = len(kinds) - min(shared, len(kinds))
    return kinds[:own] + [EMPTY] * (len(kinds) - own)
