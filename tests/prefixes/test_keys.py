"""Test that no hit crosses models, adapters, formats, settings or salts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import build
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes, fingerprint
from kvant.prefixes.keys import digest, make_page_key, make_root_key, salt_key
from kvant.recipes import CacheSpec
from kvant.spec import to_json
from kvant.weights.packing import is_packed
from prefixes.test_prefixes import generate_tokens, make_tokens

PROMPT = make_tokens(200, seed=0)


def count_hit_tokens(prefixes: Prefixes, model: Any, spec: str = "raw") -> int:
    before = prefixes.stats()["tokens_hit"]
    assert generate_tokens(model, PROMPT, spec, prefixes=prefixes) == generate_tokens(
        model, PROMPT, spec
    )
    return int(prefixes.stats()["tokens_hit"] - before)


def test_same_model_and_salt_hit() -> None:
    prefixes = Prefixes()
    assert count_hit_tokens(prefixes, build("llama")) == 0
    assert count_hit_tokens(prefixes, build("llama")) >= 192, "an equal model that was loaded again"


def test_other_weights_of_the_same_name_miss() -> None:
    """SGLang #24758: names are no proof; one different value suffices."""
    prefixes, model = Prefixes(), build("llama")
    assert count_hit_tokens(prefixes, model) == 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] += 0.5
    assert count_hit_tokens(prefixes, model) == 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] -= 0.5
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data * 1.5
    assert count_hit_tokens(prefixes, model) == 0


def test_another_adapter_misses() -> None:
    """vLLM #44701: adapters of one shape, one of which has the name of the other."""
    peft = pytest.importorskip("peft")
    prefixes = Prefixes()
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(build("llama"), config).eval()
        inner = model.get_base_model()
        assert count_hit_tokens(prefixes, inner) == 0
        assert count_hit_tokens(prefixes, inner) >= 192
        inner.model.layers[0].self_attn.q_proj.scale_layer(3.0)
        assert count_hit_tokens(prefixes, inner) == 0, "an adapter of another strength"


@pytest.mark.parametrize(
    "spec", ["affine8", "raw,page=128", "raw,slack=20", "affine8,prefill=stored", "affine8,tail=5"]
)
def test_another_spec_misses(spec: str) -> None:
    prefixes, model = Prefixes(), build("llama")
    assert count_hit_tokens(prefixes, model) == count_hit_tokens(prefixes, model, spec) == 0


def test_another_rope_misses() -> None:
    model, keys = build("llama"), set()
    spec = TransformersDecoder(model).make_cache("raw").spec
    keys.add(make_root_key(model, spec))
    model.config.rope_parameters["rope_theta"] *= 2
    keys.add(make_root_key(model, spec))
    model.model.rotary_emb.inv_freq *= 0.5
    keys.add(make_root_key(model, spec))
    assert len(keys) == 3


def old_root_key(model: Any, spec: CacheSpec) -> bytes:
    """Return a root key as written by versions that did not always read the first page."""
    description = (
        f"{model.device} {torch.is_autocast_enabled('cpu')} {torch.get_autocast_dtype('cpu')}"
    )
    return digest(
        b"kvant prefix 2", fingerprint(model), description.encode(), to_json(spec).encode()
    )


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine8,window=64,sinks=0"])
def test_old_root_key_is_found(spec: str) -> None:
    model = build("llama")
    full = TransformersDecoder(model).make_cache(spec).spec
    assert make_root_key(model, full) == old_root_key(model, full)


def test_old_root_key_misses_if_pages_are_selected() -> None:
    model = build("llama")
    full = TransformersDecoder(model).make_cache("affine8,select=1:1").spec
    assert make_root_key(model, full) != old_root_key(model, full)


def test_another_salt_misses() -> None:
    """vLLM #53347: a salt is no part of the text, and no salt is a prefix of another."""
    model = build("llama")
    spec = TransformersDecoder(model).make_cache("raw").spec
    salts = (("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"))
    top = make_root_key(model, spec)
    assert len({top} | {salt_key(top, *words) for words in salts}) == 7
    first, second = Prefixes(salt="a"), Prefixes(salt="b")
    assert count_hit_tokens(first, model) == count_hit_tokens(second, model) == 0


