"""The families of models that GGUF files are loaded as, and the names of their tensors.

llama.cpp renames tensors, reorders the query and key rows of Llama, and adds one to the norms of
Gemma; loading undoes this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kvant.gguf.file import GGUFError, GGUFHeader, read_header

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's divisors of the rotary frequencies
LONG_ROPE = "rope_factors_long.weight"  # frequencies that depend on the length of a text
SCALED_LAYER_KIND = "full_attention"
MAX_ROPE_FACTOR = 1e6


@dataclass(frozen=True)
class Family:
    """How the tensors of one architecture are named and stored."""

    layer_names: Mapping[str, str] = field(default_factory=dict)  # that differ from LAYER_NAMES
    permutes_heads: bool = False  # query and key rows alternate between the halves of a head
    norm_offset: float = 0.0
    scales_positions: bool = False  # those of SCALED_LAYER_KIND may be divided by a factor

    def find_parameter(self, name: str) -> str | None:
        """Return the parameter of transformers for a tensor; None if the family has none."""
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        if stem in MODEL_NAMES:
            return f"{MODEL_NAMES[stem]}.{kind}"
        block, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        target = (LAYER_NAMES | dict(self.layer_names)).get(part)
        if block != "blk" or not number.isdecimal() or target is None:
            return None
        return f"model.layers.{number}.{target}.{kind}"


SCALING_TYPE, SCALING_FACTOR = "rope.scaling.type", "rope.scaling.factor"
REQUIRED_SETTINGS: Mapping[str, tuple[object, ...]] = {  # with other values results would differ
    SCALING_TYPE: (None, "none"),
    SCALING_FACTOR: (None, 0.0, 1.0),
    "rope.scale_linear": (None, 0.0, 1.0),
    "expert_count": (None, 0),
    "attention.causal": (None, True),
    "attention.sliding_window_pattern": (None, 6),
}

FAMILIES = {  # by general.architecture; Mistral's files have that of Llama
    "llama": Family(permutes_heads=True),
    "mistral": Family(permutes_heads=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma2": Family(GEMMA_NAMES, norm_offset=1.0),
    "gemma3": Family(GEMMA_NAMES, norm_offset=1.0, scales_positions=True),
    "phi3": Family(PHI_NAMES),
}


def check_file(path: Path) -> GGUFHeader:
    """Read the header; raise GGUFError for a damaged file, or a model that would be wrong."""
    header = read_header(path)
    if header.architecture not in FAMILIES:
        raise GGUFError(
            f"models of architecture {header.architecture!r} are not read from GGUF: "
            f"{', '.join(FAMILIES)} are; load the safetensors that it was made from"
        )
    if (parts := header.values.get("split.count", 1)) not in (0, 1):
        raise GGUFError(f"it is one of {parts} parts: join them (llama-gguf-split --merge)")
    is_scaled = find_rope_factor(header) is not None
    for key, allowed in REQUIRED_SETTINGS.items():
        if is_scaled and key in (SCALING_TYPE, SCALING_FACTOR):
            continue
        if (value := header.get_setting(key)) not in allowed:
            raise GGUFError(
                f"{header.architecture}.{key} = {value!r} is not read from GGUF: load the "
                "safetensors that it was made from"
            )
    if LONG_ROPE in header.tensors:
        raise GGUFError(
            "its rotary frequencies depend on the length of a text (longrope), which is not read "
            "from GGUF: load the safetensors that it was made from"
        )
    # Before transformers allocates lists of `block_count` entries, also those of another family.
    for key in header.values:
        if key.endswith(".block_count") and key != f"{header.architecture}.block_count":
            raise GGUFError(f"it is a {header.architecture} model, and has {key!r}")
    num_blocks = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if (stated := header.get_setting("block_count")) != num_blocks:
        raise GGUFError(f"its values state {stated} layers, it has {num_blocks}")
    return header


def require_package() -> None:
    """Raise GGUFError if the package that transformers reads GGUF files with is missing."""
    if find_spec("gguf") is None:
        raise GGUFError("reading it needs the package gguf: pip install 'kvant[gguf]'")


def find_rope_factor(header: GGUFHeader) -> float | None:
    """Return the divisor of the positions of SCALED_LAYER_KIND; None if they are not scaled."""
    kind, factor = header.get_setting(SCALING_TYPE), header.get_setting(SCALING_FACTOR)
    if not FAMILIES[header.architecture].scales_positions or kind not in (None, "linear"):
        return None
    is_factor = isinstance(factor, float) and 1.0 < factor < MAX_ROPE_FACTOR
    return factor if is_factor else None
