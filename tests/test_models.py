"""Test layers from a config.json of the hub, without transformers: names and rules of families."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant import plan
from kvant.models import layer_shapes, max_context
from kvant.models.shapes import LayerShape

GIB = 1 << 30
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, EMPTY = "linear_attention", "dummy"

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
LLAMA_13B = LLAMA_7B | {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40}
MISTRAL_7B = LLAMA_7B | {
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
QWEN3_1_7B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2048,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
JAMBA = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
BAMBA = {
    "model_type": "bamba",
    "attn_layer_indices": [9, 18, 27],
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*-",
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}
KIMI_LINEAR = DEEPSEEK_V3 | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
}
LLAMA4 = {
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    }
}
GEMMA3N = {
    "text_config": {
        "model_type": "gemma3n_text",
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
    }
}


@pytest.mark.parametrize(
    ("config", "spec", "context", "expected"),
    [
        (LLAMA_7B, "raw", 2048, 2.0),
        (LLAMA_7B, "raw", 4096, 4.0),
        (LLAMA_13B, "raw", 2048, 3.125),  # published as 3.1
        (MISTRAL_7B, "raw", 4096, 1.0),  # published for float32; its files are bfloat16: half
        (MISTRAL_7B, "bf16", 4096, 0.5),
        (QWEN3_1_7B, "raw", 40960, 4.375),  # published as 4.38 GB: it is GiB
    ],
    ids=["LLaMA-7B 2048", "LLaMA-7B 4096", "LLaMA-13B", "Mistral-7B", "Mistral bf16", "Qwen3-1.7B"],
)
def test_sizes_equal_published_tables(
    config: dict, spec: str, context: int, expected: float
) -> None:
    """To the byte, and with steps of 256 as with 1: these contexts are multiples of both."""
    for step in ("", ",step=1"):
        assert plan(config, spec + step, context=context).nbytes == expected * GIB


@pytest.mark.parametrize(
    ("spec", "share", "dense"),
    [("affine8", 0.53125, 2), ("affine4", 0.3125, 4), ("affine4,step=256", 0.3125, 4)],
)
def test_published_shares_plus_the_open_pages(spec: str, share: float, dense: int) -> None:
    """Sealed pages have the published share of raw; open pages add the size of raw.

    They hold the tail, the slack and the new rows, in whole pages.
    """
    raw = plan(QWEN3_1_7B, "raw").nbytes_per_token
    planned = plan(QWEN3_1_7B, spec, context=40960)
    assert planned.nbytes_per_token == share * raw
    tail = 0 if spec == "affine8" else 128
    sealed = -(-(40960 - tail) // 256) * 256 if "step" in spec else 40960 - tail
    assert planned.nbytes == sealed * share * raw + dense * 64 * raw


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_7B, {(FULL, None): 32}),
        (MISTRAL_7B, {(SLIDING, 4096): 32}),
        (QWEN3_1_7B, {(FULL, None): 28}),
        (QWEN3_1_7B | {"sliding_window": 131072}, {(FULL, None): 28}),
        (
            QWEN3_1_7B
            | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
            {(FULL, None): 20, (SLIDING, 4096): 8},
        ),
        (GEMMA3_4B, {(SLIDING, 1024): 29, (FULL, None): 5}),
        (GPT_OSS_20B, {(SLIDING, 128): 12, (FULL, None): 12}),
        (QWEN3_NEXT, {(LINEAR, None): 36, (FULL, None): 12}),
        (JAMBA, {(LINEAR, None): 28, (FULL, None): 4}),
        (BAMBA, {(LINEAR, None): 29, (FULL, None): 3}),
        (NEMOTRON_H, {(LINEAR, None): 2, (FULL, None): 1, (EMPTY, None): 2}),
        (DEEPSEEK_V3, {(FULL, None): 61}),
        (KIMI_LINEAR, {(LINEAR, None): 3, (FULL, None): 1}),
        (LLAMA4, {(CHUNKED, 8192): 36, (FULL, None): 12}),
        (GEMMA3N, {(SLIDING, 512): 16, (FULL, None): 4, (EMPTY, None): 15}),
        (
            MISTRAL_7B | {"sliding_window_pattern": "LLLG", "num_hidden_layers": 8},
            {(SLIDING, 4096): 6, (FULL, None): 2},
        ),
        (
            MISTRAL_7B | {"block_types": ["recurrent", "attention"], "num_hidden_layers": 3},
            {(LINEAR, None): 2, (FULL, None): 1},
        ),
    ],
    ids=lambda value: value.get("model_type", "nested") if "hidden_size" in value else "",
)
def test_layer_kinds_and_windows(config: dict, expected: dict) -> None:
    assert Counter((layer.kind, layer.window) for layer in layer_shapes(config)) == expected


def test_layer_kinds_by_index() -> None:
    def places(config: dict, layer_type: str = FULL) -> list[int]:
        return [i for i, layer in enumerate(layer_shapes(config)) if layer.kind == layer_type]

    assert places(GEMMA3_4B) == [5, 11, 17, 23, 29]
    assert places(GPT_OSS_20B) == list(range(1, 24, 2))
    assert places(QWEN3_NEXT) == list(range(3, 48, 4))
    assert places(JAMBA) == [4, 12, 20, 28]
    assert places(BAMBA) == [9, 18, 27]
    assert places(NEMOTRON_H) == [3]
    assert places(KIMI_LINEAR) == [3]
    assert places(GEMMA3N, EMPTY) == list(range(20, 35))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GEMMA3_4B, (4, 256, 256)),  # its file omits them: they are defaults of its class
        (GPT_OSS_20B, (8, 64, 64)),
        (DEEPSEEK_V3, (1, 576, 512)),
        ({"n_layer": 2, "n_head": 4, "n_embd": 64, "multi_query": True}, (1, 16, 16)),
        (LLAMA_7B | {"attn_config": {"kv_n_heads": 8}}, (8, 128, 128)),
        (
            LLAMA_7B | {"num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True},
            (32, 128, 128),
        ),
        (LLAMA_7B | {"multi_query": True, "new_decoder_architecture": False}, (1, 128, 128)),
    ],
    ids=["gemma3", "gpt_oss", "deepseek_v3", "gpt_bigcode", "dbrx", "falcon-40b", "falcon-7b"],
)
def test_row_widths(config: dict, expected: tuple) -> None:
    shape = layer_shapes(config)[-1]
    assert (shape.num_heads, shape.key_dim, shape.value_dim) == expected


def test_rows_may_differ_by_layer() -> None:
    by_list = LLAMA_7B | {"num_hidden_layers": 3, "num_key_value_heads": [4, 2, 1]}
    assert [layer.num_heads for layer in layer_shapes(by_list)] == [4, 2, 1]
    per_layer_config = LLAMA_7B | {
        "num_hidden_layers": 2,
        "per_layer_config": {"1": {"head_dim": 64}},
    }
    assert [layer.key_dim for layer in layer_shapes(per_layer_config)] == [128, 64]
    wide_rows = GPT_OSS_20B | {"global_head_dim": 512, "num_global_key_value_heads": 4}
    assert [(layer.num_heads, layer.key_dim) for layer in layer_shapes(wide_rows)[:2]] == [
        (8, 64),
        (4, 512),
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_NEXT, 8192 * 4 * 2 + 32 * 128 * 128 * 4),
        (JAMBA, 8192 * (4 * 2 + 16 * 4)),
        (BAMBA, (8192 + 2 * 128) * 4 * 2 + 8192 * 128 * 4),
        (NEMOTRON_H, (8192 + 2 * 8 * 128) * 4 * 2 + 8192 * 128 * 4),
    ],
    ids=["qwen3_next", "jamba", "bamba", "nemotron_h"],
)
def test_recurrent_states_are_counted_once_at_every_length(config: dict, expected: int) -> None:
    layers = layer_shapes(config)
    assert layers[0] == LayerShape(kind=LINEAR, state_nbytes=expected)
    short, long = (plan(config, "affine4", context=n, sequences=3) for n in (1, 100_000))
    assert short.layer_nbytes[0] == long.layer_nbytes[0] == 3 * expected
    assert (
        short.nbytes_per_token
        == sum(layer.attends for layer in layers)
        * (
            plan(layers[-1:] if layers[-1].attends else [_first_attention_layer(layers)], "affine4")
        ).nbytes_per_token
    )


def _first_attention_layer(layers: tuple[LayerShape, ...]) -> LayerShape:
    return next(layer for layer in layers if layer.attends)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (KIMI_LINEAR, (0, 1, 2)),
        ({**QWEN3_NEXT, "linear_num_value_heads": None, "num_hidden_layers": 4}, (0, 1, 2)),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32", "num_hidden_layers": 2}, (0, 1)),
        (LLAMA_7B | {"layer_types": [FULL, "of_tomorrow"], "num_hidden_layers": 2}, (1,)),
    ],
    ids=["kimi_linear", "a file that lacks it", "an index of the host's", "unknown"],
)
def test_missing_configuration_values_are_reported_without_an_error(
    config: dict, missing: tuple
) -> None:
    planned = plan(config, "affine8")
    assert planned.uncounted_layers == missing
    assert all(planned.layer_nbytes[index] == 0 for index in missing)
    assert str(planned).endswith(f"{len(missing)} layers not counted")


def test_model_window_bounds_its_layer_only() -> None:
    """window + slack + a page, in whole pages, for any context."""
    planned = plan(GEMMA3_4B, "raw", context=100_000)
    row = 2 * 4 * 256 * 2
    by_kind = dict(zip([layer.kind for layer in planned.layers], planned.layer_nbytes, strict=True))
    assert by_kind[SLIDING] == 18 * 64 * row
    assert by_kind[FULL] == -(-100_000 // 64) * 64 * row
    assert planned.nbytes_per_token == 5 * row


def test_narrower_spec_window_applies() -> None:
    wide_rows, narrow = (plan(MISTRAL_7B, f"raw,window={n}", context=9999) for n in (8192, 1024))
    assert wide_rows.nbytes == plan(MISTRAL_7B, "raw", context=9999).nbytes
    assert narrow.layer_nbytes[0] == 18 * 64 * 2 * 8 * 128 * 4


def test_edge_layers_are_counted_among_attention_layers() -> None:
    planned = plan(JAMBA, "affine4,edge=1:raw")
    sizes = [
        n for n, layer in zip(planned.layer_nbytes, planned.layers, strict=True) if layer.attends
    ]
    assert sizes[0] == sizes[3] > sizes[1] == sizes[2]


def test_shared_layers_add_no_bytes() -> None:
    assert set(plan(GEMMA3N, "affine4").layer_nbytes[20:]) == {0}


def test_latents_are_planned_as_one_stream() -> None:
    assert plan(DEEPSEEK_V3, "raw").nbytes_per_token == 61 * 576 * 2


def test_dtype_of_a_model_overrides_its_configuration() -> None:
    model = SimpleNamespace(config=QWEN3_1_7B, dtype=torch.float32)
    assert plan(model, "raw").layers[0].dtype is torch.float32
    assert plan(GEMMA3_4B, "raw").layers[0].dtype is torch.bfloat16  # declared outside text_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [(LLAMA_7B, 2048), ({"text_config": {}, "max_position_embeddings": 7}, 7), (JAMBA, None)],
    ids=["told", "told outside", "not told"],
)
def test_max_context_is_read(config: Any, expected: int | None) -> None:
    assert max_context(config) == expected


def test_layer_with_two_attentions_counts_twice() -> None:
    config = {k: v for k, v in DEEPSEEK_V3.items() if k != "num_hidden_layers"}
    assert len(layer_shapes(config | {"model_type": "longcat_flash", "num_layers": 28})) == 56


def test_a_plan_takes_layer_shapes() -> None:
    layers = layer_shapes(GPT_OSS_20B)
    assert plan(layers, "affine8").nbytes == plan(GPT_OSS_20B, "affine8").nbytes


@pytest.mark.parametrize("nothing", [3, None, 1.5])
def test_unknown_model_is_refused(nothing: object) -> None:
    with pytest.raises(ValueError, match="is not a Shape, a configuration or a model"):
        plan(nothing)


def test_configuration_with_too_many_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        plan(LLAMA_7B | {"num_hidden_layers": 10**12})