def test_weight_writes_beyond_the_version_counter_are_detected() -> None:
    prefixes, model = Prefixes(), build("llama")
    assert count_hit_tokens(prefixes, model) == 0
    for weight in model.parameters():
        weight.data.mul_(1.5)
    assert count_hit_tokens(prefixes, model) == 0


def test_new_weight_at_the_same_address_is_detected() -> None:
    model, layer = build("llama"), None
    layer = model.model.layers[0].mlp.up_proj
    calls = set()
    for number in range(20):
        shape, layer.weight = layer.weight.shape, None
        torch.manual_seed(number)
        layer.weight = torch.nn.Parameter(torch.randn(shape))
        calls.add(fingerprint(model))
    assert len(calls) == 20


def test_weights_changed_during_a_session_are_detected() -> None:
    prefixes, model = Prefixes(), build("llama")
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    options = {"max_new_tokens": 6, "ignore_end": True}
    list(session.send(PROMPT, **options))
    session.reset()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    assert [step.token for step in session.send(PROMPT, **options)] == generate_tokens(
        model, PROMPT
    )
    assert session.stats()["hit_rate"] == 0
    assert count_hit_tokens(prefixes, model) >= 192, (
        "what the session read is kept for the weights of now"
    )


def test_models_with_arbitrary_code_are_not_cached() -> None:
    prefixes, model = Prefixes(), build("llama")
    assert count_hit_tokens(prefixes, model) == 0
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: out)
    assert count_hit_tokens(prefixes, model) == 0
    list(session.send(PROMPT, max_new_tokens=1, ignore_end=True))
    assert "model.layers.1 has hooks" in session.stats()["prefix_lost"]
    hook.remove()
    assert count_hit_tokens(prefixes, model) >= 192
    model.train()
    assert count_hit_tokens(prefixes, model) == 0


def test_another_page_or_parent_misses() -> None:
    before, page = digest(b"root"), make_tokens(64, seed=0)
    names = {
        make_page_key(before, page),
        make_page_key(digest(b"other"), page),
        make_page_key(before, [*page[:-1], 999]),
    }
    assert len(names) == 3


def test_parts_are_length_prefixed() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")


def test_key_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """openvino.genai #3722: tokens are compared, whatever their key is."""
    monkeypatch.setattr("kvant.prefixes.tree.make_page_key", lambda before, tokens: before + b"x")
    prefixes, model = Prefixes(), build("llama")
    assert count_hit_tokens(prefixes, model) == 0
    other = make_tokens(200, seed=5)
    before = prefixes.stats()["tokens_hit"]
    assert generate_tokens(model, other, prefixes=prefixes) == generate_tokens(model, other)
    assert prefixes.stats()["tokens_hit"] == before


@pytest.mark.filterwarnings("ignore:unpacked weights keep")
def test_rounded_weights_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a store crosses between 16, 8 and 4 bits, nor between codes and their values."""
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    keys = []
    for weights in ("raw", "affine8", "affine4", {"lm_head": "affine8", "*": "affine4"}):
        model = build("llama").to(torch.bfloat16)
        keys += [fingerprint(model)] if weights == "raw" else []
        assert kvant.pack(model, weights).layers
        keys.append(fingerprint(model))
        kvant.unpack(model)
        keys.append(fingerprint(model))
    assert keys[0] == keys[1] == keys[2]  # 16-bit weights are those of the dense model
    assert len(set(keys)) == 1 + 2 * 3


def test_packed_weights_have_the_same_key() -> None:
    model = build("llama").to(torch.bfloat16)
    before = fingerprint(model)
    kvant.pack(model)
    assert is_packed(model) and fingerprint(model) == before
    kvant.unpack(model)
    kvant.attach(model, "raw")
    assert fingerprint(model) == before
    kvant.detach(model)


def test_keys_do_not_depend_on_the_process() -> None:
    """LMCache #1380: another process finds the stored pages."""
    script = "from hf.zoo import build; from kvant.prefixes import fingerprint; "
    script += "print(fingerprint(build('llama')).hex())"
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parent.parent,
        env=os.environ | {"PYTHONHASHSEED": "1"},
    )
    assert process.stdout.strip() == fingerprint(build("llama")).hex()
