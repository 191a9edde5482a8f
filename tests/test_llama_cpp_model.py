"""tools/llama_cpp_model.py frees what it opens, and expands a file without changing its weights."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llama_cpp_model
from llama_cpp_model import LlamaModel, expand_gguf
from random_model import make_vocabulary, write_gguf

VOCABULARY, FILE = 5, Path("model.gguf")


class ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads")),
        *((name, ctypes.c_int) for name in ("n_threads_batch", "n_seq_max", "type_k", "type_v")),
        ("flash_attn_type", ctypes.c_int),
    ]


class FakeLlama:
    """llama.cpp's functions; the logits of a token are its number."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.positions: list[list[int]] = []
        self.model, self.context, self.failure, self.params = 1, 2, 0, ContextParams

    def __getattr__(self, name: str) -> Any:
        results = {"llama_model_load_from_file": self.model, "llama_init_from_model": self.context}
        results["llama_vocab_n_tokens"] = VOCABULARY

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return results.get(name)

        return call

    def llama_context_default_params(self) -> ctypes.Structure:
        return self.params()

    def llama_batch_init(self, count: int, embd: int, num_sequences: int) -> SimpleNamespace:
        self.calls["llama_batch_init"] += 1
        columns = {name: [0] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(seq_id=[[0] for _ in range(count)], **columns)

    def llama_decode(self, context: Any, batch: SimpleNamespace) -> int:
        assert all(batch.logits) and batch.n_tokens == len(batch.token)
        self.positions.append(batch.pos)
        values = [float(token) for token in batch.token for _ in range(VOCABULARY)]
        self.logits = (ctypes.c_float * len(values))(*values)
        return self.failure

    def llama_get_logits(self, context: Any) -> Any:
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama()
    monkeypatch.setattr(llama_cpp_model, "import_llama_cpp", lambda: fake)
    return fake


def test_readers_count_positions_and_are_freed(lib: FakeLlama) -> None:
    with LlamaModel.open(FILE) as model:
        for _ in range(2):
            with model.open_reader("q8_0", 64, 8) as reader:
                logits = reader.predict(torch.tensor([[3, 1]]))
                assert torch.equal(logits, torch.tensor([[3.0], [1.0]]).expand(2, VOCABULARY))
                reader.predict(torch.tensor([[2]]))
    assert lib.positions == [[0, 1], [2]] * 2
    assert lib.calls["llama_model_free"] == 1
    assert lib.calls["llama_init_from_model"] == lib.calls["llama_free"] == 2
    assert lib.calls["llama_batch_init"] == lib.calls["llama_batch_free"] == 4


def test_failures_free_memory(lib: FakeLlama) -> None:
    lib.failure = 1
    with (
        pytest.raises(RuntimeError, match="could not compute a batch"),
        LlamaModel.open(FILE) as model,
        model.open_reader("f16", 64, 8) as reader,
    ):
        reader.predict(torch.tensor([[3]]))
    assert lib.calls["llama_model_free"] == lib.calls["llama_free"] == 1
    assert lib.calls["llama_batch_free"] == 1


def test_missing_models_contexts_and_options_are_named(lib: FakeLlama) -> None:
    def open_all() -> None:
        with LlamaModel.open(FILE) as model, model.open_reader("q4_0", 64, 8):
            pass

    lib.context = 0
    with pytest.raises(RuntimeError, match=r"64 tokens with a q4_0 cache for model\.gguf"):
        open_all()
    assert lib.calls["llama_model_free"] == 1
    lib.params = type("Old", (ctypes.Structure,), {"_fields_": ContextParams._fields_[:-1]})
    with pytest.raises(RuntimeError, match="pip install -U llama-cpp-python"):
        open_all()
    lib.model = 0
    with pytest.raises(RuntimeError, match=r"could not load model\.gguf"):
        open_all()


def test_expanded_file_has_the_same_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    write_gguf(source, Qwen3ForCausalLM(config), make_vocabulary(config.vocab_size))
    expand_gguf(source, target)
    old, new = map(gguf.GGUFReader, (source, target))
    for name, field in old.fields.items():
        if not name.startswith("GGUF."):
            assert new.fields[name].contents() == field.contents()
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert (after.name, [*after.shape]) == (before.name, [*before.shape])
        assert after.tensor_type == gguf.GGMLQuantizationType.F32
        expected = gguf.quants.dequantize(before.data, before.tensor_type)
        assert (after.data == expected).all()
