"""A tiny random model of any causal language model of transformers: `tiny("openai-gpt")`.

It uses the default configuration of a class with small sizes. A family of the zoo is built as
there; options below shrink the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf.zoo import COMMON, FAMILIES, randomize

CAUSAL: Mapping[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # model type: class
MAX_PARAMETERS = 30_000_000
LAYERS, HEADS, WINDOW = 4, 4, 40

SIZES: dict[str, Any] = {
    **COMMON,
    **dict.fromkeys(
        ("n_layer", "n_layers", "decoder_layers", "num_decoder_layers", "num_layers"), LAYERS
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "mamba_n_heads"), LAYERS),
    **dict.fromkeys(
        ("n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), HEADS
    ),
    **dict.fromkeys(("swa_num_attention_heads", "num_heads"), HEADS),
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("swa_head_dim", "global_head_dim", "d_kv", "kv_channels"), 16),
    **dict.fromkeys(("attention_head_dim", "mlp_head_dim"), 16),
    **dict.fromkeys(("n_embd", "d_model", "dim", "emb_dim", "embedding_size", "n_embed"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "dim_model", "mamba_d_ssm"), 64),
    **dict.fromkeys(("n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(
        ("dff", "dim_ff", "hidden_dim", "ffn_hidden_size", "intermediate_size_mlp"), 96
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_window_size"), WINDOW),
    **dict.fromkeys(("window_size", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 512),
    **dict.fromkeys(("q_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "num_kv_shared_layers"), 2),
    "linear_num_value_heads": 4,
    "mamba_num_heads": 8,
    "index_n_heads": 16,
    "index_topk": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "unpadded_vocab_size": COMMON["vocab_size"],
    "encoder_hash_byte_group_vocab": 64,
    "is_decoder": True,
    "decoder_start_token_id": 2,
}


def _options(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the sizes that a configuration declares, and those of its parts."""
    declared = {field.name for field in fields(config_class)}
    sizes = {config_class.attribute_map.get(name, name): value for name, value in SIZES.items()}
    options = {name: value for name, value in sizes.items() if name in declared}
    if "kv_lora_rank" in declared:
        options["num_key_value_heads"] = HEADS
    for name, part in _parts(config_class):
        if name in declared:
            options[name] = {"model_type": part.model_type} | _options(part)
    return options


def _parts(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, type[PreTrainedConfig]]]:
    """Yield the configurations within a configuration, by name."""
    defaults = getattr(config_class, "sub_configs_defaults", {})
    for name, part in config_class.sub_configs.items():
        if part is not transformers.AutoConfig:
            yield name, part
        elif (model_type := getattr(defaults.get(name), "model_type", None)) is not None:
            yield name, CONFIG_MAPPING[model_type]


def _mix_layer_types(config: PreTrainedConfig, kinds: Iterable[str]) -> None:
    """Give the few layers all the types of the default configuration."""
    text = config.get_text_config(decoder=True)
    for name in ("layer_types", "layers_block_type"):
        present = getattr(text, name, None)
        if present and set(present) != set(kinds) and set(present) <= set(kinds):
            each = list(dict.fromkeys(kinds))
            setattr(text, name, [each[i % len(each)] for i in range(len(present))])


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
BOTH = {"layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN4 = {
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
# Options that sizes alone leave inconsistent.
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
        **BOTH,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma4": {"text_config": {**BOTH, "num_kv_shared_layers": 0}},
    "gemma4_unified": {"text_config": {**BOTH, "num_kv_shared_layers": 0}},
    "gemma4_unified_text": {**BOTH, "num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False},
    "xlm": {"pad_token_id": 3, "pad_index": 3},  # adds token 0 after every text
    "xmod": {"default_language": "en_XX"},
}


def _merge_options(options: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those of `own` over them, also within parts."""
    merged = {
        name: _merge_options(options[name], overrides[name])
        for name in overrides
        if name.endswith("_config")
    }
    return options | overrides | merged


def model_class(name: str) -> type[PreTrainedModel]:
    result: type[PreTrainedModel] = getattr(transformers, CAUSAL[name])
    return result


def tiny(name: str) -> PreTrainedModel:
    """Return a tiny model of this type, with the same weights every time."""
    family = next((family_ for family_ in FAMILIES.values() if family_.model == CAUSAL[name]), None)
    if family is not None:
        return family.build()
    config_class = model_class(name).config_class
    assert config_class is not None
    config = config_class(**_merge_options(_options(config_class), OWN.get(name, {})))
    whole = config_class().get_text_config(decoder=True)
    _mix_layer_types(config, getattr(whole, "layer_types", None) or ())
    with torch.device("meta"):
        size = sum(family_.numel() for family_ in model_class(name)(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{name}: {size:,} parameters, more than {MAX_PARAMETERS:,}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = model_class(name)(config).eval().float()
        for parameter, weight in model.named_parameters():
            randomize(parameter, weight)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
