"""Test planned bytes: equal to the allocation, and to published tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvant
from cache.tagged import make_layer, make_rows
from hf.zoo import build
from kvant import Cache, CacheSpec, RecurrentSpec, Shape, SharedSpec, SpecError, plan
from kvant.cache.layout import make_layer_group
from kvant.pages.storage import pages_nbytes
from kvant.weights import packing
from thin import thin_rows

GIB = 1 << 30
LLAMA_7B = Shape(32, 32, 128, 128, torch.float32)
LLAMA_13B = Shape(40, 40, 128, 128, torch.float32)
MISTRAL_7B = Shape(32, 8, 128, 128, torch.float32)
QWEN3_1_7B = Shape(28, 8, 128, 128, torch.bfloat16)

SPECS = (
    "raw",
    "raw,step=1",
    "raw,capacity=5000",
    "raw,window=100,sinks=4",
    "raw,window=20,sinks=100,slack=0",
    "affine8",
    "affine4,sinks=3",
    "affine8,step=1,tail=70",
    "affine8,capacity=5000",
    "affine4,start=400",
    "affine8,window=100,sinks=4",
    "affine4,window=1000,sinks=0,capacity=5000,slack=70",
    "turbo4v2,page=128",
    "raw/affine8,window=300,sinks=0,step=64",
    "affine8,edge=1:raw",
)


@pytest.mark.parametrize(
    ("text", "context"), thin_rows(itertools.product(SPECS, [1, 63, 64, 65, 300, 5000]))
)
def test_plan_equals_the_allocation_of_a_cache(text: str, context: int) -> None:
    shape = Shape(3, 2, 16, 8, torch.bfloat16)
    planned = plan(shape, text, context=context, sequences=2)
    for chunk in (context, 700, 64):
        cache = Cache(3, text)
        for place in range(0, context, chunk):
            count = min(chunk, context - place)
            keys, values = (make_rows(0, count, 2, 2, d, torch.bfloat16) for d in (16, 8))
            for state in cache:
                state.append(keys, values)
        for state, expected_nbytes in zip(cache, planned.layer_nbytes, strict=True):
            # token by token, two more pages exist for a moment
            group = make_layer_group(state.spec)
            page = pages_nbytes(state.storage.geometry, state.spec, group, [group.page] * 2)
            page += 2 * state.storage.sealed_nbytes
            dense_until = group.paging.dense_until  # until then, all of them are open
            page += pages_nbytes(state.storage.geometry, state.spec, group, [dense_until] * 2)
            assert state.nbytes <= expected_nbytes <= state.nbytes + 2 * page, chunk
            assert (
                state.nbytes == expected_nbytes or state.spec.seals or state.spec.retention.window
            )
        assert sum(planned.layer_nbytes) == planned.nbytes


@pytest.mark.parametrize("text", SPECS)
def test_plan_equals_the_allocation_token_by_token(text: str) -> None:
    shape = Shape(3, 1, 8, 8, torch.float32)
    cache, token = Cache(3, text), make_rows(0, 1)
    for context in range(1, 601):
        for state in cache:
            state.append(token, token)
        if context in (1, 2, 63, 64, 65, 128, 129, 300, 449, 600):
            assert cache.nbytes == plan(shape, text, context=context).nbytes, context


@pytest.mark.parametrize(
    ("shape", "context", "expected"),
    [
        (LLAMA_7B, 2048, 2.0),
        (LLAMA_7B, 4096, 4.0),
        (LLAMA_13B, 2048, 3.125),  # published as 3.1
        (MISTRAL_7B, 4096, 1.0),  # the published 1.0 is for float32; bfloat16 needs half
        (QWEN3_1_7B, 40960, 4.375),
    ],
    ids=["LLaMA-7B 2048", "LLaMA-7B 4096", "LLaMA-13B 2048", "Mistral-7B 4096", "Qwen3-1.7B 40960"],
)
def test_published_sizes_of_raw_caches(shape: Shape, context: int, expected: float) -> None:
    assert plan(shape, "raw,step=1", context=context).nbytes == expected * GIB


def test_spec_dtype_is_planned() -> None:
    assert plan(MISTRAL_7B, "bf16,step=1", context=4096).nbytes == GIB / 2
    assert plan(QWEN3_1_7B, "f32,step=1", context=40960).nbytes == 8.75 * GIB


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("affine8", 0.53125),
        ("affine4", 0.3125),
        ("affine4,group=16", 0.375),
        ("fp8", 130 / 256),
        ("turbo4", 66 / 256),
        ("turbo4v2", 50 / 256),  # 5.12 times smaller with 16-bit scales
        ("affine8v4", (0.53125 + 0.3125) / 2),
    ],
)
def test_published_shares_of_raw_bytes(text: str, share: float) -> None:
    raw = plan(QWEN3_1_7B, "raw").nbytes_per_token
    assert raw == 28 * 8 * 2 * 128 * 2
    assert plan(QWEN3_1_7B, text).nbytes_per_token == share * raw


@pytest.mark.parametrize(("text", "tail"), [("affine8", 0), ("affine4", 128)])
def test_open_pages_add_to_sealed_ones(text: str, tail: int) -> None:
    """All complete pages are sealed; the tail is dense, and two pages hold the slack and the
    new rows.
    """
    context = 64 * 640
    planned = plan(QWEN3_1_7B, f"{text},step=64", context=context)
    raw = plan(QWEN3_1_7B, "raw").nbytes_per_token
    assert planned.nbytes == (context - tail) * planned.nbytes_per_token + (tail + 128) * raw


def test_window_has_constant_cost() -> None:
    for text in ("raw,window=4096,sinks=4", "affine4,window=4096,sinks=0"):
        short, long = (plan(QWEN3_1_7B, text, context=n) for n in (10_000, 10_000_000))
        assert short.nbytes_per_token == 0.0
        assert short.nbytes == long.nbytes


@pytest.mark.parametrize("text", ["raw", "affine8", "affine4,step=1", "turbo3,start=5000"])
@pytest.mark.parametrize("budget", [GIB // 50, GIB, 3 * GIB + 12345])
def test_largest_context_is_the_last_that_fits(text: str, budget: int) -> None:
    context = plan(QWEN3_1_7B, text, sequences=2).largest_context(budget)
    position, beyond = (plan(QWEN3_1_7B, text, context=context + n, sequences=2) for n in (0, 1))
    assert position.nbytes <= budget < beyond.nbytes


def test_too_small_budget_has_no_context() -> None:
    assert plan(QWEN3_1_7B, "raw").largest_context(1000) == 0
    assert plan(QWEN3_1_7B, "raw,capacity=4096").largest_context(1000) == 0


@pytest.mark.parametrize("text", ["affine8", "affine4", "turbo4v2", "affine4,tail=0,window=500"])
def test_saving_length_is_the_first_from_which_on_memory_is_saved(text: str) -> None:
    shape = Shape(2, 2, 64, 64, torch.bfloat16)
    plans = {n: plan(shape, text, context=n) for n in range(1, 1500)}
    saves = {n: p.nbytes < p.count_raw_nbytes(n) for n, p in plans.items()}
    first = plans[1].find_saving_length()
    assert first is not None and not saves[first - 1]
    assert all(saves[n] for n in range(first, 1500))


def test_formats_without_a_saving_length() -> None:
    for text in ("raw", "raw,step=64", "bf16"):
        assert plan(Shape(2, 2, 64, 64, torch.bfloat16), text).find_saving_length() is None
    assert plan(Shape(2, 2, 64, 64, torch.float32), "bf16").find_saving_length() is None


def test_raw_bytes_count_the_rows_of_a_model() -> None:
    config = build("gemma3").config  # windows of some layers
    for context in (5, 300):
        planned = plan(config, "affine4", context=context, sequences=2)
        layers = [layer for layer in planned.layers if layer.attends]
        rows = [min(context, layer.window or context) for layer in layers]
        widths = [layer.num_heads * (layer.key_dim + layer.value_dim) for layer in layers]
        size = layers[0].dtype.itemsize
        expected = 2 * size * sum(n * width for n, width in zip(rows, widths, strict=True))
        assert planned.count_raw_nbytes(context) == expected


def test_sequences_need_equal_bytes() -> None:
    single, seven = (plan(QWEN3_1_7B, "affine8", sequences=n).nbytes for n in (1, 7))
    assert seven == 7 * single


def test_zero_tokens_need_no_bytes() -> None:
    assert plan(QWEN3_1_7B, "affine8,sinks=4", context=0).nbytes == 0


def test_shared_layers_add_no_bytes() -> None:
    spec = CacheSpec((make_layer("raw"), SharedSpec(0), SharedSpec(0)))
    planned = plan(Shape(3, 2, 16, 16), spec, context=300)
    assert planned.layer_nbytes[1:] == (0, 0) and planned.layer_nbytes[0] == planned.nbytes > 0


def test_values_inside_keys_add_no_bytes() -> None:
    inside = replace(make_layer("raw"), value_dim=512)
    shape = Shape(1, 1, 576, 512)
    assert plan(shape, inside).nbytes_per_token == 576 * 2
    assert plan(shape, "raw").nbytes_per_token == (576 + 512) * 2


def test_recurrent_layers_cannot_be_planned() -> None:
    with pytest.raises(SpecError, match="recurrent"):
        plan(Shape(1, 1, 8, 8), CacheSpec((RecurrentSpec(),)))


@pytest.mark.parametrize(("context", "sequences"), [(-1, 1), (5, 0)])
def test_numbers_out_of_range_are_refused(context: int, sequences: int) -> None:
    with pytest.raises(ValueError, match=f"context {context} and {sequences} sequences"):
        plan(QWEN3_1_7B, "raw", context=context, sequences=sequences)


CONFIG = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2048,
    "torch_dtype": "bfloat16",
}


@dataclass
class Model:
    config: object


@pytest.mark.parametrize(
    "model",
    [
        CONFIG,
        SimpleNamespace(**CONFIG),
        Model(SimpleNamespace(**CONFIG)),
        {"text_config": CONFIG, "num_hidden_layers": 99},
        SimpleNamespace(text_config=SimpleNamespace(**CONFIG)),
        Model({"text_config": {"text_config": CONFIG}}),
    ],
    ids=["mapping", "object", "model", "nested", "nested object", "nested twice"],
)
def test_shapes_are_read_from_configurations(model: object) -> None:
    assert plan(model, "raw").layers == QWEN3_1_7B.layers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"n_layer": 12, "n_head": 12, "n_embd": 768},
            Shape(12, 12, 64, 64, torch.bfloat16),
        ),
        (
            {**CONFIG, "num_key_value_heads": None, "head_dim": None, "dtype": torch.float16},
            Shape(28, 16, 128, 128, torch.float16),
        ),
        (
            {**CONFIG, "v_head_dim": 64, "torch_dtype": "torch.float32"},
            Shape(28, 8, 128, 64, torch.float32),
        ),
    ],
    ids=["older names", "no key heads", "narrow values"],
)
def test_other_configurations_are_read(config: dict, expected: Shape) -> None:
    assert plan(config, "raw").layers == expected.layers


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("num_attention_heads", "heads.*num_attention_heads"),
        ("num_hidden_layers", "layers.*num_hidden_layers"),
    ],
)
def test_incomplete_configuration_is_refused(missing: str, name: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(ValueError, match=name):
        plan(config, "raw")


@pytest.mark.parametrize("heads", [0, -1, "8", 2.0, True])
def test_invalid_configuration_is_refused(heads: object) -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        plan({**CONFIG, "num_attention_heads": heads}, "raw")


def test_plan_prints_as_text() -> None:
    text = str(plan(QWEN3_1_7B, "raw,step=1", context=40960))
    assert text.startswith("4.38 GiB for 1 x 40960 tokens, 114688 bytes a token")


def test_plan_names_the_dtype_of_rows() -> None:
    """Regression: a shape without a dtype was planned in bfloat16 without a note."""
    ending = "bytes a token, rows in "
    assert str(plan(Shape(2, 2, 64, 64), "affine8")).endswith(f"{ending}bfloat16")
    float32_result = plan(Shape(2, 2, 64, 64, torch.float32), "raw")
    assert str(float32_result).endswith(f"{ending}float32") and float32_result.dtypes == (
        torch.float32,
    )
    assert plan(Shape(2, 2, 64, 64, torch.float32), "f16").dtypes == (torch.float16,)
    assert plan(Shape(3, 2, 64, 64), "f32,edge=1:raw").dtypes == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("raw", 16.0),
        ("f32", 32.0),
        ("affine8", 8.5),
        ("turbo3", 3.25),
        ("turbo4v2", 3.25),
        ("turbo3,window=64,sinks=4,tail=0", 3.25),  # of sealed rows, whatever stays dense
        ("turbo3,layers=0:turbo4+3:turbo2/raw", (2 * 3.25 + 4.25 + (2.25 + 16) / 2) / 4),
    ],
)
def test_bits_of_a_value_count_scales(text: str, bits: float) -> None:
    planned = plan(Shape(4, 2, 64, 64), text)
    assert planned.bits_per_value == bits
    assert sum(planned.row_nbytes) == 4 * 2 * 128 * bits / 8


def test_bits_of_a_value_skip_values_inside_keys_and_states() -> None:
    assert plan(build("deepseek_v3"), "f16").bits_per_value == 16
    assert plan(build("falcon_h1"), "f16").bits_per_value == 16
    assert plan(build("mamba"), "raw").bits_per_value == 0


def test_window_grown_by_a_long_chunk_allocates_the_plan() -> None:
    cache = Cache(1, "raw,window=130,sinks=0,page=128,slack=1")
    for count in (1, 1, 200, 65):
        cache[0].append(*torch.zeros(2, 1, 1, count, 16))
    shape = Shape(1, 1, 16, 16, torch.float32)
    assert cache.nbytes == plan(shape, cache.spec, context=267).nbytes


@pytest.mark.parametrize("weights", ["raw", "affine8", {"lm_head": "affine4", "*": "affine8"}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "falcon_h1"])
def test_planned_weights_are_those_of_the_packed_model(
    name: str, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_PACKED_VALUES", 1)
    model = build(name)
    for parameter in model.parameters():  # buffers of rotary embeddings stay in float32
        parameter.data = parameter.data.bfloat16()
    planned = plan(model.config, weights=weights).weight_nbytes
    assert plan(model, weights=weights).weight_nbytes == planned
    kvant.pack(model, weights)
    assert plan(model, weights=weights).weight_nbytes == planned


def test_weights_are_within_the_budget_of_a_plan() -> None:
    model = build("llama")
    alone, together = plan(model), plan(model, weights="affine8")
    assert alone.weight_nbytes is None and together.weight_nbytes is not None
    budget = alone.nbytes + together.weight_nbytes
    assert together.largest_context(budget) == alone.largest_context(alone.nbytes)
    assert "weights" in str(together) and "weights" not in str(alone)
    with pytest.raises(ValueError, match="no model_type"):
        plan({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}, weights="raw")
    with pytest.raises(ValueError, match="not shapes"):
        plan(Shape(1, 2, 32, 32), weights="raw")
