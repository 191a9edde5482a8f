"""Small random models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

import gguf
from kvant.gguf.families import FAMILIES, LAYER_NAMES, MODEL_NAMES

NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 2, 4, 2, 32, 64, 96, 300
MODEL_TYPES = {"gemma3": "gemma3_text"}


def make_vocabulary(*special: str, **values: Any) -> dict[str, Any]:
    """Return the values of a byte-level vocabulary, whose last tokens are special."""
    texts = [*bytes_to_unicode().values(), "ab"]
    unused = [f"<|unused{i}|>" for i in range(VOCAB - len(texts) - len(special))]
    kinds = [1] * len(texts) + [3] * (VOCAB - len(texts))
    stated = {"model": "gpt2", "pre": "llama-bpe", "merges": ["a b"], "token_type": kinds}
    stated |= {"tokens": [*texts, *unused, *special]} | values
    return {f"tokenizer.ggml.{name}": value for name, value in stated.items()}


def make_model(architecture: str, num_layers: int = NUM_LAYERS, **settings: Any) -> Any:
    """Return a random model with the settings that a GGUF file can state."""
    sizes = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HEADS * HEAD_DIM if architecture == "phi3" else HIDDEN,
        "intermediate_size": WIDTH,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "sliding_window": 16 if architecture.startswith("gemma") else None,
    }
    config = AutoConfig.for_model(MODEL_TYPES.get(architecture, architecture), **sizes | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # zeros or ones show no mistake
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


def write_file(path: Path, architecture: str, model: Any, kind: str, **extra: Any) -> None:
    """Write a model as llama.cpp's converter does, its matrices in blocks of one type if they fit.

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
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    kinds |= {bool: writer.add_bool, list: writer.add_array}
    for key, value in extra.items():
        kinds[type(value)](key, value)
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    names = {hf: name for name, hf in MODEL_NAMES.items()}
    parts = {hf: name for name, hf in (LAYER_NAMES | dict(family.layer_names)).items()}
    for hf_name, parameter in model.named_parameters():
        stem, _, suffix = hf_name.rpartition(".")
        if stem in names:
            name = names[stem]
        else:
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            name = f"blk.{number}.{parts[part]}"
        has_blocks = parameter.ndim == 2 and parameter.shape[1] % block == 0
        number_type = gguf.GGMLQuantizationType[kind if has_blocks else "F32"]
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
