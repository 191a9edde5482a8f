"""Test that packed models compute the same as before, attached or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvant
from hf.parity import text_of
from hf.zoo import FAMILIES, NAMES, build, valid_spec
from kvant.checkpoints import load
from kvant.hf import compute_model_fingerprint
from kvant.native import get_library
from kvant.weights import packing
from kvant.weights.packed_matrix import CodedMatrix, DenseMatrix
from unpacked import unpack_copy

DEFAULT = ("llama", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "falcon_h1", "mamba", "bart")
EVERY = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.laws) for name in NAMES]

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)


@pytest.fixture(autouse=True)
def pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack small layers too: those of the families are small."""
    monkeypatch.setattr(packing, "MIN_PACKED_VALUES", 1)


@torch.no_grad()
def compute_outputs(model: PreTrainedModel, name: str, *, attached: bool) -> list[Tensor]:
    """Return the logits of a prompt and of single tokens, on a kvant cache."""
    family = FAMILIES[name]
    text, spec = text_of(family), valid_spec(name, "affine8")
    tokens = text.ids.flip(1)  # in this order no two experts have nearly equal scores
    inputs = {
        key: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        for key, tensor in text.encoder.items()
    }
    ids = "decoder_input_ids" if family.kind == "encoder-decoder" else "input_ids"
    if attached:
        kvant.attach(model, spec, guard=False)
    cache, logits, begin = kvant.cache_for(model, spec), [], 0
    for end in (12, 13, 14, 15):
        options = {ids: tokens[:, begin:end], family.cache_argument: cache}
        logits.append(model(**inputs, **options, use_cache=True).logits)
        begin = end
    if attached:
        kvant.detach(model)
    return logits


def assert_close(first: list[Tensor], second: list[Tensor]) -> None:
    """Logits differ by roundings: of sums, of rows of 16 bits, of rows in the cache."""
    limit = 0.03 if first[0].dtype == torch.bfloat16 else 0.01
    for a, b in zip(first, second, strict=True):
        assert (a - b).double().norm() <= limit * b.double().norm()


@pytest.mark.parametrize(("weights", "dtype"), [("raw", "bfloat16"), ("affine8", "float32")])
@pytest.mark.parametrize("name", EVERY)
def test_packed_family_computes_as_its_dense_copy(
    name: str, weights: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer is packed whose weight the family or kvant multiplies directly."""
    model = build(name).to(getattr(torch, dtype))
    assert kvant.pack(model, weights).layers
    plain = unpack_copy(model)
    decoded: list[Any] = []
    for matrix in (CodedMatrix, DenseMatrix):
        decode = matrix.to_dense
        monkeypatch.setattr(
            matrix, "to_dense", lambda self, decode=decode: decoded.append(self) or decode(self)
        )
    for attached in (False, True):
        expected = compute_outputs(plain, name, attached=attached)
        assert_close(compute_outputs(model, name, attached=attached), expected)
    assert not decoded


def test_model_is_packed_while_attached() -> None:
    model, ids = build("deepseek_v3").bfloat16(), torch.arange(3, 15)[None]
    options = {"max_new_tokens": 6, "do_sample": False}
    kvant.attach(model, "affine8", guard=False)
    expected = model.generate(ids, **options)
    kvant.pack(model)
    assert torch.equal(model.generate(ids, **options), expected)
    kvant.detach(model)
    kvant.attach(model, "affine8", guard=False)
    assert torch.equal(model.generate(ids, **options), expected)
    kvant.unpack(model)
    assert torch.equal(model.generate(ids, **options), expected)


def test_a_saved_model_is_dense(tmp_path: Path) -> None:
    model = build("llama").bfloat16()
    kvant.pack(model)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    assert all(
        torch.equal(first, second)
        for first, second in zip(model.parameters(), reloaded.parameters(), strict=True)
    )


def test_a_packed_model_is_the_same_model() -> None:
    """A conversation saved by one of them continues with the other."""
    model = build("llama").bfloat16()
    stats = (
        compute_model_fingerprint(model),
        model.num_parameters(),
        model.dtype,
        model.get_memory_footprint(),
    )
    kvant.pack(model)
    assert stats == (
        compute_model_fingerprint(model),
        model.num_parameters(),
        model.dtype,
        model.get_memory_footprint(),
    )


def test_conversation_continues_with_the_packed_model(tmp_path: Path) -> None:
    model, tokenizer = load(None)
    session = kvant.Session(model, tokenizer, kv_cache="affine8")
    for _ in session.send("import os\n", max_new_tokens=4):
        pass
    session.save(tmp_path / "talk")
    fork = session.fork()
    reply = "".join(step.text for step in session.send("def f", max_new_tokens=6))
    kvant.pack(model)
    loaded = kvant.Session.load(tmp_path / "talk", model, tokenizer)
    for session_ in (fork, loaded):
        assert "".join(step.text for step in session_.send("def f", max_new_tokens=6)) == reply
