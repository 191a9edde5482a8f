"""A format that hurts a model is seen before it answers; what to take instead is right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from hf.zoo import build
from kvant import SpecError, demo
from kvant.eval.outliers import scale_key_channels
from kvant.probing import explain_harm, make_trial, resolve_auto
from kvant.probing.evaluator import RANDOM_TOKENS_KL_SCALE
from kvant.probing.recommendation import CANDIDATE_SPECS, find_smallest_spec, list_promotions
from kvant.spec.auto import MAX_KL, MAX_LOST, Tolerance, parse_auto_tolerance


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def outliers(plain: Any) -> Any:
    """The same function; a few channels of keys are a hundred times as large."""
    return scale_key_channels(plain, 100.0, channels=(3, 11))


def test_a_harmless_format_is_left_as_it_is(plain: Any, tokenizer: Any) -> None:
    found = kvant.probe(plain, tokenizer, "affine4")
    assert found.harmless and found.recommended == "affine4"
    assert 0 < found.divergence.mean_kl < MAX_KL
    assert len(found.layers) == 6 and all(0 < one < MAX_KL for one in found.layers)
    assert "affine4" in str(found) and "layer" in str(found)


@pytest.mark.parametrize(
    "options", ["capacity=300", pytest.param("window=64,sinks=4", marks=pytest.mark.laws)]
)
def test_a_window_or_a_capacity_is_no_harm_of_the_format(
    options: str, plain: Any, tokenizer: Any
) -> None:
    alone = kvant.probe(plain, tokenizer, "affine4")
    found = kvant.probe(plain, tokenizer, f"affine4,{options}")
    assert found.harmless
    if "sinks" not in options:
        assert found.divergence.mean_kl == alone.divergence.mean_kl
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(plain, f"affine4,{options}", tokenizer=tokenizer)
    kvant.detach(plain)


def test_raw_does_nothing(plain: Any, tokenizer: Any) -> None:
    found = kvant.probe(plain, tokenizer, "raw")
    assert found.harmless and found.divergence.mean_kl == 0.0 and found.layers == (0.0,) * 6


@pytest.mark.parametrize("spec", ["affine4", pytest.param("turbo4v4", marks=pytest.mark.laws)])
def test_outliers_are_caught_and_scales_are_recommended(
    spec: str, outliers: Any, tokenizer: Any
) -> None:
    found = kvant.probe(outliers, tokenizer, spec)
    assert not found.harmless and found.divergence.mean_kl > 1
    assert max(found.layers) > 0.01
    assert found.recommended == f"{spec},smooth" and "outliers" in found.why
    assert kvant.probe(outliers, tokenizer, found.recommended).harmless


def test_a_layer_that_is_hurt_alone_is_named(plain: Any, tokenizer: Any) -> None:
    twin = copy.deepcopy(plain)
    block = twin.model.layers[4].self_attn
    block.k_norm.weight.data[[3, 35]] *= 300
    block.q_norm.weight.data[[3, 35]] /= 300
    found = kvant.probe(twin, tokenizer, "affine4")
    assert found.layers.index(max(found.layers)) == 4
    assert "layer 4 alone" in str(found)


def test_recipes_of_ones_own_are_probed_too(outliers: Any, tokenizer: Any) -> None:
    found = kvant.probe(outliers, tokenizer, kvant.parse("affine4", 6))
    assert not found.harmless and found.recommended == "raw"


@pytest.mark.laws
@pytest.mark.parametrize(("name", "most"), [("plain", 0.35), ("outliers", 0.6)])
def test_auto_is_the_smallest_that_does_little(
    name: str, most: float, tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    shape = kvant.Shape(1, 8, 128, 128)
    raw = kvant.plan(shape, "raw").nbytes_per_token
    chosen = resolve_auto(model, "auto", make_trial(model, tokenizer))
    assert isinstance(chosen, str) and chosen in CANDIDATE_SPECS
    assert kvant.plan(shape, chosen).nbytes_per_token <= most * raw
    found = kvant.probe(model, tokenizer, chosen)
    assert found.harmless and abs(found.divergence.perplexity_change) < 0.01
    assert found.recalled > 0.4 and found.lost < 0.1 * found.recalled


def test_a_format_that_takes_what_a_model_recalls_does_harm(plain: Any, tokenizer: Any) -> None:
    """`auto` took turbo4v2: 0.0023 nats in the mean, and every fourth needle and copy lost."""
    found = kvant.probe(plain, tokenizer, "turbo4v2")
    assert found.divergence.mean_kl < MAX_KL and found.lost > 3 * MAX_LOST
    assert not found.harmless and "what it read it gives back" in str(found)
    better = kvant.probe(plain, tokenizer, found.recommended)
    assert better.harmless and better.lost < MAX_LOST


@pytest.mark.laws
def test_what_auto_tolerates_is_an_argument(plain: Any, tokenizer: Any) -> None:
    tried = make_trial(plain, tokenizer)
    lax, usual = (resolve_auto(plain, spec, tried) for spec in ("auto,max_lost=1", "auto"))
    strict = resolve_auto(plain, "auto,max_kl=1e-3,max_lost=0.005", tried)
    row = [
        kvant.plan(plain, str(spec), context=1).nbytes_per_token for spec in (lax, usual, strict)
    ]
    assert row[0] < row[1] < row[2]


def test_what_auto_tolerates_is_in_its_spec() -> None:
    assert parse_auto_tolerance("auto", Tolerance(0.5, 0.25)) == Tolerance(0.5, 0.25)
    told = parse_auto_tolerance("auto,max_kl=1e-3,max_lost=0.005", Tolerance())
    assert told == Tolerance(max_kl=1e-3, max_lost=0.005)


def test_what_a_probe_tolerates_is_an_argument(plain: Any, tokenizer: Any) -> None:
    found = kvant.probe(plain, tokenizer, "turbo4v2", max_lost=1.0)
    assert found.harmless and found.recommended == "turbo4v2"
    assert not kvant.probe(plain, tokenizer, "affine4", max_kl=1e-5).harmless


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("auto,window=64", "auto takes max_kl=NATS and max_lost=SHARE"),
        ("auto,max_kl=1,max_kl=2", "each once"),
        ("auto:1GiB,max_lost=few", "max_lost needs a number"),
        ("auto,max_lost=-1", "max_lost=-1.0: 0 or more"),
    ],
)
def test_an_auto_that_contradicts_itself_is_refused(
    spec: str, error: str, plain: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=error):
        resolve_auto(plain, spec, make_trial(plain, tokenizer))


def test_who_looks_sees_formats_being_tried(plain: Any, tokenizer: Any) -> None:
    seen: list[tuple[int, int]] = []
    tried = make_trial(plain, tokenizer)
    chosen = resolve_auto(plain, "auto,max_lost=1", tried, lambda *step: seen.append(step))
    assert seen == [
        (n, len(CANDIDATE_SPECS)) for n in range(CANDIDATE_SPECS.index(str(chosen)) + 1)
    ]


def test_without_words_to_ask_in_auto_says_what_it_did_not_ask(plain: Any) -> None:
    with pytest.warns(UserWarning, match="by predictions alone.*give tokenizer="):
        kvant.attach(plain, "auto")
    kvant.detach(plain)


def test_auto_within_a_size() -> None:
    layers = kvant.Shape(2, 4, 64, 64).layers
    asked = []

    def judge(spec: str) -> bool:
        asked.append(spec)
        return "affine" in spec

    assert find_smallest_spec(judge, layers, 4096, None) == "affine4"
    assert asked[0] == "turbo2" and "affine8" not in asked
    nbytes = kvant.plan(layers, "turbo4v2", context=4096).nbytes
    with pytest.raises(SpecError, match=rf"auto:{nbytes}: nothing .* allow more bytes"):
        find_smallest_spec(judge, layers, 4096, str(nbytes))
    assert find_smallest_spec(lambda spec: False, layers, 4096, None) == "raw"


def test_what_is_promoted_keeps_what_was_asked_for() -> None:
    told = [spec for spec, _ in list_promotions("turbo4v2,window=64,sinks=4")]
    assert told[0] == "turbo4v2,window=64,sinks=4,smooth"
    assert told[1] == "affine8/turbo2,window=64,sinks=4"
    assert told[-1] == "raw,window=64,sinks=4"
    told = [spec for spec, _ in list_promotions("affine4,tail=0,group=64")]
    assert told[1] == "affine4,tail=0,group=64,sinks=4,smooth"
    assert told[2] == "affine4,group=64,tail=128,smooth"
    assert not any("tail=128" in spec for spec, _ in list_promotions("affine4,tail=256"))
    for word in (
        "turbo4v2",
        "affine4,tail=0",
        "affine2,tail=0,capacity=3",
        "affine4,rotate",
        "raw/affine2",
        "fp8",
        "bf16",
    ):
        for spec, why in list_promotions(word):
            kvant.parse(spec, 8)
            assert why


def test_attaching_warns_once_and_loudly(outliers: Any, plain: Any, tokenizer: Any) -> None:
    for given in ({"tokenizer": tokenizer}, {}):
        with pytest.warns(UserWarning, match="affine4 changes what Qwen3ForCausalLM predicts"):
            kvant.attach(outliers, "affine4", **given)
        kvant.detach(outliers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(outliers, "affine4", guard=False)
        kvant.attach(outliers, "affine4,smooth", tokenizer=tokenizer)
        kvant.attach(outliers, "auto", tokenizer=tokenizer)
        kvant.detach(outliers)
        kvant.attach(plain, "affine4")
        kvant.detach(plain)


def test_tokens_that_mean_nothing_are_held_against_another_limit(plain: Any) -> None:
    assert make_trial(plain).max_kl == RANDOM_TOKENS_KL_SCALE * MAX_KL
    assert make_trial(plain).ids.equal(make_trial(plain).ids)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "t5", "bloom", "deepseek_v3"])
def test_the_guard_is_in_nobodys_way(name: str) -> None:
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.attach(model, "affine8,group=16")
    kvant.detach(model)


def test_a_text_that_shows_too_little_is_refused(plain: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"a text of \d+ tokens shows too little"):
        kvant.probe(plain, tokenizer, "affine4", text="import os")


def test_a_size_that_is_none_is_refused_and_changes_nothing(plain: Any, tokenizer: Any) -> None:
    for spec in ("auto:", "auto:many"):
        with pytest.raises(ValueError, match=r"auto:|size"):
            kvant.probe(plain, tokenizer, spec)
        with pytest.raises(ValueError, match=r"auto:|size"):
            kvant.attach(plain, spec, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="not attached"):
            kvant.detach(plain)


def test_nothing_is_said_of_raw(plain: Any) -> None:
    assert explain_harm(plain, "raw", make_trial(plain)) is None
