"""Small random models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gguf
from kvant.gguf.families import FAMILIES, LAYER_NAMES, MODEL_NAMES

NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 2, 4, 2, 32, 64, 96, 300
MODEL_TYPES = {"gemma3": "gemma3_text"}


def make_model(architecture: str) -> Any:
    """Return a random model with the settings that a GGUF file can state."""
    config = AutoConfig.for_model(
        MODEL_TYPES.get(architecture, architecture),
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM if architecture == "phi3" else HIDDEN,
        intermediate_size=WIDTH,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        pad_token_id=0,
        sliding_window=16 if architecture.startswith("gemma") else None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # zeros or ones show no mistake
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


def write_file(path: Path, architecture: str, model: Any, kind: str, **extra: Any) -> None:
    """Write a model as llama.cpp's converter does, its matrices in blocks of one type.

    The model is changed to what its file holds.
    """
    config, family = model.config, FAMILIES[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    kinds[bool] = writer.add_bool
    for key, value in extra.items():
        kinds[type(value)](key, value)
    names = {hf: name for name, hf in MODEL_NAMES.items()}
    parts = {hf: name for name, hf in (LAYER_NAMES | dict(family.layer_names)).items()}
    for hf_name, parameter in model.named_parameters():
        stem, _, suffix = hf_name.rpartition(".")
        if stem in names:
            name = names[stem]
        else:
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            name = f"blk.{number}.{parts[part]}"
        number_type = gguf.GGMLQuantizationType[kind if parameter.ndim == 2 else "F32"]
        rounded = gguf.dequantize(
            gguf.quantize(parameter.detach().numpy(), number_type), number_type
        )
        values = np.ascontiguousarray(rounded)
        parameter.data = torch.from_numpy(values.copy())
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.rpartition(".")[2])
        if family.permutes_heads and heads:
            split = values.reshape(heads, 2, -1, values.shape[-1])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if family.norm_offset and name.endswith("norm"):
            values = values + family.norm_offset
        packed = gguf.quantize(np.ascontiguousarray(values), number_type)
        writer.add_tensor(f"{name}.{suffix}", packed, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
