"""Models with packed weights compute what they computed before, attached or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvant
from hf.parity import text_of
from hf.zoo import FAMILIES, NAMES, build, worded
from kvant import weights
from kvant.checkpoints import load
from kvant.hf import compute_model_fingerprint
from packing import find_unpacked_reasons

DEFAULT = ("llama", "gpt2", "gpt_oss", "deepseek_v3", "falcon_h1", "mamba", "bart")
EVERY = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.laws) for name in NAMES]

REASONS = find_unpacked_reasons(partial(torch.nn.Linear, 96, 96, dtype=torch.bfloat16))
pytestmark = pytest.mark.skipif(REASONS != "", reason=f"kvant.pack leaves layers: {REASONS}")


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the families are."""
    monkeypatch.setattr(weights, "MIN_PACKED_VALUES", 1)


@torch.no_grad()
def outputs(model: PreTrainedModel, name: str, *, attached: bool) -> list[Tensor]:
    """Of a prompt, and of tokens one at a time, on a cache of ours."""
    family = FAMILIES[name]
    text, spec = text_of(family), worded(name, "affine8")
    given = {
        key: one.bfloat16() if one.is_floating_point() else one for key, one in text.encoder.items()
    }
    ids = "decoder_input_ids" if family.kind == "encoder-decoder" else "input_ids"
    if attached:
        kvant.attach(model, spec, guard=False)
    cache, found, begin = kvant.cache_for(model, spec), [], 0
    for end in (12, 13, 14, 15):
        tokens = {ids: text.ids[:, begin:end], family.cache_argument: cache}
        found.append(model(**given, **tokens, use_cache=True).logits)
        begin = end
    if attached:
        kvant.detach(model)
    return found


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_a_family_computes_the_same_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no layer is packed whose weight the family, or kvant, multiplies with itself."""
    model = build(name).bfloat16()
    expected = [outputs(model, name, attached=attached) for attached in (False, True)]
    assert kvant.pack(model, tied=True).layers
    made: list[Any] = []
    dense = weights._make_dense
    monkeypatch.setattr(weights, "_make_dense", lambda weight: made.append(weight) or dense(weight))
    for attached, same in zip((False, True), expected, strict=True):
        assert alike(outputs(model, name, attached=attached), same)
    assert not made
    kvant.unpack(model)
    assert alike(outputs(model, name, attached=False), expected[0])


def test_a_model_is_packed_while_it_is_attached() -> None:
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
    again = type(model).from_pretrained(tmp_path)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_packed_model_is_the_same_model() -> None:
    """A conversation that one of them saved goes on with the other."""
    model = build("llama").bfloat16()
    told = (
        compute_model_fingerprint(model),
        model.num_parameters(),
        model.dtype,
        model.get_memory_footprint(),
    )
    kvant.pack(model)
    assert told == (
        compute_model_fingerprint(model),
        model.num_parameters(),
        model.dtype,
        model.get_memory_footprint(),
    )


def test_a_conversation_goes_on_with_the_packed_model(tmp_path: Path) -> None:
    model, tokenizer = load(None)
    session = kvant.Session(model, tokenizer, kv_cache="affine8")
    for _ in session.send("import os\n", max_new_tokens=4):
        pass
    session.save(tmp_path / "talk")
    twin = session.fork()
    said = "".join(step.text for step in session.send("def f", max_new_tokens=6))
    kvant.pack(model)
    again = kvant.Session.load(tmp_path / "talk", model, tokenizer)
    for one in (twin, again):
        assert "".join(step.text for step in one.send("def f", max_new_tokens=6)) == said
